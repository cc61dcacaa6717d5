"""`decodekit presets`, and presets and advice in the commands that run a model."""

import json
from pathlib import Path

from .conftest import Decodekit

HOUSE = """
[house]
description = "Ours [all] of it."
extends = "chat"
max_tokens = 3
stop = ["END"]
pinned = ["max_tokens"]

[broken]
chain = ["temperature", "no_such_stage"]

[odd]
temperature = 1.9
"""


def write(tmp_path: Path) -> str:
    path = tmp_path / "house.toml"
    path.write_text(HOUSE)
    return str(path)


def test_list_shows_shipped_and_own_presets(decodekit: Decodekit, tmp_path: Path) -> None:
    shown = decodekit("presets", "list", "--preset-file", write(tmp_path)).stdout
    listed = json.loads(decodekit("presets", "list", "--json").stdout)

    for name in ("chat", "creative", "house"):
        assert name in shown
    assert "Ours [all] of it." in " ".join(shown.split())
    assert list(listed)[:3] == ["code", "extract", "classify"]
    assert listed["creative"]["fields"]["chain"][3]["stage"] == "dry"
    assert listed["long_form"]["fields"]["repetition_detection"]["min_count"] == 8


def test_show_tells_values_origins_and_pins(decodekit: Decodekit, tmp_path: Path) -> None:
    shown = decodekit("presets", "show", "house", "--preset-file", write(tmp_path)).stdout
    data = json.loads(
        decodekit("presets", "show", "house", "--preset-file", write(tmp_path), "--json").stdout
    )

    assert "house > chat" in shown
    assert "house, pinned by house" in shown
    assert data["extends"] == ["chat"]
    assert data["fields"] == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 3, "stop": ["END"]}
    unknown = decodekit("presets", "show", "chta")
    assert unknown.exit_code == 2
    assert "did you mean 'chat'" in unknown.stderr


def test_check_plans_each_preset_on_a_model(decodekit: Decodekit, tmp_path: Path) -> None:
    result = decodekit("presets", "check", "TINY", "--preset-file", write(tmp_path))
    found = json.loads(
        decodekit("presets", "check", "TINY", "--preset-file", write(tmp_path), "--json").stdout
    )

    assert result.exit_code == 1
    assert "house: runs" in result.stdout
    assert "broken: cannot run" in result.stdout
    assert found["chat"]["steps"] == ["temperature 0.6", "top_p 0.9", "race"]
    assert found["broken"]["error"].startswith("unknown stage 'no_such_stage'")
    assert any("too_hot" in note for note in found["odd"]["notes"])


def test_check_of_one_preset(decodekit: Decodekit) -> None:
    result = decodekit("presets", "check", "TINY", "--preset", "creative")

    assert result.exit_code == 0
    assert "creative: runs" in result.stdout
    assert "chat" not in result.stdout


def test_explain_with_a_preset_says_what_came_from_it(decodekit: Decodekit, tmp_path: Path) -> None:
    options = ("--preset", "house", "--preset-file", write(tmp_path), "--top-p", "0.5")
    report = json.loads(decodekit("explain", "TINY", *options, "--json").stdout)

    assert report["order"][0]["provenance"]["t"] == "preset house"
    assert report["order"][1]["provenance"]["p"] == "request"
    assert report["fields"]["max_tokens"] == {"value": 3, "from": "preset house"}
    assert report["fields"]["stop"] == {"value": ["END"], "from": "preset house"}
    assert report["fields"]["preset"] == {"value": "house", "from": "request"}


def test_a_pinned_option_is_refused(decodekit: Decodekit, tmp_path: Path) -> None:
    options = ("--preset", "house", "--preset-file", write(tmp_path), "--max-tokens", "9")
    result = decodekit("explain", "TINY", *options)

    assert result.exit_code == 2
    assert "max_tokens is pinned to 3 by the preset 'house'" in result.stderr


def test_generate_takes_a_preset(decodekit: Decodekit, tmp_path: Path) -> None:
    options = ("--preset", "house", "--preset-file", write(tmp_path), "--prompt", "a")
    result = decodekit("generate", "TINY", *options, "--token-ids", "--ignore-eos")

    [line] = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(line["outputs"][0]["token_ids"]) == 3


def test_advice_is_shown_by_explain(decodekit: Decodekit) -> None:
    shown = decodekit("explain", "TINY", "--temperature", "1.8", "--top-p", "0.1").stdout

    assert "[hot_tiny_top_p]" in shown
    assert "[too_hot]" in shown


def test_min_tokens_is_measured_by_the_commands_own_length(decodekit: Decodekit) -> None:
    assert decodekit("explain", "TINY", "--min-tokens", "50").exit_code == 0
