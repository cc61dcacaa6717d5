"""Live servers on a table model, on loopback, and the ways to talk to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from decodekit import LLM
from decodekit.plugins.author.table_model import byte_tokenizer, flat_table, write_table_model
from decodekit.plugins.serve.live import LiveServer
from decodekit.plugins.serve.settings import ServeSettings

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}\n{% endfor %}"
    "{% if tools %}tools:{{ tools | length }}\n{% endif %}"
    "{% if mood %}mood:{{ mood }}\n{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NAME = "table"
Serve = Callable[..., LiveServer]


@pytest.fixture(scope="session")
def table_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table of 128 equally likely bytes after any token, with an end token and a template."""
    tokenizer = byte_tokenizer(special=["<end>", "<x>"], eos="<end>", chat_template=TEMPLATE)
    folder = tmp_path_factory.mktemp("served")
    return str(write_table_model(folder, flat_table(258, num_best=128), tokenizer=tokenizer))


@pytest.fixture(scope="session")
def live(table_folder: str) -> Iterator[LiveServer]:
    """A server that every test may use and none may stop."""
    settings = ServeSettings(served_model_name=[NAME, "other"])
    with LiveServer(table_folder, settings=settings, max_num_seqs=64) as server:
        yield server


@pytest.fixture(scope="session")
def offline(table_folder: str) -> LLM:
    """The same model without a server."""
    return LLM(table_folder, max_num_seqs=64)


@pytest.fixture(scope="session")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    """A plain client of the shared server."""
    with httpx.Client(base_url=live.url, timeout=60) as client:
        yield client


@pytest.fixture
def serve(table_folder: str) -> Iterator[Serve]:
    """Start servers of one test: `serve(strict_fields=True, engine={"max_num_seqs": 4})`."""
    with ExitStack() as stack:

        def start(
            folder: str | Path | None = None, *, engine: dict[str, Any] | None = None, **own: Any
        ) -> LiveServer:
            own.setdefault("served_model_name", [NAME])
            server = LiveServer(
                str(folder or table_folder), settings=ServeSettings(**own), **(engine or {})
            )
            return stack.enter_context(server)

        yield start


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream; it must end in [DONE]."""
    lines = [line for line in text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines), text
    assert lines[-1] == "data: [DONE]", text
    return [strict(line.removeprefix("data: ")) for line in lines[:-1]]


def strict(text: str) -> Any:
    """Parse JSON that holds no NaN and no infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="session", name="events_of")
def events_of_fixture() -> Callable[[str], list[dict[str, Any]]]:
    """Return the parser of streams."""
    return events_of
