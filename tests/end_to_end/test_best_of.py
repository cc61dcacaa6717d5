"""best_of: independent candidates, the best by raw log-probability returned."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.core.outputs import CompletionOutput
from decodekit.plugins.author.table_model import blank_table
from decodekit.sampling_params import RequestOutputKind

Maker = Callable[..., LLM]
CHAIN: dict[str, Any] = {"temperature": 1.3, "max_tokens": 6, "ignore_eos": True, "seed": 9}


@pytest.fixture(scope="module")
def table() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randint(-40, 40, (97, 97), generator=generator) / 16).float()


@pytest.fixture(scope="module")
def llm(make_llm: Maker, table: Tensor) -> LLM:
    return make_llm(table)


def outputs(llm: LLM, params: SamplingParams, prompt: list[int]) -> list[CompletionOutput]:
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output.outputs


def raw_score(table: Tensor, prompt: list[int], tokens: list[int]) -> float:
    rows = table[[prompt[-1], *tokens[:-1]]].double().log_softmax(1)
    return float(rows.gather(1, torch.tensor(tokens)[:, None]).sum())


@pytest.mark.parametrize("n", [1, 3])
def test_the_best_by_raw_log_probability_come_first(llm: LLM, table: Tensor, n: int) -> None:
    candidates = outputs(llm, SamplingParams(n=8, **CHAIN), [5])
    ranked = sorted(
        (list(each.token_ids) for each in candidates),
        key=lambda tokens: -raw_score(table, [5], tokens),
    )

    found = outputs(llm, SamplingParams(n=n, best_of=8, presence_penalty=0.0, **CHAIN), [5])

    assert [list(each.token_ids) for each in found] == ranked[:n]
    assert [each.index for each in found] == list(range(n))
    assert found[0].logprobs is None
    assert found[0].mean_logprob == pytest.approx(raw_score(table, [5], ranked[0]) / 6, abs=1e-5)


def test_the_ranking_is_raw_whatever_mode_is_reported(llm: LLM, table: Tensor) -> None:
    params = SamplingParams(
        n=2, best_of=8, logprobs=0, logprobs_mode="final", logit_bias={7: 3.0}, top_k=20, **CHAIN
    )

    first, second = outputs(llm, params, [5])

    scores = [raw_score(table, [5], list(each.token_ids)) for each in (first, second)]
    assert scores[0] >= scores[1]
    assert first.cumulative_logprob != pytest.approx(scores[0], abs=1e-3)


def test_different_sequences_come_before_copies(make_llm: Maker) -> None:
    table = blank_table(97)
    table[1, 2], table[1, 3] = 1.0, 0.0  # 2 is likely, so most candidates are equal
    table[2, 2] = table[3, 3] = 0.0
    llm = make_llm(table)
    params = SamplingParams(n=3, best_of=12, seed=1, max_tokens=3, ignore_eos=True)

    found = [list(each.token_ids) for each in outputs(llm, params, [1])]

    assert found == [[2, 2, 2], [3, 3, 3], [2, 2, 2]]


def test_equal_numbers_keep_the_order_of_branches(llm: LLM) -> None:
    plain = outputs(llm, SamplingParams(n=4, **CHAIN), [5])
    same = outputs(llm, SamplingParams(n=4, best_of=4, **CHAIN), [5])

    assert [each.token_ids for each in same] == [each.token_ids for each in plain]


def test_company_does_not_show(llm: LLM) -> None:
    params = [SamplingParams(n=2, best_of=3 + row, **CHAIN) for row in range(5)]
    alone = [outputs(llm, each, [5 + row]) for row, each in enumerate(params)]

    together = llm.generate([[5 + row] for row in range(5)], params, use_tqdm=False)

    assert [[each.token_ids for each in output.outputs] for output in together] == [
        [each.token_ids for each in found] for found in alone
    ]
    assert llm.llm_engine.parts.pool.num_used == 0


def test_candidates_share_the_blocks_of_the_prompt(make_llm: Maker, table: Tensor) -> None:
    engine = make_llm(table, enable_prefix_caching=False).llm_engine
    params = SamplingParams(
        best_of=4, seed=1, max_tokens=8, output_kind=RequestOutputKind.FINAL_ONLY
    )
    engine.add_request("a", [1] * 100, params)
    engine.step()
    engine.step()

    used = engine.parts.pool.num_used
    engine.abort_request("a")

    assert used == 6 + 4
    (aborted,) = engine.step()
    assert len(aborted.outputs) == 1
    assert aborted.outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_it_cannot_be_streamed(llm: LLM, kind: RequestOutputKind) -> None:
    params = SamplingParams(best_of=4, output_kind=kind, **CHAIN)

    with pytest.raises(ValueError, match="best_of=4 with n=1 cannot be streamed"):
        llm.llm_engine.add_request("s", [5], params)
    assert not llm.llm_engine.has_unfinished_requests()


def test_failed_candidates_come_last(llm: LLM) -> None:
    calls: list[int] = []

    def fails_for_some(output_ids: list[int], logits: Tensor) -> Tensor:
        calls.append(len(output_ids))
        if output_ids and output_ids[0] % 2:
            raise RuntimeError("odd")
        return logits

    params = SamplingParams(n=8, best_of=9, logits_processors=[fails_for_some], **CHAIN)

    found = outputs(llm, params, [5])

    reasons = [each.finish_reason for each in found]
    assert reasons == sorted(reasons, key=lambda reason: reason == "error")
    assert {"length", "error"} == set(reasons)
