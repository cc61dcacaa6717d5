"""A result belongs to its request: company, order, preemption and chunks do not show in it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from decodekit import LLM, SamplingParams
from decodekit.plugins.author.table_model import flat_table

Maker = Callable[..., LLM]

ODD = {
    "temperature": 0.9,
    "top_p": 0.9,
    "presence_penalty": 0.5,
    "max_tokens": 40,
    "ignore_eos": True,
}


def tokens(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[list(part.token_ids) for part in output.outputs] for output in outputs]


def mixed(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[(7 * i + j) % 97 for j in range(1 + i % 13)] for i in range(count)]
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "min_p": 0.05},
        {"temperature": 1.3, "top_p": 0.8, "frequency_penalty": 0.7},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.5, "logit_bias": {3: 2.0, 5: -100.0}},
        {"temperature": 1.0, "allowed_token_ids": [1, 2, 3, 4], "logprobs": 2},
        {"temperature": 1.0, "chain": ["top_p", "temperature"], "top_p": 0.6},
    ]
    params = [
        SamplingParams(seed=i, max_tokens=5 + 3 * (i % 11), **kinds[i % len(kinds)])  # type: ignore[arg-type]
        for i in range(count)
    ]
    return prompts, params


def random_table() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return (torch.randint(-80, 80, (97, 97), generator=generator) / 16).float()


def test_requests_of_all_kinds_equal_their_solo_results(make_llm: Maker) -> None:
    llm = make_llm(random_table())
    prompts, params = mixed(32)

    together = tokens(llm, prompts, params)
    alone = [tokens(llm, [prompt], [own])[0] for prompt, own in zip(prompts, params, strict=True)]

    assert together == alone
    assert llm.llm_engine.parts.pool.num_used == 0


def test_preemption_changes_no_token(make_llm: Maker) -> None:
    prompts, params = mixed(16)
    for own in params:
        own.max_tokens = 60
    large = make_llm(random_table())
    block = large.llm_engine.parts.runner.backend.bytes_per_block(
        large.llm_engine.parts.runner.backend.layout
    )
    small = make_llm(random_table(), kv_cache_memory_bytes=20 * block, max_model_len=128)

    expected = tokens(large, prompts, params)
    found = tokens(small, prompts, params)

    assert small.llm_engine.parts.scheduler.num_preemptions > 0
    assert found == expected
    assert small.llm_engine.parts.pool.num_used == 0


def test_chunks_change_no_token(make_llm: Maker) -> None:
    prompts = [[(3 * i + j) % 97 for j in range(50 + i)] for i in range(6)]
    params = [SamplingParams(seed=i, **ODD) for i in range(6)]  # type: ignore[arg-type]

    whole = tokens(make_llm(random_table()), prompts, params)
    chunked = tokens(
        make_llm(random_table(), max_num_batched_tokens=9, max_num_seqs=8), prompts, params
    )

    assert chunked == whole


def test_children_differ_and_child_zero_is_the_single_answer(flat_llm: LLM) -> None:
    one = SamplingParams(seed=7, max_tokens=16)
    many = SamplingParams(seed=7, max_tokens=16, n=8)

    [single] = tokens(flat_llm, [[1, 2, 3]], [one])
    [children] = tokens(flat_llm, [[1, 2, 3]], [many])
    [again, *_] = tokens(flat_llm, [[1, 2, 3], [4], [5, 6]], [many, one, many])

    assert len({tuple(child) for child in children}) == 8
    assert children[0] == single[0]
    assert children == again


def test_unseeded_requests_differ(flat_llm: LLM) -> None:
    params = SamplingParams(max_tokens=16)

    found = tokens(flat_llm, [[1]] * 6, [params] * 6)

    assert len({tuple(part[0]) for part in found}) == 6


def test_fusion_off_changes_no_token(make_llm: Maker) -> None:
    prompts, params = mixed(24)

    fused = tokens(make_llm(random_table()), prompts, params)
    plain = tokens(make_llm(random_table(), fusion=False), prompts, params)

    assert fused == plain


def test_children_share_the_blocks_of_their_prompt(make_llm: Maker) -> None:
    llm = make_llm(flat_table(97))
    engine = llm.llm_engine
    engine.add_request("a", [1] * 100, SamplingParams(n=4, seed=1, max_tokens=8))
    engine.step()
    engine.step()

    used = engine.parts.pool.num_used
    engine.abort_request("a")

    assert used == 6 + 4  # 100 tokens fill six blocks; each branch has the seventh to itself
    assert engine.parts.pool.num_used == 0
