"""Turn ggml blocks into float32: numpy for the common types, the gguf package for the others.

Meaning of each block (32 values; d, m are float16; q unsigned unless said otherwise):

* Q8_0, 34 bytes: d, 32 signed bytes q. Value = d * q.
* Q4_0, 18 bytes: d, 16 bytes whose low nibbles are q of values 0..15 and high nibbles of 16..31.
  Value = d * (q - 8).
* Q4_1, 20 bytes: d, m, nibbles as in Q4_0. Value = d * q + m.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ValidationError
from .gguf import GGUFFile, GGUFTensor

# Values decoded at a time: small enough for the cache, and torch copies them on one thread.
_PIECE_VALUES = 32768

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class BlockType(NamedTuple):
    """How a ggml type is laid out and read."""

    name: str
    block_size: int  # values a block
    block_bytes: int
    decode: Callable[[Bytes], Floats]  # [blocks, block_bytes] -> [blocks, block_size]


def dequantize(file: GGUFFile, tensor: GGUFTensor) -> Tensor:
    """Return the tensor's values as float32 in torch's shape."""
    values = torch.empty(tensor.shape, dtype=torch.float32)
    dequantize_into(file, tensor, values)
    return values


def dequantize_into(file: GGUFFile, tensor: GGUFTensor, out: Tensor) -> None:
    """Write the values to `out`, contiguous, on the CPU, of the same shape and any float dtype.

    Works in pieces that stay in the cache, so memory beyond `out` is a few hundred kilobytes.
    """
    block = _TYPES.get(tensor.type_id) or _from_gguf_package(tensor)
    num_values = int(np.prod(tensor.shape, dtype=np.int64))
    num_blocks, rest = divmod(num_values, block.block_size)
    if rest or tensor.shape[-1] % block.block_size:
        raise ValidationError(
            f"tensor {tensor.name!r} has rows of {tensor.shape[-1]} values, which is no multiple "
            f"of the {block.block_size} values in a block of {block.name}",
            parameter="model",
            value=str(file.path),
        )
    raw = file.bytes_of(tensor, num_blocks * block.block_bytes)
    blocks = raw.reshape(num_blocks, block.block_bytes)
    flat = out.view(-1)
    step = max(1, _PIECE_VALUES // block.block_size)
    for first in range(0, num_blocks, step):
        piece = block.decode(blocks[first : first + step])
        at = first * block.block_size
        flat[at : at + piece.size].copy_(torch.from_numpy(piece).view(-1))


def _f32(raw: Bytes) -> Floats:
    return raw.view(np.float32).copy()  # torch wants memory that it may write


def _f16(raw: Bytes) -> Floats:
    return raw.view(np.float16).astype(np.float32)


def _bf16(raw: Bytes) -> Floats:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _half_column(raw: Bytes, at: int) -> Floats:
    """The float16 that starts at byte `at` of each block, as a float32 column [blocks, 1]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes, at: int) -> Floats:
    """The 16 bytes from byte `at` of each block as 32 values in 0..15: low nibbles, then high."""
    packed = raw[:, at : at + 16]
    values = np.empty((raw.shape[0], 32), dtype=np.float32)
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
    return values


def _q8_0(raw: Bytes) -> Floats:
    values = raw[:, 2:].view(np.int8).astype(np.float32)
    values *= _half_column(raw, 0)
    return values


def _q4_0(raw: Bytes) -> Floats:
    values = _nibbles(raw, 2)
    values -= 8
    values *= _half_column(raw, 0)
    return values


def _q4_1(raw: Bytes) -> Floats:
    values = _nibbles(raw, 4)
    values *= _half_column(raw, 0)
    values += _half_column(raw, 2)
    return values


_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, _f16),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    30: BlockType("BF16", 1, 2, _bf16),
}


def _from_gguf_package(tensor: GGUFTensor) -> BlockType:
    """Describe a type that only the gguf package can read; refuse it if that is not installed."""
    own = ", ".join(block.name for block in _TYPES.values())
    try:
        import gguf
    except ImportError as error:
        raise ValidationError(
            f"tensor {tensor.name!r} has ggml type {tensor.type_id}; {own} can be read, "
            "others need the package gguf (pip install gguf)",
            parameter="model",
            value=tensor.type_id,
        ) from error
    try:
        kind: Any = gguf.GGMLQuantizationType(tensor.type_id)
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        gguf.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ValidationError(
            f"tensor {tensor.name!r} has ggml type {tensor.type_id}, which the package gguf "
            f"{getattr(gguf, '__version__', '')} cannot dequantise either",
            parameter="model",
            value=tensor.type_id,
        ) from error

    def decode(raw: Bytes) -> Floats:
        values: Floats = gguf.dequantize(np.ascontiguousarray(raw), kind)
        return values.astype(np.float32, copy=False)

    return BlockType(str(kind.name), block_size, block_bytes, decode)
