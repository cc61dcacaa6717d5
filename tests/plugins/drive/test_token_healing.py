"""Token healing: what may be written, the text that goes on, and prompts that need none."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from decodekit import LLM, SamplingParams
from decodekit.core.errors import ValidationError
from decodekit.plugins.author.table_model import byte_tokenizer, write_table_model
from decodekit.sampling_params import RequestOutputKind

WORDS = ("://", ":/", "//x", "/x")  # ids 256..259


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    table = torch.full((260, 260), -30.0)
    p, colon, slash, x = b"p:/x"
    table[p, 256], table[p, colon], table[p, x] = 1.0, 0.0, 5.0  # "x" wins where nothing is healed
    table[colon, x], table[colon, 258] = 3.0, 0.0
    for after in (256, 257, 258, 259, x, slash):
        table[after, x] = 0.0
    folder = write_table_model(
        tmp_path_factory.mktemp("healing"), table, tokenizer=byte_tokenizer(WORDS)
    )
    yield LLM(str(folder), generation_config="vllm", max_model_len=64)


def run(llm: LLM, driver: Any, prompt: str, **fields: Any) -> Any:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 3, "driver": driver, **fields})
    [output] = llm.generate([prompt], params, use_tqdm=False)
    assert llm.llm_engine.parts.pool.num_used == 0
    return output


def test_the_prompts_last_token_is_written_again_with_what_follows(llm: LLM) -> None:
    assert run(llm, None, "p:").outputs[0].text == "xxx"
    output = run(llm, "token_healing", "p:")
    assert list(output.outputs[0].token_ids) == [256, 120, 120]
    assert output.outputs[0].text == "//xx"  # the colon is the prompt's
    assert output.prompt_token_ids == list(b"p:")


def test_a_stream_goes_on_where_the_prompt_ends(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=3, driver="token_healing", output_kind=RequestOutputKind.DELTA
    )
    llm.llm_engine.add_request("s", "p:", params)
    pieces = []
    while llm.llm_engine.has_unfinished_requests():
        pieces += [each.outputs[0].text for each in llm.llm_engine.step()]
    assert pieces[0] == "//"
    assert "".join(pieces) == "//xx"


def test_only_what_spells_the_taken_text_may_be_written(llm: LLM) -> None:
    for seed in range(8):
        output = run(llm, {"driver": "token_healing", "tokens": 2}, "xp:/", temperature=50.0,
                     seed=seed, max_tokens=6)  # fmt: skip
        words = {i: bytes([i]) for i in range(256)} | {
            256 + i: word.encode() for i, word in enumerate(WORDS)
        }
        spelled = b"".join(words[token] for token in output.outputs[0].token_ids)
        assert spelled.startswith(b":/")
        assert output.outputs[0].text == spelled[2:].decode("utf-8", "replace")


def test_a_prompt_that_needs_none_is_left_alone(llm: LLM) -> None:
    healed = run(llm, "token_healing", "xp", temperature=1.0, seed=3)
    plain = run(llm, None, "xp", temperature=1.0, seed=3)
    assert healed.outputs[0].token_ids == plain.outputs[0].token_ids
    assert run(llm, "token_healing", ":").outputs[0].text == run(llm, None, ":").outputs[0].text


def test_prompt_logprobs_are_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="prompt_logprobs"):
        run(llm, "token_healing", "p:", prompt_logprobs=1)
