"""The pace of guessing, and the room that the scheduler leaves to guesses."""

from types import SimpleNamespace
from typing import Any

import pytest

from decodekit.core.kv_cache import BlockPool
from decodekit.core.request import Request, Sequence
from decodekit.core.scheduler import Scheduler
from decodekit.core.speculation import FIRST_LENGTH, LONGEST_WAIT, Pace


def test_guesses_that_are_right_grow_to_the_most() -> None:
    pace = Pace(20)
    lengths = []
    for _ in range(4):
        lengths.append(pace.next())
        pace.saw(lengths[-1], lengths[-1])

    assert lengths == [FIRST_LENGTH, 8, 16, 20]


def test_a_guess_that_is_partly_right_sets_the_length() -> None:
    pace = Pace(8)

    pace.saw(4, 1)

    assert pace.next() == 2


def test_text_without_copies_is_guessed_at_ever_more_rarely() -> None:
    pace = Pace(8)
    guessed = 0
    for _ in range(1000):
        length = pace.next()
        guessed += length
        if length:
            pace.saw(length, 0)

    assert guessed < 45
    assert 1000 / LONGEST_WAIT - 5 < guessed


def test_one_right_token_ends_the_pauses() -> None:
    pace = Pace(8)
    for _ in range(6):
        while not pace.next():
            pass
        pace.saw(1, 0)
    while not pace.next():
        pass

    pace.saw(1, 1)

    assert pace.next() == 2


# --- the scheduler ------------------------------------------------------------------------------


def decoding(scheduler: Scheduler, number: int, length: int) -> Sequence:
    """A running sequence that has computed a prompt of `length` tokens and said one."""
    params: Any = SimpleNamespace(skip_reading_prefix_cache=False)
    request = Request(str(number), None, tuple(range(length)), params, None, 0, 0, 0.0, number)
    sequence = Sequence(number, request, 0, request.prompt_ids, length)
    request.sequences = [sequence]
    scheduler.add(sequence)
    scheduler.schedule()
    sequence.num_computed = length
    sequence.output_ids.append(7)
    return sequence


def make(blocks: int = 8, tokens: int = 64) -> Scheduler:
    return Scheduler(BlockPool(blocks, 4), max_num_seqs=8, max_num_batched_tokens=tokens)


def test_guessed_tokens_are_computed_along() -> None:
    scheduler = make()
    sequence = decoding(scheduler, 0, 6)
    sequence.draft = (1, 2, 3)

    assert scheduler.schedule().work == [(sequence, 4)]
    assert len(sequence.blocks) == 3


def test_real_tokens_come_before_guessed_ones() -> None:
    scheduler = make(tokens=8)
    first, second = decoding(scheduler, 0, 6), decoding(scheduler, 1, 6)
    first.draft = second.draft = (1, 2, 3, 4, 5)

    assert scheduler.schedule().work == [(first, 6), (second, 2)]
    assert second.draft == (1,)


@pytest.mark.parametrize(("free", "room"), [(0, 1), (1, 5)])
def test_guesses_take_free_blocks_alone(free: int, room: int) -> None:
    scheduler = make(blocks=2 + free)
    sequence = decoding(scheduler, 0, 6)
    sequence.draft = (1, 2, 3, 4, 5, 6, 7)

    assert scheduler.schedule().work == [(sequence, 1 + room)]
    assert scheduler.num_preemptions == 0


def test_blocks_of_wrong_guesses_come_back_before_anyone_is_preempted() -> None:
    scheduler = make(blocks=5)
    wrong, other = decoding(scheduler, 0, 3), decoding(scheduler, 1, 4)
    wrong.draft = (1, 2, 3, 4, 5, 6)
    scheduler.schedule()
    wrong.num_computed += 1  # none of the guesses was right
    wrong.output_ids.append(8)
    wrong.draft = ()
    held = len(wrong.blocks)
    other.num_computed += 1
    other.output_ids += [9] * 4  # which needs another block

    step = scheduler.schedule()

    assert held == 3
    assert len(wrong.blocks) == 2
    assert [sequence for sequence, _ in step.work] == [wrong, other]
    assert scheduler.num_preemptions == 0


def test_a_preempted_sequence_has_no_guess() -> None:
    scheduler = make()
    sequence = decoding(scheduler, 0, 6)
    sequence.draft = (1, 2, 3)

    scheduler.preempt_all()

    assert sequence.draft == ()
