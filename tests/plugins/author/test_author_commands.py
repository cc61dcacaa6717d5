"""`decodekit plugin check | doctor | reload`, and reloading in an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from decodekit import LLM, SamplingParams
from decodekit.core.cli import app
from decodekit.core.errors import PluginError
from decodekit.plugins.author.scaffold import names_of, write_package
from decodekit.plugins.author.subjects import find_subject
from decodekit.plugins.author.table_model import blank_table, write_table_model
from decodekit.plugins.author.variants import examples_of

STAGE = """
from decodekit import Kind, RowView, Stage, StageParams
from pydantic import Field


class Lift(Stage):
    \"\"\"Adds to one token.\"\"\"

    name = "local.lift"
    kind = Kind.BIAS

    class Params(StageParams):
        amount: float = Field(default={amount}, ge=0, le=90, examples=[1.0])

    def transform(self, logits: torch.Tensor, rows: RowView) -> None:
        logits[:, {token}] += rows.column("amount")
"""
BROKEN = STAGE.replace('rows.column("amount")', "logits.amax()")


def call(*args: str) -> Result:
    return CliRunner().invoke(app, ["plugin", *args])


@pytest.fixture
def stage_file(tmp_path: Path) -> Path:
    path = tmp_path / "lift.py"
    path.write_text(STAGE.format(amount=60.0, token=0))
    return path


# --- check ----------------------------------------------------------------------------------------


def test_a_sound_file_is_checked_in_a_line(stage_file: Path) -> None:
    result = call("check", str(stage_file))

    assert result.exit_code == 0, result.stdout
    assert "ok   local.lift:" in result.stdout
    assert "0 broken" in result.stdout


def test_a_breach_is_told_with_its_example_and_fails(stage_file: Path) -> None:
    stage_file.write_text(BROKEN.format(amount=60.0, token=0))

    result = call("check", str(stage_file))
    told = " ".join(result.stdout.split())

    assert result.exit_code == 1
    assert "FAIL local.lift:" in told
    assert "broken row_alone the row alone became" in told
    assert "example: logits [" in told


def test_a_check_can_be_read_by_programs(stage_file: Path) -> None:
    stage_file.write_text(BROKEN.format(amount=60.0, token=0))

    found = json.loads(call("check", str(stage_file), "--json").stdout)

    assert not found["ok"]
    [checked] = found["checked"]
    assert checked["subject"] == "local.lift"
    assert {each["law"] for each in checked["outcomes"] if each["state"] == "broken"} >= {
        "row_alone"
    }


def test_a_packages_folder_is_checked_from_its_sources(tmp_path: Path) -> None:
    write_package(tmp_path / "acme-near", names_of("acme-near"), "shape")

    result = call("check", str(tmp_path / "acme-near"), "--verbose")

    assert result.exit_code == 0, result.stdout
    assert "ok   acme.near:" in result.stdout
    assert "installed" in result.stdout


def test_a_package_whose_stage_has_no_prefix_is_told_so(tmp_path: Path) -> None:
    folder = tmp_path / "acme-bare"
    write_package(folder, names_of("acme-bare"), "shape")
    source = folder / "src/acme_bare/bare.py"
    source.write_text(source.read_text().replace('"acme.bare"', '"bare"'))

    told = " ".join(call("check", str(folder)).stdout.split())

    assert "broken installed the registry refuses it: the name 'bare' has no prefix" in told


def test_parameters_can_be_given(stage_file: Path) -> None:
    good = call("check", str(stage_file), "--params", '{"stage": "local.lift", "amount": 2.5}')
    bad = call("check", str(stage_file), "--params", "amount=2")

    assert good.exit_code == 0
    assert bad.exit_code == 2
    assert '--params must be a JSON object with the key "stage"' in bad.stderr


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: None, "has no pyproject.toml, so it is no package"),
        (
            lambda folder: (folder / "pyproject.toml").write_text("[project]\nname = 'x'\n"),
            "has no [project.entry-points.decodekit], so nobody would find it",
        ),
        (
            lambda folder: (folder / "pyproject.toml").write_text(
                "[project.entry-points.decodekit]\nx = 'no_such_module_here'\n"
            ),
            "the entry point 'no_such_module_here' cannot be imported: ModuleNotFoundError",
        ),
        (
            lambda folder: (folder / "pyproject.toml").write_text("["),
            "cannot be read",
        ),
    ],
    ids=["no-pyproject", "no-entry-point", "no-module", "bad-toml"],
)
def test_what_is_wrong_with_a_folder_is_said(
    make: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    make(tmp_path)

    with pytest.raises(PluginError) as failure:
        find_subject(str(tmp_path))
    assert sentence in str(failure.value)


def test_an_unknown_name_is_refused() -> None:
    result = call("check", "no-such-plugin")

    assert result.exit_code == 2
    assert "no plugin, module or distribution 'no-such-plugin'" in result.stderr


def test_examples_come_from_the_parameters_where_none_are_given(stage_file: Path) -> None:
    [stage] = find_subject(str(stage_file)).things

    assert examples_of(stage) == [{"amount": 1.0}]


# --- doctor ---------------------------------------------------------------------------------------


def test_the_doctor_counts_the_plugins_and_names_the_set() -> None:
    result = call("doctor")
    lines = json.loads(call("doctor", "--json").stdout)

    assert result.exit_code == 0
    assert "built-in and 0 other plugins are active, fingerprint" in " ".join(result.stdout.split())
    assert lines[0]["level"] == "ok"


# --- reload ---------------------------------------------------------------------------------------


def test_a_changed_file_is_tried_as_an_engine_would(stage_file: Path) -> None:
    result = call("reload", str(stage_file))

    told = " ".join(result.stdout.split())
    assert result.exit_code == 0, result.stdout
    assert "can be loaded anew" in told
    assert "requests that run keep the former one until they end" in told


@pytest.fixture
def llm(stage_file: Path, tmp_path: Path) -> LLM:
    model = write_table_model(tmp_path / "model", blank_table(16), eos_token_id=15)
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        plugins=[str(stage_file)],
    )


def answer(llm: LLM) -> int:
    params = SamplingParams(chain=["local.lift", "greedy"], max_tokens=1)
    [output] = llm.generate([[3]], params, use_tqdm=False)
    return output.outputs[0].token_ids[0]


def test_new_requests_run_the_reloaded_file_and_running_ones_the_former(
    llm: LLM, stage_file: Path
) -> None:
    assert answer(llm) == 0
    engine = llm.llm_engine
    params = SamplingParams(chain=["local.lift", "greedy"], max_tokens=4, ignore_eos=True)
    engine.add_request("running", [3], params)
    engine.step()

    stage_file.write_text(STAGE.format(amount=60.0, token=7))
    assert llm.reload_plugins() == [str(stage_file)]
    engine.add_request("new", [3], params)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)

    assert found == {"running": [0, 0, 0, 0], "new": [7, 7, 7, 7]}
    assert answer(llm) == 7


def test_a_file_that_fails_leaves_its_former_self(llm: LLM, stage_file: Path) -> None:
    stage_file.write_text("def broken(:\n")

    with pytest.raises(PluginError, match="cannot be loaded: SyntaxError"):
        llm.reload_plugins("lift")
    assert answer(llm) == 0
    stage_file.write_text(STAGE.format(amount=60.0, token=5))
    llm.reload_plugins("lift")
    assert answer(llm) == 5


def test_a_file_whose_new_name_is_taken_leaves_its_former_self(llm: LLM, stage_file: Path) -> None:
    stage_file.write_text(STAGE.format(amount=60.0, token=5).replace("local.lift", "top_k"))

    with pytest.raises(PluginError, match="'top_k'"):
        llm.reload_plugins()
    assert answer(llm) == 0


def test_only_files_can_be_reloaded(llm: LLM) -> None:
    with pytest.raises(PluginError, match="'top_p' is no local file among the plugins"):
        llm.reload_plugins("top_p")
