"""Rank order against a plain sort of (-value, id) pairs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decodekit.kernels.reference import mass, ranked


def plain_rank(row: Tensor) -> list[int]:
    """Ids of one row by descending value, the lower id first among equals."""
    values = row.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def assert_leads(logits: Tensor, n: int, top: ranked.Ranked) -> None:
    """`top` is the first n of the plain order, with the greatest value left out as its bound."""
    for row in range(len(logits)):
        order = plain_rank(logits[row])
        values = logits[row, order].tolist()
        assert top.ids[row].tolist() == order[:n]
        assert top.values[row].tolist() == values[:n]
        assert top.bound[row].item() == (values[n] if n < len(values) else -torch.inf)


@st.composite
def tied_logits(draw: st.DrawFn) -> Tensor:
    """Rows from a handful of values: ties everywhere, masked tokens, both zeros."""
    num_rows = draw(st.integers(1, 4))
    vocab_size = draw(st.sampled_from([1, 2, 7, 40, 257, 1000, 1029, 4096]))
    levels = draw(
        st.lists(
            st.sampled_from([-torch.inf, -3.5, -0.0, 0.0, 1e-30, 2.0, 3e38]), min_size=1, max_size=5
        )
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weights = random.dirichlet(np.full(len(levels), 0.3))
    chosen = random.choice(np.array(levels, dtype=np.float32), (num_rows, vocab_size), p=weights)
    return torch.from_numpy(chosen)


@given(logits=tied_logits(), n=st.sampled_from([1, 2, 5, 20, 64, 256, 5000]))
def test_rank_top_is_exact_on_ties_and_masks(logits: Tensor, n: int) -> None:
    assert_leads(logits, n, ranked.rank_top(logits, n))


@given(logits=tied_logits())
def test_rank_all_is_the_plain_order(logits: Tensor) -> None:
    assert_leads(logits, logits.shape[1], ranked.rank_all(logits))


@pytest.mark.parametrize("vocab_size", [1, 300, 5000, 49152, 50257, 151936])
@pytest.mark.parametrize("n", [1, 50, 256, 1024])
def test_rank_top_leads_a_stable_sort(vocab_size: int, n: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size, generator=generator) * 3
    logits[1] = logits[1].bfloat16().float()  # ties, as in any half-precision model
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)

    top = ranked.rank_top(logits, n)

    assert torch.equal(top.values, values[:, :n])
    assert torch.equal(top.ids, ids[:, :n])
    rest = values[:, n] if n < vocab_size else torch.full((3,), -torch.inf)
    assert torch.equal(top.bound, rest)


@pytest.mark.parametrize("vocab_size", [1000, 49152, 50257])
def test_known_segment_maxima_change_nothing(vocab_size: int) -> None:
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(2))
    logits[3, 100:] = -torch.inf
    smax = mass.segment_max(logits)

    for n in (1, 64, 300):
        plain, helped = ranked.rank_top(logits, n), ranked.rank_top(logits, n, smax)
        assert torch.equal(plain.ids, helped.ids)
        assert torch.equal(plain.bound, helped.bound)


def test_a_row_with_few_alive_is_filled_with_masked_tokens_in_order() -> None:
    logits = torch.full((3, 49152), -torch.inf)
    logits[0, [40000, 7, 1]] = torch.tensor([1.0, 2.0, 2.0])
    logits[1] = torch.linspace(0, 1, 49152)

    top = ranked.rank_top(logits, 6)

    assert top.ids[0].tolist() == [1, 7, 40000, 0, 2, 3]
    assert top.values[0].tolist() == [2.0, 2.0, 1.0] + [-torch.inf] * 3
    assert top.ids[1].tolist() == [49151, 49150, 49149, 49148, 49147, 49146]
    assert top.ids[2].tolist() == [0, 1, 2, 3, 4, 5]
    assert top.bound[[0, 2]].tolist() == [-torch.inf, -torch.inf]


def test_a_flat_row_beside_peaked_ones_is_cut_by_id() -> None:
    logits = torch.randn(4, 49152, generator=torch.Generator().manual_seed(4))
    logits[2] = 1.5

    top = ranked.rank_top(logits, 64)

    assert top.ids[2].tolist() == list(range(64))
    assert top.bound[2].item() == 1.5
    assert_leads(logits[[0, 1, 3]], 64, ranked.rank_top(logits[[0, 1, 3]], 64))
    assert torch.equal(top.ids[[0, 1, 3]], ranked.rank_top(logits[[0, 1, 3]], 64).ids)


def test_a_ranking_does_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(64, 4000, generator=generator) * 3).bfloat16().float()
    order = torch.randperm(64, generator=generator)

    together = ranked.rank_top(logits, 50)
    shuffled = ranked.rank_top(logits[order], 50)

    assert torch.equal(shuffled.ids, together.ids[order])
    for row in range(64):
        alone = ranked.rank_top(logits[row : row + 1], 50)
        assert torch.equal(alone.ids[0], together.ids[row])
        assert torch.equal(alone.bound[0], together.bound[row])


def test_a_view_with_padded_strides_ranks_the_same() -> None:
    wide = torch.randn(4, 1100, generator=torch.Generator().manual_seed(6))
    narrow = wide[:, :1000]

    assert_leads(narrow, 40, ranked.rank_top(narrow, 40))
    assert_leads(narrow, 1000, ranked.rank_all(narrow))


def test_no_rows_give_no_ranks() -> None:
    top = ranked.rank_top(torch.empty(0, 1000), 5)

    assert top.ids.shape == (0, 5)
    assert top.bound.shape == (0,)


@given(logits=tied_logits())
def test_the_device_form_of_the_keys_is_the_cpu_form(logits: Tensor) -> None:
    """The torch formula is what other devices sort by; here it runs on the CPU by hand."""
    in_numpy = ranked._keys(logits.numpy(), np.arange(logits.shape[1]))

    assert torch.equal(ranked._keys_torch(logits), torch.from_numpy(in_numpy))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_ranks_the_same() -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(7)).bfloat16().float()
    logits[1, 3:] = -torch.inf

    here, there = ranked.rank_top(logits, 64), ranked.rank_top(logits.cuda(), 64)

    assert torch.equal(there.ids.cpu(), here.ids)
    assert torch.equal(there.values.cpu(), here.values)
    assert torch.equal(there.bound.cpu(), here.bound)
    assert torch.equal(ranked.rank_all(logits.cuda()).ids.cpu(), ranked.rank_all(logits).ids)
