"""Mirostat and adaptive-p beside a transcription of their definitions, step by step."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decodekit.core.batch import PickView, Ranking
from decodekit.core.errors import ChainError
from decodekit.core.stage import Picker
from decodekit.kernels.ops import rank_all
from decodekit.plugins.author.rows import MadeRows, make_rows
from decodekit.plugins.pick.adaptive_p import AdaptiveP
from decodekit.plugins.pick.mirostat import Mirostat

INF = float("inf")
VOCAB = 150


class Walk:
    """One sequence that picks from given rows, with the noise of each step at hand."""

    def __init__(self, picker: type[Picker], params: dict[str, Any], *, listed: bool) -> None:
        self.picker, self.params, self.listed = picker, params, listed
        self.output: list[int] = []
        self.state = self.rows().view.states[0]

    def rows(self) -> MadeRows:
        return make_rows(self.picker, [self.params], vocab_size=VOCAB, outputs=[self.output])

    def step(self, logits: Tensor) -> tuple[int, Any]:
        """Pick, accept, and return the token with the noise times by id."""
        made = self.rows()
        made.view.states = [self.state]
        ranked = rank_all(logits)
        view = PickView(
            ranking=Ranking(ranked.values, ranked.ids) if self.listed else None,
            dense=None if self.listed else logits,
            has_cut=self.listed,
            vocab_size=VOCAB,
        )
        token = int(self.picker.prototype().pick(view, made.view))
        times = made.view.exponential(torch.arange(VOCAB)[None])[0].numpy()
        self.picker.prototype().accept(self.state, [token])
        self.output.append(token)
        return token, times


def rows_of(count: int, rng: torch.Generator) -> list[Tensor]:
    found = []
    for at in range(count):
        logits = torch.randn(1, VOCAB, generator=rng) * (0.2, 2.0, 6.0)[at % 3]
        dead = torch.rand(1, VOCAB, generator=rng) < (0.0, 0.3, 0.97)[at % 3]
        dead[0, at] = False
        found.append(logits.masked_fill(dead, -INF))
    return found


def drawn(p: Any, times: Any) -> int:
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(p) - np.log(times)))


def kept_by_fit(p: Any, mu: float) -> Any:
    """Mode 1 as llama.cpp writes it, with the limit at s = 1 and without zero divisors."""
    order = np.argsort(-p, kind="stable")
    alive = order[p[order] > 0]
    products = squares = 0.0
    for i in range(min(99, len(alive) - 1)):
        t = math.log((i + 2) / (i + 1))
        products += t * math.log(p[alive[i]] / p[alive[i + 1]])
        squares += t * t
    if not squares:
        return alive
    s = products / squares
    e = s - 1
    k = ((e * 2**mu) / (1 - VOCAB**-e)) ** (1 / s)
    return alive[: max(int(min(k, VOCAB)), 1)]


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("mode", [1, 2])
def test_mirostat_follows_its_definition(mode: int, listed: bool, rng: torch.Generator) -> None:
    tau, eta = 2.5, 0.3
    walk = Walk(Mirostat, {"mode": mode, "tau": tau, "eta": eta}, listed=listed)
    mu = 2 * tau
    sizes = set()
    for logits in rows_of(90, rng):
        p = logits.double().softmax(1)[0].numpy()
        if mode == 2:
            with np.errstate(divide="ignore"):
                kept = np.flatnonzero(-np.log2(p) <= mu)
            kept = kept if len(kept) else [int(p.argmax())]
        else:
            kept = kept_by_fit(p, mu)
        q = np.zeros(VOCAB)
        q[kept] = p[kept] / p[kept].sum()

        token, times = walk.step(logits)

        assert token == drawn(q, times)
        mu -= eta * (-math.log2(q[token]) - tau)
        assert walk.state.current == pytest.approx(mu, abs=1e-5)
        sizes.add(len(kept))
    assert len(sizes) > 10


@pytest.mark.parametrize("mode", [1, 2])
def test_mirostat_holds_the_surprise_near_its_target(mode: int, rng: torch.Generator) -> None:
    walk = Walk(Mirostat, {"mode": mode, "tau": 3.0, "eta": 0.2}, listed=False)
    surprises = []
    for _ in range(250):
        before = walk.state.current
        walk.step(torch.randn(1, VOCAB, generator=rng) * 1.5)
        surprises.append(3.0 + (before - walk.state.current) / 0.2)

    assert abs(sum(surprises[50:]) / 200 - 3.0) < 0.3


@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize("listed", [False, True])
def test_mirostat_survives_the_rows_that_divide_by_zero(mode: int, listed: bool) -> None:
    one = torch.full((1, VOCAB), -INF)
    one[0, 5] = 1.0
    zipf = -torch.arange(1, VOCAB + 1).float().log()[None]  # s = 1
    sharp = torch.zeros(1, VOCAB)
    sharp[0, 3] = 200.0

    for logits in (one, torch.zeros(1, VOCAB), zipf, sharp):
        walk = Walk(Mirostat, {"mode": mode, "tau": 0.01, "eta": 1.0}, listed=listed)
        for _ in range(5):
            token, _ = walk.step(logits)
            assert logits[0, token] > -INF
        assert math.isfinite(walk.state.current)


def test_a_mu_below_zero_leaves_the_best_token(rng: torch.Generator) -> None:
    logits = torch.randn(1, VOCAB, generator=rng)
    for mode in (1, 2):
        walk = Walk(Mirostat, {"mode": mode}, listed=False)
        walk.state.values[0] = -8.0

        assert walk.step(logits)[0] == int(logits.argmax())


@pytest.mark.parametrize("listed", [False, True])
def test_adaptive_p_follows_its_definition(listed: bool, rng: torch.Generator) -> None:
    target, decay = 0.3, 0.8
    walk = Walk(AdaptiveP, {"target": target, "decay": decay}, listed=listed)
    weighted, count = target / (1 - decay), 1 / (1 - decay)
    aims = set()
    for logits in rows_of(90, rng):
        p = logits.double().softmax(1)[0].numpy()
        aim = min(max(2 * target - weighted / count, 0), 1)
        d = np.abs(p - aim) / 0.3
        bent = np.where(logits[0].numpy() > -INF, np.exp(5 - 10 * d**2 / (1 + d)), 0)

        token, times = walk.step(logits)

        assert token == drawn(bent, times)
        weighted, count = p[token] + decay * weighted, 1 + decay * count
        assert walk.state.current == pytest.approx((weighted, count), abs=1e-6)
        aims.add(round(aim, 3))
    assert len(aims) > 30


def test_adaptive_p_without_a_target_draws_as_it_is(rng: torch.Generator) -> None:
    walk = Walk(AdaptiveP, {}, listed=False)
    for logits in rows_of(12, rng):
        token, times = walk.step(logits)
        assert token == drawn(logits.double().softmax(1)[0].numpy(), times)


def test_a_row_steers_itself_alone(rng: torch.Generator) -> None:
    logits = torch.randn(6, VOCAB, generator=rng)
    for picker, params in ((Mirostat, {"tau": 1.0}), (AdaptiveP, {"target": 0.2})):
        together = make_rows(picker, [params] * 6, vocab_size=VOCAB, keys=list(range(6)))
        shown = PickView(ranking=None, dense=logits, has_cut=False, vocab_size=VOCAB)
        tokens = picker.prototype().pick(shown, together.view)
        for row in range(6):
            alone = make_rows(picker, [params], vocab_size=VOCAB, keys=[row])
            part = PickView(
                ranking=None, dense=logits[row : row + 1], has_cut=False, vocab_size=VOCAB
            )
            assert picker.prototype().pick(part, alone.view).item() == tokens[row]
            picker.prototype().accept(alone.view.states[0], [int(tokens[row])])
            picker.prototype().accept(together.view.states[row], [int(tokens[row])])
            assert alone.view.states[0].values == together.view.states[row].values


@pytest.mark.parametrize(
    ("picker", "bad"),
    [
        (Mirostat, {"mode": 0}),
        (Mirostat, {"tau": 0}),
        (Mirostat, {"eta": 0}),
        (Mirostat, {"eta": 1.1}),
        (AdaptiveP, {"target": -0.1}),
        (AdaptiveP, {"decay": 1.0}),
    ],
)
def test_values_out_of_range_are_refused(picker: type[Picker], bad: dict[str, Any]) -> None:
    with pytest.raises(ChainError, match=picker.name):
        picker(**bad)
