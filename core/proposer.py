"""The contract of proposers: plugins that guess what a sequence will say, for speculation.

The engine computes the guessed tokens together with the last real one and runs the request's own
chain at each of those places, for as long as the chain chooses what was guessed. A guess can cost
time and can save it; it cannot change a token. A proposer is called once a step, after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from pydantic import Field
from pydantic import ValidationError as PydanticError

from .errors import ValidationError, did_you_mean
from .stage import StageParams

if TYPE_CHECKING:
    from torch import Tensor

    from .request_params import RequestParams

MOST_DRAFTED = 64  # tokens that one guess may have


class Speaker(Protocol):
    """What a proposer may read of the sequence that it guesses for."""

    @property
    def key(self) -> int:
        """The key of its noise, unsigned 64 bits."""
        ...

    @property
    def branch(self) -> int: ...
    @property
    def prompt_ids(self) -> Sequence[int]:
        """Empty where the prompt is embeddings."""
        ...

    @property
    def output_ids(self) -> Sequence[int]: ...
    @property
    def params(self) -> RequestParams: ...


class FurtherModel(Protocol):
    """A model beside the engine's own, with a cache of its own."""

    @property
    def vocab_size(self) -> int: ...

    def open(self) -> Any:
        """Return the memory of one reader, empty."""
        ...

    def read(self, asked: Sequence[tuple[Any, Sequence[int]]]) -> tuple[list[int], Tensor]:
        """Read all tokens of each (memory, tokens); what a memory holds already is not read again.

        Returns the places in `asked` for which there was room, and the logits [places, vocab]
        after their last tokens.
        """
        ...

    def close(self, memory: Any) -> None:
        """Give the room of a reader back."""
        ...


class ModelLoader(Protocol):
    """Loads a further model for the engine's life; its tokenizer must be the engine's."""

    def __call__(self, model: str, *, revision: str | None = None) -> FurtherModel: ...


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What a proposer may know of the engine when it is bound."""

    vocab_size: int  # width of the logits
    tokenizer_size: int  # ids from here on are padding of the head
    max_model_len: int
    eos_ids: tuple[int, ...]
    tokenizer: Any  # core.tokenizer.Tokenizer, or None when it is not loaded
    load: ModelLoader | None = None  # None at a request, which cannot load anything


class Ask(NamedTuple):
    """One question: what may follow, at most `k` tokens."""

    proposer: Proposer
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    k: int


class Proposer:
    """Base of proposers. One object guesses for one sequence; `bound` is what `bind` returned.

    Subclasses set `name` and write `propose`. What it raises ends the speculation of its sequence,
    which goes on without; a note in the plan tells.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    of_engine: ClassVar[bool] = False  # only where `speculative_config` asks for it, not a request
    needs_prompt_ids: ClassVar[bool] = False  # cannot guess after a prompt of embeddings

    class Params(StageParams):
        """`num_speculative_tokens`: at most so many tokens a step."""

        num_speculative_tokens: int = Field(default=8, ge=1, le=MOST_DRAFTED)

    def __init__(self, bound: Any, speaker: Speaker) -> None:
        self.bound = bound

    @classmethod
    def validate(cls, params: Mapping[str, object], field: str) -> Any:
        """Check `params` against `Params`; ValidationError naming `field` otherwise."""
        try:
            return cls.Params(**params)  # type: ignore[arg-type]
        except PydanticError as error:
            raise _refusal(cls, field, error) from None

    @classmethod
    def bind(cls, params: Any, ctx: ProposerContext) -> Any:
        """Make what the proposers of one engine share; called once for each set of parameters."""
        return params

    @classmethod
    def rebind(cls, bound: Any, params: Any) -> Any:
        """Return `bound`, the engine's own, for a request with parameters of its own."""
        return params

    def propose(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], k: int
    ) -> Sequence[int]:
        """Guess the next tokens, at most `k`; none where there is nothing to go by."""
        raise NotImplementedError(f"proposer {self.name!r} does not implement propose")

    @classmethod
    def propose_all(cls, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        """Answer the questions of one step, which all have the same `bound`."""
        return [ask.proposer.propose(ask.prompt_ids, ask.output_ids, ask.k) for ask in asks]

    def close(self) -> None:
        """The sequence has ended."""


def _refusal(cls: type[Proposer], field: str, error: PydanticError) -> ValidationError:
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    known = list(cls.Params.model_fields)
    place = f"{field}.{name}" if name else field
    if first["type"] == "extra_forbidden":
        said = (
            f"{field} has no key {name!r} with method {cls.name!r} (known: {', '.join(known)})"
            f"{did_you_mean(name, known)}"
        )
    elif first["type"] == "missing":
        said = f"{field} needs the key {name!r} with method {cls.name!r}"
    else:
        allowed = first["msg"].removeprefix("Value error, ")
        said = f"{place} is {first['input']!r}, but {allowed[0].lower()}{allowed[1:]}"
    return ValidationError(said, parameter=place, value=first.get("input"))
