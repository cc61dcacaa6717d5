"""Every method in the engine: random chains in one batch, preempted, dense, and each alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decodekit import LLM, SamplingParams

Maker = Callable[..., LLM]
VOCABULARY = 97
MODEL = {"eos_token_id": 96}
KEYS = [33, 44, 55]

MASKS: list[dict[str, Any]] = [
    {"stage": "suppress_tokens", "ids": [5, 6]},
    {"stage": "bad_words", "words": [[3, 4], [9]]},
    {"stage": "no_repeat_ngram", "n": 2},
    {"stage": "no_repeat_ngram", "n": 3, "window": 9, "whitelist": [1]},
    {"stage": "forced_tokens", "prefix": [7, 8], "eos_at_end": True},
]
BIASES: list[dict[str, Any]] = [
    {"stage": "logit_bias", "bias": {11: 2.0, 12: -3.0}},
    {"stage": "sequence_bias", "bias": [[[7], 1.5], [[11, 12], 4.0]]},
    {"stage": "repetition_penalty", "penalty": 1.2},
    {"stage": "frequency_penalty", "penalty": 0.5},
    {"stage": "presence_penalty", "penalty": 0.5, "scope": "both", "last_n": 8},
    {"stage": "dry", "multiplier": 0.8, "allowed_length": 1, "breakers": [[13]]},
    {"stage": "length_decay", "start": 5, "factor": 1.1},
]
SHAPES: list[dict[str, Any]] = [
    {"stage": "temperature", "t": 1.4},
    {"stage": "dynamic_temperature", "low": 0.3, "high": 2.0},
    {"stage": "temperature_schedule", "points": [[0, 1.8], [12, 0.4, "cosine"]]},
    {"stage": "quadratic", "factor": 0.2, "curve": 1.5},
]
CUTS: list[dict[str, Any]] = [
    {"stage": "top_k", "k": 30},
    {"stage": "top_p", "p": 0.95},
    {"stage": "min_p", "p": 0.02},
    {"stage": "top_k_top_p", "k": 30, "p": 0.95},
    {"stage": "typical", "p": 0.9, "min_keep": 2},
    {"stage": "epsilon", "epsilon": 0.002},
    {"stage": "eta", "epsilon": 0.002},
    {"stage": "top_a", "a": 0.1},
    {"stage": "nsigma", "n": 1.5},
    {"stage": "tfs", "z": 0.97},
    {"stage": "top_h", "alpha": 0.8},
    {"stage": "top_h", "alpha": 0.8, "window": 20},
    {"stage": "p_less"},
    {"stage": "xtc", "probability": 0.6, "threshold": 0.05, "protect": [96]},
]
MARKS: list[dict[str, Any]] = [
    {"stage": "green_list", "delta": 1.0},
    {"stage": "green_list", "context": 3, "scheme": "selfhash"},
    {"stage": "synthid", "keys": KEYS, "ngram": 3},
]
PICKERS: list[dict[str, Any]] = [
    {"stage": "race"},
    {"stage": "flat_race"},
    {"stage": "greedy"},
    {"stage": "icdf", "skew": 0.3},
    {"stage": "mirostat", "tau": 3.0, "eta": 0.4},
    {"stage": "mirostat", "mode": 1, "tau": 3.0, "eta": 0.4},
    {"stage": "adaptive_p", "target": 0.2, "decay": 0.7},
    {"stage": "keyed_gumbel", "key": 5, "context": 2},
]
EVERY = MASKS + BIASES + SHAPES + CUTS + MARKS + PICKERS


def random_table() -> torch.Tensor:
    """Multiples of 1/16, so that float32 holds them exactly."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-64, 65, (VOCABULARY, VOCABULARY), generator=generator) / 16


def some(pool: list[dict[str, Any]], most: int, rng: random.Random) -> list[dict[str, Any]]:
    chosen = rng.sample(pool, rng.randint(0, most))
    return [{**entry} for entry in chosen]


def chain_of(number: int) -> list[dict[str, Any]]:
    """A legal chain that holds the entry `number` of all, among others that it does not exclude."""
    rng = random.Random(number)
    must = EVERY[number % len(EVERY)]

    def part(pool: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
        found = some([entry for entry in pool if entry is not must], most, rng)
        found += [must] if must in pool else []
        rng.shuffle(found)
        return found

    middle = part(SHAPES + CUTS, 3)
    picker = must if must in PICKERS else rng.choice(PICKERS)
    return [*part(MASKS, 2), *part(BIASES, 2), *middle, *part(MARKS, 1), picker]


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[(7 * i + j) % 90 for j in range(1 + i % 9)] for i in range(count)]
    params = [
        SamplingParams(chain=chain_of(i), seed=i, max_tokens=14, ignore_eos=True)
        for i in range(count)
    ]
    return prompts, params


def tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    results = llm.generate(prompts, params, use_tqdm=False)
    assert [part.error for result in results for part in result.outputs] == [None] * len(results)
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.fixture(scope="module")
def large(make_llm: Maker) -> LLM:
    return make_llm(random_table(), model=MODEL)


@pytest.fixture(scope="module")
def alone(large: LLM) -> list[list[int]]:
    """What each of 64 requests gives by itself."""
    prompts, params = requests(64)
    return [tokens(large, [prompt], [own])[0] for prompt, own in zip(prompts, params, strict=True)]


def test_sixty_four_chains_in_one_batch_give_what_each_gives_alone(
    large: LLM, alone: list[list[int]]
) -> None:
    assert tokens(large, *requests(64)) == alone
    assert len({tuple(answer) for answer in alone}) == 64


def test_preemption_changes_no_token_of_any_method(
    make_llm: Maker, large: LLM, alone: list[list[int]]
) -> None:
    backend = large.llm_engine.parts.runner.backend
    block = backend.bytes_per_block(backend.layout)
    small = make_llm(
        random_table(),
        model=MODEL,
        kv_cache_memory_bytes=10 * block,
        max_model_len=64,
        max_num_seqs=16,
    )

    found = tokens(small, *requests(len(EVERY)))

    assert small.llm_engine.parts.scheduler.num_preemptions > 10
    assert found == alone[: len(EVERY)]


def test_the_dense_form_gives_the_tokens_of_the_fused_one(
    make_llm: Maker, alone: list[list[int]]
) -> None:
    assert (
        tokens(make_llm(random_table(), model=MODEL, fusion=False), *requests(len(EVERY)))
        == (alone[: len(EVERY)])
    )


@pytest.mark.parametrize("picker", PICKERS[4:7], ids=lambda entry: str(entry))
def test_a_preempted_picker_keeps_what_it_steers_by(
    make_llm: Maker, large: LLM, picker: dict[str, Any]
) -> None:
    backend = large.llm_engine.parts.runner.backend
    block = backend.bytes_per_block(backend.layout)
    params = [
        SamplingParams(chain=[picker], seed=i, max_tokens=60, ignore_eos=True) for i in range(6)
    ]
    prompts = [[i, i + 1] for i in range(6)]
    small = make_llm(random_table(), model=MODEL, kv_cache_memory_bytes=7 * block, max_model_len=96)

    expected = tokens(large, prompts, params)

    assert tokens(small, prompts, params) == expected
    assert small.llm_engine.parts.scheduler.num_preemptions > 0


def test_branches_of_a_request_steer_by_themselves(large: LLM) -> None:
    chain = [{"stage": "mirostat", "tau": 2.0}]
    many = SamplingParams(chain=chain, seed=3, n=3, max_tokens=20)

    [result] = large.generate([[1, 2]], many, use_tqdm=False)

    answers = [list(part.token_ids) for part in result.outputs]
    single = SamplingParams(chain=chain, seed=3, max_tokens=20)
    assert answers[0] == tokens(large, [[1, 2]], [single])[0]
    assert len(set(map(tuple, answers))) == 3


def test_every_stage_is_tried() -> None:
    listed = {entry["stage"] for entry in EVERY}
    used = {entry["stage"] for number in range(64) for entry in chain_of(number)}

    assert used == listed
