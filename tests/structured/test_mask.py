"""The mask stage alone: bits, the laws of its state, reasoning, and what it does to a row."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decodekit.core.constraint import Fill, FillState
from decodekit.core.reasoning import ReasoningMarkers
from decodekit.structured.bits import Penalties, count_of, ids_of, mask_rows, num_words, words_of
from decodekit.structured.filler import Filler
from decodekit.structured.follow import ANSWER, MAYBE, THINKING, Follower, Rules, phase_of
from decodekit.structured.mask import Grammar

SIZE = 70  # the vocabulary: one letter a token; not a multiple of 32
STOP = 69
LETTERS = {token: chr(33 + token) for token in range(SIZE)}


class Texts:
    """A program that allows some texts, one letter a token."""

    memory_bytes = 0

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def matcher(self, stop_ids: Sequence[int]) -> "TextMatcher":
        return TextMatcher(self.texts, tuple(stop_ids))


class TextMatcher:
    failure: str | None = None

    def __init__(self, texts: Sequence[str], stop_ids: tuple[int, ...], ids: Any = ()) -> None:
        self.texts, self.stop_ids, self.ids = texts, stop_ids, list(ids)

    @property
    def is_terminated(self) -> bool:
        return bool(self.ids) and self.ids[-1] in self.stop_ids

    @property
    def is_completed(self) -> bool:
        return self.is_terminated or self.text in self.texts

    @property
    def text(self) -> str:
        return "".join(LETTERS[i] for i in self.ids)

    def legal(self) -> set[int]:
        if self.is_terminated:
            return set()
        ids = {
            i for i, a in LETTERS.items() if any(t.startswith(self.text + a) for t in self.texts)
        }
        return ids | (set(self.stop_ids) if self.text in self.texts else set())

    def fill(self, bitmask: torch.Tensor, row: int) -> Fill:
        legal = self.legal()
        bitmask[row] = torch.from_numpy(words_of(legal, SIZE))
        ended = self.is_completed and legal <= set(self.stop_ids)
        return Fill(FillState.CONSTRAINED if legal else FillState.DEAD, ended=ended)

    def accept(self, token: int) -> bool:
        ok = token in self.legal()
        if ok:
            self.ids.append(token)
        return ok

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.ids)
        del self.ids[-count:]

    def fork(self) -> "TextMatcher":
        return TextMatcher(self.texts, self.stop_ids, self.ids)

    def rebuild(self, tokens: Sequence[int]) -> None:
        self.ids = list(tokens)

    def forced(self) -> Sequence[int]:
        return ()


def spelled(text: str) -> list[int]:
    return [ord(letter) - 33 for letter in text]


def rules_of(*texts: str, markers: ReasoningMarkers | None = None, upload: bool = False) -> Rules:
    program = Texts(*texts)
    return Rules(
        program=lambda: program,
        label=lambda: "texts, test",
        vocab_size=SIZE,
        stop_ids=(STOP,),
        decode=lambda ids: "".join(LETTERS[i] for i in ids),
        shown=lambda ids: "".join(LETTERS[i] for i in ids),
        filler=Filler(),
        penalties=None if upload else Penalties(SIZE),
        markers=markers,
    )


def allowed(follower: Follower) -> set[int]:
    """What a row keeps after the stage, as a set of ids."""
    logits = torch.zeros(1, SIZE)
    view: Any = SimpleNamespace(states=[follower])
    Grammar.prototype().transform(logits, view)
    return set((logits[0] > -torch.inf).nonzero()[:, 0].tolist())


# --- bits -----------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 99)), st.integers(1, 100))
def test_bits_hold_what_was_set(ids: set[int], size: int) -> None:
    words = words_of(ids, size)

    known = sorted(token for token in ids if token < size)
    assert len(words) == num_words(size) and words.dtype == np.int32
    assert ids_of(words, 1000) == known and count_of(words) == len(known)
    penalty = Penalties(size).of(words)
    assert penalty.shape == (size,)
    assert (penalty == 0).nonzero()[:, 0].tolist() == known
    assert bool(((penalty == 0) | torch.isneginf(penalty)).all())


@given(st.lists(st.sets(st.integers(0, 69)), min_size=1, max_size=4), st.integers(70, 100))
def test_uploaded_masks_do_what_added_ones_do(rows: list[set[int]], width: int) -> None:
    logits = torch.randn(len(rows) + 1, width, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    mask_rows(logits, list(range(1, len(rows) + 1)), [words_of(row, 70) for row in rows])

    assert torch.equal(logits[0], before[0])
    for place, legal in enumerate(rows, 1):
        kept = (logits[place] > -torch.inf).nonzero()[:, 0].tolist()
        assert kept == sorted(legal)  # ids past the words are illegal
        assert torch.equal(logits[place, kept], before[place, kept])


def test_a_mask_that_comes_again_is_not_made_again_and_few_are_kept() -> None:
    penalties = Penalties(SIZE, cache_bytes=0)
    first = penalties.of(words_of([1], SIZE))

    assert penalties.of(words_of([1], SIZE)) is first
    for token in range(penalties.most + 1):
        penalties.of(words_of([token, 60], SIZE))
    assert penalties.of(words_of([1], SIZE)) is not first


# --- the laws of the state ------------------------------------------------------------------------

TEXTS = ("abcd", "abce", "aZ", "b")


@given(st.data())
def test_rollback_fork_and_rebuild_agree_with_a_fresh_walk(data: st.DataObject) -> None:
    rules = rules_of(*TEXTS)
    stage = Grammar.prototype()
    params: Any = SimpleNamespace(rules=rules)
    state = stage.open(params, ())
    taken: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        legal = sorted(allowed(state))
        deed = data.draw(st.sampled_from(["go", "back", "fork", "rebuild"]))
        if deed == "go" and legal:
            taken.append(data.draw(st.sampled_from(legal)))
            stage.accept(state, taken[-1:])
        elif deed == "back" and taken:
            count = data.draw(st.integers(1, len(taken)))
            stage.rollback(state, count)
            del taken[-count:]
        elif deed == "fork":
            other, state = state, stage.fork(state)
            if legal:
                stage.accept(other, legal[:1])  # what the other does is its own affair
        elif deed == "rebuild":
            state = stage.rebuild(params, (), taken)
        fresh = stage.rebuild(params, (), taken)
        assert allowed(state) == allowed(fresh)
        assert Grammar.ended(state) == Grammar.ended(fresh)


def test_the_end_is_known_with_the_last_token() -> None:
    follower = Follower.opened(rules_of("ab", "abc"), ())
    follower.accept(spelled("ab"))
    assert not follower.is_over and allowed(follower) == {STOP, *spelled("c")}
    follower.accept(spelled("c"))
    assert follower.is_over and follower.is_whole


def test_an_illegal_token_is_refused_with_its_place() -> None:
    follower = Follower.opened(rules_of("abc"), ())
    follower.accept(spelled("a"))

    with pytest.raises(ValueError, match=r"'Z' is not legal in the grammar .* after 'a'"):
        follower.accept(spelled("Z"))


def test_what_goes_wrong_in_a_fill_comes_out_where_the_mask_is_needed() -> None:
    class Broken(TextMatcher):
        failure = "a limit was hit"

    rules = rules_of("a")
    follower = Follower(rules, Broken(["a"], (STOP,)), [Follower.opened(rules, ())._places[0]], [])

    follower.settle()
    with pytest.raises(ValueError, match="a limit was hit"):
        allowed(follower)


def test_a_forked_state_may_be_filled_by_many_threads() -> None:
    followers = [Follower.opened(rules_of("ab", "cd"), ()) for _ in range(20)]
    found: list[set[int]] = []
    threads = [
        threading.Thread(target=lambda one=one: found.append(allowed(one)))  # type: ignore[misc]
        for one in followers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [set(spelled("ac"))] * 20


def test_a_dead_end_leaves_nothing_and_says_where() -> None:
    follower = Follower.opened(rules_of(), ())

    assert allowed(follower) == set()
    assert follower.describe() == "no token at the beginning (texts, test)"


def test_uploads_and_additions_give_one_row() -> None:
    for text in ("", "a", "ab"):
        followers = [Follower.opened(rules_of(*TEXTS, upload=up), ()) for up in (True, False)]
        for follower in followers:
            follower.accept(spelled(text))
        assert allowed(followers[0]) == allowed(followers[1])


# --- reasoning ------------------------------------------------------------------------------------

START, CLOSE, TAIL = spelled("<"), spelled(">"), spelled("!")
MARKERS = ReasoningMarkers(tuple(START), (*CLOSE, *TAIL), tuple(CLOSE))
WIDE = ReasoningMarkers(tuple(spelled("a<")), tuple(CLOSE), tuple(CLOSE))


def test_the_last_marker_of_the_prompt_decides() -> None:
    assert phase_of(spelled("xy"), MARKERS) == MAYBE
    assert phase_of(spelled("x<y"), MARKERS) == THINKING
    assert phase_of(spelled("x<y>"), MARKERS) == ANSWER
    assert phase_of(spelled("<y><"), MARKERS) == THINKING
    assert phase_of((), MARKERS) == MAYBE


def test_reasoning_is_free_and_the_grammar_begins_after_it() -> None:
    follower = Follower.opened(rules_of("ab", markers=MARKERS), spelled("<"))
    assert len(allowed(follower)) == SIZE
    follower.accept(spelled("zz>"))
    assert allowed(follower) == set(spelled("a"))
    assert follower.answer_start == 3
    follower.rollback(1)
    assert len(allowed(follower)) == SIZE
    follower.accept(spelled(">ab"))
    assert follower.is_over


def test_what_a_budget_writes_after_the_marker_is_no_answer() -> None:
    follower = Follower.opened(rules_of("ab", markers=MARKERS), spelled("<"))
    follower.accept(spelled("z>!"))
    assert allowed(follower) == set(spelled("a"))
    assert follower.answer_start == 3


def test_without_a_marker_both_ways_are_open() -> None:
    rules = rules_of("ab", markers=MARKERS)
    answering, thinking = Follower.opened(rules, ()), Follower.opened(rules, ())
    assert allowed(answering) == set(spelled("a<"))
    answering.accept(spelled("ab"))
    assert answering.is_over and answering.answer_start == 0
    thinking.accept(spelled("<x>"))
    assert allowed(thinking) == set(spelled("a"))


def test_a_half_written_marker_may_still_be_an_answer() -> None:
    follower = Follower.opened(rules_of("ab", markers=WIDE), ())
    follower.accept(spelled("a"))
    assert allowed(follower) == set(spelled("b<"))
    twin = follower.fork()
    follower.accept(spelled("<q"))
    assert len(allowed(follower)) == SIZE
    follower.rollback(2)
    assert allowed(follower) == set(spelled("b<"))
    for one in (follower, twin):
        one.accept(spelled("b"))
        assert one.is_over
