"""Known blocks of a prompt are used again, and never change a token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from decodekit import LLM, SamplingParams
from decodekit.core.kv_cache import BlockPool
from decodekit.plugins.author.table_model import flat_table

Maker = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def outputs(llm: LLM, prompts: list[object], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


def cached(llm: LLM, prompt: object, params: SamplingParams = GREEDY) -> int | None:
    return llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens


def test_a_repeated_prompt_reads_whole_blocks_but_its_last_token(make_llm: Maker) -> None:
    """DEC-108: at most prompt length minus 1 tokens are taken from the cache."""
    llm = make_llm(flat_table(97))
    found = {}
    for length in (15, 16, 17, 32, 33):
        prompt = [(length + j) % 97 for j in range(length)]
        first = cached(llm, prompt)
        found[length] = (first, cached(llm, prompt))

    assert found == {15: (0, 0), 16: (0, 0), 17: (0, 16), 32: (0, 16), 33: (0, 32)}


def test_hits_change_no_token(make_llm: Maker) -> None:
    prompts: list[object] = [[j % 97 for j in range(40)], [j % 97 for j in range(47)]] * 3
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, presence_penalty=0.5)
    llm = make_llm(flat_table(97))
    plain = make_llm(flat_table(97), enable_prefix_caching=False)

    expected = outputs(plain, prompts, params)
    found = [outputs(llm, [prompt], params)[0] for prompt in prompts]

    assert found == expected
    assert llm.llm_engine.parts.pool.num_hit > 0
    assert plain.llm_engine.parts.pool.num_hit == 0


def test_a_salt_keeps_prompts_apart(make_llm: Maker) -> None:
    llm = make_llm(flat_table(97))
    ids = list(range(40))

    cached(llm, {"prompt_token_ids": ids, "cache_salt": "a"})

    assert cached(llm, {"prompt_token_ids": ids}) == 0
    assert cached(llm, {"prompt_token_ids": ids, "cache_salt": "b"}) == 0
    assert cached(llm, {"prompt_token_ids": ids, "cache_salt": "a"}) == 32
    with pytest.raises(ValueError, match="cache_salt"):
        cached(llm, {"prompt_token_ids": ids, "cache_salt": ""})


def test_reset_forgets_and_refuses_while_blocks_are_in_use(make_llm: Maker) -> None:
    llm = make_llm(flat_table(97))
    cached(llm, list(range(40)))

    llm.llm_engine.add_request("a", list(range(40)), SamplingParams(max_tokens=30))
    llm.llm_engine.step()
    busy = llm.reset_prefix_cache()
    forced = llm.reset_prefix_cache(reset_running_requests=True)
    while llm.llm_engine.has_unfinished_requests():
        last = llm.llm_engine.step()

    assert (busy, forced) == (False, True)
    assert len(last[0].outputs[0].token_ids) == 30
    assert llm.reset_prefix_cache()
    assert cached(llm, list(range(40))) == 0


def test_prompt_logprobs_never_read_the_cache(make_llm: Maker) -> None:
    llm = make_llm(flat_table(97))
    prompt = list(range(40))
    cached(llm, prompt)

    output = llm.generate(
        [prompt], SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False
    )[0]

    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 40


def test_eviction_takes_the_least_recently_freed() -> None:
    pool = BlockPool(3, 4, caches_prefixes=True)
    blocks = pool.allocate(3)
    assert blocks is not None
    names = [pool.digest(b"", [i] * 4) for i in range(3)]
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name)
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.free([block])

    pool.allocate(1)

    assert pool.find([names[1]]) == []
    assert pool.find([names[0]]) == [blocks[0]]
    assert pool.find([names[2]]) == [blocks[2]]


def test_traffic_under_pressure_equals_a_fresh_engine(make_llm: Maker) -> None:
    generator = torch.Generator().manual_seed(1)
    table = (torch.randint(-80, 80, (97, 97), generator=generator) / 16).float()
    plain = make_llm(table, enable_prefix_caching=False)
    backend = plain.llm_engine.parts.runner.backend
    block = backend.bytes_per_block(backend.layout)
    small = make_llm(table, kv_cache_memory_bytes=24 * block, max_model_len=200)
    prompts: list[object] = [
        [(i // 3 + j) % 97 for j in range(20 + 5 * (i % 3))] for i in range(24)
    ]
    params = [SamplingParams(seed=i, max_tokens=40, n=1 + i % 2) for i in range(24)]

    def run(llm: LLM) -> list[list[list[int]]]:
        found = llm.generate(prompts, params, use_tqdm=False)
        return [[list(part.token_ids) for part in output.outputs] for output in found]

    expected = run(plain)
    found = [run(small), run(small)]

    assert found == [expected, expected]
    assert small.llm_engine.parts.scheduler.num_preemptions > 0
    assert small.llm_engine.parts.pool.num_hit > 0
    assert small.llm_engine.parts.pool.num_used == 0
