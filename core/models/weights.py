"""Where weights come from: one small interface over safetensors folders, GGUF files and a dummy.

Names are Hugging Face's. A source writes into memory that the model has ready, packed products
included, so that no tensor is held twice.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ValidationError
from .dequant import dequantize, dequantize_into
from .gguf import GGUFFile
from .rope import to_pairs

_GGUF_LAYER_NAMES: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_NAMES: Mapping[str, str] = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


class WeightSource(Protocol):
    """Tensors by their Hugging Face name."""

    def fill(self, name: str, out: Tensor, *, pair_heads: int | None = None) -> None:
        """Write one tensor to `out`; raise ValidationError if it's missing or of another shape.

        `pair_heads` is set for q and k: rows of so many heads, wanted in rope's pair order.
        """
        ...

    def leftover(self) -> list[str]:
        """Return the names that nobody took and that mean something to a forward."""
        ...


class SafetensorsWeights:
    """The *.safetensors files of a folder, with or without an index."""

    def __init__(self, folder: Path, *, tied: bool) -> None:
        from safetensors import safe_open

        self._folder = folder
        self._tied = tied
        self._files = ExitStack()
        self._place: dict[str, Any] = {}
        for path in safetensors_files(folder):
            file = self._files.enter_context(safe_open(path, framework="pt"))
            self._place.update(dict.fromkeys(file.keys(), file))
        self._taken: set[str] = set()

    def fill(self, name: str, out: Tensor, *, pair_heads: int | None = None) -> None:
        file = self._place.get(name)
        if file is None:
            raise _missing(name, self._folder)
        self._taken.add(name)
        tensor = _checked(file.get_tensor(name), name, tuple(out.shape))
        out.copy_(tensor if pair_heads is None else to_pairs(tensor, pair_heads))

    def leftover(self) -> list[str]:
        # rotary frequencies follow from the config; a tied output layer repeats the embedding
        skip = {"lm_head.weight"} if self._tied else set()
        return sorted(
            name
            for name in self._place.keys() - self._taken - skip
            if not name.endswith("rotary_emb.inv_freq")
        )

    def close(self) -> None:
        """Close the files; tensors that were taken stay valid."""
        self._files.close()


class GGUFWeights:
    """A parsed GGUF file of architecture `llama`, whose q and k rows are in pair order already."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._taken = {"rope_freqs.weight"}  # part of the config (`family.config_from_gguf`)

    def fill(self, name: str, out: Tensor, *, pair_heads: int | None = None) -> None:
        stored = gguf_name(name)
        place = self._file.tensors.get(stored)
        if place is None:
            raise _missing(stored, self._file.path)
        self._taken.add(stored)
        if place.shape != tuple(out.shape):
            raise _wrong_shape(stored, place.shape, tuple(out.shape))
        if out.device.type == "cpu" and out.is_contiguous():
            dequantize_into(self._file, place, out)
        else:
            out.copy_(dequantize(self._file, place))

    def leftover(self) -> list[str]:
        return sorted(self._file.tensors.keys() - self._taken)


class DummyWeights:
    """Random weights for any shape: norms are one, everything else is normal(0, 0.02).

    Each tensor is drawn from a generator of its own, keyed by its name and the seed.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def fill(self, name: str, out: Tensor, *, pair_heads: int | None = None) -> None:
        if "norm" in name:
            out.fill_(1)
            return
        key = zlib.crc32(name.encode()) * 2**32 + self._seed % 2**32
        generator = torch.Generator().manual_seed(key % 2**63)
        out.copy_(torch.randn(out.shape, generator=generator).mul_(0.02))

    def leftover(self) -> list[str]:
        return []


def gguf_name(name: str) -> str:
    """Return the GGUF name of a Hugging Face tensor of the Llama family."""
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    module, suffix = part.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[module]}.{suffix}"


def safetensors_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: those its index names, else every one there is."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValidationError(
            f"{folder} lacks {', '.join(missing)}, which its index {index.name} names",
            parameter="model",
            value=str(folder),
        )
    return [folder / name for name in names]


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of the first floating tensor in the folder's safetensors, or None."""
    from safetensors import safe_open

    names = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for path in safetensors_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                found = names.get(file.get_slice(name).get_dtype())
                if found is not None:
                    return found
    return None


def _checked(tensor: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise _wrong_shape(name, tuple(tensor.shape), shape)
    if not tensor.is_floating_point():
        raise ValidationError(
            f"tensor {name!r} has dtype {tensor.dtype}; quantised checkpoints cannot be loaded",
            parameter="model",
            value=name,
        )
    return tensor


def _missing(name: str, where: Path) -> ValidationError:
    return ValidationError(f"{where} has no tensor {name!r}", parameter="model", value=str(where))


def _wrong_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> ValidationError:
    return ValidationError(
        f"tensor {name!r} has shape {list(found)}, but the config asks for {list(wanted)}",
        parameter="model",
        value=name,
    )
