"""Rope variants equal transformers', and pair order rotates as halves do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from decodekit.core.models.rope import (
    Rope,
    RopeConfig,
    inverse_frequencies,
    rotate_,
    to_halves,
    to_pairs,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn_given_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
        "truncate": False,
    },
}


def both(numbers: dict[str, Any], theta: float, head_dim: int) -> tuple[RopeConfig, LlamaConfig]:
    """Return our config and transformers' of the same rope."""
    theirs = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": theta, **numbers},
    )
    return RopeConfig.from_config(theirs.to_dict(), head_dim), theirs


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", VARIANTS)
def test_frequencies_equal_transformers(name: str, head_dim: int, theta: float) -> None:
    ours, theirs = both(VARIANTS[name], theta, head_dim)
    kind = theirs.rope_parameters["rope_type"]
    init = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected, expected_factor = init(theirs)

    frequencies, factor = inverse_frequencies(ours)

    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-7)


def test_the_old_spelling_means_the_same() -> None:
    numbers = VARIANTS["llama3"]
    old = {
        "max_position_embeddings": 256,
        "rope_theta": 500000.0,
        "rope_scaling": {
            **{k: v for k, v in numbers.items() if k != "rope_type"},
            "type": "llama3",
        },
    }

    ours, _ = both(numbers, 500000.0, 64)

    expected, _ = inverse_frequencies(ours)
    assert torch.equal(inverse_frequencies(RopeConfig.from_config(old, 64))[0], expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_rotating_pairs_equals_rotating_halves(name: str, rng: torch.Generator) -> None:
    head_dim, num_heads = 16, 3
    ours, theirs = both(VARIANTS[name], 10000.0, head_dim)
    positions = torch.tensor([0, 1, 17, 250])
    heads = torch.randn(4, num_heads, head_dim, generator=rng)
    cos, sin = LlamaRotaryEmbedding(theirs)(heads, positions.unsqueeze(0))
    expected, _ = apply_rotary_pos_emb(heads, heads, cos[0], sin[0])

    pairs = to_pairs(heads.movedim(0, -1).flatten(0, 1), num_heads)
    rotation = Rope(ours, torch.device("cpu")).rotation(positions)
    rotated = rotate_(pairs.view(num_heads, head_dim, 4).movedim(-1, 0).contiguous(), rotation)
    back = to_halves(rotated.movedim(0, -1).flatten(0, 1), num_heads)

    torch.testing.assert_close(
        back.view(num_heads, head_dim, 4).movedim(-1, 0), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("position", [3, 63, 64, 200])
def test_dynamic_frequencies_are_those_of_a_text_that_ends_at_the_token(position: int) -> None:
    numbers = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    theirs = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters=dict(numbers),
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, seq_len=position + 1)
    rope = Rope(RopeConfig.from_config(theirs.to_dict(), 32), torch.device("cpu"))

    rotation = rope.rotation(torch.tensor([position]))[0, 0]

    expected = torch.polar(torch.tensor(1.0), position * frequencies)
    torch.testing.assert_close(rotation, expected, rtol=1e-4, atol=1e-4)


def test_factors_from_a_file_divide_the_frequencies() -> None:
    plain = RopeConfig("default", 1e4, 8, 64, 64)
    scaled = RopeConfig("default", 1e4, 8, 64, 64, {"frequency_factors": [1.0, 2.0, 4.0, 8.0]})

    ratio = inverse_frequencies(plain)[0] / inverse_frequencies(scaled)[0]

    assert ratio.tolist() == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("num_heads", [1, 3])
def test_to_halves_undoes_to_pairs(num_heads: int, rng: torch.Generator) -> None:
    rows = torch.randn(num_heads * 8, 5, generator=rng)

    assert torch.equal(to_halves(to_pairs(rows, num_heads), num_heads), rows)
    assert not torch.equal(to_pairs(rows, num_heads), rows)


@pytest.mark.parametrize(
    ("numbers", "length"),
    [
        ({"rope_type": "default"}, 256),
        (VARIANTS["linear"], 768),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        (VARIANTS["llama3"], 256),
        (VARIANTS["yarn"], 256),
        ({**VARIANTS["yarn"], "original_max_position_embeddings": 256}, 1024),
    ],
)
def test_the_context_length_counts_the_scaling(numbers: dict[str, Any], length: int) -> None:
    config = {"max_position_embeddings": 256, "rope_parameters": numbers}

    assert RopeConfig.from_config(config, 16).context_length(256) == length


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"rope_type": "longrope"}, "'longrope' is not one of default, linear"),
        ({"rope_type": "llama3", "factor": 2.0}, "needs low_freq_factor, high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
    ],
)
def test_what_cannot_be_rotated_is_named(numbers: dict[str, Any], reason: str) -> None:
    assert reason in str(RopeConfig.why_not(numbers))
