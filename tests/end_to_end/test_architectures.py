"""Tiny random models of every supported architecture decode greedily as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from decodekit import LLM, SamplingParams
from decodekit.core.errors import ValidationError

TIE = 1e-4
NUM_TOKENS = 20
LENGTHS = (1, 3, 11, 18, 40)
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large weights, so that attention decides
    "bos_token_id": 1,
    "eos_token_id": 96,
    "pad_token_id": 0,
}
GEMMA2 = {
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 5,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 20,
}
# Name: the prefix of transformers' classes, what differs from SHAPE, and whether the lean forward
# of the Llama family runs it too.
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama": ("Llama", {}, True),
    "mistral_window": ("Mistral", {"sliding_window": 7, "head_dim": 16}, True),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, True),
    "qwen3": ("Qwen3", {"head_dim": 16}, True),
    "gpt2": ("GPT2", {"n_head": 4, "n_embd": 64}, False),
    "gemma": ("Gemma", {"head_dim": 16}, False),
    "gemma2": ("Gemma2", GEMMA2, False),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}, False),
    "phi3": ("Phi3", {"sliding_window": 5}, False),
}
CASES = [
    (name, implementation)
    for name, (_, _, is_lean) in MODELS.items()
    for implementation in (("decodekit", "transformers") if is_lean else ("auto",))
]
PROMPTS = [[(13 * row + 7 * at) % 96 for at in range(count)] for row, count in enumerate(LENGTHS)]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


class Tiny(NamedTuple):
    """A saved model, transformers' own object of it, and its greedy answers to PROMPTS."""

    folder: Path
    reference: Any
    answers: list[list[int]]


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The model that the test's parameter names."""
    prefix, changes, _ = MODELS[request.param]
    torch.manual_seed(len(request.param))
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **changes})
    head = "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
    make = getattr(transformers, f"{prefix}{head}")._from_config
    model = make(config, attn_implementation="eager").eval()
    with torch.no_grad():  # biases and norms that begin as constants prove nothing
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return Tiny(folder, model, [generated(model, prompt) for prompt in PROMPTS])


def generated(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def is_greedy(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether every token is the model's best at its place, or within TIE of it."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    scores = logits.log_softmax(-1)
    behind = scores.amax(1) - scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return bool((behind < TIE).all())


def check(tiny: Tiny, answers: list[list[int]]) -> None:
    for prompt, answer, expected in zip(PROMPTS, answers, tiny.answers, strict=True):
        assert len(answer) == NUM_TOKENS
        assert answer == expected or is_greedy(tiny.reference, prompt, answer)


def together(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def engine(tiny: Tiny, implementation: str, **settings: Any) -> LLM:
    return LLM(
        str(tiny.folder),
        skip_tokenizer_init=True,
        model_impl=implementation,
        **{"max_num_seqs": 8, **settings},
    )


@pytest.mark.parametrize(("tiny", "implementation"), CASES, indirect=["tiny"])
def test_alone_and_together(tiny: Tiny, implementation: str) -> None:
    llm = engine(tiny, implementation)

    alone = [
        list(llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in PROMPTS
    ]

    wanted = "transformers" if implementation == "auto" else implementation
    assert llm.llm_engine.parts.loaded.source.implementation == wanted
    check(tiny, alone)
    check(tiny, together(llm))


@pytest.mark.parametrize(("tiny", "implementation"), CASES, indirect=["tiny"])
def test_in_chunks_and_preempted(tiny: Tiny, implementation: str) -> None:
    whole = engine(tiny, implementation)
    backend = whole.llm_engine.parts.runner.backend
    room = 8 * backend.bytes_per_block(backend.layout)
    llm = engine(
        tiny,
        implementation,
        max_num_batched_tokens=9,
        kv_cache_memory_bytes=room,
        max_model_len=64,
        enable_prefix_caching=False,
    )

    answers = together(llm)

    assert llm.llm_engine.parts.scheduler.num_preemptions > 0
    assert llm.llm_engine.parts.pool.num_used == 0
    check(tiny, answers)


@pytest.mark.parametrize("tiny", ["gemma"], indirect=True)
def test_an_implementation_that_cannot_run_a_model_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ValidationError, match="model_impl='decodekit' cannot run this model"):
        engine(tiny, "decodekit")
    with pytest.raises(ValidationError, match="model_impl must be one of 'auto', 'decodekit'"):
        engine(tiny, "terratorch")
