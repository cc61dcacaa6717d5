"""When an output is called weak."""

import logging
from typing import Any

import pytest

from decodekit.core.stage import Ending
from decodekit.plugins.author.rows import make_context
from decodekit.plugins.observe.confidence import Confidence


def judge(observer: Confidence, mean: float | None, reason: str = "stop", **asked: Any) -> Any:
    """Let one output end; return its two fields."""
    order = observer.bind(make_context(9, wish=Confidence.Params(**asked)))
    assert order is not None
    record = observer.open(order, None)
    assert set(observer.result(record).values()) == {None}
    observer.finish(record, Ending("req-7", 1, reason, 5, mean))
    fields = observer.result(record)
    return fields["low_confidence"], fields["low_confidence_reason"]


def test_below_the_threshold_is_weak_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    observer = Confidence()

    with caplog.at_level(logging.WARNING, "decodekit"):
        strong = judge(observer, -1.5, threshold=-1.5)
        weak = judge(observer, -1.75, threshold=-1.5)

    assert strong == (False, None)
    assert weak == (True, "mean log-prob -1.750 is below the threshold -1.5")
    assert observer.metrics() == {"confidence_checked": 2, "low_confidence": 1}
    (line,) = caplog.messages
    assert line == f"request req-7 output 1 has low confidence: {weak[1]}"


def test_the_baseline_is_the_mean_and_spread_of_recent_outputs() -> None:
    observer = Confidence()
    asked = {"min_samples": 4, "deviations": 2.0}
    history = [-1.0, -1.2, -0.8, -1.0]  # mean -1, standard deviation 0.1414

    early = [judge(observer, mean, **asked) for mean in history]
    weak = judge(observer, -1.29, **asked)
    observer.seen.pop()
    strong = judge(observer, -1.27, **asked)

    assert early == [(False, None)] * 4
    assert weak[0] is True
    assert "2 standard deviations under the mean of the last 4 outputs" in weak[1]
    assert strong == (False, None)


def test_only_the_window_counts_and_none_switches_the_baseline_off() -> None:
    observer = Confidence()
    for mean in (-9.0, -9.0, -1.0, -1.0):
        judge(observer, mean, deviations=None)

    assert judge(observer, -8.0, min_samples=2, window=2)[0] is True
    observer.seen.pop()
    assert judge(observer, -8.0, min_samples=2, window=4)[0] is False
    observer.seen.pop()
    assert judge(observer, -8.0, deviations=None)[0] is False


@pytest.mark.parametrize(
    ("mean", "reason"), [(-9.0, "abort"), (-9.0, "error"), (None, "stop"), (float("nan"), "stop")]
)
def test_what_did_not_end_properly_is_not_judged(mean: float | None, reason: str) -> None:
    observer = Confidence()

    assert judge(observer, mean, reason, threshold=-1.0) == (None, None)
    assert observer.metrics()["confidence_checked"] == 0
    assert not observer.seen


def test_it_watches_nothing_and_only_those_that_ask() -> None:
    observer = Confidence()

    assert observer.bind(make_context(9)) is None
    order = observer.bind(make_context(9, wish=Confidence.Params()))
    assert order is not None
    assert observer.taps(order) == frozenset()


@pytest.mark.parametrize(
    "asked",
    [{"threshold": 0.5}, {"window": 1}, {"min_samples": 1}, {"deviations": 0}, {"treshold": -1.0}],
)
def test_parameters_have_ranges(asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Confidence.Params(**asked)
