"""The thinking budget through the engine, on a model that would reason forever."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.core.outputs import CompletionOutput
from decodekit.plugins.author.table_model import blank_table, byte_tokenizer

Maker = Callable[..., LLM]
OPEN, CLOSE, EOS = 256, 257, 258
A, B, X, Y = b"abxy"
TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}:"
OPENING = TURNS + "<think>"
MESSAGES = [{"role": "user", "content": "why"}]
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}


def thinking_table() -> Tensor:
    """A colon opens the block, in which a and b follow each other; x and y follow the end."""
    table = blank_table(259)
    table[ord(":"), OPEN] = 0.0
    table[OPEN, A] = table[A, B] = table[B, A] = 0.0
    table[CLOSE, X] = table[X, Y] = table[Y, X] = 0.0
    return table


def think(make_llm: Maker, template: str = TURNS, **engine: Any) -> LLM:
    tokenizer = byte_tokenizer(
        special=["<think>", "</think>", "<eos>"], eos="<eos>", chat_template=template
    )
    model = {"tokenizer": tokenizer, "eos_token_id": EOS}
    engine.setdefault("reasoning_config", {"think_start_str": "<think>"})
    return make_llm(thinking_table(), model=model, **engine)


@pytest.fixture(scope="module")
def llm(make_llm: Maker) -> LLM:
    return think(make_llm)


def chat(llm: LLM, *params: SamplingParams, template: str = TURNS) -> list[CompletionOutput]:
    outputs = llm.chat(
        [MESSAGES] * len(params), list(params), use_tqdm=False, chat_template=template
    )
    return [output.outputs[0] for output in outputs]


def greedy(budget: int | None, **given: Any) -> SamplingParams:
    limit = {"max_tokens": 40, "temperature": 0.0}
    return SamplingParams(thinking_token_budget=budget, **{**limit, **given})


@pytest.mark.parametrize("template", [TURNS, OPENING])
@pytest.mark.parametrize("more", [{}, PENALTIES])
@pytest.mark.parametrize("budget", [0, 8])
def test_dec_112_the_budget_ends_the_reasoning(
    llm: LLM, template: str, more: dict[str, float], budget: int
) -> None:
    (found,) = chat(llm, greedy(budget, **more), template=template)

    tokens = list(found.token_ids)
    opening = [] if template == OPENING else [OPEN]
    assert tokens[: len(opening)] == opening
    assert tokens.index(CLOSE) == len(opening) + budget
    assert tokens.count(CLOSE) == 1
    assert tokens[tokens.index(CLOSE) + 1] == X
    assert len(tokens) == 40


@pytest.mark.parametrize("template", [TURNS, OPENING])
@pytest.mark.parametrize("budget", [-1, None])
def test_dec_112_minus_one_and_none_are_unlimited(
    llm: LLM, template: str, budget: int | None
) -> None:
    (found,) = chat(llm, greedy(budget), template=template)

    assert CLOSE not in found.token_ids
    assert "abababab" in found.text[-9:]


def test_dec_113_a_reasoning_that_ends_by_itself_gets_no_second_marker(llm: LLM) -> None:
    path = [OPEN, A, B, CLOSE, *[X, Y] * 10]

    def script(output_ids: list[int], logits: Tensor) -> Tensor:
        kept = torch.full_like(logits, -torch.inf)
        kept[path[len(output_ids)]] = 0.0
        return kept

    (found,) = chat(llm, greedy(8, max_tokens=20, logits_processors=[script]))

    assert list(found.token_ids) == path[:20]


def test_dec_113_an_outsider_gets_no_marker_while_rows_move(llm: LLM) -> None:
    (alone,) = chat(llm, greedy(None))
    params = [greedy(0, max_tokens=3 + row) for row in range(8)]
    params.insert(4, greedy(None))

    found = chat(llm, *params)

    assert list(found[4].token_ids) == list(alone.token_ids)
    assert CLOSE not in found[4].token_ids
    assert all(list(one.token_ids).count(CLOSE) == 1 for one in found[:4])


def test_every_branch_and_a_preempted_request_keep_their_budget(make_llm: Maker, llm: LLM) -> None:
    backend = llm.llm_engine.parts.runner.backend
    block = backend.bytes_per_block(backend.layout)
    small = think(make_llm, kv_cache_memory_bytes=12 * block, max_model_len=160)
    params = [
        SamplingParams(thinking_token_budget=20 + row, max_tokens=80, seed=row, n=2)
        for row in range(4)
    ]

    large, tight = (
        [
            [list(part.token_ids) for part in output.outputs]
            for output in engine.chat([MESSAGES] * 4, params, use_tqdm=False)
        ]
        for engine in (llm, small)
    )

    assert small.llm_engine.parts.scheduler.num_preemptions > 0
    assert tight == large
    assert all(branch.index(CLOSE) == 21 + row for row, both in enumerate(large) for branch in both)


def test_the_marker_wins_over_an_allow_list_and_a_bias(llm: LLM) -> None:
    allowed, biased, banned = chat(
        llm,
        greedy(2, allowed_token_ids=[OPEN, A, B, X, Y]),
        greedy(2, logit_bias={CLOSE: -100.0}),
        greedy(2, logit_bias={CLOSE: -float("inf")}),
    )

    for found in (allowed, biased, banned):
        assert list(found.token_ids)[:5] == [OPEN, A, B, CLOSE, X]
        assert found.error is None


def test_an_end_with_a_sentence_is_written_whole(make_llm: Maker) -> None:
    llm = think(make_llm, reasoning_config={"reasoning_end_str": " stop.</think>\n"})

    (found,) = chat(llm, greedy(3, max_tokens=14, skip_special_tokens=False))

    assert found.text.startswith("<think>aba stop.</think>\n")


def test_a_chain_may_add_a_message(llm: LLM) -> None:
    stage = {"stage": "thinking_budget", "budget": 2, "message": " so"}

    (found,) = chat(
        llm, SamplingParams(temperature=0, max_tokens=9, chain=[stage], skip_special_tokens=False)
    )

    assert found.text == "<think>ab so</think>xy"


def test_it_needs_the_setting_and_the_setting_needs_a_tokenizer(make_llm: Maker) -> None:
    plain = think(make_llm, reasoning_config=None)

    with pytest.raises(
        ValueError, match="thinking_token_budget=8 needs to know .*reasoning_config"
    ):
        chat(plain, greedy(8))
    with pytest.raises(ValueError, match="reasoning_config needs the tokenizer"):
        make_llm(thinking_table(), reasoning_config={})
