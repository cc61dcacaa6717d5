"""Every form of the linear layer is the same product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from decodekit.core.models.layers import (
    DenseLinear,
    PackedLinear,
    WideningLinear,
    gate_times_up_,
    make_linear,
    multiplies_natively,
)

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [0, 1, 4, 5, 17])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [(96, 64), (7, 33)])
def test_the_chosen_form_multiplies(
    dtype: torch.dtype,
    num_rows: int,
    has_bias: bool,
    shared: bool,
    size: tuple[int, int],
    rng: torch.Generator,
) -> None:
    weight = torch.randn(size, generator=rng).to(dtype)
    bias = torch.randn(size[0], generator=rng).to(dtype) if has_bias else None
    x = torch.randn(num_rows, size[1], generator=rng).to(dtype)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())

    with torch.inference_mode():
        y = make_linear(weight.clone(), bias, shared=shared)(x)

    assert (y.dtype, y.shape) == (dtype, (num_rows, size[0]))
    bound = TOLERANCE[dtype] * max(1.0, float(exact.abs().max()) if num_rows else 0.0)
    assert torch.all((y.double() - exact).abs() <= bound)


def test_widening_works_tile_by_tile(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    monkeypatch.setattr("decodekit.core.models.layers._TILE_VALUES", 64 * 10)
    weight = torch.randn(96, 64, generator=rng).bfloat16()
    bias = torch.randn(96, generator=rng).bfloat16()
    x = torch.randn(8, 64, generator=rng).bfloat16()

    y = WideningLinear(weight, bias)(x)

    exact = F.linear(x.float(), weight.float(), bias.float())
    assert torch.all((y.float() - exact).abs() <= exact.abs() * 2**-8 + 1e-5)  # rounded once


def test_the_form_follows_device_and_dtype() -> None:
    half = PackedLinear if multiplies_natively(torch.bfloat16) else WideningLinear

    assert isinstance(make_linear(torch.ones(4, 4)), PackedLinear)
    assert isinstance(make_linear(torch.ones(4, 4, dtype=torch.bfloat16)), half)
    assert isinstance(make_linear(torch.ones(4, 4, device="meta")), DenseLinear)


def test_without_onednn_the_plain_form_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)

    assert isinstance(make_linear(torch.ones(4, 4)), DenseLinear)
    assert not multiplies_natively(torch.bfloat16)


def test_a_shared_weight_is_not_copied() -> None:
    weight = torch.ones(4, 4)

    linear = make_linear(weight, shared=True)

    assert isinstance(linear, PackedLinear)
    assert linear.weight.data_ptr() == weight.data_ptr()


def test_gate_times_up_is_swiglu(rng: torch.Generator) -> None:
    gate, up = torch.randn(2, 5, 12, generator=rng)
    expected = gate * torch.sigmoid(gate) * up

    torch.testing.assert_close(gate_times_up_(torch.cat((gate, up), dim=-1)), expected)
