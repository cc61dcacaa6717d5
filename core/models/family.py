"""The configuration of the lean decoder family, read from a Hugging Face config or GGUF metadata.

Covers Llama (SmolLM2 too), Mistral, Qwen2 and Qwen3. What a config leaves out takes the default of
its transformers config class. `why_not_lean` names what the lean forward cannot run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ValidationError
from .rope import RopeConfig

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Defaults of transformers' config classes that old or hand-written config.json files rely on.
_SHARED = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_SHARED, "max_position_embeddings": 2048},
    "mistral": {
        **_SHARED,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        **_SHARED,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        **_SHARED,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything that shapes the lean forward."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    has_qk_norm: bool
    windows: tuple[int | None, ...]  # sliding window of each layer, in tokens


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the first entry of `architectures`, or "" where a config names none."""
    names = config.get("architectures") or []
    return str(names[0]) if names else ""


def why_not_lean(config: Mapping[str, Any]) -> str | None:
    """Return why the lean forward cannot run this config, or None if it can."""
    architecture = architecture_of(config)
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        return f"architecture {architecture or 'unnamed'!r} is not one of {known}"
    if config.get("quantization_config"):
        return "quantised checkpoints cannot be loaded"
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        return f"hidden_act {activation!r} is not 'silu'"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        return "rope parameters differ by layer type"
    if any(kind not in ("full_attention", "sliding_attention") for kind in _layer_types(config)):
        return f"layer_types {sorted(set(_layer_types(config)))} are not all full or sliding"
    if config.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        return "partial_rotary_factor is not 1"
    return RopeConfig.why_not(rope)


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a Hugging Face config; raise ValidationError if a field is missing or senseless."""
    reason = why_not_lean(config)
    if reason is not None:
        raise ValidationError(
            f"model_impl='decodekit' cannot run this model: {reason}",
            parameter="model_impl",
            value="decodekit",
        )
    architecture = architecture_of(config)
    family = ARCHITECTURES[architecture]
    full = {**_DEFAULTS[family], **{k: v for k, v in config.items() if v is not None}}
    num_heads, hidden = _positive(full, "num_attention_heads"), _positive(full, "hidden_size")
    head_dim = int(full.get("head_dim") or hidden // num_heads)
    num_kv_heads = int(full.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise _bad("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} heads")
    rope = RopeConfig.from_config(full, head_dim)
    return DecoderConfig(
        architecture=architecture,
        model_type=str(full.get("model_type", family)),
        vocab_size=_positive(full, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(full, "intermediate_size"),
        num_layers=_positive(full, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(full["rms_norm_eps"]),
        rope=rope,
        max_position=rope.context_length(int(full["max_position_embeddings"])),
        tie_embeddings=bool(full["tie_word_embeddings"]),
        qkv_bias=family == "qwen2" or bool(full.get("attention_bias", False)),
        output_bias=family != "qwen2" and bool(full.get("attention_bias", False)),
        mlp_bias=family == "llama" and bool(full.get("mlp_bias", False)),
        has_qk_norm=family == "qwen3",
        windows=_windows(family, full, config),
    )


def _windows(
    family: str, full: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[int | None, ...]:
    """The window of each layer: Llama has none, Mistral one for all, Qwen a list of layer types."""
    num_layers = _positive(full, "num_hidden_layers")
    if family == "llama":
        return (None,) * num_layers
    if family == "mistral":
        # null in the file means no window; only an absent key takes the default.
        window = given.get("sliding_window", full["sliding_window"])
        return (None if window is None else int(window),) * num_layers
    window = given.get("sliding_window", full["sliding_window"])
    if not full["use_sliding_window"] or window is None:
        return (None,) * num_layers
    first = int(full["max_window_layers"])
    kinds = _layer_types(given) or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if len(kinds) != num_layers:
        raise _bad("layer_types", kinds, f"{num_layers} entries, one a layer")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    # transformers' Llama and Mistral classes do not look at layer_types either.
    if ARCHITECTURES.get(architecture_of(config)) in ("llama", "mistral"):
        return []
    return list(config.get("layer_types") or [])


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise _bad(key, value, "a positive integer")
    return value


def _bad(key: str, value: object, allowed: str) -> ValidationError:
    return ValidationError(
        f"{key} in the model's config must be {allowed}, got {value!r}", parameter=key, value=value
    )


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    has_output: bool,
    frequency_factors: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the Hugging Face config that GGUF metadata of architecture `llama` describes.

    `has_output` says whether the file holds an `output.weight`; without one the output layer is
    tied to the embedding. `frequency_factors` are the values of its tensor `rope_freqs.weight`.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValidationError(
            f"GGUF files of architecture 'llama' can be loaded, got {architecture!r}; "
            "load the model's safetensors folder instead",
            parameter="model",
            value=architecture,
        )
    if metadata.get("llama.expert_count"):
        raise ValidationError(
            "GGUF files with experts cannot be loaded; load the model's safetensors folder instead",
            parameter="model",
            value=metadata["llama.expert_count"],
        )
    heads = metadata.get("llama.attention.head_count")
    hidden = metadata.get("llama.embedding_length")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata.get("llama.vocab_size")
        or len(metadata.get("tokenizer.ggml.tokens", ())),
        "hidden_size": hidden,
        "intermediate_size": metadata.get("llama.feed_forward_length"),
        "num_hidden_layers": metadata.get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.attention.key_length"),
        "rms_norm_eps": metadata.get("llama.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.get("llama.context_length"),
        "tie_word_embeddings": not has_output,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "rope_parameters": _gguf_rope(metadata),
    }
    if frequency_factors is not None:
        config["rope_parameters"]["frequency_factors"] = list(frequency_factors)
    return {key: value for key, value in config.items() if value is not None}


def _gguf_rope(metadata: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
    }
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return rope
    rope["rope_type"] = kind
    rope["factor"] = metadata.get("llama.rope.scaling.factor", 1.0)
    original = metadata.get("llama.rope.scaling.original_context_length")
    if original is not None:
        rope["original_max_position_embeddings"] = original
    return rope
