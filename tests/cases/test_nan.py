"""Numerical faults: DEC-105."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from decodekit import RowView, SamplingParams, Stage, StageParams

if TYPE_CHECKING:
    from tests.cases.conftest import Bench


class Poison(Stage):
    """Writes NaN at one position: over the whole row, or over a part of it."""

    name = "dec_poison"

    class Params(StageParams):
        width: int = 97

    def transform(self, logits: Tensor, rows: RowView) -> None:
        for row, params in enumerate(rows.params):
            if len(rows.output(row)) == 4:
                logits[row, 90 : 90 + params.width] = torch.nan
                if params.width > 7:
                    logits[row] = torch.nan


def poison_callable(width: int) -> Callable[[list[int], Tensor], Tensor]:
    def poison(output_ids: list[int], logits: Tensor) -> Tensor:
        if len(output_ids) == 4:
            logits[:width] = torch.nan
        return logits

    return poison


@pytest.mark.parametrize("width", [97, 3])
@pytest.mark.parametrize("kind", ["stage", "callable"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_dec_105_a_row_of_nan(rough: Bench, width: int, kind: str, temperature: float) -> None:
    bench = rough.fresh(plugins=[Poison], enable_prefix_caching=True)
    prompts = [[(number + place) % 97 for place in range(20)] for number in range(8)]
    healthy = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=20, **extra)
        for seed, extra in enumerate([{}, {"top_p": 0.9}, {"top_k": 5}, {"logprobs": 2}] * 2)
    ]
    fault: dict[str, Any] = {
        "stage": {"chain": [{"stage": "dec_poison", "width": width}]},
        "callable": {"logits_processors": [poison_callable(width)]},
    }[kind]
    bad = SamplingParams(temperature=temperature, seed=3, max_tokens=20, **fault)
    params = [*healthy[:3], bad, *healthy[4:]]
    plain = SamplingParams(temperature=temperature, seed=3, max_tokens=20)
    alone = [rough.solo(prompt, each) for prompt, each in zip(prompts, healthy, strict=True)]
    expected = rough.solo(prompts[3], plain)

    parts = [output.outputs[0] for output in bench.generate(prompts, params)]
    later = bench.ids([prompts[3]], plain)[0]

    assert parts[3].finish_reason == "error"
    assert parts[3].error
    assert list(parts[3].token_ids) == expected[:4]
    for number in (0, 1, 2, 4, 5, 6, 7):
        assert list(parts[number].token_ids) == alone[number]
    assert later == expected
    assert bench.count("prefix_cache_hits") > 0
    bench.check_answers()
