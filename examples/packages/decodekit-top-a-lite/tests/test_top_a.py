"""Top-a keeps its contract, and what its formula says."""

import decodekit_top_a_lite
import pytest
import torch
from decodekit_top_a_lite import TopA


def test_it_keeps_every_law(decodekit_check):
    decodekit_check(TopA, examples=[{"a": 0.2}, {"a": 0.9, "min_keep": 2}])


@pytest.mark.parametrize("a", [0.05, 0.3, 1.0])
def test_what_is_kept_is_what_the_formula_says(decodekit_apply, a):
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(1)) * 2
    p = logits.double().softmax(1)

    after = decodekit_apply(TopA, logits, [{"a": a}] * 64)

    assert torch.equal(after > -torch.inf, p >= a * p.amax(1, keepdim=True) ** 2)


def test_zero_keeps_all(decodekit_apply):
    logits = torch.tensor([[3.0, 1.0, -9.0]])
    assert torch.equal(decodekit_apply(TopA, logits, [{"a": 0.0}]), logits)


def test_a_registry_lists_it(decodekit_plugins):
    assert "top_a_lite.top_a" in decodekit_plugins(decodekit_top_a_lite).stages


def test_a_value_outside_the_range_is_refused():
    with pytest.raises(ValueError, match="top_a_lite.top_a.a is 1.5"):
        TopA(a=1.5)
