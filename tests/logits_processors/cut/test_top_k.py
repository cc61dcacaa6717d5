"""Top-k."""

import pytest
import torch
from transformers import TopKLogitsWarper

from decodekit.core.errors import ChainError
from decodekit.logits_processors.cut.top_k import TopK
from decodekit.plugins.author.rows import apply_stage, make_context

INF = float("inf")
NO_IDS = torch.zeros(1, 1).long()


@pytest.mark.parametrize("spread", [0.1, 3.0, 20.0])
@pytest.mark.parametrize("vocab", [2, 97, 257, 1009])
def test_it_equals_transformers(vocab: int, spread: float, rng: torch.Generator) -> None:
    ks = [k for k in (2, 3, 50, 256) if k < vocab] or [2]
    logits = torch.randn(100 * len(ks), vocab, generator=rng) * spread

    result = apply_stage(TopK, logits, [{"k": k} for k in ks for _ in range(100)])

    for place, k in enumerate(ks):
        part = slice(100 * place, 100 * place + 100)
        assert torch.equal(result[part], TopKLogitsWarper(k)(NO_IDS, logits[part]))


def test_rounded_logits_with_ties_equal_transformers(rng: torch.Generator) -> None:
    logits = (torch.randn(200, 300, generator=rng) * 2).round()

    result = apply_stage(TopK, logits, [{"k": 20}] * 200)

    assert torch.equal(result, TopKLogitsWarper(20)(NO_IDS, logits))


def test_ties_at_the_last_place_are_kept_or_cut_as_asked() -> None:
    row = torch.tensor([[0.4, 0.3, 0.3]]).log()

    assert alive(row, k=2) == [0, 1, 2]
    assert alive(row, k=2, ties="index") == [0, 1]
    assert alive(torch.zeros(1, 4), k=2) == [0, 1, 2, 3]


def test_one_keeps_the_lowest_id_of_a_tie() -> None:
    row = torch.tensor([[0.0, 3.0, 3.0, 1.0]])

    assert alive(row, k=1) == [1]
    assert alive(row, k=1, ties="value") == [1]


def test_more_than_are_alive_changes_nothing() -> None:
    row = torch.tensor([[1.0, -INF, 2.0, -INF]])

    for ties in ("value", "index"):
        assert torch.equal(apply_stage(TopK, row, [{"k": 3, "ties": ties}]), row)


@pytest.mark.parametrize("k", [251, 252, 10_000_000])
def test_the_whole_vocabulary_is_identity(k: int) -> None:
    assert TopK.is_identity(TopK.bind(TopK.validate({"k": k}), make_context(251)))
    assert not TopK.is_identity(TopK.bind(TopK.validate({"k": 250}), make_context(251)))


def test_min_keep_is_a_floor() -> None:
    row = torch.tensor([[5.0, 4.0, 3.0, -INF]])

    assert alive(row, k=1, min_keep=2) == [0, 1]
    assert alive(row, k=1, min_keep=4) == [0, 1, 2]
    assert TopK.list_hint(TopK.validate({"k": 3, "min_keep": 9})) == 9


@pytest.mark.parametrize("bad", [0, -1, 2.5, "all"])
def test_values_out_of_range_are_refused(bad: object) -> None:
    with pytest.raises(ChainError, match="top_k.k"):
        TopK(k=bad)


def alive(row: torch.Tensor, **params: object) -> list[int]:
    result = apply_stage(TopK, row, [params])
    return (result[0] > -INF).nonzero()[:, 0].tolist()
