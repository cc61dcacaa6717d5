"""The figures of a comparison, beside values worked out by hand."""

import pytest

from decodekit.plugins.console.comparison.columns import Column
from decodekit.plugins.console.comparison.metrics import (
    agreement,
    distinct,
    figures_of,
    repetition,
)
from decodekit.plugins.console.comparison.outcome import Job, Outcome


def outcome(units: str, *, prompt: int = 0, seed: int = 1, **fields: object) -> Outcome:
    job = Job(prompt, "p", Column("c"), seed)
    made = Outcome(job, text=units, units=tuple(units), num_tokens=len(units))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_distinct_counts_different_ngrams_of_the_whole_column() -> None:
    texts = [outcome("abab"), outcome("abc")]

    assert distinct(texts, 1) == pytest.approx(3 / 7)  # a, b, c among 7
    assert distinct(texts, 2) == pytest.approx(3 / 5)  # ab, ba, bc among ab ba ab ab bc
    assert distinct([outcome("a")], 2) is None


def test_repetition_is_the_share_of_four_grams_seen_before() -> None:
    assert repetition("abcdabcd") == pytest.approx(1 / 5)  # abcd comes twice among five
    assert repetition("aaaaaaaa") == pytest.approx(4 / 5)
    assert repetition("abc") is None


def test_agreement_is_the_shared_beginning_over_the_longer_text() -> None:
    assert agreement("abcd", "abxy") == 0.5
    assert agreement("ab", "abcd") == 0.5
    assert agreement("", "") == 1.0
    assert agreement("", "a") == 0.0


def test_a_column_is_measured_beside_the_same_prompt_and_seed_of_the_first() -> None:
    reference = [outcome("abcd"), outcome("wxyz", prompt=1), outcome("no", seed=2, error="lost")]
    ours = [
        outcome("abxy", mean_logprob=-1.0, finish_reason="stop"),
        outcome("wxyz", prompt=1, mean_logprob=-2.0, finish_reason="length"),
        outcome("zz", seed=2, finish_reason="stop"),
        outcome("", seed=3, error="broken"),
    ]

    figures = figures_of(ours, reference)

    assert (figures.texts, figures.errors) == (3, 1)
    assert figures.length == pytest.approx(10 / 3)
    assert figures.ended == pytest.approx(2 / 3)
    assert figures.mean_logprob == -1.5
    assert figures.agreement == pytest.approx((0.5 + 1.0) / 2)
    assert figures.identical == 0.5


def test_a_column_without_texts_has_no_figures() -> None:
    figures = figures_of([outcome("", error="broken")], [])

    assert (figures.texts, figures.errors) == (0, 1)
    assert figures.length is figures.agreement is figures.distinct_1 is None
