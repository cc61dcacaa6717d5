"""Loops are left, by a ban, by a text or by the end of the reasoning; streams and states follow."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from decodekit import LLM, SamplingParams
from decodekit.core.errors import ValidationError
from decodekit.plugins.author.table_model import byte_tokenizer, write_table_model
from decodekit.sampling_params import RequestOutputKind


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    table = torch.full((256, 256), -30.0)
    a, b, c, d, end = b"abcd/"
    for source, target, second in ((a, b, d), (b, c, d), (c, a, d), (d, a, b), (end, d, c)):
        table[source, target], table[source, second] = 0.0, -2.0
    folder = write_table_model(tmp_path_factory.mktemp("loops"), table, tokenizer=byte_tokenizer())
    yield LLM(
        str(folder), generation_config="vllm", max_model_len=128, block_size=4,
        reasoning_config={"reasoning_start_str": "<", "reasoning_end_str": "/"},
    )  # fmt: skip


def run(llm: LLM, driver: Any, prompt: str = "a", **fields: Any) -> Any:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 30, "driver": driver, **fields})
    [output] = llm.generate([prompt], params, use_tqdm=False)
    assert llm.llm_engine.parts.pool.num_used == 0
    return output.outputs[0]


def test_a_loop_is_left_by_another_token(llm: LLM) -> None:
    assert run(llm, None).text == "bca" * 10
    found = run(llm, {"driver": "break_loops", "max_pattern_size": 4, "min_count": 3})
    assert found.text.startswith("bcad")  # the second copy may not begin with b
    assert "bcabcabca" not in found.text
    assert found.suppressed[0]["position"] == 3
    assert bytes(found.suppressed[0]["token_ids"]) == b"bcabca"
    assert len(found.text) == 30


def test_a_text_may_be_written_instead(llm: LLM) -> None:
    driver = {"driver": "break_loops", "max_pattern_size": 4, "min_count": 3, "inject": "//"}
    found = run(llm, driver, logprobs=0, entropy=True)
    assert found.text.startswith("bca//d")
    assert len(found.logprobs) == len(found.token_ids) == len(found.entropy) == 30
    pairs = zip(found.logprobs, found.token_ids, strict=True)
    total = sum(each[token].logprob for each, token in pairs)
    assert found.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_a_reasoning_that_loops_is_ended(llm: LLM) -> None:
    driver = {"driver": "break_loops", "max_pattern_size": 4, "min_count": 3, "scope": "thinking"}
    found = run(llm, driver, prompt="<a")
    assert found.text.startswith("bca/d")
    assert found.text.count("/") == 1
    assert run(llm, driver, prompt="a").text == "bca" * 10  # no reasoning is open


def test_a_loop_that_cannot_be_left_ends_the_text(llm: LLM) -> None:
    driver = {"driver": "break_loops", "max_pattern_size": 2, "min_count": 2, "max_breaks": 1}
    found = run(llm, driver, allowed_token_ids=[97])
    assert found.finish_reason == "repetition"
    assert found.text == "aa"


def test_a_stream_says_the_same(llm: LLM) -> None:
    driver = {"driver": "break_loops", "max_pattern_size": 4, "min_count": 2, "inject": "d"}
    whole = run(llm, driver, temperature=0.9, seed=1)
    params = SamplingParams(
        temperature=0.9, seed=1, max_tokens=30, driver=driver, output_kind=RequestOutputKind.DELTA
    )
    engine = llm.llm_engine
    engine.add_request("s", "a", params)
    text, ids = "", []
    while engine.has_unfinished_requests():
        for output in engine.step():
            text += output.outputs[0].text
            ids += output.outputs[0].token_ids
    assert (text, ids) == (whole.text, list(whole.token_ids))


def test_bad_parameters_are_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="min_pattern_size must be at most"):
        run(llm, {"driver": "break_loops", "max_pattern_size": 2, "min_pattern_size": 3})
