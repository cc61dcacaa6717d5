"""Thinking budget: DEC-112 and DEC-113."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from torch import Tensor

from decodekit import SamplingParams
from decodekit.plugins.author.table_model import blank_table

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make

OPEN, CLOSE, END = 128, 129, 130
TALK = "{% for m in messages %}{{ m.content }}{% endfor %}:"
TEMPLATES = {"the model opens": TALK, "the template opens": TALK + "<think>"}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}


def thinking_table(*, ends: bool) -> Tensor:
    """A colon opens; a, b, a, b ... is thought, for ever or (`ends`) up to c; then x, y, x ..."""
    table = blank_table(131)
    a, b, c, x, y = b"abcxy"
    table[ord(":"), OPEN] = table[OPEN, a] = table[a, b] = 0.0
    table[b, c if ends else a] = table[c, CLOSE] = 0.0
    table[CLOSE, x] = table[x, y] = table[y, x] = 0.0
    return table


@pytest.fixture(scope="module")
def thinkers(make: Make, ascii_tokenizer: Callable[..., Any]) -> Callable[[bool], Bench]:
    """Return a function that gives a model whose reasoning ends by itself, or does not."""
    tokenizer = ascii_tokenizer(
        special=["<think>", "</think>", "<end>"], eos_token="<end>", chat_template=TALK
    )
    made: dict[bool, Bench] = {}

    def build(ends: bool) -> Bench:
        if ends not in made:
            made[ends] = make(
                thinking_table(ends=ends),
                model={"tokenizer": tokenizer},
                reasoning_config={"reasoning_start_str": "<think>"},
            )
        return made[ends]

    return build


def think(bench: Bench, template: str, *params: SamplingParams) -> list[list[int]]:
    """Ids of one chat answer for each of `params`, in one batch; an opened block is put before."""
    messages = [[{"role": "user", "content": "why"}]] * len(params)
    outputs = bench.llm.chat(messages, list(params), use_tqdm=False, chat_template=template)
    opened = [OPEN] if template.endswith("<think>") else []
    return [[*opened, *output.outputs[0].token_ids] for output in outputs]


def greedy(budget: int | None, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=40, thinking_token_budget=budget, **fields)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
@pytest.mark.parametrize("more", [{}, PENALTIES], ids=["nothing else", "penalties"])
def test_dec_112_the_budget_acts_whatever_else_is_set(
    thinkers: Callable[[bool], Bench], template: str, more: dict[str, Any]
) -> None:
    bench = thinkers(False)

    budgets = [greedy(budget, **more) for budget in (8, 0, -1, None)]
    eight, none, free, absent = think(bench, template, *budgets)

    assert eight[0] == none[0] == OPEN
    assert eight.index(CLOSE) == 9  # eight tokens between the markers
    assert len(eight) > 20
    assert none[1] == CLOSE
    for ids in (eight, none):
        assert ids.count(CLOSE) == 1
        after = ids[ids.index(CLOSE) + 1 :]
        assert after
        if not more:
            assert set(after) == set(b"xy")
    assert CLOSE not in free
    assert free == absent


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_dec_113_no_second_end_marker_and_none_in_other_requests(
    thinkers: Callable[[bool], Bench], template: str
) -> None:
    ending, endless = thinkers(True), thinkers(False)

    [by_itself] = think(ending, template, greedy(8))
    assert by_itself[: by_itself.index(CLOSE)] == [OPEN, *b"abc"]
    assert by_itself.count(CLOSE) == 1
    assert len(by_itself) - (template == TEMPLATES["the template opens"]) == 40

    outsider = greedy(None)
    [solo] = think(endless.fresh(), template, outsider)
    assert CLOSE not in solo
    # Others of all lengths leave and come while the outsider runs, so that rows are reordered.
    prompt = endless.llm.chat_prompt([{"role": "user", "content": "why"}], chat_template=template)
    limited = [
        SamplingParams(temperature=0.0, max_tokens=2 + number % 7, thinking_token_budget=number % 2)
        for number in range(24)
    ]
    for number, params in enumerate(limited[:3]):
        endless.add(f"limited-{number}", prompt, params)
    endless.add("outsider", prompt, outsider)
    for number, params in enumerate(limited[3:], 3):
        endless.add(f"limited-{number}", prompt, params)
        endless.step()
    done = endless.finish()
    opened = [OPEN] if template.endswith("<think>") else []
    assert [*opened, *done.pop("outsider").outputs[0].token_ids] == solo
    assert all(list(o.outputs[0].token_ids).count(CLOSE) <= 1 for o in done.values())
    assert any(CLOSE in output.outputs[0].token_ids for output in done.values())
