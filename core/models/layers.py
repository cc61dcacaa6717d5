"""The linear layer of the lean forward, in the fastest form that the device and dtype have.

| where | dtype | form |
|---|---|---|
| CPU | float32; halves that oneDNN multiplies | `PackedLinear`: weights packed once for oneDNN |
| CPU | halves that oneDNN doesn't multiply | `WideningLinear`: dot products, or float32 tiles |
| elsewhere | any | `DenseLinear`: torch's own |

All compute y = x W^T + b with W [out, in]; results differ only in rounding.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# From this many rows on, widening the weight to float32 beats torch's half-precision dot
# products on a CPU without half-precision units: on an AVX2 machine with two threads a
# [3072, 576] bfloat16 weight takes 0.43 / 0.53 / 1.0 / 2.0 / 3.9 ms at 1 / 2 / 4 / 8 / 16 rows as
# dot products, and 0.68 / 0.90 / 0.97 / 1.1 / 1.4 ms widened.
_WIDEN_FROM_ROWS = 5
# A tile of float32 weights that stays in the cache between being widened and being multiplied.
_TILE_VALUES = 2 * 1024 * 1024
# oneDNN picks the packed layout for a number of rows; 16 serves 1 to 64 within a few percent.
_PACK_FOR_ROWS = 16


class Linear(Protocol):
    """y = x W^T + b on rows [R, in], giving [R, out] in the weight's dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """torch's own linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """oneDNN on a weight in oneDNN's own blocked layout.

    `keep` multiplies by the plain weight instead, which costs no second copy where the weight is
    also the embedding table; for a whole vocabulary in float32 that is as fast.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, keep: bool) -> None:
        self.weight = weight if keep else _pack(weight)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return _onednn(x, self.weight, self.bias)


class WideningLinear:
    """Half-precision weights on a CPU that multiplies only float32.

    Few rows use torch's dot products, which read half the bytes; many rows widen the weight tile
    by tile and use oneDNN in float32, rounding once at the end.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self._wide_bias = None if bias is None else bias.float()
        self._tile_rows = max(1, min(weight.shape[0], _TILE_VALUES // weight.shape[1]))

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] < _WIDEN_FROM_ROWS:
            return F.linear(x, self.weight, self.bias)
        wide, num_out = x.float(), self.weight.shape[0]
        y = x.new_empty(x.shape[0], num_out)
        scratch = torch.empty(self._tile_rows, x.shape[1])
        for at in range(0, num_out, self._tile_rows):
            tile = self.weight[at : at + self._tile_rows]
            bias = None if self._wide_bias is None else self._wide_bias[at : at + tile.shape[0]]
            y[:, at : at + tile.shape[0]] = _onednn(
                wide, scratch[: tile.shape[0]].copy_(tile), bias
            )
        return y


def make_linear(weight: Tensor, bias: Tensor | None = None, *, shared: bool = False) -> Linear:
    """Return the fastest linear for `weight` [out, in]; it may keep a packed copy instead of it.

    `shared` says that the weight lives on elsewhere, as an embedding table does.
    """
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return DenseLinear(weight, bias)
    if weight.dtype == torch.float32 or multiplies_natively(weight.dtype):
        # oneDNN packs half types to advantage even for a whole vocabulary; float32 gains nothing.
        return PackedLinear(weight, bias, keep=shared and weight.dtype == torch.float32)
    return WideningLinear(weight, bias)


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies matrices of this half type on this CPU."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def cpu_has_fast_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 instructions (AVX512-BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)
    return packed


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def gate_times_up_(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, I], of gate and up side by side, [T, 2I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
