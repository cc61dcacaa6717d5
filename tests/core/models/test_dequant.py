"""Each ggml type decodes to what the gguf package decodes."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from decodekit.core.errors import ValidationError
from decodekit.core.models.dequant import dequantize, dequantize_into
from decodekit.core.models.gguf import GGUFFile, GGUFTensor

OWN = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"]
THEIRS = ["Q5_0", "Q5_1", "Q6_K", "Q4_K", "IQ4_NL"]


def file_of(kind: str, shape: tuple[int, int]) -> tuple[GGUFFile, GGUFTensor, np.ndarray[Any, Any]]:
    """Return random blocks of a type as a file of one tensor, and what they mean."""
    quant = gguf.GGMLQuantizationType[kind]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    num_blocks = shape[0] * shape[1] // block_size
    raw = np.random.default_rng(len(kind)).integers(0, 256, (num_blocks, block_bytes), np.uint8)
    if kind == "F32":
        raw = np.random.default_rng(0).normal(size=(num_blocks, 1)).astype("<f4").view(np.uint8)
    raw[:, 1::2] &= 0xBF  # no infinities: clear an exponent bit of whatever float16 stands there
    expected = gguf.dequantize(raw, quant).reshape(shape)
    file = GGUFFile(Path("none.gguf"), {}, {}, raw.ravel())
    return file, GGUFTensor("t", shape, int(quant), 0), expected


@pytest.mark.parametrize("kind", OWN + THEIRS)
@pytest.mark.parametrize("shape", [(1, 256), (7, 512), (300, 256)])  # the last takes three pieces
def test_blocks_decode_as_in_the_gguf_package(kind: str, shape: tuple[int, int]) -> None:
    file, tensor, expected = file_of(kind, shape)

    values = dequantize(file, tensor)

    assert values.dtype == torch.float32
    np.testing.assert_array_equal(values.numpy(), expected)


def test_values_are_rounded_once_to_the_wanted_dtype() -> None:
    file, tensor, expected = file_of("Q4_1", (40, 1024))
    out = torch.empty(40, 1024, dtype=torch.bfloat16)

    dequantize_into(file, tensor, out)

    assert torch.equal(out, torch.from_numpy(expected).to(torch.bfloat16))


def test_nibbles_are_not_interleaved() -> None:
    raw = np.zeros(20, np.uint8)
    raw[0:2] = np.array([1.0], "<f2").view(np.uint8)  # scale 1, minimum 0
    raw[4] = 0x21  # the first byte of nibbles: low 1, high 2
    file = GGUFFile(Path("none.gguf"), {}, {}, raw)

    values = dequantize(file, GGUFTensor("t", (1, 32), 3, 0))[0]

    assert (values[0], values[1], values[16]) == (1.0, 0.0, 2.0)


def test_a_row_that_is_no_multiple_of_the_block_is_refused() -> None:
    file = GGUFFile(Path("none.gguf"), {}, {}, np.zeros(200, np.uint8))

    with pytest.raises(ValidationError, match="rows of 48 values.*32 values in a block of Q4_1"):
        dequantize(file, GGUFTensor("t", (2, 48), 3, 0))


def test_a_type_that_nobody_knows_is_refused() -> None:
    file = GGUFFile(Path("none.gguf"), {}, {}, np.zeros(200, np.uint8))

    with pytest.raises(ValidationError, match="ggml type 999"):
        dequantize(file, GGUFTensor("t", (1, 32), 999, 0))


def test_without_the_gguf_package_other_types_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = builtins.__import__

    def no_gguf(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    file, tensor, _ = file_of("Q6_K", (1, 256))
    monkeypatch.setattr(builtins, "__import__", no_gguf)

    with pytest.raises(ValidationError, match="pip install gguf"):
        dequantize(file, tensor)
