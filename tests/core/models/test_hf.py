"""Any other decoder through transformers' attention interface: right, or refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from decodekit.core.errors import ValidationError
from decodekit.core.models.hf import TransformersDecoder, build_transformers
from decodekit.core.models.loader import load_model
from decodekit.plugins.author.toys import DenseAttention

PROMPT = [5, 17, 80, 3, 3, 41, 60, 9, 22, 11, 70]
GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"model_class": "GPT2LMHeadModel", "n_head": 4, "n_embd": 64}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2_softcaps_and_windows": (
        "Gemma2",
        {
            **GEMMA,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma3_text": (
        "Gemma3Text",
        {
            **GEMMA,
            "model_class": "Gemma3ForCausalLM",
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi_partial_rotary": ("Phi", {"partial_rotary_factor": 0.5}),
    "phi3_window": ("Phi3", {"sliding_window": 5}),
    "granite_scalings": (
        "Granite",
        {"logits_scaling": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
    ),
    "cohere_logit_scale": ("Cohere", {"logit_scale": 0.25}),
    "gpt_neox_parallel": ("GPTNeoX", {}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "olmo2": ("Olmo2", {}),
    "mixtral_experts": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "gpt_oss_sinks": (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers(
    name: str, make_tiny: Any, run: Any, reference_greedy: Any
) -> None:
    prefix, changes = MODELS[name]
    tiny = make_tiny(prefix, **changes)
    loaded = load_model(str(tiny.folder))

    tokens = run.greedy(loaded.model, PROMPT, 20, chunk=4)

    assert loaded.source.implementation == "transformers"
    assert tokens == reference_greedy(tiny.reference, PROMPT, 20)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_to_rounding(name: str, make_tiny: Any, run: Any) -> None:
    prefix, changes = MODELS[name]
    tiny = make_tiny(prefix, **changes)
    with torch.no_grad():
        expected = tiny.reference(torch.tensor([PROMPT])).logits[0]

    logits = run.all_logits(load_model(str(tiny.folder)).model, PROMPT)

    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-4)


def test_two_models_in_one_process_keep_their_own_steps(make_tiny: Any, run: Any) -> None:
    gemma = load_model(str(make_tiny("Gemma", head_dim=16).folder))
    phi = load_model(str(make_tiny("Phi", partial_rotary_factor=0.5).folder))
    alone = run.greedy(gemma.model, PROMPT, 6)

    run.greedy(phi.model, PROMPT, 6)

    assert run.greedy(gemma.model, PROMPT, 6) == alone


def test_a_forward_outside_a_step_is_refused(make_tiny: Any) -> None:
    loaded = load_model(str(make_tiny("Gemma", head_dim=16).folder))
    assert isinstance(loaded.model, TransformersDecoder)

    with pytest.raises(ValidationError, match="outside a decodekit step"):
        loaded.model._model(input_ids=torch.tensor([[1, 2]]))


def test_a_step_is_forgotten_after_a_forward_that_raises(make_tiny: Any) -> None:
    loaded = load_model(str(make_tiny("Gemma", head_dim=16).folder))
    assert isinstance(loaded.model, TransformersDecoder)

    with pytest.raises(IndexError):
        loaded.model.forward(torch.tensor([10_000]), torch.tensor([0]), DenseAttention())

    assert loaded.model._holder.step is None


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "alibi": ("Bloom", {}, "ALiBi"),
    "state_space": ("Mamba", {"state_size": 4}, "recurrent state"),
    "encoder_decoder": ("Bart", {}, "encoder-decoder"),
    "no_language_model": ("T5", {}, "no causal language model"),
    "own_attention": ("StableLm", {}, "attention interface"),
    "linear_attention": ("Qwen3Next", {}, "recurrent state"),
    "latent_attention": (
        "DeepseekV3",
        {
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "first_k_dense_replace": 2,
        },
        "keys have 16 values a head and its values 12",
    ),
    "bidirectional": ("Bert", {"is_decoder": False}, "isn't causal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_its_reason(name: str) -> None:
    prefix, changes, reason = REFUSED[name]
    shape = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = getattr(transformers, f"{prefix}Config")(**{**shape, **heads, **changes})

    with pytest.raises(ValidationError, match=reason):
        build(config)


def test_a_multimodal_config_is_refused() -> None:
    with pytest.raises(ValidationError, match="multimodal"):
        build(transformers.Gemma3Config())


def test_an_output_layer_that_does_more_than_we_know_is_refused(
    make_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(make_tiny("Cohere", logit_scale=0.25).folder)
    monkeypatch.setattr("decodekit.core.models.hf._head_arithmetic", lambda config: lambda x: x)

    with pytest.raises(ValidationError, match="differ from its own"):
        load_model(folder)


def test_a_window_that_the_attention_call_does_not_carry_is_refused(
    make_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(make_tiny("Phi3", sliding_window=5).folder)
    monkeypatch.setattr(
        "decodekit.core.models.hf_probe.expected_windows", lambda config, n: [None] * n
    )

    with pytest.raises(ValidationError, match="asks? for windows"):
        load_model(folder)


def test_length_dependent_rope_ends_at_the_trained_length(make_tiny: Any) -> None:
    factors = [1.0] * 8
    folder = make_tiny(
        "Phi3",
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": factors,
            "long_factor": [4.0] * 8,
        },
        original_max_position_embeddings=32,
    ).folder

    assert load_model(str(folder)).spec.max_position == 32


def test_dummy_weights_leave_the_global_generator_alone(tmp_path: Path, make_tiny: Any) -> None:
    folder = str(make_tiny("Gemma", head_dim=16).folder)
    torch.manual_seed(3)
    before = torch.get_rng_state()

    first = load_model(folder, load_format="dummy", seed=5)
    second = load_model(folder, load_format="dummy", seed=5)
    other = load_model(folder, load_format="dummy", seed=6)

    assert torch.equal(torch.get_rng_state(), before)
    hidden = torch.ones(1, 64)
    assert torch.equal(first.model.logits(hidden), second.model.logits(hidden))
    assert not torch.equal(first.model.logits(hidden), other.model.logits(hidden))


def build(config: Any) -> TransformersDecoder:
    """Build a model with random weights on our attention."""
    return build_transformers(
        config,
        None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        trust_remote_code=False,
        seed=0,
        generation_config={},
    )
