"""`decodekit bench serve`: it counts and times what a live server answers, within its bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decodekit.core.errors import ValidationError
from decodekit.plugins.console.options import Sampling
from decodekit.plugins.serve import bench
from decodekit.plugins.serve.bench_load import Load, Run, Timing
from decodekit.plugins.serve.bench_report import figures
from decodekit.plugins.serve.live import LiveServer


def loaded(live: LiveServer, **more: Any) -> Load:
    given: dict[str, Any] = {
        "url": live.url, "endpoint": "chat", "model": None, "prompts": ["hi", "ho"],
        "requests": 6, "seconds": 30.0, "concurrency": 3, "rate": None, "timeout": 30.0, "seed": 0,
    }  # fmt: skip
    return Load(**{**given, **more})


def test_every_request_is_counted_and_timed(live: LiveServer) -> None:
    run = Run("a", {"max_tokens": 5, "ignore_eos": True}, 6)

    bench.measure(loaded(live), [run])

    told = figures(run)
    assert (told["requests"], told["errors"]) == (6, 0)
    assert told["completion_tokens"] == 30
    for timing in run.timings:
        assert timing.first is not None
        assert 0 < timing.first <= timing.total
        assert sum(timing.gaps) <= timing.total
    for metric in ("ttft", "tpot", "itl", "e2e"):
        values = told[f"{metric}_ms"]
        assert values["p50"] <= values["p90"] <= values["p99"] <= values["max"]


@pytest.mark.parametrize("fields", [{"best_of": 2}, {"use_beam_search": True, "n": 2}])
def test_whole_answers_are_timed_to_their_end(live: LiveServer, fields: dict[str, Any]) -> None:
    run = Run("a", {"max_tokens": 4, **fields}, 2)

    bench.measure(loaded(live, requests=2), [run])

    told = figures(run)
    assert told["errors"] == 0, told["error_messages"]
    assert told["ttft_ms"] is None
    assert told["e2e_ms"] is not None


def test_completions_can_be_measured(live: LiveServer) -> None:
    run = Run("a", {"max_tokens": 4, "ignore_eos": True}, 2)

    bench.measure(loaded(live, endpoint="completions", requests=2), [run])

    assert figures(run)["completion_tokens"] == 8


def test_a_refusal_is_told(live: LiveServer) -> None:
    run = Run("a", {"temperature": -1}, 2)

    bench.measure(loaded(live, requests=2), [run])

    assert run.num_errors == 2
    assert "temperature must be" in run.errors[0]


def test_time_ends_a_load_before_its_count(live: LiveServer) -> None:
    run = Run("a", {"max_tokens": 2}, 10_000)

    bench.measure(loaded(live, requests=10_000, seconds=0.5, rate=20.0), [run])

    assert 0 < len(run.timings) < 100


def test_percentiles_are_numpys() -> None:
    run = Run("a", {}, 5, seconds=2.0)
    run.timings = [Timing(total=value, tokens=3, first=value / 2) for value in (1, 2, 3, 4, 10)]

    told = figures(run)

    assert told["e2e_ms"]["p90"] == pytest.approx(1000 * np.percentile([1, 2, 3, 4, 10], 90))
    assert told["tpot_ms"]["mean"] == pytest.approx(1000 * np.mean([1, 2, 3, 4, 10]) / 4)
    assert told["tokens_per_second"] == 7.5


def test_the_command_writes_figures_and_plot(
    live: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures_file, plot = tmp_path / "a.json", tmp_path / "a.png"

    bench.app(
        ["serve", "--url", live.url, "--requests", "3", "--max-tokens", "4", "--chain",
         "temperature=0.7,top_p=0.9", "--compare", "greedy={\"temperature\": 0, \"chain\": null}",
         "--compare", "as-is={}", "--json", str(figures_file), "--plot", str(plot)],
        standalone_mode=False,
    )  # fmt: skip

    told = json.loads(figures_file.read_text())
    assert [run["name"] for run in told["runs"]] == ["greedy", "as-is"]
    assert told["runs"][1]["fields"]["chain"] == [
        {"stage": "temperature", "t": 0.7}, {"stage": "top_p", "p": 0.9}
    ]  # fmt: skip
    assert all(run["errors"] == 0 for run in told["runs"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "greedy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:1", True),
        ("http://[::1]:80", True),
        ("http://example.org", False),
        ("http://10.0.0.1:8000", False),
    ],
)
def test_other_machines_need_a_switch(url: str, is_here: bool) -> None:
    assert bench.is_here(url) is is_here


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--url", "http://example.org"], "--remote"),
        (["--requests", "0"], "requests must be"),
        (["--endpoint", "chats"], "endpoint must be"),
        (["--compare", "a"], "compare must be"),
        (["--compare", "a={}", "--compare", "a={}"], "compare must be"),
        (["--temperature", "-1"], "temperature must be"),
    ],
)
def test_bad_options_are_refused(options: list[str], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        bench.app(["serve", *options], standalone_mode=False)


def test_presets_and_beams_become_fields() -> None:
    fields = bench.request_fields(Sampling({"max_tokens": 3}), "chat", None, 4)

    [(name, made)] = bench.settings_of(fields, ["preset:creative"])

    assert name == "preset:creative"
    assert made == {
        "max_tokens": 3, "use_beam_search": True, "n": 4, "temperature": 0, "preset": "creative",
    }  # fmt: skip
