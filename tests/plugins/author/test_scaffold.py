"""`decodekit plugin new` writes packages that pass their own tests as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from decodekit.core.cli import app
from decodekit.core.errors import ValidationError
from decodekit.plugins.author.scaffold import KINDS, Names, names_of, write_package

PLUGIN = "decodekit.plugins.author.pytest_plugin"


def call(*args: str) -> Result:
    return CliRunner().invoke(app, ["plugin", *args])


def run_pytest(*args: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args],
        cwd=cwd,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_package_passes_its_own_tests_untouched(tmp_path: Path) -> None:
    result = call("new", "acme-top-a", "--kind", "cut", "--into", str(tmp_path))

    assert result.exit_code == 0, result.stderr
    assert "the stage acme.top_a" in result.stdout
    assert "4 passed" in run_pytest(cwd=tmp_path / "acme-top-a")


def test_packages_of_every_other_kind_pass_their_tests(tmp_path: Path) -> None:
    """In one process, to save the start of eight."""
    others = [kind for kind in KINDS if kind != "cut"]
    for kind in others:
        write_package(tmp_path / f"acme-{kind}-x", names_of(f"acme-{kind}-x"), kind)
    paths = "\n".join(f"  acme-{kind}-x/src" for kind in others)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath =\n{paths}\n")

    found = run_pytest("-p", PLUGIN, "--import-mode=importlib", cwd=tmp_path)

    assert f"{3 * len(others) + len(others) - 2} passed" in found


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_holds_what_it_must(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "decodekit-near"
    written = write_package(folder, names_of("decodekit-near"), kind)

    assert {path.relative_to(folder).as_posix() for path in written} == {
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "src/decodekit_near/__init__.py",
        "src/decodekit_near/near.py",
        "src/decodekit_near/py.typed",
        "tests/test_near.py",
        "tests/test_package.py",
    }
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["decodekit"] == {"near": "decodekit_near"}
    for path in written:
        assert "$" not in path.read_text().replace("'$", ""), path
        if path.suffix == ".py":
            compile(path.read_text(), str(path), "exec")


def test_names_are_made_from_the_distributions() -> None:
    assert names_of("acme-top-a") == Names(
        "acme-top-a", "acme_top_a", "acme.top_a", "top_a", "TopA"
    )
    assert names_of("decodekit-near").stage == "near.near"
    assert names_of("acme-x", "acme.own_name").class_name == "OwnName"


@pytest.mark.parametrize("name", ["Acme", "acme_top", "1acme", "acme-", ""])
def test_a_name_that_pip_would_not_take_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="NAME must be lower-case words"):
        names_of(name)


def test_what_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "acme-x").mkdir()

    there = call("new", "acme-x", "--into", str(tmp_path))
    unknown = call("new", "acme-y", "--kind", "filter", "--into", str(tmp_path))
    stage = call("new", "acme-y", "--stage", "TopA", "--into", str(tmp_path))

    assert (there.exit_code, unknown.exit_code, stage.exit_code) == (2, 2, 2)
    assert "is there already; give another name or --into" in there.stderr.replace("\n", " ")
    assert "--kind must be one of mask, force, bias, shape, cut, mark, pick" in unknown.stderr
    assert "--stage must be 'prefix.name'" in stage.stderr
