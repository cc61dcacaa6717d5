"""/v1/responses: the official client reads items, streams, tools, the store and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from decodekit.plugins.serve.live import LiveServer
from decodekit.plugins.serve.settings import ServeSettings

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
LOGPROBS: list[Any] = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def server(table_folder: str) -> Iterator[LiveServer]:
    settings = ServeSettings(
        served_model_name=["table"], enable_auto_tool_choice=True, tool_call_parser="hermes",
        responses_store=2,
    )  # fmt: skip
    with LiveServer(
        table_folder, settings=settings, max_num_seqs=16, reasoning_parser="qwen3",
        structured_outputs_config={"disable_any_whitespace": True},
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **more: Any) -> Any:
    given: dict[str, Any] = {"model": "table", "input": "hello", "max_output_tokens": 200}
    return client.responses.create(**{**given, **more})


def says(server: LiveServer, text: str) -> dict[str, Any]:
    """Return the fields under which the model says `text` up to a semicolon."""
    ids = server.engine.engine.parts.tokenizer.encode(f"{text};", add_special_tokens=False)
    chain = {"chain": [{"stage": "forced_tokens", "prefix": ids}]}
    return {"extra_body": {**chain, "stop": [";"]}}


def test_a_response_has_a_message(client: openai.OpenAI, server: LiveServer) -> None:
    answer = ask(client, **says(server, "Good day."))

    assert answer.id.startswith("resp_")
    assert answer.status == "completed"
    assert answer.output_text == "Good day."
    assert [item.type for item in answer.output] == ["message"]
    assert answer.usage.output_tokens == len("Good day.;")
    assert answer.usage.input_tokens == len("<user>hello\n<assistant>")


def test_a_cut_response_is_incomplete(client: openai.OpenAI) -> None:
    answer = ask(client, max_output_tokens=3, extra_body={"seed": 1})

    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_reasoning_and_calls_are_items(client: openai.OpenAI, server: LiveServer) -> None:
    answer = ask(client, tools=TOOLS, **says(server, f"<think>Hm.</think>Well.{CALL}"))

    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.output[0].content[0].text == "Hm."
    assert answer.output_text == "Well."
    assert answer.output[2].name == "get_weather"
    assert json.loads(answer.output[2].arguments) == {"city": "Rome"}
    assert answer.usage.output_tokens_details.reasoning_tokens == len("<think>Hm.</think>")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_forced_call_fits_its_schema(client: openai.OpenAI, choice: Any) -> None:
    short = {"extra_body": {"thinking_token_budget": 3}}

    answer = ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **short)

    item = answer.output[-1]
    assert item.type == "function_call"
    jsonschema.validate(json.loads(item.arguments), SCHEMA)


def test_a_stream_numbers_its_events(client: openai.OpenAI, server: LiveServer) -> None:
    """Row 15 of the checklist."""
    events = list(ask(client, stream=True, **says(server, "Good day.")))

    kinds = [event.type for event in events]
    runs = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert runs == [f"response.{name}" for name in (
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    )]  # fmt: skip
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Good day."
    assert events[-1].response.output_text == "Good day."


def test_a_stream_of_items_ends_in_the_whole_response(
    client: openai.OpenAI, server: LiveServer
) -> None:
    told = says(server, f"<think>Hm.</think>Well.{CALL}")

    events = list(ask(client, tools=TOOLS, stream=True, **told))

    kinds = [event.type.removeprefix("response.") for event in events]
    for kind in ("reasoning_part.added", "reasoning_text.delta", "reasoning_text.done",
                 "function_call_arguments.delta", "function_call_arguments.done"):  # fmt: skip
        assert kind in kinds
    arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(arguments)) == {"city": "Rome"}
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


def test_the_clients_own_collector_reads_the_stream(
    client: openai.OpenAI, server: LiveServer
) -> None:
    with client.responses.stream(
        model="table", input="hello", max_output_tokens=50, **says(server, "Good day.")
    ) as stream:
        final = stream.get_final_response()

    assert final.output_text == "Good day."


def test_a_schema_is_kept(client: openai.OpenAI) -> None:
    made: Any = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}

    answer = ask(client, text=made, extra_body={"seed": 2})

    jsonschema.validate(json.loads(answer.output_text), SCHEMA)


def test_logprobs_come_with_the_text(client: openai.OpenAI, server: LiveServer) -> None:
    answer = ask(
        client, include=LOGPROBS, top_logprobs=2, **says(server, "Good")
    )  # fmt: skip

    part = answer.output[0].content[0]
    assert "".join(each.token for each in part.logprobs).startswith("Good")
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)


def test_instructions_come_first(client: openai.OpenAI) -> None:
    answer = ask(client, instructions="Be kind.", max_output_tokens=1)

    assert answer.instructions == "Be kind."
    assert answer.usage.input_tokens == len("<system>Be kind.\n<user>hello\n<assistant>")


def test_a_stored_response_is_built_on(client: openai.OpenAI, server: LiveServer) -> None:
    first = ask(client, instructions="Be kind.", **says(server, "Yes."))

    second = ask(client, input="why?", previous_response_id=first.id, max_output_tokens=1)

    expected = "<user>hello\n<assistant>Yes.\n<user>why?\n<assistant>"
    assert second.usage.input_tokens == len(expected)
    assert client.responses.retrieve(first.id).output_text == "Yes."


def test_the_store_is_bounded(client: openai.OpenAI) -> None:
    first = ask(client, max_output_tokens=1)
    for _ in range(2):
        ask(client, max_output_tokens=1)

    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_results_of_tools_are_items_of_the_input(client: openai.OpenAI) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]

    answer = ask(client, input=items, max_output_tokens=1)

    expected = "<user>weather?\n<assistant>\n<tool>sunny\n<assistant>"
    assert answer.usage.input_tokens == len(expected)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"format": {"type": "json_object"}},
          "extra_body": {"structured_outputs": {"regex": "a"}}}, "text"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    client: openai.OpenAI, more: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **more)

    assert caught.value.param == param


def test_an_unknown_response_is_not_found(client: openai.OpenAI) -> None:
    for call in (client.responses.retrieve, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call("resp_none")
    with pytest.raises(openai.NotFoundError):
        ask(client, previous_response_id="resp_none")
