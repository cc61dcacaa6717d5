"""`decodekit trace` and `decodekit replay`: tables, the page, and a run that comes again."""

import json
import re
from pathlib import Path
from typing import Any

from .conftest import Decodekit

PROMPT = ("--prompt", "ab", "--max-tokens", "3")


def data_of(page: str) -> dict[str, Any]:
    """Return the data in a page."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert match is not None
    found: dict[str, Any] = json.loads(match[1])
    return found


def test_a_table_a_position_shows_what_each_stage_did(decodekit: Decodekit) -> None:
    shown = decodekit("trace", "TINY", *PROMPT, "--temperature", "0.7", "--top-k", "5").stdout

    assert shown.count("chosen by race") == 3
    assert "t=0.7" in shown and "k=5" in shown
    assert re.search(r"alive +25\d +25\d +5", shown)
    assert "all 3 positions" in shown


def test_why_says_what_became_of_a_token(decodekit: Decodekit) -> None:
    shown = decodekit("trace", "TINY", *PROMPT, "--top-k", "1", "--why", "a", "--why", "b").stdout

    assert shown.count("'a' ") >= 3 and shown.count("'b' ") >= 3
    assert "by 'top_k' (k=1) at position 2" in shown


def test_the_page_has_every_run_and_needs_no_network(decodekit: Decodekit, tmp_path: Path) -> None:
    path = tmp_path / "trace.html"
    runs = ("--chain", "temperature=0.7,top_k=4", "--chain", "top_p=0.5", "--profile", "llama.cpp")

    result = decodekit("trace", "TINY", *PROMPT, *runs, "--html", str(path))

    page = path.read_text()
    data = data_of(page)
    assert result.exit_code == 0 and result.stdout == ""
    names = [run["name"] for run in data["runs"]]
    assert names == ["temperature=0.7,top_k=4", "top_p=0.5", "profile llama.cpp"]
    assert data["runs"][0]["points"] == ["model", "temperature", "top_k"]
    assert {run["seed"] for run in data["runs"]} == {0}
    for run in data["runs"]:
        assert [at["parent"] for at in run["positions"]] == [-1, 0, 1]
        for at in run["positions"]:
            assert len(at["effects"]) == len(run["points"]) - 1
            chosen = next(each for each in at["tokens"] if each["id"] == at["token"])
            assert "was chosen at position" in chosen["why"]
    assert not re.search(r"https?:|src=|href=|@import|url\(|fetch\(", page)


def test_a_prompt_cannot_break_out_of_the_page(decodekit: Decodekit, tmp_path: Path) -> None:
    path = tmp_path / "trace.html"
    prompt = "</script><!-- <b>&amp;"

    decodekit("trace", "TINY", "--prompt", prompt, "--max-tokens", "1", "--html", str(path))

    assert data_of(path.read_text())["prompt"] == prompt
    assert prompt not in path.read_text()


def test_the_summary_has_no_tokens(decodekit: Decodekit, tmp_path: Path) -> None:
    path = tmp_path / "trace.html"

    decodekit("trace", "TINY", *PROMPT, "--level", "summary", "--html", str(path))

    (run,) = data_of(path.read_text())["runs"]
    assert all(at["tokens"] == [] for at in run["positions"])


def test_what_is_wrong_is_refused_in_a_sentence(decodekit: Decodekit) -> None:
    none = decodekit("trace", "TINY")
    level = decodekit("trace", "TINY", *PROMPT, "--level", "all")
    many = decodekit("trace", "TINY", *PROMPT, "--watch", "two words")

    assert none.exit_code == level.exit_code == many.exit_code == 2
    assert "there is no prompt" in none.stderr
    assert "trace" in level.stderr and "tokens" in level.stderr
    assert "each must be one" in many.stderr


def test_a_bundle_of_the_command_line_comes_again(decodekit: Decodekit, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    decodekit("trace", "TINY", *PROMPT, "--temperature", "0.9", "--bundle", str(path), "--top", "2")

    same = decodekit("replay", str(path))
    bundle = json.loads(path.read_text())
    bundle["outputs"][0]["token_ids"][1] ^= 1
    path.write_text(json.dumps(bundle))
    other = decodekit("replay", str(path), "--json")

    assert same.exit_code == 0
    assert same.stdout.startswith("same: 3 tokens of 1 output")
    assert other.exit_code == 1
    found = json.loads(other.stdout)
    assert found["same"] is False
    assert found["tokens"][0]["position"] == 1
