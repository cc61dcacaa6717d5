"""The example packages: built to wheels, installed beside decodekit, and used by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from decodekit.plugins.author.table_model import byte_tokenizer, write_table_model

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "examples/packages"
NAMES = {"decodekit-top-a-lite": "top_a_lite", "decodekit-phrase-ban": "phrase_ban"}

# Runs in a process of its own, as a user's would.
SCRIPT = """
import json, sys
from decodekit import LLM, SamplingParams

llm = LLM(sys.argv[1], dtype="float32", max_model_len=128)
registry = llm.llm_engine.parts.registry
listed = {info.name: [info.distribution, info.version, info.state, list(info.stages)]
          for info in registry.plugins() if not info.built_in}


def ask(chain):
    params = SamplingParams(chain=chain, max_tokens=12, seed=3)
    [output] = llm.generate("go ", params, use_tqdm=False)
    return [output.outputs[0].text, output.outputs[0].error, [s.stage for s in output.plan.order]]


ban = {"stage": "phrase_ban.phrases", "phrases": ["abc"]}
cut = {"stage": "top_a_lite.top_a", "a": 1.0}
print(json.dumps({
    "listed": listed,
    "plain": ask(["greedy"]),
    "banned": ask([ban, "greedy"]),
    "cut": ask([{"stage": "temperature", "t": 2.0}, cut]),
    "both": ask([ban, cut]),
}))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Built in copies by the backend itself: no network, and no litter in the checkout."""
    found = []
    for name in NAMES:
        source = tmp_path_factory.mktemp("source") / name
        shutil.copytree(
            PACKAGES / name, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
        build = "import setuptools.build_meta as backend; backend.build_wheel('dist')"
        subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
        found += (source / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def place(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the two packages and nothing else, as pip installs them."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), *map(str, wheels)], check=True)
    return target


def environment(place: Path) -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(place), *([known] if known else [])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def test_a_wheel_holds_the_module_and_its_entry_point(wheels: list[Path]) -> None:
    assert len(wheels) == len(NAMES)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            points = next(name for name in names if name.endswith("entry_points.txt"))
            text = archive.read(points).decode()
        assert "[decodekit]" in text
        assert not [name for name in names if name.startswith("tests/")]
        assert [name for name in names if name.endswith("/py.typed")]


def test_installed_packages_are_found_and_used_by_name(place: Path, tmp_path: Path) -> None:
    table = torch.full((257, 257), -30.0)
    table[:, ord("a")] = -5.0
    for before, after in ("ab", "bc", "ca"):  # greedy writes abcabc...
        table[ord(before), ord(after)] = 0.0
    model = write_table_model(
        tmp_path / "model",
        table,
        eos_token_id=256,
        tokenizer=byte_tokenizer(special=["<end>"], eos="<end>"),
    )

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)],
        env=environment(place),
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["listed"] == {
        "phrase_ban": ["decodekit-phrase-ban", "0.1.0", "active", ["phrase_ban.phrases"]],
        "top_a_lite": ["decodekit-top-a-lite", "0.1.0", "active", ["top_a_lite.top_a"]],
    }
    assert found["plain"][0].startswith("abcabc")
    text, error, order = found["banned"]
    assert error is None
    assert "abc" not in text and "ab" in text
    assert order == ["phrase_ban.phrases", "greedy"]
    assert found["cut"][2] == ["temperature", "top_a_lite.top_a", "race"]
    assert found["cut"][1] is None
    assert "abc" not in found["both"][0]


def test_the_packages_pass_their_own_tests_where_they_are_installed(place: Path) -> None:
    """Not from their sources: no settings of theirs are read."""
    plugin = "decodekit.plugins.author.pytest_plugin"
    settings = ["-c", os.devnull, "--rootdir", str(place), "-p", "no:cacheprovider", "-p", plugin]
    tests = [str(PACKAGES / name / "tests") for name in NAMES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", *settings, *tests],
        env=environment(place),
        cwd=place,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 passed" in done.stdout


def test_the_check_command_finds_an_installed_package(place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "decodekit", "plugin", "check", "top_a_lite", "--json"],
        env=environment(place),
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [each["subject"] for each in found["checked"]] == ["top_a_lite.top_a"]
    assert found["ok"]
