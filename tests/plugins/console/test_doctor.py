"""The checks of a machine and of a model: each fault is seen, named, and comes with a remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodekit.core.models.locate import EMBEDDED_INSTALL
from decodekit.plugins.console import doctor as doctor_module
from decodekit.plugins.console import model_checks
from decodekit.plugins.console.model_checks import MIN_LOOP, MIN_TURNS, repeating_tail

from .conftest import CHATML, Decodekit, write_model

Lines = dict[str, dict[str, Any]]


def examine(decodekit: Decodekit, *args: str) -> tuple[Lines, int]:
    """Run the doctor and return its checks by name, and its exit code."""
    result = decodekit("doctor", *args, "--json")
    found = json.loads(result.stdout)
    assert found["ok"] == (result.exit_code == 0)
    return {line["check"]: line for line in found["checks"]}, result.exit_code


@pytest.fixture
def examine_template(decodekit: Decodekit, tmp_path: Path) -> Any:
    def call(template: str, *args: str) -> Lines:
        write_model(tmp_path, template)
        return examine(decodekit, str(tmp_path), "--load-format", "dummy", *args)[0]

    return call


def test_the_embedded_model_passes_every_check(
    decodekit: Decodekit, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NUM_GREEDY", "NUM_SAMPLED", "NUM_LONG"):  # as many as keep the test short
        monkeypatch.setattr(model_checks, name, 12)

    lines, code = examine(decodekit, "--request-seed", "1")

    assert code == 0
    assert {line["verdict"] for line in lines.values()} <= {"ok", "info", "warn"}
    assert "Paris" in lines["greedy answer"]["seen"]
    assert "'<|im_end|>' (2)" in lines["end token"]["seen"]
    assert lines["first token"]["data"]["rendered"].endswith("<|im_start|>assistant\n")
    assert lines["samples"]["verdict"] == "ok"
    assert lines["attention"]["seen"].startswith("torch")
    assert "no loop" in lines["repetition"]["seen"]


def test_without_a_model_only_the_machine_and_the_plugins_are_looked_at(
    decodekit: Decodekit,
) -> None:
    lines, code = examine(decodekit, "--no-model")

    assert code == 0
    assert {"python", "torch", "device", "threads", "plugins"} <= set(lines)
    assert "greedy answer" not in lines


def test_a_line_has_verdict_check_and_what_was_seen(decodekit: Decodekit) -> None:
    lines = decodekit("doctor", "--no-model").stdout.splitlines()

    assert lines[0].startswith("ok   python")


def test_a_broken_plugin_fails_with_its_reason(decodekit: Decodekit, tmp_path: Path) -> None:
    plugin = tmp_path / "sick.py"
    plugin.write_text(
        "from decodekit import hookimpl\n"
        "from decodekit.core.stage import Finding\n"
        "@hookimpl\n"
        "def decodekit_doctor():\n"
        "    return [Finding('error', 'no card in slot 3', 'push it in')]\n"
    )

    lines, code = examine(decodekit, "--no-model", "-p", str(plugin))

    assert code == 1
    assert lines["plugin"]["verdict"] == "FAIL"
    assert (lines["plugin"]["seen"], lines["plugin"]["remedy"]) == (
        "no card in slot 3",
        "push it in",
    )


def test_plugins_that_cannot_be_loaded_fail_and_the_report_goes_on(decodekit: Decodekit) -> None:
    lines, code = examine(decodekit, "--no-model", "-p", "nosuch")

    assert code == 1
    assert "no plugin" in lines["plugins"]["seen"]
    assert "python" in lines


def test_a_model_that_cannot_be_loaded_fails_with_the_reason(decodekit: Decodekit) -> None:
    lines, code = examine(decodekit, "/nosuch")

    assert code == 1
    assert "/nosuch" in lines["model"]["seen"]


def test_a_missing_embedded_model_comes_with_the_command_that_installs_it(
    decodekit: Decodekit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decodekit.core.models.locate._EMBEDDED_PACKAGE", "no_such_package")

    lines, code = examine(decodekit)

    assert code == 1
    assert lines["embedded model"]["remedy"] == EMBEDDED_INSTALL
    assert EMBEDDED_INSTALL in lines["model"]["seen"]


def test_more_threads_than_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 10**4)

    checks = {check.name: check for check in doctor_module.environment()}

    assert checks["threads"].level == "warn"
    assert "OMP_NUM_THREADS=" in checks["threads"].remedy


def test_a_template_in_order_passes(examine_template: Any) -> None:
    lines = examine_template(CHATML)

    names = ("generation prompt", "BOS", "end token")
    assert [lines[name]["verdict"] for name in names] == ["ok", "ok", "ok"]
    assert lines["generation prompt"]["seen"] == repr("<|im_start|>assistant\n")


def test_a_template_without_a_generation_prompt_fails(examine_template: Any) -> None:
    lines = examine_template(CHATML.partition("{% if add")[0])

    assert lines["generation prompt"]["verdict"] == "FAIL"


def test_a_template_that_writes_bos_twice_fails(examine_template: Any) -> None:
    lines = examine_template("{{ bos_token }}{{ bos_token }}" + CHATML)

    assert lines["BOS"]["verdict"] == "FAIL"
    assert "2 times" in lines["BOS"]["seen"]


def test_an_end_token_that_stops_nothing_fails(examine_template: Any) -> None:
    lines = examine_template(CHATML.replace("<|im_end|>", "<|im_start|>"))

    assert lines["end token"]["verdict"] == "FAIL"
    assert "--stop-token-id 25" in lines["end token"]["remedy"]


def test_a_template_without_an_end_token_is_a_warning(examine_template: Any) -> None:
    lines = examine_template(CHATML.replace("<|im_end|>", ""))

    assert lines["end token"]["verdict"] == "warn"


def test_a_template_that_does_not_render_fails(examine_template: Any) -> None:
    lines = examine_template("{{ raise_exception('no users here') }}")

    assert lines["chat template"]["verdict"] == "FAIL"
    assert "no users here" in lines["chat template"]["seen"]


def test_a_first_token_that_ends_the_answer_fails(decodekit: Decodekit, tmp_path: Path) -> None:
    write_model(tmp_path, eos_token_id=list(range(259)))

    lines, code = examine(decodekit, str(tmp_path), "--load-format", "dummy")

    assert code == 1
    assert lines["first token"]["verdict"] == "FAIL"
    assert "is an end token (p = " in lines["first token"]["seen"]


def test_a_model_that_loops_is_a_warning(decodekit: Decodekit, tmp_path: Path) -> None:
    write_model(tmp_path)

    lines, _ = examine(
        decodekit,
        *(str(tmp_path), "--load-format", "dummy", "--temperature", "0", "--ignore-eos"),
        *("--params", '{"allowed_token_ids": [65]}'),
    )

    assert lines["repetition"]["verdict"] == "warn"
    assert "repeat 1 token" in lines["repetition"]["seen"]
    assert "--repetition-penalty" in lines["repetition"]["remedy"]


def test_the_generation_config_in_force_is_shown(decodekit: Decodekit, tmp_path: Path) -> None:
    write_model(tmp_path, temperature=0.6, top_k=9)

    lines, _ = examine(decodekit, str(tmp_path), "--load-format", "dummy")

    assert lines["generation_config"]["data"] == {"temperature": 0.6, "top_k": 9}


@given(
    st.lists(st.integers(0, 3), max_size=20),
    st.lists(st.integers(0, 3), min_size=1, max_size=7),
    st.integers(1, 12),
)
def test_a_loop_is_found_where_a_plain_search_finds_one(
    head: list[int], body: list[int], turns: int
) -> None:
    tokens = head + body * turns

    def has_loop(period: int) -> bool:
        need = max(MIN_LOOP, MIN_TURNS * period)
        tail = tokens[-need:]
        return len(tail) == need and all(tail[i] == tail[i + period] for i in range(need - period))

    periods = [period for period in range(1, len(tokens) + 1) if has_loop(period)]
    loop = repeating_tail(tokens)
    assert (loop.period if loop else None) == (periods[0] if periods else None)


def test_a_long_stretch_of_different_tokens_is_no_loop() -> None:
    assert repeating_tail(list(range(256))) is None
    assert repeating_tail([]) is None
