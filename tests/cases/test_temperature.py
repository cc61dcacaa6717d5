"""Greedy and temperature: DEC-008 to DEC-012."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from decodekit import RequestOutput, SamplingParams
from decodekit.plugins.author.table_model import blank_table

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dec_008_tiny_temperatures_behave_like_greedy(make: Make, dtype: str) -> None:
    generator = torch.Generator().manual_seed(3)
    table = torch.stack([torch.randperm(97, generator=generator) for _ in range(97)]) / 16.0 - 10
    table.scatter_(1, table.argmax(1, keepdim=True), -2.0)  # the next best is at -4.0625
    bench = make(table, dtype=dtype)
    temperatures = [0.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-12]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # says that it raises them to 0.01
        params = [
            SamplingParams(temperature=t, max_tokens=20, logprobs=1, seed=5) for t in temperatures
        ]

    outputs = bench.generate([[7]] * len(params), params)

    ids = [list(output.outputs[0].token_ids) for output in outputs]
    assert ids[0] == bench.path(7, 20)
    assert ids[2:] == [ids[0]] * 6
    for output in outputs:
        assert not any(math.isnan(value) for value in _values(output))
    bench.check_answers()


def test_dec_009_greedy_rows_with_masked_tokens_beside_sampled_rows(
    make: Make, ascii_tokenizer: Callable[..., Any]
) -> None:
    generator = torch.Generator().manual_seed(4)
    table = (torch.randint(-80, 81, (129, 129), generator=generator) / 16).float()
    bench = make(table, model={"tokenizer": ascii_tokenizer(special=["<end>"])})
    letters = [chr(code) for code in range(40, 100)]
    greedy: list[dict[str, Any]] = [
        {"bad_words": letters},
        {"allowed_token_ids": [3, 90, 127]},
        {"bad_words": [chr(code) for code in range(60, 127)]},
        {"allowed_token_ids": list(range(64, 128, 3))},
    ]
    params = [
        SamplingParams(temperature=0.0, logprobs=1, max_tokens=16, **fields) for fields in greedy
    ]
    params += [
        SamplingParams(temperature=0.8, top_p=0.9, logprobs=1, max_tokens=16, seed=seed)
        for seed in range(4)
    ]
    prompts = [[65 + number] for number in range(8)]
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # neighbours of both kinds

    outputs = bench.generate([prompts[i] for i in order], [params[i] for i in order])

    for place, number in enumerate(order):
        ids = list(outputs[place].outputs[0].token_ids)
        assert len(ids) == 16
        if number < 4:
            assert ids == bench.solo(prompts[number], params[number])
        else:
            for before, token in itertools.pairwise([*prompts[number], *ids]):
                assert token in bench.kept_after(before, temperature=0.8, top_p=0.9)
        for value in _values(outputs[place]):
            assert not math.isnan(value)
            assert value <= 0.0


def test_dec_010_ties_under_greedy(make: Make) -> None:
    table = blank_table(97)
    table[1, [5, 9]] = 2.0
    table[5, [20, 40, 60, 80]] = 2.0
    table[20, [9, 5]] = 2.0
    bench = make(table)

    for copies, count in itertools.product((1, 7, 8, 64), (None, 4)):
        params = SamplingParams(temperature=0.0, max_tokens=10, logprobs=count)
        assert bench.ids([[1]] * copies, params) == [[5, 20] * 5] * copies
    mixed = [SamplingParams(temperature=float(i % 2), max_tokens=10, seed=i) for i in range(64)]
    assert bench.ids([[1]] * 64, mixed)[::2] == [[5, 20] * 5] * 32


def test_dec_011_temperature_reshapes_the_distribution_as_stated(make: Make) -> None:
    table = blank_table(97)
    table[:, 0], table[:, 1] = 2.0, 0.0
    bench = make(table)

    for temperature, share in ((0.5, 0.982), (1.0, 0.881), (2.0, 0.731)):
        params = [
            SamplingParams(temperature=temperature, max_tokens=1, n=100, seed=seed)
            for seed in range(40)
        ]
        drawn = [ids for [*answers] in bench.all_ids([[1]] * 40, params) for ids in answers]
        assert len(drawn) == 4000
        assert drawn.count([0]) / 4000 == pytest.approx(share, abs=0.03)


def test_dec_012_greedy_does_not_depend_on_company_on_the_table(rough: Bench) -> None:
    for number in range(5):
        prompt = [10 * number + 1, 3 * number + 2]
        alone = rough.solo(prompt, GREEDY)
        assert list(_in_company(rough, prompt).outputs[0].token_ids) == alone


def test_dec_012_greedy_does_not_depend_on_company_with_attention(
    attentive: Bench, same_by_tie_rule: Callable[[RequestOutput, RequestOutput], bool]
) -> None:
    for number in range(5):
        prompt = [(7 * number + place) % 97 for place in range(3 + 5 * number)]
        alone = attentive.fresh().generate([prompt], GREEDY)[0]
        assert same_by_tie_rule(alone, _in_company(attentive, prompt))


def _in_company(bench: Bench, prompt: list[int]) -> RequestOutput:
    """Run a greedy request while 45 others of every kind start and finish."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8},
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {"temperature": 1.0, "logit_bias": {3: 50.0}, "n": 2},
    ]
    others = [
        ([(number + place) % 97 for place in range(1 + number % 9)],
         SamplingParams(seed=number, max_tokens=1 + 5 * number % 31, **kinds[number % 5]))
        for number in range(45)
    ]  # fmt: skip
    for number, (other, params) in enumerate(others[:20]):
        bench.add(f"other-{number}", other, params)
    bench.step(3)
    bench.add("main", prompt, GREEDY)
    for number, (other, params) in enumerate(others[20:], 20):
        bench.add(f"other-{number}", other, params)
        bench.step()
    done = bench.finish()
    assert len(done) == 46
    return done["main"]


def _values(output: RequestOutput) -> list[float]:
    """Every log-prob of an output."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return [entry.logprob for position in logprobs for entry in position.values()]
