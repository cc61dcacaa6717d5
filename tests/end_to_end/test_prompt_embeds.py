"""A prompt may be embeddings: the same answer as its token ids, and nothing else has to know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from decodekit import LLM, SamplingParams
from decodekit.plugins.author.table_model import flat_table

Maker = Callable[..., LLM]
PROMPT = [(7 * i) % 90 for i in range(37)]


def ids(llm: LLM, prompt: object, params: SamplingParams) -> list[list[int]]:
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    assert [part.error for part in output.outputs] == [None] * params.n
    return [list(part.token_ids) for part in output.outputs]


@pytest.fixture(scope="module")
def table(make_llm: Maker) -> LLM:
    generator = torch.Generator().manual_seed(2)
    rows = (torch.randint(-80, 80, (97, 97), generator=generator) / 16).float()
    return make_llm(rows, enable_prompt_embeds=True, max_num_batched_tokens=16, max_num_seqs=8)


def embeds_of(llm: LLM, prompt: list[int]) -> torch.Tensor:
    return llm.apply_model(lambda model: model._embedding[torch.tensor(prompt)].clone())[0]


@pytest.mark.parametrize("n", [1, 3])
def test_embeddings_of_ids_give_the_answer_of_the_ids(table: LLM, n: int) -> None:
    params = SamplingParams(seed=4, n=n, max_tokens=20, frequency_penalty=0.5, min_p=0.02)
    expected = ids(table, PROMPT, params)

    found = ids(table, {"prompt_embeds": embeds_of(table, PROMPT)}, params)
    again = ids(table, {"prompt_embeds": embeds_of(table, PROMPT)[None]}, params)

    assert found == expected
    assert again == expected


def test_unknown_ids_count_as_no_tokens(table: LLM) -> None:
    """The repetition penalty sees the output alone, so its first token is the unpenalised one."""
    strong = SamplingParams(temperature=0.0, repetition_penalty=50.0, max_tokens=1)
    plain = SamplingParams(temperature=0.0, max_tokens=1)
    [[winner]] = ids(table, PROMPT, plain)
    holding = [winner, *PROMPT]

    penalised = ids(table, holding, strong)
    by_embeds = ids(table, {"prompt_embeds": embeds_of(table, holding)}, strong)

    assert penalised != [[winner]]
    assert by_embeds == [[winner]]


def test_the_cache_tells_embeddings_apart(table: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    other = [(5 * i + 1) % 90 for i in range(37)]

    first = ids(table, {"prompt_embeds": embeds_of(table, PROMPT)}, params)
    second = ids(table, {"prompt_embeds": embeds_of(table, other)}, params)

    assert first == ids(table, PROMPT, params)
    assert second == ids(table, other, params)


def test_bad_embeddings_are_named(table: LLM, make_llm: Maker) -> None:
    params = SamplingParams(max_tokens=1)
    good = embeds_of(table, PROMPT)

    with pytest.raises(ValueError, match="prompt_embeds must be a floating-point tensor"):
        ids(table, {"prompt_embeds": good[:, :3]}, params)
    with pytest.raises(ValueError, match="from 1 to"):
        ids(table, {"prompt_embeds": good[:0]}, params)
    with pytest.raises(ValueError, match="prompt_logprobs needs token ids"):
        ids(table, {"prompt_embeds": good}, SamplingParams(max_tokens=1, prompt_logprobs=1))
    with pytest.raises(ValueError, match="enable_prompt_embeds=True"):
        ids(make_llm(flat_table(97)), {"prompt_embeds": good}, params)
    assert ids(table, PROMPT, params)


def test_the_transformers_route_takes_embeddings_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=2,
                   bos_token_id=None, eos_token_id=None)
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, enable_prompt_embeds=True, dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=8)
    given = model.transformer.wte.weight[torch.tensor(PROMPT)].detach()

    assert ids(llm, {"prompt_embeds": given}, params) == ids(llm, PROMPT, params)
