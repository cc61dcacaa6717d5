"""A row without a token alive, by what its request wants."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import LLM, RowView, SamplingParams, Stage
from decodekit.core.outputs import RequestOutput
from decodekit.core.stage import Kind
from decodekit.plugins.author.table_model import flat_table

Maker = Callable[..., LLM]
IMPOSSIBLE: dict[str, Any] = {
    "allowed_token_ids": [4],
    "chain": [
        "allowed_tokens",
        {"stage": "suppress_tokens", "ids": [4]},
        "temperature",
        "top_k",
    ],
}


@pytest.fixture(scope="module")
def llm(make_llm: Maker) -> LLM:
    return make_llm(flat_table(97), model={"eos_token_id": 9})


def run(llm: LLM, **given: Any) -> RequestOutput:
    params = SamplingParams(**{"max_tokens": 4, "seed": 1, "ignore_eos": True, **given})
    (output,) = llm.generate([[3]], params, use_tqdm=False)
    return output


def test_relax_leaves_the_last_soft_mask_out_and_says_so(llm: LLM) -> None:
    output = run(llm, on_dead_row="relax", **IMPOSSIBLE)

    found = output.outputs[0]
    assert list(found.token_ids) == [4] * 4
    assert found.error is None
    assert output.plan is not None
    (note,) = [note for note in output.plan.notes if "left out" in note]
    assert "'suppress_tokens' was left out" in note
    assert "position 0" in note
    again = llm.explain(SamplingParams(on_dead_row="relax", **IMPOSSIBLE))
    assert not [note for note in again.notes if "left out" in note]  # the shared plan has none


def test_the_default_names_the_stage_and_eos_ends(llm: LLM) -> None:
    failed = run(llm, **IMPOSSIBLE).outputs[0]
    ended = run(llm, on_dead_row="eos", **{**IMPOSSIBLE, "ignore_eos": False}).outputs[0]

    assert failed.finish_reason == "error"
    assert failed.error is not None and "stage=suppress_tokens" in failed.error
    assert (list(ended.token_ids), ended.finish_reason) == ([9], "stop")


def test_a_relaxed_row_draws_what_the_rest_of_its_chain_draws(llm: LLM) -> None:
    banned = {"stage": "suppress_tokens", "ids": list(range(97))}
    chain = ["temperature", {"stage": "top_k", "k": 5}, {"stage": "top_p", "p": 0.7}]

    relaxed = run(llm, on_dead_row="relax", max_tokens=20, chain=[banned, *chain])
    plain = run(llm, max_tokens=20, chain=chain)

    assert relaxed.outputs[0].token_ids == plain.outputs[0].token_ids


def test_log_probs_of_a_relaxed_row_are_those_that_it_was_drawn_from(llm: LLM) -> None:
    asked = {"logprobs": 0, "logprobs_mode": ["final", "masked"]}

    found = run(llm, on_dead_row="relax", **asked, **IMPOSSIBLE).outputs[0]

    assert found.logprobs is not None and found.logprobs_at is not None
    for position in (*found.logprobs, *found.logprobs_at["masked"]):
        assert position[4].logprob == 0.0
    assert found.mean_logprob == pytest.approx(-math.log(64), abs=1e-4)  # raw: flat over 64


class Kills(Stage):
    """Leaves nothing alive where a request says so."""

    name = "kills"
    kind = Kind.BIAS

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.fill_(-torch.inf)


def test_a_stage_of_another_kind_that_empties_the_row_is_left_out_itself(llm: LLM) -> None:
    output = run(
        llm, on_dead_row="relax", chain=[{"stage": "suppress_tokens", "ids": [4]}, Kills()]
    )

    assert output.outputs[0].error is None
    assert 4 not in output.outputs[0].token_ids
    assert output.plan is not None
    assert any("'kills' was left out" in note for note in output.plan.notes)


def test_neighbours_are_not_relaxed(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=3, on_dead_row=policy, **IMPOSSIBLE)
        for policy in ("relax", "error", "relax")
    ]

    found = [output.outputs[0] for output in llm.generate([[3]] * 3, params, use_tqdm=False)]

    assert [each.finish_reason for each in found] == ["length", "error", "length"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_relax_does_not_hide_a_broken_row(llm: LLM, value: float) -> None:
    def broken(output_ids: list[int], logits: Tensor) -> Tensor:
        return torch.full_like(logits, value)

    found = run(llm, on_dead_row="relax", logits_processors=[broken]).outputs[0]

    assert found.finish_reason == "error"
