"""The lean family's configuration reads what transformers' config classes mean."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from decodekit.core.errors import ValidationError
from decodekit.core.models.family import (
    ARCHITECTURES,
    config_from_gguf,
    decoder_config,
    why_not_lean,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    """Return a config of the smallest contents, and the given changes."""
    family = ARCHITECTURES[architecture]
    return {"architectures": [architecture], "model_type": family, **SIZES, **changes}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_config_leaves_out_takes_transformers_default(architecture: str) -> None:
    prefix = architecture.removesuffix("ForCausalLM")
    theirs = getattr(transformers, f"{prefix}Config")(**SIZES)

    ours = decoder_config(config_of(architecture))

    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128 // 32)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    window = getattr(theirs, "sliding_window", None)
    assert ours.windows == (window,) * 4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_config_written_by_transformers_reads_the_same(architecture: str) -> None:
    prefix = architecture.removesuffix("ForCausalLM")
    theirs = getattr(transformers, f"{prefix}Config")(**SIZES, architectures=[architecture])

    assert decoder_config(theirs.to_dict()) == decoder_config(
        {**config_of(architecture), "rope_parameters": theirs.rope_parameters}
    )


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
        {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ],
)
def test_qwen_windows_are_those_of_transformers(architecture: str, changes: dict[str, Any]) -> None:
    prefix = architecture.removesuffix("ForCausalLM")
    theirs = getattr(transformers, f"{prefix}Config")(**SIZES, **changes)
    expected = tuple(
        theirs.sliding_window if kind == "sliding_attention" else None
        for kind in theirs.layer_types
    )

    assert decoder_config(config_of(architecture, **changes)).windows == expected


def test_biases_follow_the_family() -> None:
    asked = {"attention_bias": True, "mlp_bias": True}
    biases = {
        name: (c.qkv_bias, c.output_bias, c.mlp_bias)
        for name in ARCHITECTURES
        for c in [decoder_config(config_of(name, **asked))]
    }

    assert biases["LlamaForCausalLM"] == (True, True, True)
    assert biases["Qwen2ForCausalLM"] == (True, False, False)
    assert biases["Qwen3ForCausalLM"] == (True, True, False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not one of Llama"),
        ({"architectures": None}, "'unnamed' is not one of"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not 'silu'"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_the_lean_forward_cannot_run_has_a_reason(
    changes: dict[str, Any], reason: str
) -> None:
    config = config_of("LlamaForCausalLM", **changes)

    assert reason in str(why_not_lean(config))
    with pytest.raises(ValidationError, match="model_impl='decodekit' cannot run this model"):
        decoder_config(config)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
    ],
)
def test_a_senseless_size_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        decoder_config(config_of("LlamaForCausalLM", **changes))

    assert caught.value.parameter == field
    assert field in str(caught.value)


def test_gguf_metadata_becomes_a_config() -> None:
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.context_length": 512,
        "llama.rope.freq_base": 5e5,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": ["a"] * 97,
        "tokenizer.ggml.eos_token_id": 3,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }

    ours = decoder_config(config_from_gguf(metadata, has_output=True))

    assert (ours.num_layers, ours.hidden_size, ours.vocab_size) == (2, 64, 97)
    assert (ours.num_kv_heads, ours.head_dim, ours.tie_embeddings) == (4, 16, False)
    assert (ours.rope.kind, ours.rope.theta, ours.rope.original_context) == ("yarn", 5e5, 128)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general.architecture": "qwen3"}, "architecture 'llama' can be loaded, got 'qwen3'"),
        ({"general.architecture": "llama", "llama.expert_count": 8}, "experts"),
    ],
)
def test_other_gguf_files_are_refused(metadata: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        config_from_gguf(metadata, has_output=False)
