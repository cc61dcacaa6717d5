"""Fixed-point masses against float64 and integer arithmetic."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decodekit.kernels.reference import mass

VOCABULARIES = [1, 5, 255, 256, 257, 1000, 49152, 50257]


def random_logits(num_rows: int, vocab_size: int, seed: int = 0, masked: float = 0.0) -> Tensor:
    """Normal logits with a share of them masked, float32 [R, V]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 4
    dead = torch.rand(num_rows, vocab_size, generator=generator) < masked
    return logits.masked_fill(dead, -torch.inf)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_segment_view_holds_the_row_and_a_masked_tail(vocab_size: int) -> None:
    logits = random_logits(3, vocab_size)

    view = mass.segment_view(logits)

    assert view.shape == (3, mass.num_segments(vocab_size), 256)
    assert torch.equal(view.flatten(1)[:, :vocab_size], logits)
    assert bool((view.flatten(1)[:, vocab_size:] == -torch.inf).all())
    assert (view.data_ptr() == logits.data_ptr()) == (vocab_size % 256 == 0)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_segment_max_is_the_maximum_of_each_segment(vocab_size: int) -> None:
    logits = random_logits(4, vocab_size, masked=0.5)

    assert torch.equal(mass.segment_max(logits), mass.segment_view(logits).amax(-1))


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("masked", [0.0, 0.9])
def test_segment_mass_equals_integers_summed_one_by_one(vocab_size: int, masked: float) -> None:
    logits = random_logits(2, vocab_size, masked=masked)
    smax = mass.segment_max(logits)

    got = mass.segment_mass(logits, smax)

    anchored = mass.segment_view(logits) - smax.clamp_min(-3e38)[..., None]
    terms = torch.exp(anchored).double().numpy() * 2.0**40
    exact = [[sum(int(np.rint(term)) for term in part) for part in row] for row in terms]
    assert got.dtype == torch.int64
    assert got.tolist() == exact


def test_segment_mass_is_the_float64_mass_to_float32_rounding() -> None:
    logits = random_logits(8, 49152)
    smax = mass.segment_max(logits)

    got = mass.segment_mass(logits, smax).double() / mass.ONE

    view = mass.segment_view(logits).double()
    expected = torch.exp(view - smax.double()[..., None]).sum(-1)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_a_masked_segment_weighs_nothing() -> None:
    logits = random_logits(2, 1024)
    logits[:, 256:512] = -torch.inf

    smax = mass.segment_max(logits)
    smass = mass.segment_mass(logits, smax)

    assert smax[:, 1].tolist() == [-torch.inf, -torch.inf]
    assert smass[:, 1].tolist() == [0, 0]
    assert bool((smass[:, 0] >= 2**40).all())


def test_a_dead_row_weighs_nothing_and_warns_nobody() -> None:
    logits = torch.full((1, 600), -torch.inf)

    smax = mass.segment_max(logits)
    rows = mass.row_weights(smax, mass.segment_mass(logits, smax))

    assert rows.maximum.tolist() == [-torch.inf]
    assert rows.weights.tolist() == [[0, 0, 0]]
    assert rows.total.tolist() == [0]
    assert mass.token_mass(logits[:, :2], rows.maximum).tolist() == [[0, 0]]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_row_weights_are_the_softmax_of_segments(vocab_size: int) -> None:
    logits = random_logits(4, vocab_size, masked=0.3)
    smax = mass.segment_max(logits)

    rows = mass.row_weights(smax, mass.segment_mass(logits, smax))

    softmax = torch.softmax(logits.double(), dim=-1)
    parts = torch.nn.functional.pad(softmax, (0, -vocab_size % 256)).unflatten(1, (-1, 256))
    torch.testing.assert_close(
        rows.weights.double() / rows.total[:, None], parts.sum(-1), rtol=2e-6, atol=1e-10
    )
    assert torch.equal(rows.maximum, logits.amax(-1))
    assert torch.equal(rows.total, rows.weights.sum(-1))


@given(
    differences=st.lists(st.floats(-30, 0, width=32), min_size=1, max_size=40),
    maximum=st.floats(-50, 50, width=32),
)
def test_token_mass_is_the_rounded_exponential(differences: list[float], maximum: float) -> None:
    values = torch.tensor([differences]) + maximum
    top = values.amax(-1)

    got = mass.token_mass(values, top)

    # Torch's exp errs by under one unit in the last place, 2**-23 of the mass; rounding by a half.
    for value, one in zip(values[0].tolist(), got[0].tolist(), strict=True):
        difference = float(np.float32(value) - np.float32(top.item()))
        exact = math.exp(difference) * 2**40
        assert abs(one - exact) <= exact * 2.0**-23 + 0.5
    assert int(got.max()) == 2**40


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_row_total_is_the_sum_of_token_masses_but_for_rounding(vocab_size: int) -> None:
    logits = random_logits(3, vocab_size, masked=0.4)
    logits[1] = -torch.inf
    maximum = logits.amax(-1)

    summed = mass.token_mass(logits, maximum).sum(-1)
    # A token's exp is taken beside its segment here and beside its row there: two units in the
    # last place of float32 a token at most.
    assert torch.allclose(mass.row_total(logits).double(), summed.double(), rtol=2.0**-22, atol=0)


def test_one_is_the_mass_of_the_best_token() -> None:
    logits = random_logits(3, 300)

    assert mass.token_mass(logits, logits.amax(-1)).amax(-1).tolist() == [2**40] * 3
    assert int(mass.ONE) == 2**40


@pytest.mark.parametrize("vocab_size", [1000, 49152])
def test_masses_do_not_depend_on_the_batch(vocab_size: int) -> None:
    logits = random_logits(64, vocab_size, masked=0.1)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    smax = mass.segment_max(logits)
    smass = mass.segment_mass(logits, smax)
    rows = mass.row_weights(smax, smass)

    shuffled = logits[order]
    shuffled_mass = mass.segment_mass(shuffled, mass.segment_max(shuffled))

    assert torch.equal(shuffled_mass, smass[order])
    for row in range(64):
        alone = logits[row : row + 1]
        alone_max = mass.segment_max(alone)
        alone_mass = mass.segment_mass(alone, alone_max)
        assert torch.equal(alone_mass[0], smass[row])
        assert torch.equal(mass.row_weights(alone_max, alone_mass).weights[0], rows.weights[row])
        tokens = alone[:, 3:40]
        assert torch.equal(
            mass.token_mass(tokens, rows.maximum[row : row + 1])[0],
            mass.token_mass(logits, rows.maximum)[row, 3:40],
        )


def test_a_row_slice_of_a_wider_tensor_weighs_the_same() -> None:
    """Padded strides are common: the logits of a step may be a view."""
    wide = random_logits(4, 1100)
    narrow = wide[:, :1000]

    smax = mass.segment_max(narrow)

    assert torch.equal(
        mass.segment_mass(narrow, smax), mass.segment_mass(narrow.contiguous(), smax)
    )


def test_the_inputs_are_left_alone() -> None:
    logits = random_logits(2, 600, masked=0.2)
    before = logits.clone()

    smax = mass.segment_max(logits)
    smass = mass.segment_mass(logits, smax)
    kept = smass.clone()
    mass.row_weights(smax, smass)
    mass.token_mass(logits, smax.amax(-1))

    assert torch.equal(logits, before)
    assert torch.equal(smass, kept)
