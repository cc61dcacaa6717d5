"""Min-p."""

import pytest
import torch
from transformers import MinPLogitsWarper

from decodekit.core.errors import ChainError
from decodekit.logits_processors.cut.min_p import MinP
from decodekit.plugins.author.rows import apply_stage

INF = float("inf")
NO_IDS = torch.zeros(1, 1).long()


@pytest.mark.parametrize("spread", [0.1, 3.0, 20.0])
@pytest.mark.parametrize("vocab", [1, 97, 257, 1009])
def test_it_equals_transformers(vocab: int, spread: float, rng: torch.Generator) -> None:
    shares = [0.02, 0.1, 0.25, 0.9]
    logits = torch.randn(100 * len(shares), vocab, generator=rng) * spread

    result = apply_stage(MinP, logits, [{"p": p} for p in shares for _ in range(100)])

    for place, p in enumerate(shares):
        part = slice(100 * place, 100 * place + 100)
        expected = MinPLogitsWarper(p)(NO_IDS, logits[part].double()).float()
        weights = (logits[part].double() - logits[part].double().amax(1, keepdim=True)).exp()
        clear = ~((weights - p).abs() < 1e-6).any(1)
        assert int(clear.sum()) > 90
        assert torch.equal(result[part][clear], expected[clear])


def test_the_stated_vectors_hold() -> None:
    assert alive(torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log(), 0.25) == [0, 1, 2]
    row = torch.tensor([[0.6, 0.3, 0.06, 0.04]]).log()
    assert alive(row, 0.2) == [0, 1]
    assert alive(row / 2, 0.2) == [0, 1, 2, 3]
    assert alive(row, 1.0) == [0]


def test_one_keeps_the_maximal_ties() -> None:
    assert alive(torch.tensor([[2.0, -1.0, 2.0, 1.999]]), 1.0) == [0, 2]


def test_masked_tokens_stay_masked() -> None:
    assert alive(torch.tensor([[-INF, 1.0, 0.0, -INF]]), 0.001) == [1, 2]


def test_zero_and_unset_are_identities() -> None:
    assert MinP.is_identity(MinP.validate({"p": 0}))
    assert MinP.is_identity(MinP.validate({}))


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_values_out_of_range_are_refused(bad: float) -> None:
    with pytest.raises(ChainError, match="min_p.p"):
        MinP(p=bad)


def alive(row: torch.Tensor, p: float) -> list[int]:
    result = apply_stage(MinP, row, [{"p": p}])
    return (result[0] > -INF).nonzero()[:, 0].tolist()
