"""Bias, bad words, allow-lists: DEC-049 to DEC-053."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from decodekit import SamplingParams
from decodekit.plugins.author.table_model import blank_table, flat_table

if TYPE_CHECKING:
    from tests.cases.conftest import Make

A, B = 10, 11
X, Y, Z = 30, 31, 32


def test_dec_049_logit_bias_adds_in_floating_point_within_its_range(make: Make) -> None:
    table = blank_table(97)
    table[A, A], table[A, B] = 2.0, 1.6
    bench = make(table)

    def run(bias: float) -> tuple[int, float]:
        params = SamplingParams(temperature=0.0, max_tokens=1, logit_bias={B: bias}, logprobs=2)
        part = bench.generate([[A]], params)[0].outputs[0]
        assert part.logprobs is not None
        assert {A, B} <= set(part.logprobs[0])
        return part.token_ids[0], part.logprobs[0][B].logprob

    with pytest.warns(UserWarning, match="clamped"):
        huge = run(1e9)
    found = [run(0.3), run(0.5), run(100.0), huge]

    assert [token for token, _ in found] == [A, B, B, B]
    assert len({logprob for _, logprob in found}) == 1
    assert found[0][1] == pytest.approx(bench.logprobs_after(A)[B], abs=1e-3)
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams(logit_bias={B: math.nan})


def test_dec_050_a_bias_of_minus_100_holds_in_every_one_of_n_answers(
    make: Make, ascii_tokenizer: Callable[..., Any]
) -> None:
    bench = make(flat_table(128), model={"tokenizer": ascii_tokenizer()})
    banned = {5, 40}
    params = SamplingParams(n=10, seed=3, max_tokens=200, logit_bias=dict.fromkeys(banned, -100.0))

    free = bench.all_ids([[1]], SamplingParams(n=10, seed=3, max_tokens=40))[0]
    found = bench.all_ids([[1]], params)[0]

    assert sum(bool(banned & set(ids)) for ids in free) > 3
    assert [len(ids) for ids in found] == [200] * 10
    assert not any(banned & set(ids) for ids in found)


MERGES = [
    ("d", "e"), ("de", "s"), ("des", "c"), ("r", "i"), ("ri", "b"), ("rib", "e"), ("ribe", "d"),
    (" ", "desc"), (" desc", "ribed"), ("a", "t"), (" ", "at"), ("t", "h"), ("th", "e"),
    (" ", "the"), (" ", "a"),
]  # fmt: skip


@pytest.fixture(scope="module")
def merged(ascii_tokenizer: Callable[..., Any]) -> Any:
    """A BPE tokenizer where `described` is two tokens and ` described` is one."""
    tokenizer = ascii_tokenizer(merges=MERGES)
    assert tokenizer.tokenize("described") == ["desc", "ribed"]
    assert len(tokenizer.encode(" described")) == 1
    return tokenizer


def test_dec_051_bad_words_with_and_without_a_leading_space(make: Make, merged: Any) -> None:
    desc, ribed, spaced = merged.convert_tokens_to_ids(["desc", "ribed", "Ġdescribed"])
    table = blank_table(len(merged))
    table[0, desc] = table[desc, ribed] = 4.0
    table[desc, ord("s")] = table[ribed, ord(",")] = table[ord("s"), ord(",")] = 1.0
    table[ord(","), spaced] = table[spaced, ord(" ")] = 4.0
    table[ord(","), ord(".")] = 1.0
    table[ord(" "), desc] = table[ord("."), ord(" ")] = 4.0
    bench = make(table, model={"tokenizer": merged})

    def texts(**fields: Any) -> list[str]:
        params = [
            SamplingParams(max_tokens=24, seed=seed, temperature=float(seed > 0), **fields)
            for seed in range(40)
        ]
        return [each.outputs[0].text for each in bench.generate([[0]] * 40, params)]

    free, found = texts(), texts(bad_words=["described"])

    assert free[0].startswith("described, described described, ")
    assert sum("described" in text for text in free) > 30
    assert all(len(text) > 10 for text in found)
    assert not any("described" in text for text in found)


def test_dec_052_a_bad_word_of_several_tokens_bans_only_the_completion(
    make: Make, merged: Any
) -> None:
    at, the = merged.convert_tokens_to_ids(["Ġat", "Ġthe"])
    table = blank_table(len(merged))
    table[0, at] = table[at, the] = table[the, ord("s")] = table[ord("s"), at] = 4.0
    table[at, ord("a")] = 2.0
    table[ord("a"), the] = 4.0
    bench = make(table, model={"tokenizer": merged})
    params = SamplingParams(temperature=0.0, max_tokens=9, bad_words=["at the"])

    free = bench.ids([[0]], SamplingParams(temperature=0.0, max_tokens=9))[0]
    found = bench.ids([[0]], params)[0]
    begun = bench.ids([[0, at]], params)[0]

    assert free == [at, the, ord("s")] * 3
    assert found == [at, ord("a"), the, ord("s"), at, ord("a"), the, ord("s"), at]
    assert begun == [the, ord("s"), at, ord("a"), the, ord("s"), at, ord("a"), the]
    # The stage says so: matches begin in the output alone, unless the chain asks for "both".
    both = SamplingParams(
        temperature=0.0,
        max_tokens=2,
        chain=[{"stage": "bad_words", "words": ["at the"], "scope": "both"}],
    )
    assert bench.ids([[0, at]], both) == [[ord("a"), the]]


def test_dec_053_an_allow_list_is_private_to_its_request(make: Make) -> None:
    table = blank_table(97)
    table[:, X], table[:, Y], table[:, Z] = 3.0, 1.0, 2.0
    bench = make(table, max_num_seqs=3)

    def free(count: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=count)

    def bound(count: int, token: int = Y) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=count, allowed_token_ids=[token])

    bench.add("first", [1], free(4))
    bench.add("middle", [2], bound(20))
    bench.add("last", [3], free(20))
    bench.add("new", [4], free(12))  # waits for the row of the first
    done = bench.finish()
    ids = {name: set(output.outputs[0].token_ids) for name, output in done.items()}
    assert ids == {"first": {X}, "middle": {Y}, "last": {X}, "new": {X}}

    # Two restricted rows change places around an unrestricted one.
    bench.add("a", [1], bound(3))
    bench.add("b", [2], free(20))
    bench.add("c", [3], bound(9, Z))
    bench.add("d", [4], bound(9, Z))
    bench.step(6)
    bench.add("e", [5], bound(9))
    bench.add("f", [6], free(5))
    done = bench.finish()
    ids = {name: set(output.outputs[0].token_ids) for name, output in done.items()}
    assert ids == {"a": {Y}, "b": {X}, "c": {Z}, "d": {Z}, "e": {Y}, "f": {X}}

    with pytest.raises(ValueError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=[])
    bench.check_answers()
