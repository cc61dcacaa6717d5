"""The catalog of methods is what the code says, and has every built-in stage."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from decodekit.core.registry import Registry

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_make_catalog", DOCS / "make_catalog.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(tool: ModuleType) -> None:
    assert (DOCS / "methods.md").read_text() == tool.page(), "run `python docs/make_catalog.py`"


def test_every_stage_has_its_place_and_every_parameter_its_row(tool: ModuleType) -> None:
    page = tool.page()
    headings = " ".join(re.findall(r"^### (.*)$", page, re.M))

    for name, stage in Registry.load(autoload=False, environ={}).stages.items():
        assert f"`{name}`" in headings
        for parameter in stage.Params.model_fields:
            assert f"| `{parameter}` |" in page


def test_formulas_are_no_markup(tool: ModuleType) -> None:
    assert tool.marked("l * p ** 2 and l_i < `l_j`") == r"l \* p \*\* 2 and l\_i &lt; `l_j`"
    assert tool.marked("a:\n* one\n* two") == "a:\n\n* one\n* two"


def test_ranges_read_as_words(tool: ModuleType) -> None:
    number = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    assert tool.allowed({"anyOf": [number, {"type": "null"}]}) == "a number in (0, 1]"
    assert tool.allowed({"type": "integer", "minimum": 1}) == "a whole number from 1 up"
    assert tool.allowed({"enum": ["a", None]}) == '`"a"`, `null`'
