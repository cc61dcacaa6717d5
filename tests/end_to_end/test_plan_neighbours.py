"""The draw belongs to its row: batch size, row order and the plans beside it leave no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.core.stage import Caps, Form, Kind, Stage, StageParams

Maker = Callable[..., LLM]

NUM_ROWS = 64
VOCABULARY = 211


class Tilt(Stage):
    """A guest's stage with a number of its own: favours low ids."""

    name = "tilt"
    kind = Kind.BIAS
    form = Form.ELEMENTWISE
    caps = Caps(graph_safe=True)

    class Params(StageParams):
        """How steep."""

        slope: float = 0.01

    def transform(self, logits: Tensor, rows: Any) -> None:
        ids = torch.arange(logits.shape[1], device=logits.device)
        logits -= rows.column("slope")[:, None] * ids


def halved(output_ids: list[int], logits: Tensor) -> Tensor:
    """A request's own callable, for every second token."""
    return logits / 2 if len(output_ids) % 2 else logits


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"top_k": 3},
    {"top_k": 50, "top_p": 0.9},
    {"min_p": 0.1, "temperature": 1.5},
    {"top_p": 0.99, "presence_penalty": 0.8},
    {"repetition_penalty": 1.7, "temperature": 0.0},
    {"frequency_penalty": 1.2, "top_k": 20, "logprobs": 3},
    {"allowed_token_ids": list(range(10, 90)), "min_tokens": 4},
    {"logit_bias": {5: 3.0, 9: float("-inf")}, "top_p": 0.7},
    {"chain": ["top_p", "temperature"], "top_p": 0.6, "temperature": 1.4},
    {"chain": ["temperature", "top_p"], "top_p": 0.6, "temperature": 1.4},
    {"chain": ["top_k", "top_p", "top_k", {"stage": "min_p", "p": 0.05}], "top_p": 0.8},
    {"chain": [Tilt(slope=0.02), "min_p"], "min_p": 0.02},
    {"chain": ["top_k", Tilt(slope=0.05), "temperature"], "top_k": 30, "temperature": 0.8},
    {"logits_processors": [halved], "top_k": 40},
]
KINDS[13]["chain"][0] = {"stage": "top_k", "k": 90}
KINDS[13]["chain"][2] = {"stage": "top_k", "k": 12}

Request = tuple[list[int], SamplingParams]


def requests() -> list[Request]:
    """64 requests; a kind comes back with other numbers, prompts and seeds."""
    made = []
    for place in range(NUM_ROWS):
        prompt = [(5 * place + 3 * step) % VOCABULARY for step in range(1 + place % 9)]
        params = SamplingParams(
            seed=place // 3, max_tokens=6 + place % 7, **KINDS[place % len(KINDS)]
        )
        made.append((prompt, params))
    return made


def tokens(llm: LLM, chosen: list[Request]) -> list[list[int]]:
    prompts, params = [prompt for prompt, _ in chosen], [own for _, own in chosen]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].error for output in outputs] == [None] * len(chosen)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module", params=[True, False], ids=["fused", "plain"])
def llm(request: pytest.FixtureRequest, make_llm: Maker) -> LLM:
    """An engine on a table of exact logits, sixteenths up to 5."""
    generator = torch.Generator().manual_seed(11)
    table = torch.randint(-80, 81, (VOCABULARY, VOCABULARY), generator=generator) / 16
    return make_llm(table.float(), fusion=request.param)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """What each of the 64 requests gives in a batch of one."""
    return [tokens(llm, [request])[0] for request in requests()]


def test_a_batch_of_64_chains_equals_64_batches_of_one(llm: LLM, alone: list[list[int]]) -> None:
    assert tokens(llm, requests()) == alone


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_rows_leaves_no_trace(seed: int, llm: LLM, alone: list[list[int]]) -> None:
    order = random.Random(seed).sample(range(NUM_ROWS), NUM_ROWS)
    every = requests()

    found = tokens(llm, [every[place] for place in order])

    assert found == [alone[place] for place in order]


@pytest.mark.parametrize("seed", range(6))
def test_other_plans_beside_a_row_leave_no_trace(
    seed: int, llm: LLM, alone: list[list[int]]
) -> None:
    company = random.Random(100 + seed).sample(range(NUM_ROWS), 5 + 9 * seed)
    every = requests()

    found = tokens(llm, [every[place] for place in company])

    assert found == [alone[place] for place in company]


@pytest.mark.parametrize("place", range(len(KINDS)))
def test_64_copies_of_a_request_give_64_equal_answers(
    place: int, llm: LLM, alone: list[list[int]]
) -> None:
    found = tokens(llm, [requests()[place]] * NUM_ROWS)

    assert found == [alone[place]] * NUM_ROWS


def test_the_requests_do_differ(alone: list[list[int]]) -> None:
    assert len({tuple(answer) for answer in alone}) > NUM_ROWS * 3 // 4
