"""Stops by id and by length."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from decodekit.core.stage import Stop, Verdict
from decodekit.plugins.author.rows import make_context
from decodekit.plugins.stop.tokens import EndOfSequence, Length, StopIds, decodekit_stops


@dataclass
class Sequence:
    output_ids: list[int]
    prompt_ids: list[int] = field(default_factory=lambda: [1])


def verdict(stop: Stop, output: list[int], **given: Any) -> Verdict | None:
    """Bind `stop` for a model with the end ids 2 (the tokenizer's) and 3, and ask it once."""
    request = {"ignore_eos": False, "stop_token_ids": (), "max_tokens": None}
    context = make_context(
        50,
        eos_ids=given.pop("eos_ids", (2, 3)),
        max_model_len=given.pop("max_model_len", 100),
        prompt_ids=(1,) * given.pop("num_prompt", 1),
        request=SimpleNamespace(**{**request, **given}),
    )
    check = stop.bind(context)
    return None if check is None else check(Sequence(output))


def test_the_tokenizers_end_id_stops_without_a_stop_reason() -> None:
    assert verdict(EndOfSequence(), [5, 2]) == Verdict("stop", None)
    assert verdict(EndOfSequence(), [2, 5]) is None
    assert verdict(EndOfSequence(), [5, 3]) is None


def test_other_end_ids_and_the_callers_stop_with_the_id() -> None:
    assert verdict(StopIds(), [5, 3]) == Verdict("stop", 3)
    assert verdict(StopIds(), [5, 9], stop_token_ids=(9,)) == Verdict("stop", 9)
    assert verdict(StopIds(), [9, 5], stop_token_ids=(9,)) is None


def test_ignore_eos_switches_the_models_ids_off_and_not_the_callers() -> None:
    assert verdict(EndOfSequence(), [2], ignore_eos=True) is None
    assert verdict(StopIds(), [3], ignore_eos=True) is None
    assert verdict(StopIds(), [9], ignore_eos=True, stop_token_ids=(9,)) == Verdict("stop", 9)
    assert verdict(StopIds(), [2], ignore_eos=True, stop_token_ids=(2,)) == Verdict("stop", 2)


def test_what_cannot_happen_is_not_asked() -> None:
    context = make_context(
        9, eos_ids=(), request=SimpleNamespace(ignore_eos=False, stop_token_ids=())
    )

    assert EndOfSequence().bind(context) is None
    assert StopIds().bind(context) is None


@pytest.mark.parametrize(
    ("max_tokens", "num_prompt", "limit"), [(4, 1, 4), (4, 97, 3), (None, 90, 10), (500, 50, 50)]
)
def test_length_is_the_smaller_of_max_tokens_and_what_the_context_leaves(
    max_tokens: int | None, num_prompt: int, limit: int
) -> None:
    given = {"max_tokens": max_tokens, "num_prompt": num_prompt}

    assert verdict(Length(), [7] * (limit - 1), **given) is None
    assert verdict(Length(), [7] * limit, **given) == Verdict("length", None)


def test_the_order_is_eos_then_ids_then_length_and_only_length_ignores_min_tokens() -> None:
    stops = sorted(decodekit_stops(), key=lambda stop: stop.rank)

    assert [(stop.name, stop.respects_min_tokens) for stop in stops] == [
        ("eos", True),
        ("stop_ids", True),
        ("length", False),
    ]
