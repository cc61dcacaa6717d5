"""The contract that every plugin is written against: stages, pickers, stops, observers and more.

A stage is data (parameters, kind, order, capabilities) and one deed, `transform`. One object of
the class serves every row of a batch: numbers of a request live in columns (`rows.column("p")`),
never on the object. See `batch.py` for what `transform` is given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field
from pydantic import ValidationError as PydanticError

from .constraint import ConstraintBackend as ConstraintBackend
from .errors import ChainError, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .batch import PickView, Ranking, RowView, TapView
    from .plan_report import PlanReport
    from .reasoning import ReasoningMarkers
    from .request_params import RequestParams

STAGE_API = 1


class Kind(IntEnum):
    """What a stage may do; the values are the default order of the segments."""

    FORWARD = 0  # combines several logits rows
    MASK = 1  # sets illegal tokens to -inf
    FORCE = 2  # leaves exactly one token alive
    BIAS = 3  # adds to or scales logits by id or history
    SHAPE = 4  # strictly increasing map of the row
    CUT = 5  # keeps a subset
    MARK = 6  # reweights after the truncation
    PICK = 7  # chooses the token


class Form(Enum):
    """How a stage executes; decides what it can be fused with."""

    ELEMENTWISE = "elementwise"
    ROW_STATISTIC = "row_statistic"
    TRUNCATION = "truncation"
    PICKER = "picker"
    OPAQUE = "opaque"


class Need(Enum):
    """What of the history a stage reads."""

    PROMPT = "prompt"  # prompt token ids, `rows.prompt(i)`
    OUTPUT = "output"  # generated token ids, `rows.output(i)`
    COUNTS = "counts"  # tokens seen and how often, `rows.seen`


@dataclass(frozen=True, slots=True)
class ApiRange:
    """The stage API versions that a stage was written for, both ends included."""

    low: int = STAGE_API
    high: int = STAGE_API

    def __contains__(self, version: int) -> bool:
        return self.low <= version <= self.high


@dataclass(frozen=True, slots=True)
class Order:
    """Soft place of a stage: names of stages, or kinds, that it stands before or after."""

    before: tuple[str | Kind, ...] = ()
    after: tuple[str | Kind, ...] = ()


@dataclass(frozen=True, slots=True)
class Caps:
    """Capabilities, declared as data; the defaults are the conservative side.

    `monotone`: a non-decreasing map of each logit that looks at nothing but the row's columns, so
    that `transform` may be given any subset of a row's tokens. `keeps_top_segment`: a CUT whose
    kept set is a prefix of the order (logit descending, id ascending). `needs_full_row`: reads more
    of a row than its best tokens and `Ranking.total` tell. `shifts_row`: adds one number to every
    logit of a row, as a log-softmax does; `reads_zero`: multiplies logits, so that such a shift
    before it changes its strength (the plan notes the two in that order). `carried`: the state
    holds what tokens do not tell, so a preempted sequence keeps it, and `rebuild` serves only for
    tokens that another chain chose.
    """

    needs: frozenset[Need] = frozenset()
    random: bool = False
    stateful: bool = False
    monotone: bool = False
    keeps_top_segment: bool = False
    graph_safe: bool = False
    spec: str = "sequential"  # "any-history" | "sequential" | "no"
    needs_full_row: bool = True
    shifts_row: bool = False
    reads_zero: bool = False
    carried: bool = False


class StageParams(BaseModel):
    """Base of a stage's parameters: frozen, unknown names refused, None is off."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


@dataclass(frozen=True, slots=True)
class BindContext:
    """What a stage may know when a request is admitted."""

    vocab_size: int  # width of the logits
    tokenizer_size: int  # ids from here on are padding of the head
    max_model_len: int
    eos_ids: tuple[int, ...]  # every end id of the model
    stop_ids: tuple[int, ...]  # end ids and the request's own stop ids
    device: torch.device
    tokenizer: Any = None  # core.tokenizer.Tokenizer, or None when it is not loaded
    request: Any = None  # the frozen request parameters
    prompt_ids: tuple[int, ...] = ()  # empty where the prompt is embeddings
    prompt_len: int = -1  # in tokens; -1 is replaced by the number of ids
    logprobs_mode: str = "raw_logprobs"  # the engine's, where the request names none
    reasoning: ReasoningMarkers | None = None  # where reasoning begins and ends, if it is known
    wish: Any = None  # for an observer that the request names: its checked Params
    constraint_backends: Mapping[str, type[ConstraintBackend]] = field(default_factory=dict)
    structured_outputs_config: Any = None  # the engine's StructuredOutputsConfig
    shared: dict[str, Any] = field(default_factory=dict)  # what plugins keep for the engine's life

    def __post_init__(self) -> None:
        if self.prompt_len < 0:
            object.__setattr__(self, "prompt_len", len(self.prompt_ids))


class Written(NamedTuple):
    """What a sequence has written so far, as stages that tell of it are shown."""

    text: str  # empty where the request wants no text
    token_ids: Sequence[int]
    finish_reason: str | None  # None while it runs
    stop_reason: int | str | None


class Stage:
    """One step of the chain.

    Subclasses set `name`, `kind`, `Params` and write `transform`. `TopA(a=0.2, id="a1")` makes an
    instance for one request; the engine runs one shared object made by `prototype`.

    Raises ChainError on unknown or invalid parameters.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[Kind] = Kind.BIAS
    form: ClassVar[Form] = Form.OPAQUE
    version: ClassVar[int] = 1
    api: ClassVar[ApiRange] = ApiRange()
    caps: ClassVar[Caps] = Caps()
    order: ClassVar[Order] = Order()
    fields: ClassVar[Mapping[str, str]] = {}  # flat request field -> own parameter
    mandatory: ClassVar[bool] = False  # part of every chain, cannot be left out
    automatic: ClassVar[bool] = False  # part of every default chain; an own chain may omit it
    soft: ClassVar[bool] = True  # on_dead_row="relax" may leave it out; False for a grammar
    yields: ClassVar[bool] = False  # gives way where a stage that is not soft allows only its bans
    kernel: ClassVar[Any] = None  # a triton.jit function, or one for each mode; kernels/program.py

    class Params(StageParams):
        """No parameters."""

    def __init__(self, *, id: str | None = None, **params: object) -> None:
        self.id = id
        self.params = self.validate(params)

    @classmethod
    def prototype(cls) -> Stage:
        """Return the parameterless object that runs this stage for every request."""
        return cls.__new__(cls)

    @classmethod
    def validate(cls, params: Mapping[str, object]) -> StageParams:
        """Check `params` against `Params`; ChainError with one sentence otherwise."""
        try:
            return cls.Params(**params)
        except PydanticError as error:
            raise ChainError(_one_sentence(cls, error), parameter=_place(cls, error)) from None

    # --- admission ------------------------------------------------------------------------------

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        """Check `params` against the vocabulary and tokenizer and return what is to run."""
        return params

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        """Say whether these parameters change nothing, so that the stage is left out."""
        return False

    @classmethod
    def argmax_invariant(cls, params: Any) -> bool:
        """Say whether these parameters can never change the winner of a row."""
        return False

    @classmethod
    def structure(cls, params: Any) -> Hashable:
        """Return the part of `params` that changes the code path; rows share a program if equal."""
        return ()

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        """Return the row's scalars; each becomes a column. Default: every numeric parameter."""
        values = {name: getattr(params, name) for name in type(params).model_fields}
        return {
            name: int(value) if isinstance(value, bool) else value
            for name, value in values.items()
            if isinstance(value, int | float)
        }

    @classmethod
    def pending(cls, params: Any) -> Future[Any] | None:
        """Return what must be done before a request with these bound parameters runs, or None.

        The request waits without holding others up; what the future raises fails it alone.
        """
        return None

    @classmethod
    def remarks(cls, params: Any) -> Sequence[str]:
        """Return sentences about these bound parameters for the notes of the plan."""
        return ()

    # --- step -----------------------------------------------------------------------------------

    def transform(self, logits: Tensor, rows: RowView) -> None:
        """Change `logits` [rows, vocab] float32 in place; row i belongs to `rows.slots[i]`.

        Dead tokens are -inf and stay so. Reads nothing of other rows and mutates no state.
        """
        raise NotImplementedError(f"stage {self.name!r} does not implement transform")

    # --- state: a function of tokens --------------------------------------------------------------

    def open(self, params: Any, prompt: Sequence[int]) -> Any:
        """Return the state of a sequence that has generated nothing."""
        return None

    def accept(self, state: Any, tokens: Sequence[int]) -> None:
        """Advance `state` by tokens that were really generated, in order, once each."""

    def rollback(self, state: Any, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        raise NotImplementedError(f"stage {self.name!r} does not implement rollback")

    def fork(self, state: Any) -> Any:
        """Return an independent copy of `state`."""
        raise NotImplementedError(f"stage {self.name!r} does not implement fork")

    def rebuild(self, params: Any, prompt: Sequence[int], output: Sequence[int]) -> Any:
        """Return the state of a sequence from its tokens alone."""
        state = self.open(params, prompt)
        if output:
            self.accept(state, output)
        return state

    @classmethod
    def ended(cls, state: Any) -> bool:
        """Say whether the sequence is over after its last token.

        It then ends with the reason "stop", whatever `min_tokens` and `ignore_eos` say.
        """
        return False

    @classmethod
    def describe(cls, state: Any) -> str:
        """Say in a few words what `state` allows, for the error of a row without a token alive."""
        return ""

    @classmethod
    def result(cls, params: Any, state: Any, written: Written) -> Mapping[str, Any]:
        """Return fields of CompletionOutput, by name; called whenever an output is made."""
        return {}


class CutParams(StageParams):
    """Base of every truncation's parameters."""

    min_keep: int = Field(default=1, ge=1)


class CutStage(Stage):
    """A truncation given by `keep` on the ranked row; `transform` is that rule on a full sort.

    `keep` must return a prefix of the order: the kept set is decided from the top down.
    """

    kind = Kind.CUT
    form = Form.TRUNCATION
    caps = Caps(keeps_top_segment=True, graph_safe=True, spec="any-history", needs_full_row=False)
    needs_mass: ClassVar[bool] = False  # `keep` reads ranking.total, the mass of all alive tokens

    class Params(CutParams):
        """Only min_keep."""

    def keep(self, ranking: Ranking, rows: RowView) -> Tensor:
        """Return a bool mask [rows, n] over `ranking` of the tokens that stay."""
        raise NotImplementedError(f"stage {self.name!r} does not implement keep")

    @classmethod
    def argmax_invariant(cls, params: Any) -> bool:
        return True

    @classmethod
    def list_hint(cls, params: Any) -> int | None:
        """Return about how many tokens survive, or None where only the row can tell."""
        return None

    @classmethod
    def mode(cls, params: Any) -> Hashable:
        """Return the structural part of the rule itself, as `rows.mode` shows it."""
        return ()

    @classmethod
    def structure(cls, params: Any) -> Hashable:
        return (cls.mode(params), params.min_keep > 1)

    def cut(self, ranking: Ranking, rows: RowView) -> Tensor:
        """Apply `keep` and the floor `min_keep`; return the mask [rows, n]."""
        mask = self.keep(ranking, rows) & ranking.alive
        if not rows.min_keep:  # every rule keeps the best token by itself
            return mask
        floor = rows.column("min_keep")
        return mask | ((ranking.ranks < floor[:, None]) & ranking.alive)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        from .batch import Ranking

        ranking = Ranking.of_row(logits)
        mask = self.cut(ranking, rows)
        ranking.write(logits, mask)


class JointStage(Stage):
    """A stage that works on all its rows of a step at once, whatever else their chains hold.

    Groups of rows that reach it wait for each other. `begin` is told of the step's rows before any
    chain runs, `join` does the work, and `transform` then gives each row its outcome, as often as
    it is asked: a row may be run again by itself.
    """

    def begin(self, sources: Sequence[Any]) -> None:
        """Take note of the sequences whose rows come in this step; raises nothing."""
        raise NotImplementedError(f"stage {self.name!r} does not implement begin")

    def join(self, parts: Sequence[tuple[RowView, Tensor]]) -> None:
        """Work on `parts`, each some rows and their logits [rows, vocab], and keep the outcomes."""
        raise NotImplementedError(f"stage {self.name!r} does not implement join")


class Picker(Stage):
    """The last stage of a chain: chooses one token a row."""

    kind = Kind.PICK
    form = Form.PICKER

    def pick(self, view: PickView, rows: RowView) -> Tensor:
        """Return the chosen ids, int64 [rows]; never a dead token of a row that has alive ones."""
        raise NotImplementedError(f"picker {self.name!r} does not implement pick")


# --- the other plugin types ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a sequence ends: `reason` is the finish_reason, `detail` the stop_reason."""

    reason: str
    detail: int | str | None = None


class SequenceView(Protocol):
    """What a stop or an observer may read of a sequence."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def output_ids(self) -> Sequence[int]: ...

    @property
    def branch(self) -> int: ...
    @property
    def score(self) -> float:
        """Sum of its tokens' log-probabilities before every stage."""
        ...


Checker = Callable[[SequenceView], "Verdict | None"]


@dataclass(frozen=True, slots=True)
class TextStop:
    """A stop that looks at the text, as stop strings do; `detail` becomes the stop_reason.

    `find(text, start)` returns the place (first, end) of the first match that begins at `start` or
    later, or None. No match may be longer than `span` characters, which a stream withholds. The
    text ends before the match, or after it where `include` is set. What the first `min_tokens`
    tokens wrote is never part of a match.
    """

    find: Callable[[str, int], tuple[int, int] | None]
    detail: str
    span: int
    include: bool = False


class Stop:
    """A reason to end a sequence. `bind` returns the check of one request, or None.

    Installed ones are asked for every request. A request names those of `Params` in `stops`
    ({"stop": name, ...}, which `bind` finds in `ctx.wish`), or gives objects.
    """

    name: ClassVar[str] = ""
    rank: ClassVar[int] = 100  # the order of the checks, low first
    respects_min_tokens: ClassVar[bool] = True  # not asked before min_tokens

    class Params(StageParams):
        """No parameters."""

    def bind(self, ctx: BindContext) -> Checker | TextStop | None:
        """Return a function called once after each accepted token, a TextStop, or None."""
        raise NotImplementedError(f"stop {self.name!r} does not implement bind")


class Tap(Enum):
    """A point of the chain where observers look."""

    RAW = "raw"  # before every stage
    MASKED = "masked"  # after MASK and FORCE
    FINAL = "final"  # what the picker saw
    EACH = "each"  # after every stage; `measure` finds an `After` for each, in their order


@dataclass(frozen=True, slots=True)
class After:
    """The point right after one stage of the chain, by its instance id; not the picker's."""

    instance: str


Point = Tap | After


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence ended, as observers are told."""

    request_id: str
    index: int  # of the sequence in its request
    reason: str  # the finish_reason
    num_tokens: int
    mean_logprob: float | None  # of its tokens, before every stage; None without tokens
    error: str | None = None  # the sentence, where the reason is "error"


class Observer:
    """Reads a tap of the chain and feeds fields of the output; changes nothing.

    A request asks for one by a field of its own, or in `observers`: by name, with parameters of
    `Params` ({"observer": name, ...}, which `bind` finds in `ctx.wish`), or as an object.
    """

    name: ClassVar[str] = ""

    class Params(StageParams):
        """No parameters."""

    def bind(self, ctx: BindContext) -> Hashable | None:
        """Return this request's order (hashable; equal orders are measured together), or None."""
        raise NotImplementedError(f"observer {self.name!r} does not implement bind")

    def taps(self, order: Any) -> frozenset[Point]:
        """Return the points that `order` reads.

        An `After` names a stage that runs in the request, or the request is refused.
        """
        raise NotImplementedError(f"observer {self.name!r} does not implement taps")

    def measure(
        self, order: Any, taps: Mapping[Any, TapView], tokens: Tensor
    ) -> Mapping[str, Tensor]:
        """Return small tensors [rows, ...] about the chosen `tokens` [rows]; runs on the device.

        `taps` has a view for each `Point`, those of the request's other observers too, in the order
        of the chain.
        """
        raise NotImplementedError(f"observer {self.name!r} does not implement measure")

    def open(self, order: Any, tokenizer: Any) -> Any:
        """Return the host record of one sequence."""
        raise NotImplementedError(f"observer {self.name!r} does not implement open")

    def record(self, record: Any, token: int, values: Mapping[str, Any]) -> None:
        """Append one step: `values` holds this row of what `measure` returned, as NumPy arrays."""
        raise NotImplementedError(f"observer {self.name!r} does not implement record")

    def fork(self, record: Any) -> Any:
        """Return an independent copy of `record`, for a sequence that continues another."""
        return copy.deepcopy(record)

    def result(self, record: Any) -> Mapping[str, Any]:
        """Return fields of CompletionOutput, by name."""
        raise NotImplementedError(f"observer {self.name!r} does not implement result")

    def planned(self, record: Any, plan: PlanReport) -> None:
        """Take note of the chain that the sequence runs; called once, after `open`."""

    def failed(self, record: Any, values: Mapping[str, Any]) -> None:
        """Take note of the values of a step in which the sequence failed: it has no token."""

    def taken_back(self, record: Any, position: int, token: int, values: Mapping[str, Any]) -> None:
        """Take note of a token that the request's driver took back, of which `record` never heard.

        `position` is its place among the output's tokens; of several the newest comes first.
        """

    def finish(self, record: Any, ending: Ending) -> None:
        """Take note that the sequence ended; called once, before its last `result`."""

    def metrics(self) -> Mapping[str, int]:
        """Return counts since the engine was made, by name; they become `decodekit:` counters."""
        return {}


@dataclass(frozen=True, slots=True)
class Profile:
    """A named default chain: the order of the built-in stages inside their kinds.

    `settings` are parameters of stages that a request leaves open. `fields` says which stage and
    parameter a flat request field means here, where that is another stage than elsewhere.
    """

    name: str
    order: tuple[str, ...]
    picker: str = "race"
    greedy: str = "greedy"
    description: str = ""
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    fields: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of the key/value cache that an attention backend allocates."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int  # tokens a block
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's flat batch as the backend needs it; all lists are on the host.

    Sequence s has `query_lens[s]` tokens in this step, which end at position `context_lens[s]`
    (exclusive, this step's tokens included), and its pages are `block_tables[s]`.
    """

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]


@runtime_checkable
class AttentionStep(Protocol):
    """Attention of one engine step over the paged cache."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write k, v [T, kv_heads, d] to the cache; return causal attention [T, heads, d]."""
        ...


class AttentionBackend(Protocol):
    """Owns the key/value cache and makes the attention of each step."""

    name: ClassVar[str]

    @classmethod
    def unsupported(cls, layout: KVLayout) -> str | None:
        """Return why this backend cannot serve `layout`, or None."""
        ...

    def __init__(self, layout: KVLayout) -> None: ...

    def begin(self, plan: AttentionPlan) -> AttentionStep:
        """Prepare one step."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in every layer."""
        ...

    def release(self) -> None:
        """Give the cache's memory back; nothing is read before `restore`."""
        ...

    def restore(self) -> None:
        """Allocate the cache anew; its content is lost."""
        ...

    @classmethod
    def bytes_per_block(cls, layout: KVLayout) -> int:
        """Return the memory of one block over all layers, in bytes."""
        ...


class Reviewer:
    """One rule about plans that are legal and defeat themselves; `name` is the rule.

    Asked once for each request, when it is admitted. What it finds is told in the plan's notes, and
    logged once an engine; it can neither change nor refuse anything.
    """

    name: ClassVar[str] = ""

    def review(self, report: PlanReport, request: RequestParams) -> Iterable[Finding]:
        """Return findings about what runs (`report.order`) for `request`, none if all is well."""
        raise NotImplementedError(f"reviewer {self.name!r} does not implement review")


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A sub-command: `app` is a typer.Typer (a group), a function, or a TyperCommand (one)."""

    name: str
    app: Any
    help: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a self-check or a plan review."""

    level: str  # "ok" | "info" | "warn" | "error"
    message: str
    remedy: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def _place(cls: type[Stage], error: PydanticError) -> str:
    first = error.errors()[0]
    return ".".join([cls.name, *(str(part) for part in first["loc"])])


def _one_sentence(cls: type[Stage], error: PydanticError) -> str:
    """Turn pydantic's first complaint into our sentence: field, value, what is allowed."""
    first = error.errors()[0]
    known: Iterable[str] = cls.Params.model_fields
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        listed = ", ".join(known) or "none"
        return (
            f"stage {cls.name!r} has no parameter {name!r} (known: {listed})"
            f"{did_you_mean(name, known)}"
        )
    if first["type"] == "missing":
        return f"stage {cls.name!r} needs the parameter {name!r}"
    allowed = first["msg"][0].lower() + first["msg"][1:]
    return f"{_place(cls, error)} is {first['input']!r}, but {allowed}"
