"""/v1/messages: the official client reads text, thinking, tools, streams and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest

from decodekit.plugins.serve.live import LiveServer
from decodekit.plugins.serve.settings import ServeSettings

TALK: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture(scope="module")
def server(table_folder: str) -> Iterator[LiveServer]:
    settings = ServeSettings(
        served_model_name=["table"],
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        api_key=["secret"],
    )
    with LiveServer(
        table_folder, settings=settings, max_num_seqs=16, reasoning_parser="qwen3",
        structured_outputs_config={"disable_any_whitespace": True},
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, **more: Any) -> Any:
    given: dict[str, Any] = {"model": "table", "messages": TALK, "max_tokens": 200}
    return client.messages.create(**{**given, **more})


def says(server: LiveServer, text: str) -> dict[str, Any]:
    """Return the fields under which the model says `text` up to a semicolon."""
    ids = server.engine.engine.parts.tokenizer.encode(f"{text};", add_special_tokens=False)
    chain = {"chain": [{"stage": "forced_tokens", "prefix": ids}]}
    return {"extra_body": {**chain, "stop": [";"]}}


def test_a_message_has_a_block_of_text(client: anthropic.Anthropic, server: LiveServer) -> None:
    answer = ask(client, **says(server, "Good day."))

    assert answer.type == "message"
    assert answer.id.startswith("msg_")
    assert [(block.type, block.text) for block in answer.content] == [("text", "Good day.")]
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence == ";"
    assert answer.usage.output_tokens == len("Good day.;")


def test_the_reasons_to_stop_are_named(client: anthropic.Anthropic) -> None:
    short = ask(client, max_tokens=3, extra_body={"seed": 1})
    stopped = ask(client, stop_sequences=["a", "e", "i", "o"], extra_body={"seed": 1})

    assert short.stop_reason == "max_tokens"
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence in "aeio"


def test_thinking_is_a_block_of_its_own(client: anthropic.Anthropic, server: LiveServer) -> None:
    answer = ask(client, **says(server, "<think>Hm.</think>Yes."))

    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == "Hm."
    assert answer.content[0].signature


def test_a_call_is_a_block_of_its_own(client: anthropic.Anthropic, server: LiveServer) -> None:
    answer = ask(client, tools=TOOLS, **says(server, f"I look.{CALL}"))

    assert [block.type for block in answer.content] == ["text", "tool_use"]
    assert answer.content[1].name == "get_weather"
    assert answer.content[1].input == {"city": "Rome"}
    assert answer.stop_reason == "tool_use"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_call_fits_its_schema(client: anthropic.Anthropic, choice: Any) -> None:
    alone = {**choice, "disable_parallel_tool_use": True}

    short = {"extra_body": {"thinking_token_budget": 3}}

    answer = ask(client, tools=TOOLS, tool_choice=alone, **short)

    block = answer.content[-1]
    jsonschema.validate(block.input, SCHEMA)
    assert answer.stop_reason == "tool_use"


def test_a_stream_has_its_events_in_order(client: anthropic.Anthropic, server: LiveServer) -> None:
    """Row 14 of the checklist."""
    told = says(server, f"<think>Hm.</think>Well.{CALL}")

    events = list(ask(client, tools=TOOLS, stream=True, **told))

    kinds = [event.type for event in events]
    runs = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert runs == ["message_start", *block * 3, "message_delta", "message_stop"]
    starts = [event for event in events if event.type == "content_block_start"]
    assert [event.index for event in starts] == [0, 1, 2]
    assert [event.content_block.type for event in starts] == ["thinking", "text", "tool_use"]


def test_a_stream_puts_together_the_whole_message(
    client: anthropic.Anthropic, server: LiveServer
) -> None:
    told = says(server, f"<think>Hm.</think>Well.{CALL}")
    whole = ask(client, tools=TOOLS, **told)

    with client.messages.stream(
        model="table", messages=TALK, max_tokens=200, tools=TOOLS, **told
    ) as stream:
        final = stream.get_final_message()

    assert final.content[0].thinking == "Hm."  # type: ignore[union-attr]
    assert final.content[1].text == "Well."  # type: ignore[union-attr]
    assert final.content[2].input == {"city": "Rome"}  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_system_and_results_of_tools_reach_the_model(client: anthropic.Anthropic) -> None:
    talk: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {"role": "assistant", "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
            {"type": "text", "text": "so?"}]},
    ]  # fmt: skip
    system: list[Any] = [
        {"type": "text", "text": "x-anthropic-billing-header: a"},
        {"type": "text", "text": "Be kind."},
    ]
    expected = (
        "<system>Be kind.\n<user>weather?\n<assistant>I look.\n<tool>sunny\n<user>so?\n<assistant>"
    )

    counted = client.messages.count_tokens(model="table", messages=talk, system=system)

    assert counted.input_tokens == len(expected)


def test_a_last_turn_of_the_assistant_is_continued(client: anthropic.Anthropic) -> None:
    talk: list[Any] = [*TALK, {"role": "assistant", "content": "It is"}]

    counted = client.messages.count_tokens(model="table", messages=talk)

    assert counted.input_tokens == len("<user>hello\n<assistant>It is")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"temperature": -1.0}}, "temperature"),
        ({"tool_choice": {"type": "always"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "runs no tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "no images"),
    ],
)
def test_refusals_have_anthropics_shape(
    client: anthropic.Anthropic, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, **more)

    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert said in body["error"]["message"]


def test_an_unknown_model_is_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, model="gpt")

    body: Any = caught.value.body
    assert body["error"]["type"] == "not_found_error"


def test_the_key_of_the_client_is_taken(server: LiveServer) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            ask(client)

    body: Any = caught.value.body
    assert body["error"]["type"] == "authentication_error"


def test_thinking_without_a_parser_is_named(http: httpx.Client) -> None:
    body = {"messages": TALK, "max_tokens": 2, "metadata": {"user_id": "x"}}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}

    answer = http.post("/v1/messages", json={**body, **thinking})

    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Decodekit-Ignored"] == "metadata, thinking"
