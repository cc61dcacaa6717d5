"""Words of structured output: a grammar, its compiled program, the matcher of one sequence.

A backend turns a `GrammarSpec` into a `CompiledGrammar`, which requests share; each sequence walks
it with a `Matcher` of its own. Bit masks are int32 tensors [rows, ceil(vocab / 32)] on the host;
bit `i % 32` of word `i // 32` is set where token `i` is legal.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a text must be. `text` is canonical: equal grammars have equal specs and keys.

    `kind` is "json" (`text`: a JSON Schema), "json_object", "regex", "choice" (`text`: a JSON list
    of strings), "grammar" (EBNF), "lark" or "structural_tag" (`text`: JSON).
    """

    kind: str
    text: str
    options: tuple[tuple[str, Hashable], ...] = ()  # sorted by name

    @property
    def key(self) -> str:
        """A digest of all three; the name of the program in the cache."""
        words = repr((self.kind, self.text, self.options)).encode()
        return blake2b(words, digest_size=16).hexdigest()

    def option(self, name: str, default: Any = None) -> Any:
        """The value of an option, or `default`."""
        return dict(self.options).get(name, default)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One part of a grammar that a backend cannot honour exactly."""

    pointer: str  # JSON pointer into the schema; "" is the whole, or "offset 12" in a regex
    what: str  # the keyword or construct
    reason: str


@dataclass(frozen=True, slots=True)
class Suited:
    """A spec rewritten for one backend; exact if nothing is refused."""

    spec: GrammarSpec
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every token id, made once a tokenizer.

    `tokens` has one entry a column of the logits; control ids hold a marker that is never part of
    UTF-8 text, ids past the tokenizer are empty.
    """

    tokens: tuple[bytes, ...]
    control_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    tokenizer_size: int  # ids from here on are padding of the head
    encode: Any = None  # text -> ids as the model spells it going on with a text, or None
    control_texts: Mapping[str, int] = field(default_factory=dict)  # "<|im_end|>" -> its id

    @property
    def size(self) -> int:
        """Width of the logits."""
        return len(self.tokens)


class FillState(Enum):
    """What a mask says of a row."""

    CONSTRAINED = "constrained"
    FREE = "free"  # every token of the tokenizer is legal; the row of the mask is all ones
    DEAD = "dead"  # no token is legal


class Fill(NamedTuple):
    """The outcome of filling one row; `only` is the id, where a single one is legal."""

    state: FillState
    only: int | None = None
    ended: bool = False  # the text is whole and nothing but a stop id may follow; DEAD without any


class Matcher(Protocol):
    """Where one sequence stands in its grammar. One thread at a time."""

    def fill(self, bitmask: Tensor, row: int) -> Fill:
        """Write the legal next tokens to `bitmask[row]`; stop ids are among them at an end."""
        ...

    def accept(self, token: int) -> bool:
        """Advance by a token; False, and nothing changed, if it is not legal here."""
        ...

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back, a stop id among them."""
        ...

    def fork(self) -> Matcher:
        """Return an independent matcher at the same place."""
        ...

    def rebuild(self, tokens: Sequence[int]) -> None:
        """Go back to the start and accept `tokens`; ValueError if one of them is not legal."""
        ...

    @property
    def is_completed(self) -> bool:
        """Whether the text so far is a whole sentence."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Whether a stop id was consumed."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the backend gave this sequence up, as when a limit of its own was hit; else None."""
        ...

    def forced(self) -> Sequence[int]:
        """Return ids that are certain to come next; may be empty."""
        ...


class CompiledGrammar(Protocol):
    """A program, immutable and shared by requests."""

    @property
    def memory_bytes(self) -> int:
        """About how much memory it takes."""
        ...

    def matcher(self, stop_ids: Sequence[int]) -> Matcher:
        """Return a matcher at the start; any of `stop_ids` ends the text where it may end."""
        ...


@runtime_checkable
class ConstraintBackend(Protocol):
    """Compiles grammars for one vocabulary. Its methods are called from several threads."""

    name: ClassVar[str]  # as in a request's `backend`
    aliases: ClassVar[tuple[str, ...]]  # other accepted names, such as the package's
    rank: ClassVar[int]  # the order in which `auto` asks, low first

    @classmethod
    def missing(cls) -> str | None:
        """Return a sentence that says what to install, or None if it is ready."""
        ...

    def __init__(self, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> None: ...

    def suit(self, spec: GrammarSpec) -> Suited:
        """Rewrite `spec` so that this backend is exact; name what it cannot honour. Fast."""
        ...

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile what `suit` returned; ValueError with one sentence if it cannot be done."""
        ...
