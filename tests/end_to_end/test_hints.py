"""Notes of one request: they say something and change nothing."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decodekit import LLM, SamplingParams
from decodekit.core.outputs import RequestOutput
from decodekit.plugins.author.table_model import byte_tokenizer

Maker = Callable[..., LLM]
TEMPLATE = "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}{% endfor %}<|turn|>"


@pytest.fixture(scope="module")
def llm(make_llm: Maker) -> LLM:
    generator = torch.Generator().manual_seed(2)
    table = (torch.randint(-80, 80, (257, 257), generator=generator) / 16).float()
    table[:, 256] = -30.0
    tokenizer = byte_tokenizer(special=["<|turn|>"], chat_template=TEMPLATE)
    return make_llm(table, model={"tokenizer": tokenizer})


def notes(output: RequestOutput, word: str) -> list[str]:
    assert output.plan is not None
    return [note for note in output.plan.notes if word in note]


def run(llm: LLM, prompts: Any, **given: Any) -> list[RequestOutput]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 5, **given})
    return llm.generate(prompts, params, use_tqdm=False)


def test_generate_names_chat_where_a_prompt_looks_like_one(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = ["What is it?", "<|turn|>user: hi<|turn|>", "A story", {"prompt": "Who?"}, [65, 63]]

    with caplog.at_level(logging.WARNING, "decodekit"):
        outputs = run(llm, prompts)
        run(llm, prompts)

    assert [len(notes(output, "`chat`")) for output in outputs] == [1, 1, 0, 1, 0]
    assert len([line for line in caplog.messages if "plain question" in line]) == 1
    assert outputs[0].plan is not outputs[2].plan


def test_chat_gets_no_such_note_and_the_note_changes_nothing(llm: LLM) -> None:
    (output,) = llm.chat(
        [{"role": "user", "content": "What is it?"}],
        SamplingParams(temperature=0, max_tokens=5),
        use_tqdm=False,
    )
    (raw,) = run(llm, "What is it?")
    (ids,) = run(llm, [list(b"What is it?")])

    assert not notes(output, "`chat`")
    assert raw.outputs[0].token_ids == ids.outputs[0].token_ids
    assert not notes(ids, "`chat`")


def test_the_default_max_tokens_is_named_where_it_ended_the_text(llm: LLM) -> None:
    (by_default,) = llm.generate("a", SamplingParams(temperature=0), use_tqdm=False)
    (asked,) = run(llm, "a", max_tokens=16)
    first = by_default.outputs[0].token_ids[0]
    (stopped,) = llm.generate(
        "a", SamplingParams(temperature=0, stop_token_ids=[first]), use_tqdm=False
    )

    assert len(by_default.outputs[0].token_ids) == 16
    (note,) = notes(by_default, "max_tokens")
    assert "default of 16" in note
    assert by_default.outputs[0].token_ids == asked.outputs[0].token_ids
    assert not notes(asked, "max_tokens")
    assert stopped.outputs[0].finish_reason == "stop"
    assert not notes(stopped, "max_tokens")
