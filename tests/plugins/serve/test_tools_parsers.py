"""Tool parsers: what a text holds, however it is cut, and what is no call stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decodekit.core.parsers import Piece, ToolParser
from decodekit.core.registry import Registry
from decodekit.plugins.serve.parsers.forced import ForcedCalls, NamedCall

PARSERS = dict(Registry.load(autoload=False).tool_parsers)
NAMES = ("get_weather", "add")
CALL = '{"name": "get_weather", "arguments": {"city": "Par\\"is}", "days": [1, {"a": 2}]}}'
ARGUMENTS = {"city": 'Par"is}', "days": [1, {"a": 2}]}
SWAPPED = '{"parameters": {"a": 1, "b": 2}, "name": "add"}'
SUM = {"a": 1, "b": 2}
Calls = list[tuple[str, Any]]

HELD: list[tuple[str, str, str, Calls]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [("get_weather", ARGUMENTS)]),
    (
        "hermes",
        f"I look.\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{SWAPPED}\n</tool_call>\n",
        "I look.",
        [("get_weather", ARGUMENTS), ("add", SUM)],
    ),
    ("hermes", f"<tool_call>{SWAPPED}</tool_call> Done.", " Done.", [("add", SUM)]),
    ("hermes", "a <tool and </tool_call> b", "a <tool and </tool_call> b", []),
    ("hermes", "x <tool_call>none</tool_call>", "x<tool_call>none</tool_call>", []),
    ("llama3_json", CALL.replace("arguments", "parameters"), "", [("get_weather", ARGUMENTS)]),
    (
        "llama3_json",
        f"<|python_tag|>{CALL}; {SWAPPED}",
        "",
        [("get_weather", ARGUMENTS), ("add", SUM)],
    ),
    ("llama3_json", '{"name": "Ann", "age": 5}', '{"name": "Ann", "age": 5}', []),
    ("llama3_json", "plain {text}", "plain {text}", []),
    (
        "mistral",
        f"[TOOL_CALLS] [{CALL}, {SWAPPED}]",
        "",
        [("get_weather", ARGUMENTS), ("add", SUM)],
    ),
    (
        "mistral",
        'Hm.[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]get_weather{"city": "}"}',
        "Hm.",
        [("add", SUM), ("get_weather", {"city": "}"})],
    ),
    ("json", f" [{CALL},\n{SWAPPED}]\n", "", [("get_weather", ARGUMENTS), ("add", SUM)]),
    ("json", f"```json\n{CALL}\n```", "", [("get_weather", ARGUMENTS)]),
    ("json", f"```\n{SWAPPED}\n```\n", "", [("add", SUM)]),
    ("json", "```python\nprint(1)\n```", "```python\nprint(1)\n```", []),
    ("json", "[1, 2]", "[1, 2]", []),
    ("json", '{"name": "add", "arguments": {"a": 1', '{"name": "add", "arguments": {"a": 1', []),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}', None, []),  # type: ignore[list-item]
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", {"a": 1})]),
]


def read(pieces: list[Piece]) -> tuple[str, Calls]:
    text, calls = "", []
    for piece in pieces:
        if piece.kind == "text":
            text += piece.text
        elif piece.kind == "name":
            calls.append([piece.text, ""])
        else:
            calls[-1][1] += piece.text
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def run(parser: ToolParser, text: str, size: int) -> list[Piece]:
    pieces: list[Piece] = []
    for start in range(0, len(text), size):
        pieces += parser.push(text[start : start + size])
    return pieces + parser.end()


@pytest.mark.parametrize(("name", "text", "content", "calls"), HELD)
def test_a_whole_text_is_read(name: str, text: str, content: str | None, calls: Calls) -> None:
    told = read(run(PARSERS[name](NAMES, stream=False), text, len(text)))

    assert told == (text if content is None else content, calls)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [case for case in HELD if case[2] is not None and not case[1].endswith('"a": 1')],
)
def test_a_stream_says_the_same_however_it_is_cut(
    name: str, text: str, content: str, calls: Calls, size: int
) -> None:
    assert read(run(PARSERS[name](NAMES, stream=True), text, size)) == (content, calls)


def test_arguments_are_sent_while_they_come() -> None:
    parser = PARSERS["hermes"](NAMES, stream=True)

    first = parser.push('<tool_call>{"name": "add", "arguments": {"a": 1')
    second = parser.push('2, "b"')

    assert first == [Piece("name", "add"), Piece("arguments", '{"a": 1')]
    assert second == [Piece("arguments", '2, "b"')]


def test_a_named_call_is_its_arguments() -> None:
    assert read(run(NamedCall(["add"], stream=True), '{"a": 1}', 3)) == ("", [("add", {"a": 1})])


def test_forced_calls_are_a_list() -> None:
    text = f"[{SWAPPED}, {CALL}]"

    assert read(run(ForcedCalls(NAMES, stream=True), text, 4))[1] == [
        ("add", SUM),
        ("get_weather", ARGUMENTS),
    ]
