"""The contract of drivers: plugins that own the sequences of a request (beam search, backtracking).

One object of a Driver class serves one request. Its sequences are *lanes*: each runs the request's
own chain, in the same batch as everybody's. A driver that `chooses` is shown the distributions of
all its lanes together and names the tokens; any other lets the picker choose and looks on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from pydantic import ValidationError as PydanticError

from .errors import ValidationError, did_you_mean
from .stage import BindContext, Stage, StageParams, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from .request_params import RequestParams


class Lane(Protocol):
    """What a driver may read of one of its sequences."""

    @property
    def branch(self) -> int:
        """Its number among the lanes of the request, and part of the noise address."""
        ...

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def output_ids(self) -> Sequence[int]: ...
    @property
    def text(self) -> Any:
        """The TextStream: `lane.text.text` is what may be shown, `lane.text.whole` all of it."""
        ...

    @property
    def score(self) -> float:
        """Sum of its tokens' log-probabilities before every stage."""
        ...

    @property
    def mean_logprob(self) -> float | None:
        """The score over the number of its tokens; None without tokens."""
        ...

    @property
    def finish_reason(self) -> str | None: ...
    @property
    def ending(self) -> Verdict | None:
        """While `accepted` looks: why the lane ends with this token, unless it is taken back."""
        ...

    def record_of(self, observer: str) -> Any:
        """Return the record of an observer of the request, by its name; None without it."""
        ...

    note: Any  # the driver's own, copied by reference when a lane forks


class Move(NamedTuple):
    """One continuation that a choosing driver wants: `parent` is a place in the round's lanes."""

    parent: int
    token: int
    note: Any = None  # becomes the `note` of the lane, or of the finished sequence
    ends: bool = False  # the token ends it, so that it takes no lane


@dataclass(frozen=True, slots=True)
class Round:
    """The distributions of every live lane of a request, after the chain, at one position."""

    lanes: Sequence[Lane]
    logits: Tensor  # float32 [lanes, vocab] as the picker would have seen them, -inf where dead
    raw: Tensor  # float32 [lanes, ids of the tokenizer] before every stage
    exponential: Callable[[str, Tensor], Tensor]  # (purpose, ids [lanes, n]) -> addressed Exp(1)

    def logprobs(self) -> Tensor:
        """Log-probabilities over the alive tokens, float32 [lanes, vocab]."""
        import torch

        return torch.log_softmax(self.logits, 1)


@dataclass(frozen=True, slots=True)
class Rewind:
    """Take the last `count` tokens of a lane back, and never choose `banned` where they began.

    Bans of a place last until a rewind goes before it. Where they leave no token alive they give
    way. `inject` are written there instead, as `Inject` says. One of the two is needed, since the
    noise of a place is always the same, and the lane would come to what it came to.
    """

    count: int
    banned: frozenset[int] = frozenset()
    inject: tuple[int, ...] = ()


class Finish(NamedTuple):
    """End a lane."""

    verdict: Verdict


class Inject(NamedTuple):
    """Write these tokens next, whatever the chain would choose. A lane that ends ends all the same.

    They are computed along in the next step, and observers see them as forced tokens.
    """

    tokens: tuple[int, ...]


Action = Rewind | Finish | Inject


@dataclass(frozen=True, slots=True)
class Adjusted:
    """The fields that lanes run with, and which of the request's have no effect."""

    params: RequestParams
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    on_logprobs: bool = False  # the chain runs on log-probabilities, as transformers' beams do


@dataclass(slots=True)
class Ranked:
    """The outputs of a request: places among the finished sequences, best first."""

    order: Sequence[int]
    notes: Mapping[str, str] = field(default_factory=dict)
    fields: Sequence[Mapping[str, Any]] = ()  # of CompletionOutput, one a place of `order`


class Driver:
    """Base of drivers. `bound` is what `bind` returned; the object is one request's.

    `start` lanes are opened at the prompt's end, at most `width(bound)` live at once.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    chooses: ClassVar[bool] = False  # `advance` names tokens; else the picker does
    forks: ClassVar[bool] = False  # lanes continue others, so stages must fork
    rewinds: ClassVar[bool] = False  # `accepted` may take tokens back, so stages must roll back
    injects: ClassVar[bool] = False  # `accepted` may write tokens
    streams: ClassVar[bool] = False  # outputs may be shown before the end

    class Params(StageParams):
        """No parameters."""

    def __init__(self, bound: Any, ctx: BindContext) -> None:
        self.bound = bound

    @classmethod
    def validate(cls, params: Mapping[str, object]) -> StageParams:
        """Check `params` against `Params`; ValidationError with one sentence otherwise."""
        try:
            return cls.Params(**params)
        except PydanticError as error:
            raise _refusal(cls, error) from None

    @classmethod
    def of_fields(cls, params: RequestParams) -> Mapping[str, object] | None:
        """Return this driver's parameters where flat fields of a request ask for it, else None."""
        return None

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        """Check `params` against the request, the vocabulary and the tokenizer."""
        return params

    @classmethod
    def width(cls, bound: Any, ctx: BindContext) -> int:
        """Return the most lanes that are live at once."""
        return int(ctx.request.best_of)

    @classmethod
    def start(cls, bound: Any, ctx: BindContext) -> int:
        """Return how many lanes begin at the prompt."""
        return 1 if cls.chooses else cls.width(bound, ctx)

    @classmethod
    def adjust(cls, bound: Any, params: RequestParams) -> Adjusted:
        """Return the fields that its lanes run with."""
        return Adjusted(params)

    @classmethod
    def stages(cls, bound: Any, ctx: BindContext) -> Sequence[Stage]:
        """Return stages of its own, MASK or FORCE, that run after the request's of their kind."""
        return ()

    @classmethod
    def trim(cls, bound: Any, ctx: BindContext) -> int:
        """Return how many tokens of the prompt's end the lanes write again themselves.

        Their text is left out of the output's.
        """
        return 0

    def advance(self, round: Round) -> Sequence[Move]:
        """Choose the continuations of a round; lanes that none continues are dropped.

        No moves: the request is over, and the lanes end as they are, by `leftover`.
        """
        raise NotImplementedError(f"driver {self.name!r} does not implement advance")

    def leftover(self, lane: Lane) -> Verdict | None:
        """Say how a lane ends that is live when the request is over; None drops it."""
        return Verdict("length")

    def accepted(self, lane: Lane) -> Action | None:
        """Look at a lane's newest token; called once for each, after it is written.

        Only `rewinds` may return Rewind, and only `injects` tokens to write.
        """
        return None

    def held(self, lane: Lane) -> int:
        """Return how many of a lane's newest tokens may yet be taken back; asked of `rewinds`.

        Ids, text and log-probabilities of the others come out, and stay.
        """
        return len(lane.output_ids)

    def fields(self, lane: Lane) -> Mapping[str, Any]:
        """Return fields of CompletionOutput, by name; called whenever an output is made."""
        return {}

    def ended(self, lane: Lane, live: Sequence[Lane]) -> Iterable[Lane]:
        """Take note that a lane has finished; return the live ones that need not go on.

        Called after the step, once for each lane that ended in it. Those returned end as aborted;
        `rank` may leave them out.
        """
        return ()

    def rank(self, lanes: Sequence[Lane]) -> Ranked:
        """Order the finished sequences, best first; at most the request's n are returned."""
        return Ranked(range(len(lanes)))


def _refusal(cls: type[Driver], error: PydanticError) -> ValidationError:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    known = list(cls.Params.model_fields)
    place = f"driver.{name}" if name else "driver"
    if first["type"] == "extra_forbidden":
        said = (
            f"driver {cls.name!r} has no parameter {name!r} (known: {', '.join(known) or 'none'})"
            f"{did_you_mean(name, known)}"
        )
    elif first["type"] == "missing":
        said = f"driver {cls.name!r} needs the parameter {name!r}"
    else:
        allowed = first["msg"][0].lower() + first["msg"][1:]
        said = f"{place} is {first['input']!r}, but {allowed}"
    return ValidationError(said, parameter=place, value=first.get("input"))
