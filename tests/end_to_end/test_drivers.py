"""Drivers together: beams under a grammar with everything else, and all kinds in one batch."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.plugins.author.table_model import byte_tokenizer, write_table_model
from decodekit.sampling_params import RequestOutputKind, StructuredOutputsParams

END = 256
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"enum": ["x", "yy", "yz"]},
        "b": {"enum": ["pq", "pr", "s"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def table() -> Tensor:
    generator = torch.Generator().manual_seed(8)
    values = (torch.rand(257, 257, generator=generator) * 48).round() / 16
    values[:, 128:256] = -30.0
    return values


@pytest.fixture(scope="module")
def llm(table: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = write_table_model(
        tmp_path_factory.mktemp("drivers"),
        table,
        eos_token_id=END,
        tokenizer=byte_tokenizer(special=("<end>",), eos="<end>"),
    )
    yield LLM(
        str(folder), generation_config="vllm", max_model_len=128, block_size=4, max_num_seqs=40
    )


def worth(table: Tensor, texts: list[str], text: str, start: int, fields: dict[str, Any]) -> float:
    """Return the log-probability of a text: grammar, ban and penalties at every place."""
    total, written = 0.0, ""
    for char in [*text, None]:
        last = ord(written[-1]) if written else start
        row = table[last].double().clone()
        counts = Counter(written)
        for each, count in counts.items():
            row[ord(each)] -= fields["frequency_penalty"] * count + fields["presence_penalty"]
        alive = {ord(each[len(written)]) for each in texts
                 if each.startswith(written) and len(each) > len(written)}  # fmt: skip
        if written in texts:
            alive.add(END)
        if written.endswith(fields["bad_words"][0][:-1]):
            alive.discard(ord(fields["bad_words"][0][-1]))
        chosen = END if char is None else ord(char)
        if chosen not in alive:
            return -math.inf
        ids = torch.tensor(sorted(alive))
        total += float(row[chosen] - torch.logsumexp(row[ids], 0))
        written += char or ""
    return total


def test_beams_keep_to_a_schema_with_penalties_and_bad_words_as_brute_force_does(
    llm: LLM, table: Tensor
) -> None:
    texts = [
        json.dumps({"a": a, "b": b}, separators=(",", ":"))
        for a, b in itertools.product(("x", "yy", "yz"), ("pq", "pr", "s"))
    ]
    fields: dict[str, Any] = {
        "frequency_penalty": 0.25, "presence_penalty": 0.5, "bad_words": ["pr"]
    }  # fmt: skip
    grammar = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    for penalty in (0.0, 1.0):
        scores = {
            text: worth(table, texts, text, ord("k"), fields) / len(text) ** penalty
            for text in texts
        }
        right = sorted((text for text in texts if scores[text] > -math.inf),
                       key=lambda text: -scores[text])  # fmt: skip
        assert len(right) == 6
        params = SamplingParams(
            driver={"driver": "beam_search", "width": 9, "length_penalty": penalty},
            n=5, max_tokens=40, temperature=0.0, structured_outputs=grammar, **fields,
        )  # fmt: skip

        [output] = llm.generate(["k"], params, use_tqdm=False)

        assert [part.text for part in output.outputs] == right[:5]
        for part in output.outputs:
            jsonschema.validate(json.loads(part.text), SCHEMA)
            assert part.beam_score == pytest.approx(scores[part.text], rel=1e-4)
    assert llm.llm_engine.parts.pool.num_used == 0


def mix() -> list[SamplingParams]:
    """32 requests of every kind."""
    grammar = StructuredOutputsParams(regex="[a-f]{4,9}")
    kinds: list[dict[str, Any]] = [
        {"driver": {"driver": "beam_search", "width": 3}, "n": 2, "temperature": 0.0},
        {"driver": {"driver": "best_of", "of": 4, "by": "final_mean"}, "n": 2},
        {},
        {"driver": {"driver": "backtrack", "strings": list("aeiouxy"), "max_retries": 60}},
        {"speculation": "prompt_lookup", "temperature": 0.0},
        {"driver": {"driver": "backtrack", "regexes": ["[a-m]{2}"]}, "frequency_penalty": 0.4,
         "speculation": "prompt_lookup"},
        {"driver": {"driver": "majority_vote", "of": 3, "answer": "[a-z]"}},
        {"driver": {"driver": "break_loops", "max_pattern_size": 3, "min_count": 2,
                    "inject": "!?"}, "speculation": "prompt_lookup", "temperature": 0.1},
        {"driver": {"driver": "backtrack", "strings": list("ace")}, "n": 2,
         "structured_outputs": grammar, "logprobs": 1},
        {"driver": {"driver": "beam_search", "width": 4, "stochastic": True}, "n": 1},
    ]  # fmt: skip
    return [
        SamplingParams(
            **{"seed": i, "max_tokens": 10 + i % 5, "top_k": 40, **kinds[i % 10]},
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for i in range(32)
    ]


def said(output: Any) -> list[Any]:
    return [
        (part.text, list(part.token_ids), part.finish_reason, part.beam_score, part.score,
         part.answer, part.suppressed, part.logprobs, part.error)
        for part in output.outputs
    ]  # fmt: skip


def test_every_kind_of_driver_in_one_batch_says_what_it_says_alone(llm: LLM) -> None:
    params = mix()
    prompts = [f"prompt {i % 4} prompt" for i in range(32)]
    together = llm.generate(prompts, params, use_tqdm=False)
    pool = llm.llm_engine.parts.pool
    assert pool.num_used == 0
    for prompt, one, output in zip(prompts, params, together, strict=True):
        [alone] = llm.generate([prompt], one, use_tqdm=False)
        assert said(output) == said(alone)
        assert all(part.error is None for part in output.outputs)
    assert any(part.suppressed for output in together for part in output.outputs)
    assert pool.num_used == 0


def test_an_abort_in_the_middle_leaks_nothing_and_changes_nobody(llm: LLM) -> None:
    params = mix()
    prompts = [f"prompt {i % 4} prompt" for i in range(32)]
    engine = llm.llm_engine
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, one)
    done: dict[str, Any] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        steps += 1
        if steps == 5:
            engine.abort_request([str(i) for i in range(0, 32, 2)])
    assert len(done) == 32
    assert engine.parts.pool.num_used == 0
    scheduler = engine.parts.scheduler
    assert sorted(scheduler._free_slots) == list(range(40))
    assert (scheduler._reserved, +scheduler._taken) == (0, Counter())
    for i in range(1, 32, 2):
        [alone] = llm.generate([prompts[i]], params[i], use_tqdm=False)
        assert said(done[str(i)]) == said(alone)
