"""Rotary position embedding: the frequencies of each scaling variant, and the rotation.

Query and key rows are kept in pair order (2i, 2i+1), so that a rotation is one complex product;
`to_pairs` re-orders the rows of checkpoints that rotate halves (i, i + d/2), as Hugging Face's do.
The variants equal transformers' `modeling_rope_utils` to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import ValidationError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rope variant with its numbers; all `dim` values of a head are rotated."""

    kind: str
    theta: float
    dim: int
    max_position_embeddings: int
    original_context: int
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def why_not(rope: Mapping[str, Any]) -> str | None:
        """Return why these rope parameters cannot be run, or None."""
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in KINDS:
            return f"rope type {kind!r} is not one of {', '.join(KINDS)}"
        if rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            return "partial_rotary_factor is not 1"
        missing = [key for key in _NEEDS[kind] if rope.get(key) is None]
        return f"rope type {kind!r} needs {', '.join(missing)}" if missing else None

    @staticmethod
    def from_config(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before)."""
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
        longest = int(config["max_position_embeddings"])
        original = config.get("original_max_position_embeddings") or rope.get(
            "original_max_position_embeddings"
        )
        if head_dim % 2:
            raise ValidationError(
                f"head_dim must be even for rotary embedding, got {head_dim}",
                parameter="head_dim",
                value=head_dim,
            )
        return RopeConfig(
            kind=str(rope.get("rope_type", rope.get("type", "default"))),
            theta=float(theta),
            dim=head_dim,
            max_position_embeddings=longest,
            original_context=int(original or longest),
            numbers=rope,
        )

    def context_length(self, max_position_embeddings: int) -> int:
        """Return how far the model can read.

        As vLLM: linear and dynamic stretch the trained length by their factor, yarn its original
        length; llama3 configs state the stretched length already.
        """
        factor = float(self.numbers.get("factor") or 1.0)
        if self.kind in ("linear", "dynamic"):
            return int(max_position_embeddings * factor)
        if self.kind == "yarn":
            return max(max_position_embeddings, int(self.original_context * factor))
        return max_position_embeddings


class Rope:
    """Makes the rotation of a step's positions and applies it."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.config = config
        inv_freq, attention_factor = inverse_frequencies(config)
        self._inv_freq = inv_freq.to(device)
        self._radius = torch.tensor(attention_factor, dtype=torch.float32, device=device)

    def rotation(self, positions: Tensor) -> Tensor:
        """Return e^(i * position * frequency), [T, 1, dim / 2] complex64, of positions [T]."""
        at = positions.to(torch.float32).unsqueeze(-1)
        freqs = self._dynamic(at) if self.config.kind == "dynamic" else self._inv_freq
        return torch.polar(self._radius, at * freqs).unsqueeze(1)

    def _dynamic(self, at: Tensor) -> Tensor:
        """Frequencies [T, dim / 2] of dynamic NTK: the base grows past the trained length.

        transformers uses one base for a whole forward, that of its longest sequence. Here each
        token takes the base of its own position, which is the same thing when tokens come one at
        a time, and doesn't depend on chunks or neighbours.
        """
        config, dim = self.config, self.config.dim
        factor, trained = float(config.numbers["factor"]), config.max_position_embeddings
        length = (at + 1.0).clamp_(min=trained)
        base = config.theta * (factor * length / trained - (factor - 1.0)) ** (dim / (dim - 2))
        return 1.0 / base ** _exponents(dim, at.device)


def rotate_(heads: Tensor, rotation: Tensor) -> Tensor:
    """Rotate heads [T, H, d], pairs (2i, 2i+1), and return them.

    float32 is rotated in place; lower precisions are rotated in float32 and rounded once.
    """
    if heads.dtype != torch.float32:
        return rotate_(heads.float(), rotation).to(heads.dtype)
    torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2)).mul_(rotation)
    return heads


def to_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Re-order rows [num_heads * d, ...] from halves (i, i + d/2) to pairs (2i, 2i+1)."""
    return _swap(rows, num_heads, 2, rows.shape[0] // num_heads // 2)


def to_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Undo `to_pairs`: rows in the order of Hugging Face checkpoints."""
    return _swap(rows, num_heads, rows.shape[0] // num_heads // 2, 2)


def _swap(rows: Tensor, num_heads: int, outer: int, inner: int) -> Tensor:
    blocks = rows.reshape(num_heads, outer, inner, *rows.shape[1:])
    return blocks.transpose(1, 2).reshape(rows.shape)


def inverse_frequencies(config: RopeConfig) -> tuple[Tensor, float]:
    """Return the frequencies [dim / 2] float32 and the factor that scales cos and sin."""
    plain = 1.0 / config.theta ** _exponents(config.dim, torch.device("cpu"))
    factors = config.numbers.get("frequency_factors")  # GGUF's tensor rope_freqs
    if factors is not None:
        plain = plain / torch.tensor(factors, dtype=torch.float32)
    if config.kind == "linear":
        return plain / float(config.numbers["factor"]), 1.0
    if config.kind == "llama3":
        return _llama3(config, plain), 1.0
    if config.kind == "yarn":
        return _yarn(config)
    return plain, 1.0


def _exponents(dim: int, device: torch.device) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between are blended."""
    numbers = config.numbers
    factor = float(numbers["factor"])
    low, high = float(numbers["low_freq_factor"]), float(numbers["high_freq_factor"])
    wavelength = 2 * math.pi / plain
    slowed = torch.where(wavelength > config.original_context / low, plain / factor, plain)
    smooth = (config.original_context / wavelength - low) / (high - low)
    blended = (1 - smooth) * slowed / factor + smooth * slowed
    between = (wavelength >= config.original_context / high) & (
        wavelength <= config.original_context / low
    )
    return torch.where(between, blended, slowed)


def _yarn(config: RopeConfig) -> tuple[Tensor, float]:
    """YaRN (https://huggingface.co/papers/2309.00071): a ramp between interpolated and plain."""
    numbers, dim = config.numbers, config.dim
    factor = float(numbers["factor"])
    waves = config.theta ** _exponents(dim, torch.device("cpu"))
    low = _yarn_dimension(config, float(numbers.get("beta_fast") or 32))
    high = _yarn_dimension(config, float(numbers.get("beta_slow") or 1))
    if numbers.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp must not divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp_(0, 1)
    keep = 1 - ramp
    frequencies = (1.0 / (factor * waves)) * (1 - keep) + (1.0 / waves) * keep
    return frequencies, _yarn_attention_factor(numbers, factor)


def _yarn_dimension(config: RopeConfig, turns: float) -> float:
    """The dimension whose wave makes `turns` turns over the original context."""
    ratio = config.original_context / (turns * 2 * math.pi)
    return config.dim * math.log(ratio) / (2 * math.log(config.theta))


def _yarn_attention_factor(numbers: Mapping[str, Any], factor: float) -> float:
    given = numbers.get("attention_factor")
    if given is not None:
        return float(given)
    if factor <= 1:
        return 1.0
    scale, scale_all = numbers.get("mscale"), numbers.get("mscale_all_dim")
    if scale and scale_all:
        top = 0.1 * float(scale) * math.log(factor) + 1.0
        return top / (0.1 * float(scale_all) * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0
