"""Stops that a request names: a regex with hold-back, and low confidence."""

from collections.abc import Iterator
from typing import Any

import pytest

from decodekit import LLM, SamplingParams
from decodekit.core.errors import ValidationError
from decodekit.plugins.author.table_model import (
    byte_tokenizer,
    spelling_table,
    write_table_model,
)
from decodekit.sampling_params import RequestOutputKind

TEXT = "the quick=12;brown/FOX"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    table = spelling_table(256, list(dict.fromkeys(TEXT.encode())))
    table[ord("k"), ord("=")], table[ord("k"), ord("x")] = -2.0, -2.0
    folder = write_table_model(tmp_path_factory.mktemp("stops"), table, tokenizer=byte_tokenizer())
    yield LLM(str(folder), generation_config="vllm", max_model_len=128)


def run(llm: LLM, stops: Any, **fields: Any) -> Any:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 18, "stops": stops, **fields})
    [output] = llm.generate(["t"], params, use_tqdm=False)
    return output.outputs[0]


def test_a_regex_ends_the_text_before_its_match_or_after_it(llm: LLM) -> None:
    plain = run(llm, None).text
    assert "=12;" in plain
    place = plain.index("1")
    stop = {"stop": "regex", "pattern": "[0-9]{2}"}
    found = run(llm, [stop])
    assert (found.text, found.finish_reason, found.stop_reason) == (
        plain[:place], "stop", "[0-9]{2}"
    )  # fmt: skip
    assert run(llm, [{**stop, "include": True}]).text == plain[: place + 2]
    assert run(llm, [stop, {"stop": "regex", "pattern": "=."}]).text == plain[: place - 1]
    assert run(llm, [stop], stop=["q"]).text == plain[: plain.index("q")]
    assert run(llm, [stop], min_tokens=place + 2).text == plain


def test_no_part_of_a_match_leaks_into_a_stream(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=18, stops=[{"stop": "regex", "pattern": "=1.;", "span": 4}],
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    llm.llm_engine.add_request("s", "t", params)
    text = ""
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            text += output.outputs[0].text
            assert "=" not in text
    assert text == run(llm, None).text.split("=")[0]


def test_low_confidence_ends_a_text(llm: LLM) -> None:
    plain = run(llm, None, logprobs=0)
    values = [
        each[token].logprob for each, token in zip(plain.logprobs, plain.token_ids, strict=True)
    ]
    first = next(i for i in range(2, len(values)) if sum(values[i - 2 : i + 1]) / 3 < -0.2)
    found = run(llm, [{"stop": "confidence", "threshold": -0.2, "window": 3}])
    assert len(found.token_ids) == first + 1
    assert (found.finish_reason, found.stop_reason) == ("stop", "confidence")


def test_bad_stops_are_refused(llm: LLM) -> None:
    for stops, said in (
        ([{"stop": "regx"}], "unknown stop 'regx'; did you mean 'regex'"),
        ([{"stop": "regex", "patern": "a"}], "no parameter 'patern'"),
        ([{"stop": "regex", "pattern": "("}], "no regular expression"),
        ([{"stop": "regex", "pattern": "a*"}], "matches the empty text"),
        ([{"stop": "confidence", "threshold": 1.0}], "threshold"),
    ):
        with pytest.raises(ValidationError, match=said.replace("(", r"\(")):
            run(llm, stops)
