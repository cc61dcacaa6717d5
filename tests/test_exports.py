"""The face: what `import decodekit` offers, that it is lazy, and that it is complete."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import decodekit

ROOT = Path(__file__).resolve().parents[1]

PUBLIC = set(
    """
    LLM SamplingParams PoolingParams RequestOutput CompletionOutput PoolingOutput
    PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput ClassificationOutput
    ClassificationRequestOutput ScoringOutput ScoringRequestOutput AsyncLLM LLMEngine
    AsyncLLMEngine EngineArgs AsyncEngineArgs Stage StageParams Kind Form Order Caps RowView
    hookimpl request_schema ChoiceOutput GrammarProcessor PromptType TextPrompt TokensPrompt
    __version__ __version_tuple__
    """.split()
)
ELSEWHERE = ["StructuredOutputsParams", "RepetitionDetectionParams", "BeamSearchParams",
             "RequestOutputKind", "LoRARequest", "LogitsProcessor"]  # fmt: skip


def test_all_is_sorted_and_complete() -> None:
    assert decodekit.__all__ == sorted(decodekit.__all__)
    assert set(decodekit.__all__) == PUBLIC
    assert dir(decodekit) == decodekit.__all__


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_name_loads(name: str) -> None:
    assert getattr(decodekit, name) is not None


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_of_other_modules_are_not_on_the_face(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(decodekit, name)


def test_one_class_under_two_names() -> None:
    assert decodekit.AsyncLLMEngine is decodekit.AsyncLLM


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert decodekit.__version__ == project["version"]
    assert ".".join(map(str, decodekit.__version_tuple__)) == project["version"]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, decodekit; decodekit.__version__\n"
        "heavy = ('torch', 'transformers', 'pydantic', 'pluggy', 'numpy', 'typer')\n"
        "print([name for name in heavy if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "decodekit", "--help"], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


def test_the_package_is_typed() -> None:
    package = Path(importlib.import_module("decodekit").__file__ or "").parent

    assert (package / "py.typed").is_file()
