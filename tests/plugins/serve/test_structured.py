"""Constraints over HTTP: every spelling gives what it asks for, and bad ones are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest

Events = Callable[[str], list[dict[str, Any]]]
CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer", "minimum": 0,
                                                     "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 60,
}  # fmt: skip
COMPACT = {"disable_any_whitespace": True}


def text(http: httpx.Client, **more: Any) -> str:
    answer = http.post(CHAT, json={**BODY, **more})
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    content: str = choice["message"]["content"]
    return content


def test_a_json_schema_is_kept(http: httpx.Client, events_of: Events) -> None:
    """Row 8 of the checklist."""
    more = {"structured_outputs": {"json": SCHEMA, **COMPACT}}
    whole = text(http, **more)
    events = events_of(http.post(CHAT, json={**BODY, **more, "stream": True}).text)

    jsonschema.validate(json.loads(whole), SCHEMA)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == whole


def test_response_format_is_the_same_constraint(http: httpx.Client) -> None:
    named = {"name": "it", "schema": SCHEMA, "strict": True}
    made = {"response_format": {"type": "json_schema", "json_schema": named}}
    both = text(http, **made, structured_outputs={"json": {"type": "null"}, **COMPACT})

    jsonschema.validate(json.loads(both), SCHEMA)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, r"[a-c]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "<" [a-z] ">"'}, "<[a-z]>"),
    ],
    ids=["regex", "choice", "grammar"],
)
def test_other_constraints_are_kept(
    http: httpx.Client, constraint: dict[str, Any], pattern: str
) -> None:
    assert re.fullmatch(pattern, text(http, structured_outputs=constraint))


@pytest.mark.parametrize(
    "more",
    [
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"grammar": "root ::= ("}},
        {"structured_outputs": {"json": {"type": "no such type"}}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regx": "a"}},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    ],
    ids=str,
)
def test_a_bad_constraint_is_refused_with_its_reason(
    http: httpx.Client, more: dict[str, Any]
) -> None:
    answer = http.post(CHAT, json={**BODY, **more})

    assert answer.status_code == 400, answer.text
    assert len(answer.json()["error"]["message"]) > 20


def test_format_text_asks_for_nothing(http: httpx.Client) -> None:
    plain = http.post(CHAT, json=BODY).json()["choices"]

    assert (
        http.post(CHAT, json={**BODY, "response_format": {"type": "text"}}).json()["choices"]
        == plain
    )
