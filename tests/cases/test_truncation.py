"""top-k, top-p, min-p: DEC-013 to DEC-020."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decodekit import SamplingParams
from decodekit.plugins.author.table_model import blank_table

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make


def same_row(probabilities: list[float], low: float = -60.0) -> Tensor:
    """A table of 97 tokens in which every row gives ids 0, 1, ... these probabilities."""
    table = blank_table(97, low)
    table[:, : len(probabilities)] = torch.tensor(probabilities).log()
    return table


def draws(bench: Bench, count: int, **fields: Any) -> list[int]:
    """Return `count` draws from the one row of `same_row`."""
    params = [SamplingParams(seed=seed, max_tokens=20, **fields) for seed in range(count // 20)]
    return [token for ids in bench.ids([[1]] * len(params), params) for token in ids]


def test_dec_013_a_top_k_beyond_the_vocabulary_is_off(make: Make) -> None:
    generator = torch.Generator().manual_seed(6)
    table = (torch.randint(-48, 49, (251, 251), generator=generator) / 16).float()
    bench = make(table)

    def run(top_k: int) -> list[list[int]]:
        params = [SamplingParams(top_k=top_k, seed=seed, max_tokens=12) for seed in range(4)]
        return bench.ids([[1]] * 4, params)

    off = run(0)
    assert len({tuple(ids) for ids in off}) == 4
    for top_k in (251, 252, 10_000_000):
        assert run(top_k) == off

    mixed = [
        SamplingParams(temperature=0.0, max_tokens=12),
        SamplingParams(top_k=5, seed=3, max_tokens=12),
    ]
    greedy, five = bench.ids([[1], [1]], mixed)
    assert greedy == bench.path(1, 12)
    assert five == bench.solo([1], mixed[1])
    for before, token in itertools.pairwise([1, *five]):
        assert token in bench.kept_after(before, top_k=5)
    bench.check_answers()


@pytest.mark.parametrize("fusion", [True, False])
def test_dec_014_ties_at_the_kth_place(make: Make, fusion: bool) -> None:
    bench = make(same_row([0.4, 0.3, 0.3]), fusion=fusion)

    def shares(params: list[SamplingParams]) -> list[dict[int, float]]:
        found = []
        for size in (1, 4, 8, 64):
            parts = _parts(params, size)
            drawn = [ids[0] for part in parts for ids in bench.ids([[1]] * len(part), part)]
            found.append({token: drawn.count(token) / 600 for token in sorted(set(drawn))})
        return found

    kept = shares([SamplingParams(top_k=2, seed=seed, max_tokens=1) for seed in range(600)])
    exact = [{"stage": "top_k", "k": 2, "ties": "index"}]
    cut = shares([SamplingParams(chain=exact, seed=seed, max_tokens=1) for seed in range(600)])

    assert kept == [kept[0]] * 4  # the same draws, so the same shares
    assert kept[0] == pytest.approx({0: 0.4, 1: 0.3, 2: 0.3}, abs=0.06)
    assert cut == [cut[0]] * 4
    assert cut[0] == pytest.approx({0: 0.571, 1: 0.429}, abs=0.06)


def _parts(params: list[SamplingParams], size: int) -> list[list[SamplingParams]]:
    return [params[start : start + size] for start in range(0, len(params), size)]


def test_dec_015_small_top_k_with_top_p_never_empties_the_set(make: Make) -> None:
    ordinary = make(same_row([0.05, 0.5, 0.25, 0.2]))
    table = blank_table(97)
    table[:, 8:72] = 1.0
    flat = make(table)  # the best are 8 .. 71, so that token 0 would show
    every = set(range(8, 72))

    assert set(draws(ordinary, 200, top_k=1, top_p=0.8, temperature=0.01)) == {1}
    assert set(draws(ordinary, 200, top_k=2, top_p=0.05)) == {1}
    assert set(draws(ordinary, 200, top_k=3, top_p=0.3, min_p=0.99)) == {1}
    assert set(draws(flat, 200, top_k=1, top_p=0.8, temperature=0.01)) == {8}
    assert set(draws(flat, 200, top_k=2, top_p=0.05)) <= every
    assert set(draws(flat, 200, top_k=3, top_p=0.3, min_p=0.99)) <= every
    ordinary.check_answers()
    flat.check_answers()


def test_dec_016_the_token_that_crosses_top_p_is_kept(make: Make) -> None:
    bench = make(same_row([0.4, 0.3, 0.2, 0.1]))

    seen = [set(draws(bench, 400, top_p=top_p)) for top_p in (0.35, 0.6, 0.8, 1.0)]

    assert seen == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]


def test_dec_017_top_p_of_zero_tiny_and_exactly_one(rough: Bench) -> None:
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=0)
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=0.0)

    tiny = SamplingParams(top_p=1e-6, seed=1, max_tokens=16)
    assert rough.ids([[3]], tiny) == [rough.path(3, 16)]

    absent, whole, real = rough.ids(
        [[3]] * 3,
        [
            SamplingParams(seed=1, max_tokens=16),
            SamplingParams(top_p=1, seed=1, max_tokens=16),
            SamplingParams(top_p=1.0, seed=1, max_tokens=16),
        ],
    )
    assert absent == whole == real


def test_dec_018_min_p_has_its_scale_and_its_place(make: Make) -> None:
    bench = make(same_row([0.6, 0.3, 0.06, 0.04], low=-30.0))

    assert set(draws(bench, 600, min_p=0.2)) == {0, 1}
    assert set(draws(bench, 600, min_p=0.2, temperature=2.0)) == {0, 1, 2, 3}
    assert set(draws(bench, 600, min_p=1.0)) == {0}


@pytest.mark.parametrize("fusion", [True, False])
def test_dec_019_top_k_comes_before_top_p_on_renormalised_mass(make: Make, fusion: bool) -> None:
    bench = make(same_row([0.4, 0.3, 0.2, 0.1]), fusion=fusion)

    assert set(draws(bench, 400, top_k=2, top_p=0.5)) == {0}


@pytest.mark.parametrize("size", [97, 251, 257, 1009])
def test_dec_020_odd_vocabularies_and_long_runs_of_draws(make: Make, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    table = (torch.randint(-80, 81, (size, size), generator=generator) / 16).float()
    bench = make(table)
    random = np.random.default_rng(size)
    drawn = 0
    for batch in (1, 2, 3, 5, 8, 13, 21, 33, 32, 31, 17, 33, 33):
        fields: list[dict[str, Any]] = [
            {
                "top_p": 0.9,
                "temperature": float(random.choice([0.5, 1.0, 1.7])),
                "top_k": int(random.choice([0, 3, 40, size - 1])),
                "min_p": float(random.choice([0.0, 0.02])),
            }
            for _ in range(batch)
        ]
        params = [
            SamplingParams(seed=int(random.integers(2**40)), max_tokens=22, **each)
            for each in fields
        ]
        prompts = [[int(random.integers(size))] for _ in range(batch)]
        for prompt, each, ids in zip(prompts, fields, bench.ids(prompts, params), strict=True):
            drawn += len(ids)
            assert all(0 <= token < size for token in ids)
            for before, token in itertools.pairwise([*prompt, *ids]):
                assert token in bench.kept_after(before, **each), (before, token, each)
    assert drawn > 5000  # 20,000 over the four sizes
