"""Regular expressions and flat schemas through outlines_core, whose table has every state.

Building the table cannot be interrupted and may take gigabytes, so it is done in a helper process
that can be ended. The library loses continuations after a state that accepts; a NUL behind the
expression, spelled by an id past the vocabulary, keeps them: a text may end where the NUL leads to
a final state. Tokens that hold a NUL are left out, so no text has one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from threading import Lock
from typing import Any, ClassVar

import numpy as np

from ..core.constraint import GrammarSpec, Suited, Vocabulary
from ..core.errors import ValidationError
from ..core.hookspecs import hookimpl
from .matching import token_words, told
from .states import StateProgram
from .workshop import Died, OverTime, Workshop

END = b"\0"
BOUNDED = r"[ \n\t\r]{0,8}"
MAX_REGEX = 20_000  # characters of the expression that a schema becomes
SECONDS = 10.0
MEMORY = 4 << 30
MOST_ROWS = 2_000  # masks that are made beside the table; past that each at its first visit

_WHITESPACE = {"bounded": BOUNDED, "compact": "", "json_dumps": "[ ]?", "any": r"[ \n\t\r]*"}


class OutlinesBackend:
    """Builds tables for one vocabulary, in a process of its own."""

    name: ClassVar[str] = "outlines"
    aliases: ClassVar[tuple[str, ...]] = ("outlines_core",)
    rank: ClassVar[int] = 30

    @classmethod
    def missing(cls) -> str | None:
        """Say what to install, if outlines_core is not there."""
        if find_spec("outlines_core") is not None:
            return None
        return "outlines (outlines_core) is not installed; pip install decodekit[structured]"

    def __init__(self, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> None:
        self.vocabulary = vocabulary
        self._seconds = float(settings.get("compile_seconds", SECONDS))
        self._workshop = Workshop(int(settings.get("compile_memory_bytes", MEMORY)))
        self._tokens: dict[bytes, list[int]] | None = None
        self._lock = Lock()

    def suit(self, spec: GrammarSpec) -> Suited:
        """Rewrite `spec` so that it is exact here, or name what is not."""
        from .suit import suit

        return suit(self.name, spec)

    def compile(self, spec: GrammarSpec) -> OutlinesProgram:
        """Build the table of what `suit` returned; ValidationError with the reason if it cannot."""
        try:
            regex = expression(spec)
            index, rows = self._workshop.call(
                build_index, regex, self._map(), self.vocabulary.size, seconds=self._seconds
            )
        except OverTime as error:
            self._refuse(spec, f"compile time over the limit of {self._seconds:g} seconds", error)
        except (Died, MemoryError) as error:
            self._refuse(spec, "the compilation ran out of memory", error)
        except (ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, ValidationError):
                raise
            self._refuse(spec, told(error), error)
        return OutlinesProgram(index, rows, self.vocabulary)

    def close(self) -> None:
        """End the helper process."""
        self._workshop.close()

    def _refuse(self, spec: GrammarSpec, reason: str, cause: Exception) -> None:
        raise ValidationError(
            f"outlines cannot compile this {spec.kind}: {reason}",
            parameter="structured_outputs",
            value=spec.text,
        ) from cause

    def _map(self) -> dict[bytes, list[int]]:
        with self._lock:
            if self._tokens is None:
                tokens: dict[bytes, list[int]] = {}
                for token_id, token in enumerate(self.vocabulary.tokens):
                    if token and END not in token:
                        if token_id not in self.vocabulary.control_ids:
                            tokens.setdefault(token, []).append(token_id)
                tokens[END] = [self.vocabulary.size]
                self._tokens = tokens
            return self._tokens


def expression(spec: GrammarSpec) -> str:
    """Return the regular expression of a spec, without the NUL."""
    if spec.kind == "regex":
        regex = spec.text
    elif spec.kind == "choice":
        regex = "|".join(_literal(text) for text in json.loads(spec.text))
    elif spec.kind in ("json", "json_object"):
        from outlines_core.json_schema import build_regex_from_schema

        pattern = spec.option("whitespace_pattern")
        if pattern is None:
            pattern = _WHITESPACE[spec.option("whitespace", "bounded")]
        regex = build_regex_from_schema(spec.text, pattern)
    else:
        raise ValueError(f"it has no grammars of kind {spec.kind!r}")
    if len(regex) > MAX_REGEX:
        raise ValueError(f"its expression is over the limit of {MAX_REGEX:,} characters")
    return regex


def build_index(
    regex: str, tokens: Mapping[bytes, Sequence[int]], size: int
) -> tuple[Any, dict[int, bytes]]:
    """Run in the helper process: return the table of `regex` with a NUL behind it, and its masks.

    The masks are rows of int32 words by state; there are none if the table is large.
    """
    import outlines_core

    vocabulary = outlines_core.Vocabulary(size + 1, tokens)  # an end id that is nowhere in the map
    index = outlines_core.Index(rf"(?:{regex})\x00", vocabulary)
    table = index.get_transitions()
    if len(table) > MOST_ROWS:
        return index, {}
    rows: dict[bytes, bytes] = {}  # equal ones are sent once
    masks = {}
    for state, moves in table.items():
        row = token_words((token for token in moves if token < size), size).tobytes()
        masks[state] = rows.setdefault(row, row)
    return index, masks


def _literal(text: str) -> str:
    """The text as an expression; Rust refuses some of the escapes that `re.escape` makes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~]", r"\\\g<0>", text)


class OutlinesProgram(StateProgram):
    """A table of outlines_core, its states numbered as they are met."""

    def __init__(self, index: Any, rows: Mapping[int, bytes], vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._index = index
        self._end = vocabulary.size  # id of the NUL
        self._theirs = [index.get_initial_state()]  # our number -> theirs
        self._ours = {self._theirs[0]: 0}
        self._size = 0
        for state, row in rows.items():
            words = self._unique.setdefault(row, np.frombuffer(row, dtype=np.int32))
            self._rows[self._number(state)] = words

    @property
    def memory_bytes(self) -> int:
        """Bytes of the table, measured once by its pickle, and of the kept rows."""
        if not self._size:
            import pickle

            self._size = len(pickle.dumps(self._index))
        return super().memory_bytes + self._size

    def next_state(self, state: int, token: int) -> int:
        """Look the token up."""
        if token == self._end:
            return -1
        after = self._index.get_next_state(self._theirs[state], token)
        return -1 if after is None else self._number(after)

    def accepts(self, state: int) -> bool:
        """Whether a NUL would end the match; inside a class it would be a character."""
        after = self._index.get_next_state(self._theirs[state], self._end)
        return after is not None and self._index.is_final_state(after)

    def legal(self, state: int) -> list[int]:
        """Return the tokens of a state, the NUL left out."""
        allowed = self._index.get_allowed_tokens(self._theirs[state]) or ()
        return [token for token in allowed if token < self._end]

    def certain(self, state: int) -> list[int]:
        """Return the ids that come one by one without an alternative."""
        found: list[int] = []
        while not self.accepts(state):
            legal = self.legal(state)
            if len(legal) != 1:
                break
            found += legal
            state = self.next_state(state, legal[0])
        return found

    def states(self, limit: int) -> list[int] | None:
        """Return our numbers of all states of the table."""
        table = self._index.get_transitions()
        if len(table) > limit:
            return None
        return sorted(self._number(state) for state in table)

    def _number(self, theirs: int) -> int:
        ours = self._ours.get(theirs)
        if ours is None:
            with self._lock:
                ours = self._ours.get(theirs)
                if ours is None:
                    ours = len(self._theirs)
                    self._theirs.append(theirs)
                    self._ours[theirs] = ours
        return ours


@hookimpl
def decodekit_constraint_backends() -> list[type[OutlinesBackend]]:
    return [OutlinesBackend]
