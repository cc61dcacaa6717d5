"""The repetition stop: exactly the stated algorithm, on generated tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodekit.core.params import RepetitionDetectionParams
from decodekit.core.stage import Verdict
from decodekit.plugins.author.rows import make_context
from decodekit.plugins.stop.repetition import Repetition


@dataclass
class Output:
    output_ids: Sequence[int]
    prompt_ids: Sequence[int] = field(default_factory=lambda: [1, 2, 1, 2, 1, 2])


def fires(output: Sequence[int], asked: RepetitionDetectionParams | None) -> bool:
    context = make_context(50, request=SimpleNamespace(repetition_detection=asked))
    check = Repetition().bind(context)
    if check is None:
        return False
    verdict = check(Output(output))
    assert verdict in (None, Verdict("repetition", "repetition_detected"))
    return verdict is not None


def by_definition(output: Sequence[int], asked: RepetitionDetectionParams) -> bool:
    """The algorithm as it is written down: blocks cut out and compared."""
    for size in range(max(asked.min_pattern_size, 1), asked.max_pattern_size + 1):
        if size * asked.min_count > len(output):
            return False
        tail = list(output[len(output) - size * asked.min_count :])
        blocks = [tail[i : i + size] for i in range(0, len(tail), size)]
        if all(block == blocks[0] for block in blocks):
            return True
    return False


@pytest.mark.parametrize(
    ("output", "shortest", "longest", "count", "expected"),
    [
        ([7, 1, 2, 1, 2, 1, 2], 1, 3, 3, True),
        ([5, 5], 1, 3, 3, False),
        ([5, 5, 5], 0, 1, 3, True),  # a least size of 0 is read as 1
        ([5, 5, 5], 2, 3, 2, False),
        ([5, 5, 5, 5], 2, 3, 2, True),
        ([1, 2, 1, 2, 1, 3], 1, 3, 2, False),
        ([1, 2, 1, 2, 3], 1, 3, 2, False),  # the repeat is not at the end
        ([1, 2, 3, 1, 2, 3], 1, 2, 2, False),  # longer than the longest pattern
    ],
)
def test_known_answers(
    output: list[int], shortest: int, longest: int, count: int, expected: bool
) -> None:
    assert fires(output, RepetitionDetectionParams(longest, shortest, count)) is expected


@given(
    output=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    sizes=st.tuples(st.integers(0, 6), st.integers(1, 6)),
    count=st.integers(2, 5),
)
def test_it_is_the_stated_algorithm(output: list[int], sizes: tuple[int, int], count: int) -> None:
    asked = RepetitionDetectionParams(max(sizes), min(sizes), count)

    assert fires(output, asked) == by_definition(output, asked)


def test_it_is_asked_last_and_minds_min_tokens() -> None:
    assert Repetition.rank > 30
    assert Repetition.respects_min_tokens
    assert not fires([1, 1, 1, 1], None)
