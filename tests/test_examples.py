"""What people see first: the README's code and claims, and the example scripts."""

import asyncio
import importlib.util
import io
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

import decodekit
from decodekit import LLM
from decodekit.core import hookspecs
from decodekit.core.registry import Registry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """Return the README's code blocks in `language`, in order."""
    return [body for name, body in FENCE.findall(README) if name == language]


def table_rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table under `heading`, its head left out."""
    section = README.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quoted(text: str) -> list[str]:
    """Return what stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The embedded model with room for the tour's log-probs."""
    return LLM(max_model_len=512, max_num_seqs=16, max_logprobs=50)


@pytest.fixture(scope="module")
def readme_names(llm: LLM) -> Iterator[dict[str, Any]]:
    """Run the README's Python blocks in order in one namespace, its `LLM()` being ours."""
    names: dict[str, Any] = {"__name__": "readme"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decodekit, "LLM", lambda: llm)
        for number, block in enumerate(blocks("python")):
            exec(compile(block, f"README.md, Python block {number + 1}", "exec"), names)
    yield names


@pytest.fixture(scope="module")
def registry() -> Registry:
    """The built-in plugins alone."""
    return Registry.load(autoload=False)


# --- the README ----------------------------------------------------------------------------------


def test_every_python_block_of_the_readme_runs(readme_names: dict[str, Any]) -> None:
    [answer] = [readme_names["answer"]]
    assert answer.outputs[0].finish_reason == "stop"
    assert "4" in answer.outputs[0].text
    assert len(blocks("python")) == 3


def test_the_readme_chains_run_in_the_order_in_which_they_are_written(
    readme_names: dict[str, Any], llm: LLM
) -> None:
    orders = [[step.id for step in llm.explain(params).order] for params in readme_names["mixed"]]
    assert orders == [
        ["temperature", "top_p", "race"],
        ["top_p", "temperature", "race"],
        ["top_k", "temperature", "last", "race"],
    ]


def test_the_readme_stage_is_offered_by_the_readme_hook(readme_names: dict[str, Any]) -> None:
    module = ModuleType("decodekit_acme")
    module.decodekit_stages = readme_names["decodekit_stages"]  # type: ignore[attr-defined]
    registry = Registry.load(autoload=False)
    registry.register(module)
    assert registry.stage("acme.near") is readme_names["Near"]
    [toml] = blocks("toml")
    points = tomllib.loads(toml)["project"]["entry-points"]
    assert points == {"decodekit": {"acme": module.__name__}}


def test_the_readme_names_every_hook() -> None:
    specs = {name for name in vars(hookspecs) if name.startswith("decodekit_")}
    listed = [name for row in table_rows("Hooks") for name in quoted(row[0])]
    assert sorted(listed) == sorted(specs)


def stages_of_the_readme() -> list[tuple[str, str, list[str]]]:
    """Return kind, name and sorted parameters of each stage in the table, in its order."""
    found = []
    for head, stages in table_rows("Stages"):
        shared = quoted(head)
        for entry in quoted(stages):
            name, _, parameters = entry.partition(": ")
            own = parameters.split(", ") if parameters else []
            found.append((head.split()[0], name, sorted(own + shared)))
    return found


def test_the_readme_lists_every_stage_with_its_parameters(registry: Registry) -> None:
    there = [
        (stage.kind.name, stage.name, sorted(stage.Params.model_fields))
        for stage in registry.stages.values()
    ]
    assert sorted(stages_of_the_readme()) == sorted(there)


def test_the_readme_lists_the_stages_in_the_order_of_the_default_profile(
    registry: Registry,
) -> None:
    listed = [name for _, name, _ in stages_of_the_readme()]
    order = [name for name in registry.profiles["default"].order if name in listed]
    assert [name for name in listed if name in order] == order


def test_the_readme_names_every_flat_field_that_is_not_named_as_its_stage(
    registry: Registry,
) -> None:
    [sentence] = re.findall(r"^Flat fields of a request.*?\.$", README, re.MULTILINE | re.DOTALL)
    others = {
        field for stage in registry.stages.values() for field in stage.fields if field != stage.name
    }
    assert others <= set(quoted(sentence))


def test_the_readme_names_every_stop_observer_and_profile(registry: Registry) -> None:
    [stops] = re.findall(r"^Stops: (.*)$", README, re.MULTILINE)
    assert quoted(stops) == [stop.name for stop in registry.stops]
    [observers] = re.findall(r"^Observers: (.*)$", README, re.MULTILINE)
    assert sorted(quoted(observers)) == sorted(item.name for item in registry.observers)
    [profiles] = re.findall(r"^Profiles: (.*?)\.$", README, re.MULTILINE | re.DOTALL)
    assert sorted(quoted(profiles)) == sorted(registry.profiles)


def test_the_readme_names_every_command(registry: Registry) -> None:
    listed = {quoted(row[0])[0].split()[1] for row in table_rows("Commands")}
    assert listed == {command.name for command in registry.commands}


def test_the_files_that_the_readme_names_exist() -> None:
    named = {name for name in quoted(FENCE.sub("", README)) if re.fullmatch(r"[\w/]+\.\w+", name)}
    paths = {name for name in named if "/" in name or name.endswith(".md")}
    assert len(paths) >= 4
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_readme_has_fewer_than_240_lines_of_at_most_100_columns() -> None:
    lines = README.splitlines()
    assert len(lines) < 240
    tables_apart = [line for line in lines if not line.startswith("|")]
    assert [line for line in tables_apart if len(line) > 100] == []


# --- the tour ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tour() -> Iterator[ModuleType]:
    """The quickstart as a module; it was not run."""
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "examples/quickstart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module  # where the stage's annotations are looked up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["quickstart"]


@pytest.fixture
def screen(tour: ModuleType, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the tour prints."""
    text = io.StringIO()
    monkeypatch.setattr(tour, "console", Console(file=text, highlight=False, width=96))
    return text


def test_the_tour_generates_and_chats(tour: ModuleType, screen: io.StringIO, llm: LLM) -> None:
    tour.generate(llm)
    assert "1, 2, 3, 4, 5, 6, 7, 8, 9, 10," in screen.getvalue()
    tour.chat(llm)
    assert "ended by 'stop'" in screen.getvalue()


def test_the_tour_gives_three_answers_that_company_does_not_change(
    tour: ModuleType, screen: io.StringIO, llm: LLM
) -> None:
    tour.several(llm)
    assert re.findall(r"^(\d):", screen.getvalue(), re.MULTILINE) == ["0", "1", "2"]
    assert "beside other requests: True" in screen.getvalue()


def test_the_tour_shows_log_probs_best_first(
    tour: ModuleType, screen: io.StringIO, llm: LLM
) -> None:
    tour.logprobs(llm)
    rows = [line for line in screen.getvalue().splitlines() if re.search(r"-\d\.\d\d", line)]
    assert len(rows) == 5
    for row in rows:
        values = [float(value) for value in re.findall(r"-\d+\.\d\d", row)]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)


def test_the_stage_of_the_tour_bans_its_letter(
    tour: ModuleType, screen: io.StringIO, llm: LLM
) -> None:
    tour.custom_stage(llm)
    plain, without = screen.getvalue().split("without the letter e:")
    assert "e" in plain.split("as the model likes:")[1]
    assert len(without.strip()) > 10
    assert "e" not in without.lower()


def test_the_two_orders_of_the_tour_keep_different_sets(
    tour: ModuleType, screen: io.StringIO, llm: LLM
) -> None:
    tour.two_orders(llm)
    found = re.findall(r"(\w+) -> \w+ keeps (\d+):", screen.getvalue())
    sizes = {first: int(size) for first, size in found}
    assert 1 <= sizes["top_p"] < sizes["temperature"] < tour.NUM_WATCHED


def test_the_tour_streams(
    tour: ModuleType, screen: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:

    asyncio.run(tour.stream())
    assert "1. 1\n2. 2\n3. 3\n" in capsys.readouterr().out


# --- structured output ----------------------------------------------------------------------------


def example(name: str) -> ModuleType:
    """Load an example script; it is not run."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / f"examples/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pydantic looks the models' annotations up
    spec.loader.exec_module(module)
    return module


def test_the_extraction_gives_a_nested_object_and_other_constraints_hold(llm: LLM) -> None:
    module = example("extract")
    order = module.extract(llm, module.TEXT)

    assert isinstance(order, module.Order)
    assert order.customer.name == "Zoë Müller"
    assert str(order.date) == "2024-03-14"
    postcode, colour = module.other_constraints(llm)
    assert re.fullmatch(r" \d{5}", postcode) and colour in (" blue", " green", " red")


def test_choosing_is_at_least_as_good_as_reading_the_text(llm: LLM) -> None:
    module = example("classify")
    line = module.compare(llm, [module.SHOTS.format(text=text) for text, _ in module.REVIEWS])

    chosen, greedy, drawn = (int(share) for share in re.findall(r"(\d+)% right", line))
    assert chosen >= 80
    assert chosen >= greedy >= drawn
