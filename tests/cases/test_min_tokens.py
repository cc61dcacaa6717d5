"""min_tokens: DEC-030 to DEC-033."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from decodekit import SamplingParams
from decodekit.plugins.author.table_model import blank_table

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make

E1, E2, S1 = 128, 129, 90


@pytest.fixture(scope="module")
def ending(make: Make, ascii_tokenizer: Callable[..., Any]) -> Callable[..., Bench]:
    """Return a maker of models whose tokenizer ends with E1 and whose generation config with E2."""

    def build(**favoured: float) -> Bench:
        table = blank_table(130)
        for token in range(130):
            table[token, 65 + token % 7] = -10.0
        for name, logit in favoured.items():
            table[:, {"e1": E1, "e2": E2, "s1": S1}[name]] = logit
        tokenizer = ascii_tokenizer(special=["<end>", "<turn>"], eos_token="<end>")
        return make(
            table, model={"tokenizer": tokenizer, "generation_config": {"eos_token_id": [E2]}}
        )

    return build


@pytest.mark.parametrize("best", ["e1", "e2", "s1"])
def test_dec_030_all_end_tokens_are_held_back_for_exactly_min_tokens_steps(
    ending: Callable[..., Bench], best: str
) -> None:
    logits = {"e1": 3.0, "e2": 3.5, "s1": 4.0, best: 6.0}
    bench = ending(**logits)

    for min_tokens, length in ((0, 1), (1, 2), (4, 5)):
        params = SamplingParams(
            temperature=0.0, stop_token_ids=[S1], min_tokens=min_tokens, max_tokens=32
        )
        ids = bench.ids([[65]], params)[0]
        assert len(ids) == length
        assert ids[-1] == {"e1": E1, "e2": E2, "s1": S1}[best]
        assert not {E1, E2, S1} & set(ids[:-1])


def test_dec_031_a_stop_string_before_min_tokens_does_not_stop(
    make: Make, ascii_tokenizer: Callable[..., Any]
) -> None:
    table = blank_table(128)
    table[ord("a"), ord("b")] = table[ord("b"), ord("a")] = table[ord("c"), ord("a")] = 5.0
    bench = make(table, model={"tokenizer": ascii_tokenizer()})
    params = SamplingParams(temperature=0.0, stop=["b"], min_tokens=6, max_tokens=20)

    part = bench.generate(["c"], params)[0].outputs[0]
    stream = bench.stream(["c"], params)[0]

    assert list(part.token_ids) == list(b"abababab")
    assert part.text == "abababa"
    assert (part.finish_reason, part.stop_reason) == ("stop", "b")
    assert stream.text() == part.text


def test_dec_032_the_prompt_does_not_count(ending: Callable[..., Bench]) -> None:
    bench = ending(e1=5.0)
    params = SamplingParams(temperature=0.0, min_tokens=10, max_tokens=30)

    ids = bench.ids([[65 + place % 26 for place in range(50)]], params)[0]

    assert len(ids) == 11
    assert not {E1, E2} & set(ids[:10])


def test_dec_033_min_tokens_and_max_tokens_together(ending: Callable[..., Bench]) -> None:
    bench = ending(e1=5.0)

    def run(**fields: Any) -> tuple[int, str | None]:
        part = bench.generate([[65]], SamplingParams(temperature=0.0, **fields))[0].outputs[0]
        return len(part.token_ids), part.finish_reason

    assert run(min_tokens=8, max_tokens=8) == (8, "length")
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(min_tokens=9, max_tokens=8)
    assert run(min_tokens=0, max_tokens=1) == (1, "stop")
    bench.check_answers()
