"""One matcher over every library: stop ids, ends, dead ends and the truth of the mask.

A backend brings `Steps`, a walker that knows text alone. What a text may end with, what a stop id
does and what a finished sequence may still say is decided here, so that it is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ..core.constraint import Fill, FillState, Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

Words = np.ndarray[Any, np.dtype[np.int32]]

CONSTRAINED = Fill(FillState.CONSTRAINED)
FREE = Fill(FillState.FREE)
DEAD = Fill(FillState.DEAD)


class Steps(Protocol):
    """A library's walker of one sequence, without any notion of stop ids."""

    mask_is_truth: ClassVar[bool]  # False: `step` may take a token that the mask forbids

    @property
    def state(self) -> int | None:
        """The place in a table of masks, if there is one."""
        ...

    def mask(self, bitmask: Tensor, row: int, words: Words) -> str | None:
        """Write the legal text tokens to `words`, row `row` of `bitmask`; say why if it gave up."""
        ...

    def step(self, token: int) -> bool:
        """Advance; False, and nothing changed, if the token does not fit."""
        ...

    def undo(self, count: int) -> None:
        """Take `count` steps back."""
        ...

    def copy(self) -> Steps:
        """Return an independent walker at the same place."""
        ...

    def restart(self) -> None:
        """Go back to the start."""
        ...

    def may_end(self) -> bool:
        """Whether the text so far is a whole sentence."""
        ...

    def certain(self) -> Sequence[int]:
        """Return ids of the text that must come next, as the tokenizer spells it."""
        ...


class Gate:
    """What every matcher of one program and one set of stop ids shares."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop_ids: Iterable[int],
        *,
        names_tokens: bool = False,
        never: Iterable[int] = (),
    ) -> None:
        """Stop ids past the vocabulary are left out.

        names_tokens: whether the grammar may name control tokens by id. never: ids that the
        library's masks may hold and that are not legal anywhere.
        """
        ids = sorted({i for i in stop_ids if 0 <= i < vocabulary.size})
        self.size = vocabulary.size
        self.num_words = (vocabulary.size + 31) // 32
        self.ids = frozenset(ids)
        self.tail = int(_word_bits(range(vocabulary.size % 32))) if vocabulary.size % 32 else -1
        # Control ids are in no mask but that of a grammar which names tokens.
        in_text = [i for i in ids if names_tokens or i not in vocabulary.control_ids]
        closed = _by_word([*in_text, *never])
        self.closed = np.array([word for word, _ in closed], dtype=np.int64)
        self.kept = ~np.array([bits for _, bits in closed], dtype=np.int32)
        self.opened = [(w, int(bits)) for w, bits in _by_word(ids)]
        self.all = token_words(range(vocabulary.tokenizer_size), vocabulary.size)
        state = FillState.CONSTRAINED if ids else FillState.DEAD
        self.ended = Fill(state, ids[0] if len(ids) == 1 else None, ended=True)

    def shut(self, words: Words) -> None:
        """Clear the stop ids, and the bits past the vocabulary."""
        if len(self.closed):
            words[self.closed] &= self.kept
        if self.tail != -1:
            words[-1] &= self.tail

    def open(self, words: Words) -> None:
        """Set the stop ids."""
        for word, bits in self.opened:
            words[word] |= bits


class GatedMatcher:
    """A `Matcher` made of a library's `Steps` and a `Gate`.

    The mask is the truth: a token that it forbids is refused even where the library would take it.
    """

    def __init__(self, steps: Steps, gate: Gate) -> None:
        self._steps = steps
        self._gate = gate
        self._length = 0  # accepted tokens, the stop id left out
        self._terminated = False
        self._failure: str | None = None
        self._bitmask: Tensor | None = None  # the last one seen, and a view of it
        self._view: Words | None = None
        self._legal: Words | None = None  # the mask at this place, if it was filled

    # --- the protocol -----------------------------------------------------------------------------

    def fill(self, bitmask: Tensor, row: int) -> Fill:
        """Write the legal next tokens to `bitmask[row]`; see `core.constraint.Matcher`."""
        words = self._row(bitmask, row)
        if self._terminated or self._failure is not None:
            return self._fill_closed(words)
        try:
            failure = self._steps.mask(bitmask, row, words)
        except RuntimeError as error:
            failure = told(error)
        return self._settle(words, failure)

    def accept(self, token: int) -> bool:
        """Advance by a token, a stop id among them; False if it is not legal here."""
        if self._terminated or self._failure is not None:
            return False
        if token in self._gate.ids:
            self._terminated = self._steps.may_end()
            return self._terminated
        if not 0 <= token < self._gate.size or not self._allows(token):
            return False
        if not self._steps.step(token):
            return False
        self._length += 1
        self._legal = None
        return True

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back; ValueError if there are fewer."""
        if not 0 <= count <= self._length + self._terminated:
            raise ValueError(
                f"rollback must be in [0, {self._length + self._terminated}], got {count}"
            )
        if count and self._terminated:
            self._terminated = False
            count -= 1
        if count:
            self._steps.undo(count)
            self._length -= count
            self._legal = None
            self._failure = None

    def fork(self) -> GatedMatcher:
        """Return an independent matcher at the same place."""
        twin = GatedMatcher(self._steps.copy(), self._gate)
        twin._length = self._length
        twin._terminated = self._terminated
        twin._failure = self._failure
        return twin

    def rebuild(self, tokens: Sequence[int]) -> None:
        """Go back to the start and accept `tokens`, which were legal once.

        ValueError if one does not fit; the matcher is then at the start.
        """
        self._reset()
        for place, token in enumerate(tokens):
            if token in self._gate.ids:
                fits = not self._terminated and self._steps.may_end()
                self._terminated = fits
            else:
                fits = not self._terminated and self._steps.step(token)
                self._length += fits
            if not fits:
                self._reset()
                raise ValueError(f"token {token} at place {place} is not legal in the grammar")

    @property
    def is_completed(self) -> bool:
        """Whether the text so far is a whole sentence."""
        return self._failure is None and self._steps.may_end()

    @property
    def is_terminated(self) -> bool:
        """Whether a stop id was consumed."""
        return self._terminated

    @property
    def failure(self) -> str | None:
        """Why the library gave this sequence up, in its words."""
        return self._failure

    @property
    def state(self) -> int | None:
        """The row of the program's table of masks, for programs that have one; else None."""
        return self._steps.state

    @property
    def steps(self) -> Steps:
        """The library's walker, for filling several at once."""
        return self._steps

    def forced(self) -> Sequence[int]:
        """Return the ids of the text that must come next; empty where a stop id may come."""
        if self._terminated or self._failure is not None or self._steps.may_end():
            return []
        ids = list(self._steps.certain())
        stops = [place for place, token in enumerate(ids) if token in self._gate.ids]
        return ids[: stops[0]] if stops else ids

    # --- filling ----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a fill has to ask the library."""
        return not self._terminated and self._failure is None

    def settle(self, bitmask: Tensor, row: int, failure: str | None) -> Fill:
        """Finish a row that the library filled together with others."""
        return self._settle(self._row(bitmask, row), failure)

    def _settle(self, words: Words, failure: str | None) -> Fill:
        gate = self._gate
        if failure is not None:
            self._failure = failure
            return self._fill_closed(words)
        gate.shut(words)
        num_filled = int(np.count_nonzero(words))
        ends = self._steps.may_end()
        if num_filled == 0:
            if ends:
                gate.open(words)
            self._keep(words)
            return gate.ended if ends else DEAD
        if ends:
            gate.open(words)
        self._keep(words)
        if num_filled == 1 and not ends:
            place = int(np.flatnonzero(words)[0])
            bits = int(words[place]) & 0xFFFFFFFF
            if bits & (bits - 1) == 0:
                return Fill(FillState.CONSTRAINED, 32 * place + bits.bit_length() - 1)
        elif num_filled >= len(words) - 1 and np.array_equal(words, gate.all):
            return FREE
        return CONSTRAINED

    def _fill_closed(self, words: Words) -> Fill:
        words[:] = 0
        if not self._terminated:
            return DEAD
        self._gate.open(words)
        return self._gate.ended

    def _keep(self, words: Words) -> None:
        if not self._steps.mask_is_truth:
            self._legal = words.copy()

    def _allows(self, token: int) -> bool:
        if self._steps.mask_is_truth:
            return True
        if self._legal is None:
            import torch

            scratch = torch.zeros(1, self._gate.num_words, dtype=torch.int32)
            self.fill(scratch, 0)
            if self._legal is None:  # it gave up
                return False
        return bool((int(self._legal[token >> 5]) >> (token & 31)) & 1)

    def _row(self, bitmask: Tensor, row: int) -> Words:
        if bitmask is not self._bitmask:
            view: Words = bitmask.numpy()
            if view.dtype != np.int32 or view.shape[1] != self._gate.num_words:
                raise ValueError(
                    f"the bit mask must be int32 [rows, {self._gate.num_words}], "
                    f"got {view.dtype} {list(view.shape)}"
                )
            self._bitmask, self._view = bitmask, view
        assert self._view is not None
        words: Words = self._view[row]
        return words

    def _reset(self) -> None:
        self._steps.restart()
        self._length = 0
        self._terminated = False
        self._failure = None
        self._legal = None


def token_words(ids: Iterable[int], vocab_size: int) -> Words:
    """Return one row of a bit mask, [ceil(vocab_size / 32)] int32, with `ids` set."""
    num_words = (vocab_size + 31) // 32
    bits = np.zeros(num_words * 32, dtype=np.bool_)
    bits[np.fromiter(ids, dtype=np.int64)] = True
    words: Words = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)
    return words


def told(error: BaseException) -> str:
    """Return a library's message without the place in its own sources, on one line."""
    text = str(error).strip()
    if text.startswith("[") and "] " in text:
        text = text.split("] ", 1)[1]  # [20:32:09] /project/cpp/x.cc:820: message
        head, colon, rest = text.partition(": ")
        if colon and ":" in head and head.rsplit(":", 1)[1].isdigit():
            text = rest
    return " ".join(text.split())


def canonical(
    vocabulary: Vocabulary, text: bytes, closed: bool, extends: Callable[[bytes], bool]
) -> list[int]:
    """Spell bytes that must come next as the tokenizer would.

    Unless the sentence ends with them (`closed`), the last tokens are left out where a longer one
    could take their place.
    """
    if not text or vocabulary.encode is None:
        return []
    ids: list[int] = vocabulary.encode(text.decode("utf-8", "ignore"))
    if not closed:
        while ids and extends(vocabulary.tokens[ids[-1]]):
            ids.pop()
    return ids


def _by_word(ids: Iterable[int]) -> list[tuple[int, np.int32]]:
    bits: dict[int, set[int]] = {}
    for token_id in ids:
        bits.setdefault(token_id // 32, set()).add(token_id % 32)
    return [(word, _word_bits(bits[word])) for word in sorted(bits)]


def _word_bits(bits: Iterable[int]) -> np.int32:
    return np.uint32(sum(1 << bit for bit in set(bits))).astype(np.int32)
