"""`from_generate` beside transformers: its own processors and ours on the same rows, by step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from decodekit import LLM, SamplingParams

Maker = Callable[..., LLM]
V, END = 97, 96
STEPS = 6
PROMPT = [3, 17, 40, 3, 17, 8, 55]
NUDGE = 1e-5

DRAWN: dict[str, list[Any]] = {
    "temperature": [0.6, 1.4],
    "top_k": [0, 5, 30],
    "top_p": [0.4, 0.9],
    "min_p": [0.02, 0.1],
    "top_h": [0.5, 0.9],
    "typical_p": [0.5, 0.9],
    "epsilon_cutoff": [0.003, 0.02],
    "eta_cutoff": [0.003, 0.05],
}
ALWAYS: dict[str, list[Any]] = {
    "repetition_penalty": [1.3, 0.8],
    "encoder_repetition_penalty": [1.5],
    "no_repeat_ngram_size": [2],
    "encoder_no_repeat_ngram_size": [2],
    "bad_words_ids": [[[17], [40, 3]]],
    "suppress_tokens": [[5, 6, 7]],
    "begin_suppress_tokens": [[9, 10]],
    "sequence_bias": [[[[17], 2.0], [[3, 17], -4.0]]],
    "exponential_decay_length_penalty": [(2, 1.3)],
    "min_new_tokens": [3],
}


def configs(count: int) -> list[dict[str, Any]]:
    rng = random.Random(11)
    made = []
    for number in range(count):
        config: dict[str, Any] = {"do_sample": number % 4 != 0, "max_new_tokens": STEPS}
        pool = {**ALWAYS, **(DRAWN if config["do_sample"] else {})}
        for name in rng.sample(sorted(pool), rng.randint(1, 5)):
            config[name] = rng.choice(pool[name])
        made.append(config)
    return made


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=V, num_attention_heads=1, eos_token_id=END, **sizes)
    ).eval()


@pytest.fixture(scope="module")
def llm(make_llm: Maker) -> LLM:
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(3)) * 3
    return make_llm(table, model={"eos_token_id": END}, max_logprobs=-1)


def processed(
    model: LlamaForCausalLM, config: dict[str, Any], rows: Tensor, ids: list[int]
) -> Tensor:
    """What transformers' own list makes of each step's raw row [STEPS, V]."""
    prepared, _ = model._prepare_generation_config(GenerationConfig(**config))
    model._prepare_special_tokens(prepared)
    made = model._get_logits_processor(
        generation_config=prepared,
        input_ids_seq_length=len(PROMPT),
        encoder_input_ids=torch.tensor([PROMPT]),
    )
    steps = [
        made(torch.tensor([[*PROMPT, *ids[:step]]]), row[None].clone())[0]
        for step, row in enumerate(rows)
    ]
    return torch.stack(steps)


def nudged(config: dict[str, Any], by: float) -> dict[str, Any]:
    return {
        name: value * (1 + by) if isinstance(value, float) and name != "temperature" else value
        for name, value in config.items()
    }


def test_every_random_config_keeps_what_transformers_keeps(
    llm: LLM, reference: LlamaForCausalLM
) -> None:
    given = configs(120)
    params = []
    for seed, config in enumerate(given):
        made = SamplingParams.from_generate(GenerationConfig(**config))
        made.seed = None if made.temperature == 0 else seed
        made.output_tensors, made.logprobs_mode = True, ["raw_logits", "processed_logits"]
        made.ignore_eos = True
        params.append(made)
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * len(params), params, use_tqdm=False)
    rows = borders = 0
    for config, output in zip(given, outputs, strict=True):
        assert output.outputs[0].error is None, (config, output.outputs[0].error)
        tensors = output.outputs[0].tensors
        ids = list(output.outputs[0].token_ids)
        raw, ours = tensors["raw_logits"], tensors["processed_logits"]
        theirs = processed(reference, config, raw, ids)
        rows += len(ids)
        same = (ours.isneginf() == theirs.isneginf()).all(1)
        if not same.all():
            low, high = (
                processed(reference, nudged(config, by), raw.double(), ids)
                for by in (-NUDGE, NUDGE)
            )
            decided = (low.isneginf() == high.isneginf()).all(1)
            assert not (decided & ~same).any(), config
            borders += int((~same).sum())
        kept = ~theirs.isneginf() & same[:, None]
        torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-5, atol=1e-5)
        if not config["do_sample"]:
            assert theirs.argmax(1).tolist() == ids
    print(f"from_generate: {len(given)} configs, {rows} rows, {borders} at a border, 0 differ")
    assert borders <= 5
