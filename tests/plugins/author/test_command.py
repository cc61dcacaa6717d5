"""`decodekit plugin list`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from decodekit.core.cli import app

STAGE = """
from decodekit import Kind, Stage

class Quiet(Stage):
    name = "local.quiet"
    kind = Kind.SHAPE

    def transform(self, logits, rows):
        logits.mul_(0.5)
"""


def call(*args: str) -> Result:
    return CliRunner().invoke(app, ["plugin", "list", *args])


@pytest.fixture
def stage_file(tmp_path: Path) -> str:
    path = tmp_path / "quiet.py"
    path.write_text(STAGE)
    return str(path)


def test_every_plugin_is_listed_with_all_that_is_known_of_it(stage_file: str) -> None:
    result = call("--json", "-p", stage_file)

    assert result.exit_code == 0
    by_name = {info["name"]: info for info in json.loads(result.stdout)}
    top_p = by_name["logits_processors.cut.top_p"]
    assert top_p == {
        "name": "logits_processors.cut.top_p",
        "distribution": None,
        "version": None,
        "api": [1, 1],
        "hooks": ["decodekit_stages"],
        "stages": ["top_p"],
        "state": "active",
        "reason": "",
        "built_in": True,
    }
    assert by_name[stage_file]["stages"] == ["local.quiet"]
    assert by_name["plugins.author.command"]["api"] is None


def test_the_table_begins_with_what_is_not_built_in(stage_file: str) -> None:
    shown = call("-p", stage_file).stdout

    assert shown.index("local.quiet") < shown.index("vocab_padding")


def test_a_blocked_plugin_is_listed_with_the_reason() -> None:
    shown = call("-p", "no:top_p").stdout

    assert "logits_processors.cut.top_p is blocked: " in shown.replace("\n", " ")


def test_a_plugin_that_nobody_knows_is_refused_with_a_suggestion() -> None:
    result = call("-p", "logits_processors.cut.topp")

    assert result.exit_code == 2
    assert "did you mean 'logits_processors.cut.top_p'?" in result.stderr


def test_the_group_has_a_second_name() -> None:
    assert CliRunner().invoke(app, ["plugins", "list"]).stdout == call().stdout
