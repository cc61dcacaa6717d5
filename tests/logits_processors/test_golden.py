"""Each method beside its reference: transformers where it has the method, else the formula.

Rows are random: several vocabularies, flat and spiky, a few tokens masked. The table of rows tried
and rows that differ is printed (pytest -s). A truncation's row that differs is left out where its
reference itself keeps other tokens when its parameter moves by 1e-5, for there rounding decides.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from decodekit.core.stage import Stage
from decodekit.logits_processors.cut.epsilon_eta import Epsilon, Eta
from decodekit.logits_processors.cut.min_p import MinP
from decodekit.logits_processors.cut.p_less import PLess
from decodekit.logits_processors.cut.tail_free import TailFree
from decodekit.logits_processors.cut.top_a import TopA
from decodekit.logits_processors.cut.top_h import TopH
from decodekit.logits_processors.cut.top_k import TopK
from decodekit.logits_processors.cut.top_k_top_p import TopKTopP
from decodekit.logits_processors.cut.top_n_sigma import TopNSigma
from decodekit.logits_processors.cut.top_p import TopP
from decodekit.logits_processors.cut.typical import TypicalP
from decodekit.logits_processors.cut.xtc import Xtc
from decodekit.logits_processors.shape.dynamic_temperature import DynamicTemperature
from decodekit.logits_processors.shape.quadratic import Quadratic
from decodekit.logits_processors.shape.temperature_schedule import TemperatureSchedule
from decodekit.plugins.author.rows import apply_stage

INF = float("inf")
Row = np.ndarray[Any, np.dtype[np.float64]]
Rule = Callable[[Row, float], Row]
NUDGE = 1e-5


class Golden(NamedTuple):
    """A method with one set of parameters; `rule` takes a row and the main parameter."""

    stage: type[Stage]
    main: str  # the parameter that is nudged; "" for none
    params: dict[str, Any]
    against: str
    rule: Rule


# --- truncations: each returns which tokens stay ------------------------------------------------


def softmax(row: Row) -> Row:
    weights: Row = np.exp(row - row.max())
    return weights / weights.sum()


def ranks(row: Row) -> list[int]:
    return sorted(np.flatnonzero(row > -INF).tolist(), key=lambda i: (-row[i], i))


def only(row: Row, kept: Any) -> Row:
    mask = np.zeros(len(row), dtype=bool)
    mask[kept] = True
    return np.where(mask, row, -INF)


def warper(make: Callable[[float], Any]) -> Rule:
    def rule(row: Row, value: float) -> Row:
        alive = np.flatnonzero(row > -INF)  # the reference's entropies want no masked token
        scores = torch.from_numpy(row[alive])[None]
        kept = make(value)(torch.zeros(1, 1).long(), scores)[0].numpy() > -1e30
        return only(row, alive[kept])

    return rule


def top_a(row: Row, a: float) -> Row:
    p = softmax(row)
    return only(row, p >= a * p.max() ** 2)


def top_n_sigma(row: Row, n: float) -> Row:
    return only(row, row >= row.max() - n * row[row > -INF].std())


def p_less(row: Row, _: float) -> Row:
    p = softmax(row)
    return only(row, p >= (p**2).sum())


def tail_free(row: Row, z: float) -> Row:
    order = ranks(row)
    p = softmax(row)[order]
    bends = np.abs(np.diff(p, 2))
    if len(order) < 3 or bends.sum() == 0:
        return row
    running = np.cumsum(bends / bends.sum())
    return only(row, [order[0]] + [order[i + 1] for i, c in enumerate(running) if c <= z])


def top_h(row: Row, alpha: float) -> Row:
    order = ranks(row)
    p = softmax(row)[order]
    terms = [-x * math.log(x) if x > 0 else 0.0 for x in p]
    running = np.cumsum(terms)
    return only(
        row,
        [i for i, c in zip(order, running, strict=True) if c <= alpha * running[-1]] or [order[0]],
    )


def top_k_top_p(row: Row, share: float) -> Row:
    order = ranks(row)
    p = softmax(row)[order]
    before = np.cumsum(p) - p
    return only(row, [i for place, i in enumerate(order) if place < 12 and before[place] < share])


def xtc(row: Row, threshold: float) -> Row:
    p = softmax(row)
    top = [i for i in ranks(row) if p[i] >= threshold]
    return only(row, [i for i in ranks(row) if i not in top[:-1]])


def xtc_expected(row: Row, threshold: float) -> Row:
    p = softmax(row)
    out = [i for i in ranks(row) if p[i] >= threshold][:-1]
    rest = 1.0 - p[out].sum()
    with np.errstate(divide="ignore"):
        mixed = np.log(
            np.where(np.isin(np.arange(len(row)), out), 0.6 * p, 0.6 * p + 0.4 * p / rest)
        )
    return np.asarray(mixed)


# --- shapes: each returns the row ---------------------------------------------------------------


def dynamic_temperature(row: Row, high: float) -> Row:
    p = softmax(row)
    p = p[p > 0]
    n = int((row > -INF).sum())
    heat = 0.2 + (high - 0.2) * (-(p * np.log(p)).sum() / math.log(n)) ** 0.8 if n > 1 else 1.0
    return row / heat


def quadratic(row: Row, factor: float) -> Row:
    """The webui's form, with a curve of 1.7."""
    k, s = (3 - 1.7) / 2, (1.7 - 1) / 2
    d = np.where(row > -INF, row - row.max(), 0)
    bent = -(k * factor * d**2) + s * factor * d**3 + row.max()
    return np.where(row > -INF, bent, -INF)


def schedule(row: Row, _: float) -> Row:
    return row / float(np.interp(4, [0, 10], [2.0, 0.5]))


def top_k(row: Row, k: float) -> Row:
    return warper(lambda value: TopKLogitsWarper(round(value)))(row, k)


CUTS = [
    Golden(TopK, "k", {"k": 40}, "transformers", top_k),
    Golden(TopP, "p", {"p": 0.8}, "transformers", warper(TopPLogitsWarper)),
    Golden(MinP, "p", {"p": 0.07}, "transformers", warper(MinPLogitsWarper)),
    Golden(Epsilon, "epsilon", {"epsilon": 2e-3}, "transformers", warper(EpsilonLogitsWarper)),
    Golden(Epsilon, "epsilon", {"epsilon": 0.4}, "transformers", warper(EpsilonLogitsWarper)),
    Golden(Eta, "epsilon", {"epsilon": 2e-3}, "transformers", warper(EtaLogitsWarper)),
    Golden(Eta, "epsilon", {"epsilon": 0.3}, "transformers", warper(EtaLogitsWarper)),
    Golden(TypicalP, "p", {"p": 0.9}, "transformers", warper(TypicalLogitsWarper)),
    Golden(TypicalP, "p", {"p": 0.2}, "transformers", warper(TypicalLogitsWarper)),
    Golden(TopH, "alpha", {"alpha": 0.4, "window": 100}, "transformers", warper(TopHLogitsWarper)),
    Golden(TopH, "alpha", {"alpha": 0.4}, "formula", top_h),
    Golden(TopA, "a", {"a": 0.2}, "formula", top_a),
    Golden(TopNSigma, "n", {"n": 1.0}, "formula", top_n_sigma),
    Golden(PLess, "", {}, "formula", p_less),
    Golden(TailFree, "z", {"z": 0.9}, "formula", tail_free),
    Golden(TopKTopP, "p", {"k": 12, "p": 0.8}, "formula", top_k_top_p),
    Golden(Xtc, "threshold", {"threshold": 0.08, "probability": 1.0}, "formula", xtc),
]
VALUES = [
    Golden(
        Xtc,
        "threshold",
        {"threshold": 0.08, "probability": 0.4, "mode": "expected"},
        "formula",
        xtc_expected,
    ),
    Golden(
        DynamicTemperature,
        "high",
        {"low": 0.2, "high": 1.8, "exponent": 0.8},
        "formula",
        dynamic_temperature,
    ),
    Golden(Quadratic, "factor", {"factor": 0.4, "curve": 1.7}, "formula", quadratic),
    Golden(TemperatureSchedule, "", {"points": [(0, 2.0), (10, 0.5)]}, "formula", schedule),
]


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    lines = [f"{'method':44} {'against':14} {'rows':>5} {'left out':>9} {'differ':>7}"]
    yield lines
    print("\n" + "\n".join(lines))


@pytest.fixture(scope="module")
def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    found = []
    for vocab in (2, 61, 257, 701):
        for spread in (0.3, 2.5, 9.0):
            logits = torch.randn(85, vocab, generator=generator) * spread
            masked = torch.rand(85, vocab, generator=generator) < 0.05
            masked[:, 0] = False
            masked[::2] = False
            found.append(logits.masked_fill(masked, -INF))
    return found


def named(cases: list[Golden]) -> Any:
    return pytest.mark.parametrize(
        "case", cases, ids=[f"{case.stage.name}-{case.params}" for case in cases]
    )


def expected(case: Golden, row: Row, nudge: float = 0.0) -> Row:
    return case.rule(row, case.params.get(case.main, 0.0) * (1.0 + nudge))


def report(table: list[str], case: Golden, tried: int, unclear: int, wrong: int) -> None:
    name = f"{case.stage.name} {case.params}"
    table.append(f"{name[:44]:44} {case.against:14} {tried:5} {unclear:9} {wrong:7}")


@named(CUTS)
def test_a_truncation_keeps_what_its_reference_keeps(
    case: Golden, rows: list[Tensor], table: list[str]
) -> None:
    tried = unclear = wrong = 0
    for logits in rows:
        result = apply_stage(case.stage, logits, [case.params] * len(logits))
        for ours, row in zip(result, logits.double().numpy(), strict=True):
            tried += 1
            if not np.array_equal(ours.numpy() > -INF, expected(case, row) > -INF):
                low, high = expected(case, row, -NUDGE), expected(case, row, NUDGE)
                decided = np.array_equal(low > -INF, high > -INF)
                unclear += not decided
                wrong += decided

    report(table, case, tried, unclear, wrong)
    assert tried > 1000
    assert unclear < 5
    assert wrong == 0


@named(VALUES)
def test_a_reweighting_gives_the_distribution_of_its_reference(
    case: Golden, rows: list[Tensor], table: list[str]
) -> None:
    tried = wrong = 0
    for logits in rows:
        outputs = [[0] * 4] * len(logits)
        result = apply_stage(case.stage, logits, [case.params] * len(logits), outputs=outputs)
        for ours, row in zip(result.double().numpy(), logits.double().numpy(), strict=True):
            tried += 1
            wrong += bool(np.abs(softmax(ours) - softmax(expected(case, row))).max() > 2e-5)
            wrong += bool(((ours > -INF) != (row > -INF)).any())

    report(table, case, tried, 0, wrong)
    assert tried > 1000
    assert wrong == 0
