"""Reasoning over HTTP: it is told apart from the answer, however the text is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from decodekit import LLM
from decodekit.core.errors import ValidationError
from decodekit.core.registry import Registry
from decodekit.plugins.serve.live import LiveServer
from decodekit.plugins.serve.parsers.reasoning import Splitter
from decodekit.plugins.serve.settings import ServeSettings

PARSERS = Registry.load(autoload=False).reasoning_parsers
TALK: list[Any] = [{"role": "user", "content": "why?"}]

SPLIT = [
    ("qwen3", None, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", None, "Yes.", "", "Yes."),
    ("qwen3", True, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", False, "Yes </think> no", "", "Yes </think> no"),
    ("deepseek_r1", None, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("deepseek_r1", None, "<think>Hm. <b </think>Yes </think>.", "Hm. <b", "Yes </think>."),
    ("deepseek_r1", None, "only this ", "only this", ""),
    ("mistral", None, "[THINK]a[/THINK]b", "a", "b"),
    ("granite", None, "Here is my thought process: a Here is my response: b", "a", "b"),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("name", "inside", "text", "reasoning", "content"), SPLIT)
def test_a_text_is_split_however_it_is_cut(
    name: str, inside: bool | None, text: str, reasoning: str, content: str, size: int
) -> None:
    splitter = Splitter(PARSERS[name], inside)

    parts = [p for at in range(0, len(text), size) for p in splitter.push(text[at : at + size])]
    parts += splitter.end()

    assert "".join(part.text for part in parts if part.is_reasoning) == reasoning
    assert "".join(part.text for part in parts if not part.is_reasoning) == content


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<a>hi\n<think>\n", True),
        ("<a>hi\n<think>\n\n</think>\n\n", False),
        ("<think>x</think>y<assistant>", None),
        ("hello", None),
    ],
)
def test_the_prompt_says_where_an_answer_begins(prompt: str, inside: bool | None) -> None:
    assert PARSERS["qwen3"].begins_inside(prompt) is inside


@pytest.fixture(scope="module")
def server(table_folder: str) -> Iterator[LiveServer]:
    settings = ServeSettings(
        served_model_name=["table"],
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_content_field=True,
    )
    with LiveServer(
        table_folder, settings=settings, max_num_seqs=16, reasoning_parser="qwen3"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, server: LiveServer, text: str, **more: Any) -> Any:
    ids = server.engine.engine.parts.tokenizer.encode(text, add_special_tokens=False)
    extra = {"chain": [{"stage": "forced_tokens", "prefix": ids}], **more.pop("extra_body", {})}
    return client.chat.completions.create(
        model="table", messages=TALK, max_tokens=len(text), extra_body=extra, **more
    )


def test_reasoning_stands_beside_the_content(client: openai.OpenAI, server: LiveServer) -> None:
    [choice] = ask(client, server, "<think>\nHm.\n</think>\n\nYes.").choices

    assert choice.message.content == "Yes."
    assert choice.message.reasoning == "Hm."
    assert choice.message.reasoning_content == "Hm."


def test_a_stream_tells_both(client: openai.OpenAI, server: LiveServer) -> None:
    events = ask(client, server, "<think>\nHm.\n</think>\n\nYes.", stream=True)

    deltas = [event.choices[0].delta for event in events]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."


def test_reasoning_can_be_left_out(client: openai.OpenAI, server: LiveServer) -> None:
    more = {"extra_body": {"include_reasoning": False}}

    answer = ask(client, server, "<think>Hm.</think>Yes.", **more)

    assert answer.choices[0].message.content == "Yes."
    assert answer.choices[0].message.reasoning is None
    assert answer.usage.completion_tokens == len("<think>Hm.</think>Yes.")


def test_calls_are_looked_for_behind_the_reasoning(
    client: openai.OpenAI, server: LiveServer
) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tools: list[Any] = [{"type": "function", "function": {"name": "f"}}]

    answer = ask(client, server, f"<think>{call}</think>{call};", tools=tools, stop=[";"])

    [choice] = answer.choices
    assert choice.message.reasoning == call
    assert [each.function.name for each in choice.message.tool_calls] == ["f"]
    assert choice.finish_reason == "tool_calls"


def test_the_budget_ends_the_reasoning(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.chat.completions.create(
        model="table", messages=[{"role": "user", "content": "<think>"}], max_tokens=40, seed=1,
        extra_body={"thinking_token_budget": 5, "chat_template_kwargs": {},
                    "add_generation_prompt": False},
    )  # fmt: skip

    reasoning = answer.choices[0].message.reasoning  # type: ignore[attr-defined]
    assert reasoning
    assert len(reasoning) <= 5


def test_a_parser_sets_the_markers_of_the_engine(server: LiveServer, table_folder: str) -> None:
    llm = LLM(table_folder, reasoning_parser="mistral")

    assert server.engine.engine.config.reasoning_config is not None
    assert llm.llm_engine.config.reasoning_config is not None
    assert llm.llm_engine.config.reasoning_config.reasoning_start_str == "[THINK]"


def test_an_unknown_parser_is_refused(table_folder: str) -> None:
    with pytest.raises(ValidationError, match="did you mean 'qwen3'"):
        LLM(table_folder, reasoning_parser="qwen")
