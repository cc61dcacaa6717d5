"""Parameter ranges, generation config and context length: DEC-084, DEC-092 to DEC-096."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from decodekit import SamplingParams
from decodekit.plugins.author.table_model import blank_table, flat_table

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make

A, B = 10, 11
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("top_k", -5),
        ("top_k", 1.5),
        ("top_k", math.nan),
        ("min_p", 2),
        ("min_p", math.nan),
        ("presence_penalty", 3),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -3),
        ("frequency_penalty", math.inf),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", math.inf),
        ("max_tokens", -1),
    ],
)
def test_dec_084_out_of_range_sampling_values_stop_at_the_door(
    rough: Bench, name: str, value: Any
) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=12, presence_penalty=0.5)
    rough.add("long", [1], long)
    rough.step(4)

    with pytest.raises(ValueError, match=name) as caught:
        rough.add("bad", [2], SamplingParams(**{name: value}))
    assert getattr(caught.value, "parameter", None) == name
    with pytest.raises(ValueError, match=name):
        setattr(SamplingParams(), name, value)

    done = rough.finish()
    assert list(done) == ["long"]
    assert list(done["long"].outputs[0].token_ids) == rough.ids([[1]], long)[0]


CONFIG = {"temperature": 0.6, "top_k": 1, "top_p": 0.9, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def configured(make: Make) -> Bench:
    """From A and B the row is A 5.0, B 4.5; the model's file sets four defaults."""
    table = blank_table(97)
    table[[A, B], A], table[[A, B], B] = 5.0, 4.5
    return make(table, model={"generation_config": CONFIG})


def values(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in CONFIG}


def test_dec_092_model_defaults_fill_gaps_and_an_explicit_value_always_wins(
    configured: Bench,
) -> None:
    llm = configured.llm
    neutral = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0}
    repeats = [[A]] * 20

    assert values(llm.get_default_sampling_params()) == CONFIG
    outputs = llm.generate(repeats, use_tqdm=False)
    # B at first, since A is penalised; then A and B both are, and A leads again; nothing is drawn.
    assert {tuple(output.outputs[0].token_ids) for output in outputs} == {(B, *[A] * 15)}
    assert values(llm.get_default_sampling_params()) == CONFIG

    greedy = configured.ids([[A]], SamplingParams(temperature=0.0))
    assert greedy == [[A] * 16]  # an object is taken as it is: no penalty
    drawn = configured.ids(repeats, [SamplingParams(seed=s, **neutral) for s in range(20)])  # type: ignore[arg-type]
    assert {token for ids in drawn for token in ids} == {A, B}
    assert len({tuple(ids) for ids in drawn}) > 10
    assert drawn == configured.ids(repeats, [SamplingParams(seed=s) for s in range(20)])
    gap = llm.get_default_sampling_params()
    gap.repetition_penalty = 1.0
    assert configured.ids([[A]], gap) == [[A] * 16]

    off = configured.fresh(generation_config="vllm")
    assert off.llm.get_default_sampling_params() == SamplingParams()
    free = off.llm.generate(repeats, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in free}) > 10


def test_dec_092_the_effective_parameters_can_be_seen(configured: Bench) -> None:
    def stages(bench: Bench) -> set[str]:
        output = bench.llm.generate([[A]], use_tqdm=False)[0]
        assert output.plan.order == bench.llm.explain().order
        return {entry.stage for entry in output.plan.order}

    assert {"temperature", "top_k", "top_p", "repetition_penalty"} <= stages(configured)
    off = configured.fresh(generation_config="vllm")
    assert not {"temperature", "top_k", "top_p", "repetition_penalty"} & stages(off)


def ended(output: Any) -> tuple[int, str | None]:
    return len(output.outputs[0].token_ids), output.outputs[0].finish_reason


def test_dec_093_default_max_tokens(make: Make, ascii_tokenizer: Callable[..., Any]) -> None:
    tokenizer = ascii_tokenizer(chat_template=CHAT)
    bench = make(flat_table(128), model={"tokenizer": tokenizer, "context": 128})
    messages = [{"role": "user", "content": "hello"}]
    full = SamplingParams(max_tokens=None)

    assert ended(bench.llm.generate(["hello"], use_tqdm=False)[0]) == (16, "length")
    assert ended(bench.generate(["hello"], SamplingParams())[0]) == (16, "length")
    assert ended(bench.llm.chat(messages, use_tqdm=False)[0]) == (16, "length")
    assert ended(bench.generate(["hello"], full)[0]) == (123, "length")
    assert ended(bench.llm.chat(messages, full, use_tqdm=False)[0]) == (123, "length")


def test_dec_094_prompt_plus_max_tokens_at_the_edge_of_the_context(make: Make) -> None:
    bench = make(flat_table(97), model={"context": 32})

    def run(length: int, max_tokens: int) -> tuple[int, str | None]:
        return ended(bench.generate([[1] * length], SamplingParams(max_tokens=max_tokens))[0])

    assert run(31, 1) == (1, "length")
    assert run(20, 12) == (12, "length")
    for length in (32, 33):
        with pytest.raises(ValueError, match=rf"32.*{length}"):
            run(length, 1)
    assert run(20, 13) == (12, "length")
    assert run(31, 2) == (1, "length")
    bench.check_answers()


def test_dec_095_a_request_that_can_never_fit(make: Make) -> None:
    bench = make(flat_table(97), blocks=10)  # the model's own limit is 4096
    short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    with pytest.raises(ValueError, match="200"):
        bench.add("never", [1] * 200, short)
    for token in (1, 2, 3):
        bench.add(f"short-{token}", [token], short)
    bench.step(20)
    assert not bench.engine.has_unfinished_requests()
    ids = {name: list(output.outputs[0].token_ids) for name, output in bench.finish().items()}
    assert ids == {f"short-{token}": bench.path(token, 8) for token in (1, 2, 3)}

    bench.add("long", [1, 2, 3], SamplingParams(max_tokens=400))
    bench.step(170)  # one token a step, and a few to tell that the cache is full
    assert not bench.engine.has_unfinished_requests()
    assert ended(bench.finish()["long"]) == (157, "length")
    for number in range(2):
        bench.add(f"both-{number}", [1, 2, 3], SamplingParams(max_tokens=400, seed=1))
    bench.step(500)
    assert not bench.engine.has_unfinished_requests()
    assert [ended(output) for output in bench.finish().values()] == [(157, "length")] * 2
    bench.check_answers()


@pytest.mark.parametrize("adds_bos", [False, True])
def test_dec_096_empty_prompts(
    make: Make, ascii_tokenizer: Callable[..., Any], adds_bos: bool
) -> None:
    tokenizer = ascii_tokenizer(
        special=["<s>"], adds_bos=adds_bos, bos_token="<s>", chat_template="{{ '' }}"
    )
    bench = make(flat_table(129), model={"tokenizer": tokenizer})
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def refused(prompts: Any) -> None:
        with pytest.raises(ValueError, match="prompt"):
            bench.llm.generate(prompts, greedy, use_tqdm=False)

    refused([])
    refused([[]])
    refused({"prompt_token_ids": []})
    with pytest.raises(ValueError, match="prompt"):
        bench.llm.chat([{"role": "user", "content": "x"}], greedy, use_tqdm=False)
    for empty in ("", [""]):
        if not adds_bos:
            refused(empty)
            continue
        [output] = bench.llm.generate(empty, greedy, use_tqdm=False)
        assert output.prompt_token_ids == [128]
        assert list(output.outputs[0].token_ids) == bench.path(128, 4)
    if adds_bos:
        first, second = bench.generate(["ok", ""], greedy)
        assert (first.prompt_token_ids, second.prompt_token_ids) == ([128, *b"ok"], [128])
    else:
        refused(["ok", ""])
    bench.check_answers()
