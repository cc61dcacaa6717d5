"""The lean decoder equals transformers, family by family, on tiny random models in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decodekit.core.models.loader import load_model
from decodekit.plugins.author.toys import DenseAttention

LEAN = [
    "llama",
    "llama_tied",
    "llama_biases",
    "llama_wide_heads",
    "llama_llama3",
    "llama_yarn",
    "llama_linear",
    "llama_dynamic",
    "mistral_window",
    "mistral_no_window",
    "qwen2",
    "qwen2_window",
    "qwen3",
]
PROMPT = [5, 17, 80, 3, 3, 41, 60, 9, 22, 11, 70]


@pytest.mark.parametrize("name", LEAN)
def test_greedy_tokens_equal_transformers(
    name: str, tiny_lean: Any, run: Any, reference_greedy: Any
) -> None:
    tiny = tiny_lean(name)
    loaded = load_model(str(tiny.folder))

    tokens = run.greedy(loaded.model, PROMPT, 24)

    assert loaded.source.implementation == "decodekit"
    assert tokens == reference_greedy(tiny.reference, PROMPT, 24)


@pytest.mark.parametrize("name", LEAN)
def test_logits_equal_transformers_to_rounding(name: str, tiny_lean: Any, run: Any) -> None:
    tiny = tiny_lean(name)
    # within the trained length: dynamic rope takes one base for a whole forward in transformers
    with torch.no_grad():
        expected = tiny.reference(torch.tensor([PROMPT])).logits[0]

    logits = run.all_logits(load_model(str(tiny.folder)).model, PROMPT)

    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LEAN)
def test_both_implementations_agree(name: str, tiny_lean: Any, run: Any) -> None:
    folder = str(tiny_lean(name).folder)
    lean = load_model(folder, model_impl="decodekit")
    other = load_model(folder, model_impl="transformers")

    assert other.source.implementation == "transformers"
    assert run.greedy(lean.model, PROMPT, 5) == run.greedy(other.model, PROMPT, 5)
    for field in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "num_parameters"):
        assert getattr(lean.spec, field) == getattr(other.spec, field), field


@pytest.mark.parametrize("chunk", [1, 4, 10])
@pytest.mark.parametrize("name", ["llama", "llama_dynamic", "mistral_window", "qwen3"])
def test_a_prompt_in_chunks_gives_the_same_tokens(
    name: str, chunk: int, tiny_lean: Any, run: Any
) -> None:
    model = load_model(str(tiny_lean(name).folder)).model

    assert run.greedy(model, PROMPT, 12, chunk) == run.greedy(model, PROMPT, 12)


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2_window"])
def test_sequences_in_one_flat_batch_do_not_see_each_other(
    name: str, tiny_lean: Any, run: Any
) -> None:
    model = load_model(str(tiny_lean(name).folder)).model
    prompts = [[5, 6, 7, 8, 9, 10, 11], [90], [33, 2, 33, 2]]
    attention = DenseAttention()

    with torch.inference_mode():
        positions = attention.begin([len(prompt) for prompt in prompts])
        flat = torch.tensor([token for prompt in prompts for token in prompt])
        logits = model.logits(model.forward(flat, positions, attention))

    for prompt, part in zip(prompts, logits.split([7, 1, 4]), strict=True):
        torch.testing.assert_close(part, run.all_logits(model, prompt), rtol=1e-4, atol=1e-4)


def test_a_window_shorter_than_the_text_changes_the_result(tiny_lean: Any, run: Any) -> None:
    folder = str(tiny_lean("mistral_window").folder)
    windowed = load_model(folder)
    whole = load_model(folder, hf_overrides={"sliding_window": None})

    assert windowed.model.config.windows == (7, 7)
    assert whole.model.config.windows == (None, None)
    difference = run.all_logits(windowed.model, PROMPT) - run.all_logits(whole.model, PROMPT)
    assert difference[:7].abs().max() < 1e-4  # the first seven tokens see everything
    assert difference[7:].abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 11])  # both forms of the widening product
def test_half_precision_stays_close_to_transformers(
    dtype: torch.dtype, num_tokens: int, tiny_lean: Any, run: Any
) -> None:
    tiny = tiny_lean("qwen3")
    with torch.no_grad():
        expected = tiny.reference(torch.tensor([PROMPT[:num_tokens]])).logits[0]

    logits = run.all_logits(load_model(str(tiny.folder), dtype=dtype).model, PROMPT[:num_tokens])

    assert logits.dtype == dtype
    spread = float(expected.max() - expected.min())
    assert float((logits.float() - expected).abs().max()) < 0.05 * spread


def test_no_rows_give_no_logits(tiny_lean: Any) -> None:
    loaded = load_model(str(tiny_lean("llama_tied").folder))

    with torch.inference_mode():
        logits = loaded.model.logits(torch.empty(0, 64))

    assert logits.shape == (0, 97)
