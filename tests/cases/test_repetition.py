"""Repetition detection: DEC-110 and DEC-111."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from decodekit import SamplingParams
from decodekit.plugins.author.table_model import blank_table
from decodekit.sampling_params import RepetitionDetectionParams

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make

A, B, C, END = ord("a"), ord("b"), ord("c"), 128


@pytest.fixture(scope="module")
def looper(make: Make, ascii_tokenizer: Callable[..., Any]) -> Bench:
    """Writes a b a b ... after c."""
    table = blank_table(129)
    table[C, A] = table[A, B] = table[B, A] = 0.0
    return make(table, model={"tokenizer": ascii_tokenizer(special=["<end>"], eos_token="<end>")})


def greedy(**fields: Any) -> SamplingParams:
    fields.setdefault("max_tokens", 100)
    return SamplingParams(temperature=0.0, **fields)


def test_dec_110_where_it_fires_and_how_it_is_reported(looper: Bench) -> None:
    detection = RepetitionDetectionParams(max_pattern_size=4, min_count=3)

    for prompt in ("c", "cabab"):
        params = greedy(repetition_detection=detection)
        part = looper.generate([prompt], params)[0].outputs[0]
        stream = looper.stream([prompt], params)[0]
        assert list(part.token_ids) == stream.ids() == [A, B] * 3
        assert part.text == stream.text() == "ababab"
        assert (part.finish_reason, part.stop_reason) == ("repetition", "repetition_detected")
        assert stream.last().stop_reason == "repetition_detected"
    for bad in ({"max_pattern_size": 4, "min_count": 1}, {"max_pattern_size": 4}):
        with pytest.raises(ValueError, match="min_count"):
            RepetitionDetectionParams(**bad)
        with pytest.raises(ValueError, match="min_count"):
            greedy(repetition_detection=bad)
    for off in (None, RepetitionDetectionParams()):
        part = looper.generate(["c"], greedy(repetition_detection=off))[0].outputs[0]
        assert len(part.token_ids) == 100
        assert part.finish_reason == "length"


def test_dec_111_no_false_alarms(looper: Bench, spell: Callable[..., SamplingParams]) -> None:
    detection = {"max_pattern_size": 4, "min_count": 6}
    items = [token for letter in b"xyzuvwpqrs" for token in (A, letter)]
    run = [*b"so ", *b"!!!!!", *b" it was"]

    params = [
        spell([*items, END], repetition_detection=detection),
        greedy(),
        spell([*run, END], repetition_detection=detection),
    ]
    parts = [output.outputs[0] for output in looper.generate([[C]] * 3, params)]

    assert list(parts[0].token_ids) == [*items, END]
    assert list(parts[2].token_ids) == [*run, END]
    assert [part.finish_reason for part in parts] == ["stop", "length", "stop"]
    assert list(parts[1].token_ids) == [A, B] * 50
