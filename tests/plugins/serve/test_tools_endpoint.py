"""Tool calls over HTTP: the client reads what a scripted model says, and forced calls fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import openai
import pytest

from decodekit.core.errors import ValidationError
from decodekit.plugins.serve.live import LiveServer
from decodekit.plugins.serve.settings import ServeSettings

Script = Callable[[str], dict[str, Any]]
TALK: list[Any] = [{"role": "user", "content": "weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 0,
                                                                 "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}  # fmt: skip
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
TREE = {
    "type": "object",
    "properties": {"leaf": {"$ref": "#/$defs/Leaf"}},
    "required": ["leaf"],
    "additionalProperties": False,
    "$defs": {"Leaf": {"enum": ["green", "red"]}},
}
PLANT = {"type": "function", "function": {"name": "plant", "parameters": TREE}}
TOOLS: list[Any] = [WEATHER, PLANT]
SCHEMAS = {"get_weather": SCHEMA, "plant": TREE}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def server(table_folder: str) -> Iterator[LiveServer]:
    settings = ServeSettings(
        served_model_name=["table"], enable_auto_tool_choice=True, tool_call_parser="hermes"
    )
    config = {"disable_any_whitespace": True}
    with LiveServer(
        table_folder, settings=settings, max_num_seqs=16, structured_outputs_config=config
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def script_of(server: LiveServer, text: str) -> dict[str, Any]:
    """Return the further fields under which the model says `text` and nothing else."""
    ids = server.engine.engine.parts.tokenizer.encode(text, add_special_tokens=False)
    stages = [{"stage": "forced_tokens", "prefix": ids}, "temperature"]
    return {"chain": stages}


@pytest.fixture(scope="module")
def script(server: LiveServer) -> Script:
    return lambda text: script_of(server, text)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    given: dict[str, Any] = {
        "model": "table", "messages": TALK, "tools": TOOLS, "max_tokens": 300, "seed": 4,
    }  # fmt: skip
    return client.chat.completions.create(**{**given, **more})


def put_together(events: Any) -> tuple[str, list[dict[str, Any]], list[str | None]]:
    """Return content, calls and finish reasons as a client of a stream collects them."""
    text, calls, reasons = "", [], []
    for event in events:
        [choice] = event.choices
        text += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            if call.index == len(calls):
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments
    return text, calls, reasons


def scripted(script: Script, text: str, **more: Any) -> dict[str, Any]:
    return {"extra_body": {**script(text), **more}, "max_tokens": len(text)}


def test_a_call_of_the_model_is_told(client: openai.OpenAI, script: Script) -> None:
    end = {"stop": [";"]}
    answer = ask(client, extra_body=script(f"I look. {CALL};"), **end)

    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("chatcmpl-tool-")
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Rome", "days": 2}


def test_a_stream_tells_the_same_call_in_pieces(client: openai.OpenAI, script: Script) -> None:
    told = {"extra_body": script(f"I look. {CALL};"), "stop": [";"]}

    text, calls, reasons = put_together(ask(client, stream=True, **told))

    assert text == "I look."
    assert [call["name"] for call in calls] == ["get_weather"]
    assert json.loads(calls[0]["arguments"]) == {"city": "Rome", "days": 2}
    assert [reason for reason in reasons if reason] == ["tool_calls"]


def test_text_without_a_call_stops_as_text(client: openai.OpenAI, script: Script) -> None:
    [choice] = ask(client, extra_body=script("No <tool> here;"), stop=[";"]).choices

    assert choice.finish_reason == "stop"
    assert choice.message.content == "No <tool> here"
    assert not choice.message.tool_calls


def test_a_broken_call_is_text(client: openai.OpenAI, script: Script) -> None:
    broken = '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'

    [choice] = ask(client, extra_body=script(f"{broken};"), stop=[";"]).choices

    assert choice.message.content == broken
    assert choice.finish_reason == "stop"


def test_one_call_is_kept_without_parallel_calls(client: openai.OpenAI, script: Script) -> None:
    both = {"extra_body": script(f"{CALL}\n{CALL};"), "stop": [";"]}

    [every] = ask(client, **both).choices
    [one] = ask(client, parallel_tool_calls=False, **both).choices

    assert len(every.message.tool_calls) == 2
    assert len(one.message.tool_calls) == 1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_required_forces_calls_that_fit(client: openai.OpenAI, seed: int) -> None:
    """Row 9 of the checklist."""
    [choice] = ask(client, tool_choice="required", parallel_tool_calls=False, seed=seed).choices

    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_stream_of_required_calls_says_the_same(client: openai.OpenAI) -> None:
    forced: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}

    [choice] = ask(client, **forced).choices
    text, calls, reasons = put_together(ask(client, stream=True, **forced))

    [call] = choice.message.tool_calls
    assert text == ""
    assert [(c["name"], c["arguments"]) for c in calls] == [
        (call.function.name, call.function.arguments)
    ]
    assert reasons[-1] == "tool_calls"


def test_a_named_call_is_its_arguments_and_stops(client: openai.OpenAI) -> None:
    """Row 9 of the checklist."""
    named = {"type": "function", "function": {"name": "plant"}}

    [choice] = ask(client, tool_choice=named).choices
    _, calls, reasons = put_together(ask(client, tool_choice=named, stream=True))

    [call] = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), TREE)
    assert choice.finish_reason == "stop"
    assert [(c["name"], c["arguments"]) for c in calls] == [("plant", call.function.arguments)]
    assert reasons[-1] == "stop"


def test_strict_functions_hold_the_models_own_calls(
    client: openai.OpenAI, server: LiveServer
) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    ids = server.engine.engine.parts.tokenizer.encode("<tool_call>", add_special_tokens=False)
    bias = {"chain": [{"stage": "forced_tokens", "prefix": ids}, "temperature"]}

    [choice] = ask(client, tools=[strict], extra_body=bias, max_tokens=150).choices

    call = choice.message.tool_calls[0]
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_no_tools_are_called_under_none(client: openai.OpenAI, script: Script) -> None:
    [choice] = ask(client, tool_choice="none", extra_body=script(f"{CALL};"), stop=[";"]).choices

    assert choice.message.content == CALL
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "auto", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": 3}}]}, "tools"),
        (
            {"tool_choice": "required", "extra_body": {"structured_outputs": {"regex": "a"}}},
            "structured_outputs",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    client: openai.OpenAI, more: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **more)

    assert caught.value.param == param


def test_an_automatic_choice_needs_a_parser(live: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            ask(client)


def test_a_required_call_needs_none(live: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        [choice] = ask(client, tools=[PLANT], tool_choice="required").choices

    assert choice.message.tool_calls[0].function.name == "plant"


def test_an_unknown_parser_is_refused_at_start(table_folder: str) -> None:
    settings = ServeSettings(tool_call_parser="hermess")

    with pytest.raises(ValidationError, match="did you mean 'hermes'"):
        LiveServer(table_folder, settings=settings)


def test_the_switch_needs_a_parser() -> None:
    with pytest.raises(ValidationError, match="needs tool_call_parser"):
        ServeSettings(enable_auto_tool_choice=True)
