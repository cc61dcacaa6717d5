"""Top-p."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TopPLogitsWarper

from decodekit.core.errors import ChainError
from decodekit.logits_processors.cut.top_p import TopP
from decodekit.plugins.author.rows import apply_stage

INF = float("inf")
NO_IDS = torch.zeros(1, 1).long()
BAND = 2.0**-20  # a prefix mass this near to p * total may fall on either side


def near_the_border(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Say for which rows some prefix mass lies inside the band, bool [rows]."""
    sums = logits.double().softmax(1).sort(1, descending=True).values.cumsum(1)
    return ((sums - p).abs() < BAND).any(1)


@pytest.mark.parametrize("spread", [0.1, 3.0, 20.0])
@pytest.mark.parametrize("vocab", [2, 97, 257, 1009])
def test_it_equals_transformers(vocab: int, spread: float, rng: torch.Generator) -> None:
    shares = [0.01, 0.35, 0.9, 0.99]
    logits = torch.randn(100 * len(shares), vocab, generator=rng) * spread

    result = apply_stage(TopP, logits, [{"p": p} for p in shares for _ in range(100)])

    for place, p in enumerate(shares):
        part = slice(100 * place, 100 * place + 100)
        expected = TopPLogitsWarper(p)(NO_IDS, logits[part].double()).float()
        clear = ~near_the_border(logits[part], p)
        assert int(clear.sum()) > 90
        assert torch.equal(result[part][clear], expected[clear])


@pytest.mark.parametrize(
    ("p", "kept"), [(0.35, 1), (0.6, 2), (0.8, 3), (0.95, 4), (1e-6, 1), (1.0, 4)]
)
def test_the_token_that_crosses_is_kept(p: float, kept: int) -> None:
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()

    assert alive(row, p=p) == list(range(kept))


@pytest.mark.parametrize(("p", "kept"), [(0.75, 2), (0.85, 3)])
def test_the_stated_vectors_hold(p: float, kept: int) -> None:
    assert alive(torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log(), p=p) == list(range(kept))


def test_a_tie_is_cut_by_id_or_kept_whole() -> None:
    row = torch.zeros(1, 4)  # a quarter each

    assert alive(row, p=0.4) == [0, 1]
    assert alive(row, p=0.4, ties="value") == [0, 1, 2, 3]
    # The group of 1 and 2 is above the border as a whole, that of 0 and 3 below it.
    two_groups = torch.tensor([[0.1, 0.4, 0.4, 0.1]]).log()
    assert alive(two_groups, p=0.5, ties="value") == [1, 2]
    assert alive(two_groups, p=0.85, ties="value") == [0, 1, 2, 3]


def test_mass_on_the_border_itself_is_not_crossed() -> None:
    row = torch.zeros(1, 4)  # the masses before are exactly 0, 1/4, 1/2, 3/4 of the total

    assert alive(row, p=0.5) == [0, 1]
    assert alive(row, p=0.5 + 2**-23) == [0, 1, 2]


def test_masked_tokens_carry_no_mass() -> None:
    row = torch.tensor([[-INF, 0.0, -INF, 0.0, 0.0]])

    assert alive(row, p=0.5) == [1, 3]


def test_one_and_unset_are_identities() -> None:
    assert TopP.is_identity(TopP.validate({"p": 1}))
    assert TopP.is_identity(TopP.validate({}))
    assert not TopP.is_identity(TopP.validate({"p": 0.999999}))


@pytest.mark.parametrize("bad", [0, -0.1, 1.1, float("nan")])
def test_values_out_of_range_are_refused(bad: float) -> None:
    with pytest.raises(ChainError, match="top_p.p"):
        TopP(p=bad)


@given(
    values=st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=300),
    p=st.floats(0.001, 0.999),
)
def test_what_stays_is_the_smallest_prefix_that_reaches_the_share(
    values: list[float], p: float
) -> None:
    logits = torch.tensor([values])

    result = apply_stage(TopP, logits, [{"p": p}])

    mass = logits[0].double().softmax(0)
    kept = result[0] > -INF
    assert torch.equal(result[0][kept], logits[0][kept])
    assert float(mass[kept].sum()) > p - BAND
    least = min(kept.nonzero()[:, 0].tolist(), key=lambda i: (values[i], -i))
    assert float(mass[kept].sum() - mass[least]) < p + BAND
    if not bool(kept.all()):
        assert float(mass[~kept].max()) <= float(mass[kept].min())


def alive(row: torch.Tensor, **params: object) -> list[int]:
    result = apply_stage(TopP, row, [params])
    return (result[0] > -INF).nonzero()[:, 0].tolist()
