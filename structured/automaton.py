"""Small regular expressions as our own automaton: masks known for every state, no library.

What is too large for it is refused, and another backend takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any, ClassVar

from ..core.constraint import GrammarSpec, Refusal, Suited, Vocabulary
from ..core.errors import ValidationError
from ..core.hookspecs import hookimpl
from . import byte_automaton
from .byte_automaton import ByteAutomaton, TooLarge
from .matching import canonical
from .regex_syntax import parse, whole
from .states import StateProgram
from .token_index import TokenIndex

PRECOMPUTE_SECONDS = 0.5  # masks that take longer than this in all are computed when met


class AutomatonBackend:
    """Regular expressions with few states, for one vocabulary."""

    name: ClassVar[str] = "automaton"
    aliases: ClassVar[tuple[str, ...]] = ("dfa",)
    rank: ClassVar[int] = 5

    @classmethod
    def missing(cls) -> str | None:
        """It needs nothing."""
        return None

    def __init__(self, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> None:
        self._index = TokenIndex(vocabulary)

    def suit(self, spec: GrammarSpec) -> Suited:
        """Take a regular expression that may well have few states."""
        if spec.kind != "regex":
            return _refused(spec, spec.kind, "the automaton knows regular expressions alone")
        tree = whole(parse(spec.text), spec.text)
        construct = byte_automaton.unknown(tree)
        if construct is not None:
            return _refused(spec, construct, "the automaton has no Unicode tables")
        if byte_automaton.positions(tree) > byte_automaton.MAX_POSITIONS:
            limit = byte_automaton.MAX_POSITIONS
            return _refused(spec, "repetition", f"it takes more than {limit:,} bytes written out")
        return Suited(spec)

    def compile(self, spec: GrammarSpec) -> RegexProgram:
        """Build the automaton; ValidationError if it has too many states or no text matches."""
        try:
            automaton = byte_automaton.build(whole(parse(spec.text), spec.text))
        except TooLarge as error:
            raise ValidationError(
                f"regex is too large for the backend 'automaton': {error}",
                parameter="regex",
                value=spec.text,
            ) from error
        except ValueError as error:
            raise ValidationError(
                f"regex cannot be satisfied: {error}", parameter="regex", value=spec.text
            ) from error
        return RegexProgram(automaton, self._index)


def _refused(spec: GrammarSpec, what: str, reason: str) -> Suited:
    return Suited(spec, (Refusal("", what, reason),))


class RegexProgram(StateProgram):
    """An automaton over bytes, walked by tokens."""

    def __init__(self, automaton: ByteAutomaton, index: TokenIndex) -> None:
        super().__init__(index.vocabulary)
        self._automaton = automaton
        self._index = index
        deadline = monotonic() + PRECOMPUTE_SECONDS
        for state in range(automaton.num_states):
            self.row(state)
            if monotonic() > deadline:
                break

    @property
    def memory_bytes(self) -> int:
        """Bytes of the table and of the kept rows."""
        return super().memory_bytes + self._automaton.moves.nbytes

    def next_state(self, state: int, token: int) -> int:
        """Walk the token's bytes."""
        text = self.vocabulary.tokens[token]
        if not text or token in self.vocabulary.control_ids:
            return -1
        return self._automaton.after(state, text)

    def accepts(self, state: int) -> bool:
        """Whether the text matches as it is."""
        return bool(self._automaton.ends[state])

    def legal(self, state: int) -> Any:
        """Return the tokens whose bytes stay alive."""
        return self._index.trie.legal(self._automaton.moves, state)

    def certain(self, state: int) -> list[int]:
        """Return the ids of the bytes that must come next."""
        text, closed = self._automaton.certain(state)
        return canonical(self.vocabulary, text, closed, self._index.has_longer)

    def states(self, limit: int) -> list[int] | None:
        """Return all states; some may stand inside every token, and are never met."""
        count = self._automaton.num_states
        return list(range(count)) if count <= limit else None


@hookimpl
def decodekit_constraint_backends() -> list[type[AutomatonBackend]]:
    return [AutomatonBackend]
