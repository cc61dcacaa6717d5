"""Log-probabilities of one sequence: an object a token, and a flat form for the whole request."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import NoReturn, overload


@dataclass(slots=True)
class Logprob:
    """One candidate at one position.

    `rank` is 1 + the number of larger values in the vocabulary, so ties share a rank.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class FlatLogprobs(MutableSequence[dict[int, Logprob]]):
    """A list of `dict[token_id, Logprob]` kept as parallel lists, one element a (position, entry).

    Position i owns `[start_indices[i], end_indices[i])` of the value lists. Appending is the only
    change; a position without entries reads as `{}`. An id stored twice at a position is merged by
    the dict view, the last value winning.
    """

    __slots__ = (
        "start_indices",
        "end_indices",
        "token_ids",
        "logprobs",
        "ranks",
        "decoded_tokens",
    )

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []

    def append(self, position: Mapping[int, Logprob] | None) -> None:
        """Add one position; None adds an empty one."""
        entries = position or {}
        self.append_fast(
            list(entries),
            [entry.logprob for entry in entries.values()],
            [entry.rank for entry in entries.values()],
            [entry.decoded_token for entry in entries.values()],
        )

    def append_fast(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add one position from its columns, of equal lengths, without a dict in between."""
        start = len(self.token_ids)
        self.start_indices.append(start)
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[Mapping[int, Logprob] | None]) -> None:
        """Append each position of a list or of another FlatLogprobs."""
        for position in list(positions):
            self.append(position)

    def __len__(self) -> int:
        return len(self.start_indices)

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        """A position as a dict, or a slice as a FlatLogprobs whose indices start at 0."""
        if isinstance(index, slice):
            return self._slice(range(len(self))[index])
        if not isinstance(index, int):
            raise TypeError(
                f"FlatLogprobs is indexed by an int or a slice, got {type(index).__name__}"
            )
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(self.start_indices[index], self.end_indices[index])
        }

    def _slice(self, positions: Iterable[int]) -> FlatLogprobs:
        part = FlatLogprobs()
        for position in positions:
            own = slice(self.start_indices[position], self.end_indices[position])
            part.append_fast(
                self.token_ids[own], self.logprobs[own], self.ranks[own], self.decoded_tokens[own]
            )
        return part

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise TypeError("FlatLogprobs can only be appended to, not assigned")

    def __delitem__(self, index: object) -> NoReturn:
        raise TypeError("FlatLogprobs can only be appended to, not deleted from")

    def insert(self, index: int, value: object) -> NoReturn:
        """Refused: positions are only ever appended."""
        raise TypeError("FlatLogprobs can only be appended to, not inserted into")

    def __eq__(self, other: object) -> bool:
        """Equal content, also against the list form, whose None is an empty position."""
        if not isinstance(other, (FlatLogprobs, list)):
            return NotImplemented
        return len(self) == len(other) and all(
            mine == (theirs or {}) for mine, theirs in zip(self, other, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"FlatLogprobs({list(self)!r})"


class KeptSets(Sequence[Sequence[int]]):
    """The ids that a picker could choose from, ascending, at each position of a sequence.

    Compressed rows: position i has `ids[offsets[i]:offsets[i + 1]]`. Reads as a list of id lists.
    """

    __slots__ = ("ids", "offsets")

    def __init__(self) -> None:
        self.ids = array("i")
        self.offsets = array("q", [0])

    def append(self, ids: Iterable[int]) -> None:
        """Add one position."""
        self.ids.extend(ids)
        self.offsets.append(len(self.ids))

    def extend(self, positions: Iterable[Iterable[int]]) -> None:
        """Add each position of another one, or of a list of id lists."""
        for ids in positions:
            self.append(ids)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Sequence[int]: ...
    @overload
    def __getitem__(self, index: slice) -> KeptSets: ...
    def __getitem__(self, index: int | slice) -> Sequence[int] | KeptSets:
        """The ids of a position, or a part as a KeptSets of its own."""
        if isinstance(index, slice):
            part = KeptSets()
            part.extend(self[i] for i in range(len(self))[index])
            return part
        place = range(len(self))[index]
        return self.ids[self.offsets[place] : self.offsets[place + 1]]

    def __eq__(self, other: object) -> bool:
        """Equal content, also against a list of id lists."""
        if not isinstance(other, (KeptSets, list)):
            return NotImplemented
        return len(self) == len(other) and all(
            list(mine) == list(theirs) for mine, theirs in zip(self, other, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"KeptSets({[list(ids) for ids in self]!r})"


SampleLogprobs = list[dict[int, Logprob]] | FlatLogprobs
PromptLogprobs = list[dict[int, Logprob] | None] | FlatLogprobs
