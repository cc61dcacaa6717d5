"""The embedded model decodes greedily as transformers does: alone, batched, chunked, preempted.

transformers gets the same dequantised weights. One forward of its own over prompt and answer says
at every position which token its greedy decoding takes next, so that 64 steps cost one forward.
Where its two best log-probabilities lie closer than `TIE`, either token counts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.core.models.dequant import dequantize
from decodekit.core.models.gguf import read_gguf
from decodekit.core.models.locate import embedded_path
from decodekit.core.models.rope import to_halves
from decodekit.core.models.weights import gguf_name

pytestmark = pytest.mark.slow

TIE = 1e-4
NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    "The future of AI is",
    "1, 2, 3, 4, 5,",
    "Once upon a time",
    "def fibonacci(n):",
    "Water",
    "The capital of France is Paris. The capital of Italy is",
    "In 1969, the first humans",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\nx =",
    "To make a good cup of tea, first boil the water. Then",
    "Q: What is the largest planet?\nA:",
    "Il était une fois",
    "a\n\n1. b\n2. c",
    "The quick brown fox jumps over the lazy dog. In 2024, about 8 billion people lived on Earth."
    "\n\n1. Water freezes at 0 degrees.\n2. Water boils at",
    CHAT.format("What is the capital of France?"),
    CHAT.format("Count from 1 to 10."),
    CHAT.format("Write a short poem about the sea."),
    CHAT.format("What is 2 + 2?"),
    CHAT.format("Why is the sky blue?"),
    CHAT.format("Name three colours."),
]


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    """transformers' own Llama in float32 with the embedded weights."""
    file = read_gguf(embedded_path())
    meta = file.metadata
    heads = {
        "q_proj": meta["llama.attention.head_count"],
        "k_proj": meta["llama.attention.head_count_kv"],
    }
    config = transformers.LlamaConfig(
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=heads["q_proj"],
        num_key_value_heads=heads["k_proj"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config)
    weights: dict[str, Tensor] = {}
    for name in model.state_dict().keys() - {"lm_head.weight"}:
        stored = dequantize(file, file.tensors[gguf_name(name)])
        part = name.split(".")[-2]
        weights[name] = to_halves(stored, heads[part]) if part in heads else stored
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are not weights
    yield model.eval()
    del model, weights
    gc.collect()


def first_departure(reference: Any, prompt: list[int], answer: list[int]) -> int | None:
    """Return the first position at which `answer` is not greedy by `reference`, ties allowed."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + answer])).logits[0].float()
    scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]  # [answer, vocab]
    behind = scores.amax(1) - scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
    wrong = (behind >= TIE).nonzero()[:, 0].tolist()
    return wrong[0] if wrong else None


def engine(**settings: Any) -> LLM:
    return LLM(dtype="float32", **{"max_model_len": 256, "max_num_seqs": 32, **settings})


Answers = list[tuple[list[int], list[int]]]  # prompt ids and tokens


def together(llm: LLM) -> Answers:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [
        (list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids))
        for output in outputs
    ]


def check(reference: Any, found: Answers, known: Answers | None = None) -> None:
    """Check every answer, but those that are known to be right."""
    assert [len(answer) for _, answer in found] == [NUM_TOKENS] * len(PROMPTS)
    departures = {
        place: first_departure(reference, *pair)
        for place, pair in enumerate(found)
        if known is None or pair != known[place]
    }
    assert {place: at for place, at in departures.items() if at is not None} == {}


@pytest.fixture(scope="module")
def alone() -> Answers:
    """Every prompt in a batch of its own."""
    llm = engine()
    answers = []
    for prompt in PROMPTS:
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        answers.append((list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)))
    return answers


def test_every_prompt_alone(reference: Any, alone: Answers) -> None:
    check(reference, alone)


def test_the_check_sees_a_wrong_token(reference: Any, alone: Answers) -> None:
    prompt, answer = alone[1]
    changed = [*answer[:9], answer[9] + 1, *answer[10:]]

    assert first_departure(reference, prompt, changed) == 9


def test_a_generate_of_transformers_itself(reference: Any, alone: Answers) -> None:
    prompt, answer = alone[1]  # digits, whose margins are wide
    ids = torch.tensor([prompt])

    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=24,
        min_new_tokens=24,
        eos_token_id=None,
        pad_token_id=0,
    )

    assert out[0, len(prompt) :].tolist() == answer[:24]


def test_all_in_one_batch(reference: Any, alone: Answers) -> None:
    check(reference, together(engine()), alone)


def test_in_chunks_beside_decoding_rows_and_preempted(reference: Any, alone: Answers) -> None:
    block = 2 * 30 * 3 * 64 * 16 * 4  # keys and values, layers, heads, width, tokens, bytes
    llm = engine(
        max_num_batched_tokens=20,
        max_num_seqs=17,
        kv_cache_memory_bytes=64 * block,
        enable_prefix_caching=False,
    )

    found = together(llm)

    assert max(len(prompt) for prompt, _ in found) > 20
    assert llm.llm_engine.parts.pool.num_blocks == 64
    assert llm.llm_engine.parts.scheduler.num_preemptions > 0
    assert llm.llm_engine.parts.pool.num_used == 0
    check(reference, found, alone)
