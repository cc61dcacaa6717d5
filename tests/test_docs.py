"""The user pages are true: code runs, output and screens are real, tables are complete."""

import contextlib
import importlib.util
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import decodekit
from decodekit import LLM, AsyncLLM, CompletionOutput, EngineArgs, LLMEngine
from decodekit.core import absent
from decodekit.core.params import FIELD_NAMES
from decodekit.core.registry import Registry
from decodekit.plugins.catalogue import BUILT_INS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
LARGEST_PICTURE = 60_000  # bytes

FENCE = re.compile(r"^(?P<lead><!-- not run: (?P<why>[^\n]+) -->\n)?```(?P<info>[^\n`]*)\n"
                   r"(?P<code>.*?)^```$", re.M | re.S)  # fmt: skip


class Block(NamedTuple):
    """One fenced block; `line` is that of its first line."""

    language: str
    is_output: bool  # what the block before it prints
    code: str
    line: int
    is_run: bool


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page; `<!-- not run: why -->` over one keeps it from running."""
    text = (DOCS / page).read_text()
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].partition(" ")
        yield Block(
            language=language,
            is_output='title="output"' in rest,
            code=match["code"],
            line=text.count("\n", 0, match.start("code")) + 1,
            is_run=match["why"] is None,
        )


def load(path: Path) -> ModuleType:
    """Import a script by its path."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def shared_llm() -> Iterator[Callable[..., LLM]]:
    """`LLM` for the pages: one engine wherever a page asks for the embedded model as it is."""
    made: list[LLM] = []

    def make(*args: Any, **kwargs: Any) -> LLM:
        if args or kwargs:
            return LLM(*args, **kwargs)
        if not made:
            made.append(LLM())
        return made[0]

    yield make


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(
    page: str,
    shared_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(decodekit, "LLM", shared_llm)
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"docs_{page.removesuffix('.md').replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    printed = ""

    for block in blocks(page):
        if block.is_output:
            assert printed == block.code, f"{page}:{block.line}: the output is another"
        if block.language != "python" or not block.is_run:
            continue
        source = "\n" * (block.line - 1) + block.code
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            exec(compile(source, str(DOCS / page), "exec"), vars(module))
        printed = stream.getvalue()


def test_an_output_block_follows_the_code_that_prints_it() -> None:
    for page in PAGES:
        before: Block | None = None
        for block in blocks(page):
            if block.is_output:
                assert before is not None and before.language == "python" and before.is_run, (
                    f"{page}:{block.line}: no code that runs stands before this output"
                )
            before = block


@pytest.mark.parametrize("page", PAGES)
def test_a_screen_is_what_the_command_writes(page: str) -> None:
    tool = load(DOCS / "make_screens.py")

    for screen in tool.screens((DOCS / page).read_text()):
        if not screen.varies:
            assert tool.run(screen.command) == screen.shown, (
                f"{page}: run `python docs/make_screens.py {page}`"
            )


def test_a_screen_that_varies_uses_commands_and_options_that_exist() -> None:
    tool = load(DOCS / "make_screens.py")
    helps: dict[str, str] = {}

    for page in PAGES:
        for screen in tool.screens((DOCS / page).read_text()):
            words = screen.command.split()
            command = " ".join(words[:3] if words[1] == "plugin" else words[:2])
            if command not in helps:
                helps[command] = tool.run(f"{command} --help")
            for option in re.findall(r"(?<= )--?[a-z][a-z-]*", screen.command):
                assert re.search(rf"{option}\b", helps[command]), f"{page}: {screen.command}"


# --- tables ---------------------------------------------------------------------------------------


def section(page: str, title: str) -> str:
    """Return the text between the heading `title` and the next heading of its level or above."""
    text = (DOCS / page).read_text()
    match = re.search(rf"^(#+) {re.escape(title)}$", text, re.M)
    assert match is not None, f"{page} has no heading {title!r}"
    rest = text[match.end() :]
    following = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.M)
    return rest[: following.start()] if following else rest


def first_column(text: str) -> set[str]:
    """Return the names in backticks in the first cells of a section's tables, without arguments."""
    cells = re.findall(r"^\| (`[^|]*)\|", text, re.M)
    return {name for cell in cells for name in re.findall(r"`([A-Za-z_]+)[^`]*`", cell)}


def headings(page: str) -> set[str]:
    """Return the names in backticks in a page's headings."""
    lines = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(), re.M)
    return {name for line in lines for name in re.findall(r"`([^`]+)`", line)}


def absent_fields() -> set[str]:
    """Fields whose every use is refused, unlike those of which one value is."""
    whole = {row.name for row in absent.REQUEST_FIELDS} - {"on_dead_row", "logprobs_mode"}
    return whole


def test_the_guide_has_every_parameter() -> None:
    text = (DOCS / "parameters.md").read_text()
    described = headings("parameters.md") | first_column(text)

    assert set(FIELD_NAMES) - described == set()


def test_the_guide_tells_which_parameters_are_refused() -> None:
    told = first_column(section("parameters.md", "Refused in this version"))
    companions = {"length_penalty", "early_stopping"}  # refused without use_beam_search

    assert told - companions == absent_fields()


def test_the_guide_has_every_stage_with_its_parameters() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| ([A-Z]+) \| ([^|]*)\|",
        section("parameters.md", "Stages of a chain"),
        re.M,
    )
    told = {name: (kind, set(re.findall(r"`(\w+)`", listed))) for name, kind, listed in rows}

    assert told == {
        name: (stage.kind.name, set(stage.Params.model_fields))
        for name, stage in Registry.load(autoload=False, environ={}).stages.items()
    }


def test_the_guide_names_every_profile() -> None:
    text = section("parameters.md", "The chain itself")

    for name in Registry.load(autoload=False, environ={}).profiles:
        assert f"`{name}`" in text


@pytest.mark.parametrize("owner", [LLM, AsyncLLM, LLMEngine], ids=lambda owner: owner.__name__)
def test_the_api_page_names_every_public_method(owner: type) -> None:
    refused = {row.name for row in absent.METHODS if is_refusal(owner, row)}
    public = {name for name in dir(owner) if not name.startswith("_")} - refused

    assert first_column(section("api.md", owner.__name__)) - attributes(owner) == public


def is_refusal(owner: type, row: absent.Absent) -> bool:
    return getattr(getattr(owner, row.name, None), "__doc__", None) == row.sentence()


def attributes(owner: type) -> set[str]:
    """Public attributes that are set on the object, as the page may name them too."""
    source = inspect.getsource(owner)
    return set(re.findall(r"self\.([a-z]\w+)(?:: [^=\n]+)? = ", source))


def test_the_api_page_names_the_fields_of_the_outputs() -> None:
    parameters = inspect.signature(decodekit.RequestOutput).parameters
    request = {name for name in parameters if name != "unknown"}

    assert first_column(section("api.md", "RequestOutput")) - {"trace"} >= request
    assert first_column(section("api.md", "CompletionOutput")) >= {
        item.name for item in fields(CompletionOutput)
    }


def test_the_api_page_names_every_engine_argument_that_acts() -> None:
    refused = {row.name for row in absent.ENGINE_ARGUMENTS}
    acting = {item.name for item in fields(EngineArgs) if item.name != "_"} - refused

    assert first_column(section("api.md", "Engine arguments")) == acting


def test_the_command_page_has_every_command() -> None:
    folders = ("plugins.console.", "plugins.author.", "plugins.serve.")
    rooms = [name for name in BUILT_INS if name.startswith(folders)]
    registry = Registry.load(catalogue=rooms, autoload=False, environ={})
    names = {spec.name for spec in registry.commands}
    told = {name.split()[1] for name in headings("cli.md") if name.startswith("decodekit ")}

    assert told == names


# --- pictures -------------------------------------------------------------------------------------


def test_every_picture_is_small_and_shown() -> None:
    pages = "".join((DOCS / page).read_text() for page in PAGES)

    for path in (DOCS / "img").iterdir():
        assert path.stat().st_size < LARGEST_PICTURE, path.name
        assert f"(img/{path.name})" in pages, f"{path.name} is on no page"
