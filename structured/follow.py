"""Follows one sequence through its grammar: which tokens count, what comes next, when it is over.

Where a model reasons first, the grammar begins after the reasoning. A prompt whose last marker
opens the reasoning is inside it; one without a marker may open it with its first tokens, or begin
the answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.constraint import CompiledGrammar, Fill, FillState, Matcher
from ..core.reasoning import ReasoningMarkers
from .bits import Penalties, Words, count_of, ids_of, num_words
from .filler import Filler

MOST_NAMED = 5  # tokens in a message
LAST_LETTERS = 40

ANSWER, MAYBE, THINKING = range(3)


@dataclass(frozen=True, slots=True)
class Rules:
    """What the sequences of one request share."""

    program: Callable[[], CompiledGrammar]  # raises what the compilation failed with
    label: Callable[[], str]  # such as "json, xgrammar"
    vocab_size: int
    stop_ids: tuple[int, ...]
    decode: Callable[[Sequence[int]], str]
    shown: Callable[[Sequence[int]], str]  # as the request's text is decoded
    filler: Filler
    penalties: Penalties | None  # None where masks are uploaded
    markers: ReasoningMarkers | None = None  # None: the grammar holds from the first token


class Place(NamedTuple):
    """Where a sequence stands after a token."""

    phase: int
    opening: int = 0  # MAYBE: how much of the opening marker is written
    is_legal: bool = True  # MAYBE: whether the grammar allows what is written
    tail: int = 0  # ANSWER: how much of the lead-over after the closing marker is written
    fed: bool = False  # the token went to the matcher
    skipped: bool = False  # the token is no part of the answer


class Follower:
    """One sequence's matcher with the mask of its next token; safe for several threads."""

    __slots__ = (
        "_error",
        "_filled",
        "_is_over",
        "_lock",
        "_mask",
        "_penalty",
        "_places",
        "_state",
        "_tokens",
        "_words",
        "matcher",
        "rules",
    )

    def __init__(self, rules: Rules, matcher: Matcher, places: list[Place], tokens: list[int]):
        self.rules = rules
        self.matcher = matcher
        self._places = places  # the first is the prompt's; one a token after it
        self._tokens = tokens  # all that were accepted
        self._mask = torch.zeros(1, num_words(rules.vocab_size), dtype=torch.int32)
        self._words: Words = self._mask.numpy()[0]
        self._penalty: Tensor | None = None
        self._state = FillState.FREE
        self._error: Exception | None = None
        self._is_over = False
        self._filled = False
        self._lock = Lock()

    @classmethod
    def opened(cls, rules: Rules, prompt: Sequence[int]) -> Follower:
        """Return the state of a sequence that has generated nothing; its mask is being filled."""
        phase = ANSWER if rules.markers is None else phase_of(prompt, rules.markers)
        follower = cls(rules, rules.program().matcher(rules.stop_ids), [Place(phase)], [])
        rules.filler.start(follower)
        return follower

    # --- tokens -----------------------------------------------------------------------------------

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by tokens; ValueError for one that the grammar does not allow."""
        with self._lock:
            for token in tokens:
                self._places.append(self._after(self._places[-1], token))
                self._tokens.append(token)
            self._filled = False
            self._is_over = self._has_ended()
        if not self._is_over:
            self.rules.filler.start(self)

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back."""
        if not count:
            return
        with self._lock:
            keep = len(self._tokens) - count
            gone = self._places[keep + 1 :]
            fed = sum(place.fed for place in gone)
            if fed:
                self.matcher.rollback(fed)
            del self._tokens[keep:], self._places[keep + 1 :]
            self._feed_again()
            self._filled = False
            self._is_over = False
        self.rules.filler.start(self)

    def fork(self) -> Follower:
        """Return an independent follower at the same place."""
        with self._lock:
            twin = Follower(self.rules, self.matcher.fork(), list(self._places), list(self._tokens))
            twin._is_over = self._is_over
        if not twin._is_over:
            self.rules.filler.start(twin)
        return twin

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow the last token."""
        return self._is_over

    @property
    def is_whole(self) -> bool:
        """Whether the answer so far is a whole sentence of the grammar."""
        with self._lock:
            return self._places[-1].phase != THINKING and self.matcher.is_completed

    @property
    def has_begun(self) -> bool:
        """Whether the grammar has had a say."""
        return self._places[-1].phase == ANSWER

    @property
    def answer_start(self) -> int:
        """How many tokens come before the answer."""
        for number in range(len(self._tokens), 0, -1):
            if self._places[number].skipped:
                return number
        return 0

    def _after(self, place: Place, token: int) -> Place:
        if place.phase == ANSWER:
            return self._in_answer(place, token)
        markers = self.rules.markers
        assert markers is not None
        if place.phase == THINKING:
            recent = [*self._tokens[-len(markers.closing) :], token]
            closes = tuple(recent[-len(markers.closing) :]) == markers.closing
            return Place(ANSWER if closes else THINKING, skipped=True)
        if token != markers.start[place.opening]:
            if not place.is_legal:
                raise ValueError(self._refusal(token))
            return self._in_answer(Place(ANSWER), token)
        opening = place.opening + 1
        if opening == len(markers.start):
            self._take_back(place.opening)
            return Place(THINKING, skipped=True)
        is_legal = place.is_legal and self.matcher.accept(token)
        return Place(MAYBE, opening, is_legal, fed=is_legal)

    def _in_answer(self, place: Place, token: int) -> Place:
        if self.matcher.accept(token):
            return place if place.fed and not place.tail else Place(ANSWER, fed=True)
        markers = self.rules.markers
        if markers is not None and not place.fed and len(self._tokens):
            # A thinking budget may go on writing the words that lead over to the answer.
            rest = tail_of(markers)[place.tail :]
            if rest and rest[0] == token:
                return Place(ANSWER, tail=place.tail + 1, skipped=True)
        raise ValueError(self._refusal(token))

    def _take_back(self, count: int) -> None:
        """What seemed to begin an answer was the opening marker: the matcher has seen nothing."""
        for number in range(len(self._places) - count, len(self._places)):
            if self._places[number].fed:
                self.matcher.rollback(1)
                self._places[number] = self._places[number]._replace(fed=False)

    def _feed_again(self) -> None:
        """After a rollback into a half-written opening marker: it may be an answer again."""
        for number, place in enumerate(self._places):
            if place.phase == MAYBE and place.opening and place.is_legal and not place.fed:
                self.matcher.accept(self._tokens[number - 1])
                self._places[number] = place._replace(fed=True)

    def _has_ended(self) -> bool:
        if self._places[-1].phase != ANSWER:
            return False
        if self.matcher.is_terminated:
            return True
        if not self._places[-1].fed or not self.matcher.is_completed:
            return False
        return self._fill().ended

    # --- masks ------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Fill the mask of the next token if that is still to be done; raises nothing."""
        with self._lock:
            if not self._filled and not self._is_over:
                try:
                    self._fill()
                except Exception as error:
                    self._error = error
                    self._filled = True

    def mask(self) -> FillState:
        """Return what the mask says, filled by now; raises what went wrong."""
        self.settle()
        if self._error is not None:
            raise self._error
        return FillState.DEAD if self._is_over else self._state

    @property
    def words(self) -> Words:
        """The mask as `mask` left it."""
        return self._words

    @property
    def penalty(self) -> Tensor:
        """The mask as `mask` left it, to be added to the logits."""
        assert self._penalty is not None
        return self._penalty

    def _fill(self) -> Fill:
        """Fill the mask; the lock is held."""
        place = self._places[-1]
        if place.phase == THINKING:
            self._state, self._filled = FillState.FREE, True
            return Fill(FillState.FREE)
        fill = self.matcher.fill(self._mask, 0)
        if self.matcher.failure is not None:
            raise ValueError(f"the grammar ({self.rules.label()}) gave up: {self.matcher.failure}")
        state = fill.state
        if place.phase == MAYBE and state is not FillState.FREE:
            assert self.rules.markers is not None
            if state is FillState.DEAD or not place.is_legal:
                self._words.fill(0)
            word, bit = divmod(self.rules.markers.start[place.opening], 32)
            self._words.view("uint32")[word] |= 1 << bit
            state = FillState.CONSTRAINED
        if state is FillState.CONSTRAINED and self.rules.penalties is not None:
            self._penalty = self.rules.penalties.of(self._words)
        self._state, self._filled = state, True
        return fill

    # --- messages ---------------------------------------------------------------------------------

    def describe(self) -> str:
        """Say what is allowed next, for an error."""
        state = self.mask()
        text = self.rules.decode(self._tokens)
        after = f" after {text[-LAST_LETTERS:]!r}" if text else " at the beginning"
        return f"{self._allowed(state)}{after} ({self.rules.label()})"

    def _allowed(self, state: FillState) -> str:
        if state is FillState.FREE:
            return "every token"
        count = 0 if state is FillState.DEAD else count_of(self._words)
        if not count:
            return "no token"
        named = [
            f"{token} {self.rules.decode([token])!r}" for token in ids_of(self._words, MOST_NAMED)
        ]
        more = ", ..." if count > len(named) else ""
        return f"{count} token{'s' * (count > 1)} [{', '.join(named)}{more}]"

    def _refusal(self, token: int) -> str:
        text = self.rules.decode(self._tokens)
        return (
            f"the token {token} {self.rules.decode([token])!r} is not legal in the grammar "
            f"({self.rules.label()}) after {text[-LAST_LETTERS:]!r}"
        )


def phase_of(prompt: Sequence[int], markers: ReasoningMarkers) -> int:
    """Say where a prompt leaves the sequence: inside the reasoning, after it, or undecided."""
    opened, closed = _last(prompt, markers.start), _last(prompt, markers.closing)
    if opened < 0 and closed < 0:
        return MAYBE
    return THINKING if opened > closed else ANSWER


def tail_of(markers: ReasoningMarkers) -> tuple[int, ...]:
    """Return what a thinking budget writes after the model's own closing marker."""
    at = _last(markers.end, markers.closing)
    return markers.end[at + len(markers.closing) :]


def _last(ids: Sequence[int], part: Sequence[int]) -> int:
    """Return where `part` begins for the last time in `ids`, or -1."""
    wanted, whole = tuple(part), tuple(ids)
    for at in range(len(whole) - len(wanted), -1, -1):
        if whole[at] == wanted[0] and whole[at : at + len(wanted)] == wanted:
            return at
    return -1
