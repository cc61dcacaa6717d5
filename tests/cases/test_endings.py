"""Stop conditions, the ids: DEC-041, DEC-043 to DEC-047."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from decodekit import CompletionOutput, SamplingParams
from decodekit.plugins.author.table_model import blank_table, spelling_table

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make

Spell = Callable[..., SamplingParams]

END, TURN, MARK = 128, 129, 130  # the tokenizer's end, a second end id, a special token


@pytest.fixture(scope="module")
def writer(make: Make, ascii_tokenizer: Callable[..., Any]) -> Bench:
    """ASCII bytes and three special tokens; END and TURN end."""
    tokenizer = ascii_tokenizer(special=["<end>", "<turn>", "<mark>"], eos_token="<end>")
    model = {"tokenizer": tokenizer, "generation_config": {"eos_token_id": [END, TURN]}}
    return make(blank_table(131), model=model)


def ended(part: CompletionOutput) -> tuple[str | None, int | str | None]:
    return part.finish_reason, part.stop_reason


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [ord("Z"), MARK])
def test_dec_041_stop_token_ids_in_the_ids_and_in_the_text(
    writer: Bench, spell: Spell, stop: int, include: bool
) -> None:
    params = spell(
        [*b"quite complete", stop, *b"more"],
        stop_token_ids=[stop],
        include_stop_str_in_output=include,
    )
    shown = "Z" if include and stop == ord("Z") else ""  # a special token is skipped

    part = writer.generate([[0]], params)[0].outputs[0]
    stream = writer.stream([[0]], params)[0]

    assert list(part.token_ids) == [*b"quite complete", stop]
    assert part.text == "quite complete" + shown
    assert ended(part) == ("stop", stop)
    assert stream.text() == part.text
    assert stream.ids() == list(part.token_ids)


def test_dec_041_an_included_special_stop_token_shows_if_special_tokens_do(
    writer: Bench, spell: Spell
) -> None:
    params = spell(
        [*b"so", MARK],
        stop_token_ids=[MARK],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )

    assert writer.generate([[0]], params)[0].outputs[0].text == "so<mark>"


def test_dec_043_the_callers_objects_come_back_unchanged(
    make: Make, ascii_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = ascii_tokenizer(special=["<end>", "<turn>"], eos_token="<end>")
    model = {"tokenizer": tokenizer, "generation_config": {"eos_token_id": [TURN], "top_k": 3}}
    table = spelling_table(130, list(b"abcdefghij"))
    first, second = make(table, model=model), make(table, model=model)
    params = SamplingParams(
        temperature=0.0, max_tokens=8, stop=["zz"], stop_token_ids=[7], bad_words=["q"]
    )
    before = repr(params)

    results = []
    for bench in (first, first, second):
        results.append(bench.ids([[ord("a")]], params)[0])
        assert repr(params) == before
    assert results == [list(b"bcdefghi")] * 3
    assert (params.stop, params.stop_token_ids, params.bad_words) == (["zz"], [7], ["q"])

    first.engine.add_request("running", [ord("a")], params)
    outputs = [output for _ in range(3) for output in first.engine.step()]
    params.stop.append("ef")
    params.stop_token_ids.append(ord("f"))
    params.bad_words.append("g")
    params.max_tokens = 4
    params.temperature = 1.0
    while first.engine.has_unfinished_requests():
        outputs += first.engine.step()
    assert list(outputs[-1].outputs[0].token_ids) == results[0]


@pytest.mark.parametrize(
    ("tokens", "fields"),
    [
        ([*b"one", *b"two", *b"end"], {"stop": ["tw"]}),
        ([*b"one", ord("Z"), *b"two"], {"stop_token_ids": [ord("Z")]}),
        ([*b"one", END, *b"two"], {}),
        ([*b"onetwo"], {"max_tokens": 5}),
    ],
)
def test_dec_044_ids_logprobs_and_text_agree_after_a_stop(
    writer: Bench, spell: Spell, tokens: list[int], fields: dict[str, Any]
) -> None:
    for flat in (False, True):
        params = spell(tokens, logprobs=2, flat_logprobs=flat, **fields)

        part = writer.generate([[0]], params)[0].outputs[0]
        stream = writer.stream([[0]], params)[0]

        assert part.logprobs is not None
        assert len(part.logprobs) == len(part.token_ids)
        assert len(part.token_ids) < len(tokens)
        streamed = [position for delta in stream.parts() for position in delta.logprobs or ()]
        assert streamed == list(part.logprobs)
        for token, position in zip(part.token_ids, streamed, strict=True):
            assert next(iter(position)) == token
        for delta in stream.parts():
            assert len(delta.logprobs or ()) == len(delta.token_ids)


def test_dec_045_finish_reason_and_stop_reason(writer: Bench, spell: Spell) -> None:
    cases = [
        (spell([*b"abc", END, *b"d"]), ("stop", None)),
        (spell([*b"abcd"], stop=["c"]), ("stop", "c")),
        (spell([*b"abcd"], stop_token_ids=[ord("c")]), ("stop", ord("c"))),
        (spell([*b"abcd"], max_tokens=3), ("length", None)),
        (spell([*b"abc", END], max_tokens=4), ("stop", None)),
    ]

    outputs = writer.generate([[0]] * len(cases), [params for params, _ in cases])

    assert [ended(output.outputs[0]) for output in outputs] == [right for _, right in cases]


def test_dec_046_ignore_eos_covers_every_end_id(
    make: Make, ascii_tokenizer: Callable[..., Any]
) -> None:
    table = blank_table(130)
    table[:, END], table[:, TURN], table[:, ord("a")] = 6.0, 5.0, 0.0
    table[END, TURN] = 7.0
    tokenizer = ascii_tokenizer(special=["<end>", "<turn>"], eos_token="<end>")
    model = {"tokenizer": tokenizer, "generation_config": {"eos_token_id": [END, TURN]}}
    bench = make(table, model=model)

    free = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
    asked = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20, stop_token_ids=[TURN])
    plain, stopped = (each.outputs[0] for each in bench.generate([[0]] * 2, [free, asked]))

    assert list(plain.token_ids) == [END, TURN] * 10
    assert ended(plain) == ("length", None)
    assert list(stopped.token_ids) == [END, TURN]
    assert ended(stopped) == ("stop", TURN)


def test_dec_047_end_ids_from_all_sources_are_united(
    make: Make, ascii_tokenizer: Callable[..., Any]
) -> None:
    table = spelling_table(130, list(b"abc"))
    table[ord("c"), END] = table[ord("z"), TURN] = 30.0
    table[ord("x"), ord("z")] = 30.0
    tokenizer = ascii_tokenizer(special=["<end>", "<turn>"], eos_token="<end>")
    bench = make(table, model={"tokenizer": tokenizer, "generation_config": {"eos_token_id": TURN}})

    params = SamplingParams(temperature=0.0, max_tokens=20, skip_special_tokens=False)
    outputs = [each.outputs[0] for each in bench.generate(["a", "x"], params)]

    assert [list(part.token_ids) for part in outputs] == [[*b"bc", END], [*b"z", TURN]]
    assert [part.text for part in outputs] == ["bc", "z"]
    assert [part.finish_reason for part in outputs] == ["stop", "stop"]
