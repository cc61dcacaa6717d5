"""Tiny random models, saved as folders by transformers, and greedy decoding of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from decodekit.core.models.config import CausalLM
from decodekit.plugins.author.toys import DenseAttention

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Large weights, so that attention decides and no two candidates are nearly tied.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 96,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LEAN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_wide_heads": ("Llama", {"head_dim": 32}),
    "llama_llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_yarn": ("Llama", {"rope_parameters": YARN}),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama_dynamic": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "max_position_embeddings": 16,
        },
    ),
    "mistral_window": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "mistral_no_window": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


class Tiny(NamedTuple):
    """A saved model and transformers' own object of it, float32, eager attention."""

    folder: Path
    reference: Any


MakeTiny = Callable[..., Tiny]


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> MakeTiny:
    """Return a maker of tiny models: prefix of the config class, then what differs from SHAPE."""
    made: dict[str, Tiny] = {}

    def make(prefix: str, /, model_class: str | None = None, **changes: Any) -> Tiny:
        key = repr((prefix, sorted(changes.items(), key=str)))
        if key not in made:
            torch.manual_seed(len(key))
            config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **changes})
            name = model_class or f"{prefix}ForCausalLM"
            model = getattr(transformers, name)._from_config(config, attn_implementation="eager")
            model = model.eval()
            with torch.no_grad():  # biases and norms that begin as constants prove nothing
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            folder = tmp_path_factory.mktemp(prefix)
            model.save_pretrained(folder)
            made[key] = Tiny(folder, model)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_lean(make_tiny: MakeTiny) -> Callable[[str], Tiny]:
    """Return the maker of the named models in LEAN."""

    def make(name: str) -> Tiny:
        prefix, changes = LEAN[name]
        return make_tiny(prefix, **changes)

    return make


def greedy(model: CausalLM, prompt: Sequence[int], num_tokens: int, chunk: int = 0) -> list[int]:
    """Decode greedily with dense attention; `chunk` > 0 feeds the prompt in pieces of that size."""
    attention = DenseAttention()
    pieces = [list(prompt)]
    if chunk:
        pieces = [list(prompt[at : at + chunk]) for at in range(0, len(prompt), chunk)]
    out: list[int] = []
    with torch.inference_mode():
        for piece in pieces:
            hidden = feed(model, attention, piece)
        while True:
            out.append(int(model.logits(hidden[-1:])[0].argmax()))
            if len(out) == num_tokens:
                return out
            hidden = feed(model, attention, out[-1:])


def feed(model: CausalLM, attention: DenseAttention, tokens: Sequence[int]) -> torch.Tensor:
    """Run one forward over the next tokens of sequence 0; return the hidden states."""
    positions = attention.begin([len(tokens)])
    return model.forward(torch.tensor(tokens), positions, attention)


def all_logits(model: CausalLM, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits [T, vocab] of one sequence fed at once."""
    with torch.inference_mode():
        return model.logits(feed(model, DenseAttention(), tokens))


class Run(NamedTuple):
    """The decoding functions, handed to tests as a fixture."""

    greedy: Callable[..., list[int]]
    feed: Callable[..., torch.Tensor]
    all_logits: Callable[..., torch.Tensor]


@pytest.fixture(scope="session")
def run() -> Run:
    """Return greedy decoding and logits with dense attention."""
    return Run(greedy, feed, all_logits)


@pytest.fixture(scope="session")
def reference_greedy() -> Callable[..., list[int]]:
    """Return transformers' greedy decoding: (model, prompt, num_tokens) -> new tokens."""

    def decode(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return decode
