"""Penalties: DEC-021 to DEC-029."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from decodekit import SamplingParams
from decodekit.plugins.author.table_model import blank_table

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make

A, B = 10, 11


def two_row_table(a: float, b: float) -> Tensor:
    """From A and from B the row is A `a`, B `b`; all else is far below."""
    table = blank_table(97)
    table[[A, B], A] = a
    table[[A, B], B] = b
    return table


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def test_dec_021_presence_and_frequency_count_only_what_was_generated(make: Make) -> None:
    bench = make(two_row_table(5.0, 4.5))

    assert bench.ids([[A, A, A]], greedy(3, presence_penalty=1.0)) == [[A, B, A]]
    assert bench.ids([[A, A, A]], greedy(3, frequency_penalty=1.0)) == [[A, B, A]]


def test_dec_022_repetition_counts_prompt_and_output_once_with_the_right_sign(make: Make) -> None:
    positive = make(two_row_table(5.0, 4.5))
    negative = make(two_row_table(-1.0, -1.5))

    for prompt in ([A], [A, A, A, A]):
        assert positive.ids([prompt], greedy(3, repetition_penalty=2.0)) == [[B, A, A]]
        assert negative.ids([prompt], greedy(1, repetition_penalty=2.0)) == [[B]]


def test_dec_023_padding_is_not_a_generated_token(rough: Bench) -> None:
    short, long = [7], [(5 * place) % 97 for place in range(60)]
    params = [greedy(24, frequency_penalty=1.05), greedy(24)]

    together = rough.ids([short, long], params)

    assert together == [rough.solo(short, params[0]), rough.solo(long, params[1])]
    assert together[0] != rough.path(7, 24)  # the penalty does something here


@pytest.mark.parametrize("first_is_plain", [True, False])
def test_dec_024_a_penalised_request_joins_a_running_batch_and_the_reverse(
    rough: Bench, first_is_plain: bool
) -> None:
    own: dict[str, Any] = {} if first_is_plain else {"presence_penalty": 1.5}
    other: dict[str, Any] = {"presence_penalty": 1.5} if first_is_plain else {}

    rough.add("first", [1], greedy(200, **own))
    rough.step(10)
    rough.add("second", [2], greedy(90, **other))
    rough.step(30)
    rough.engine.abort_request("first")
    rough.add("third", [3], greedy(90, **own))
    done = rough.finish()

    ids = {name: list(output.outputs[0].token_ids) for name, output in done.items()}
    assert done["first"].outputs[0].finish_reason == "abort"
    assert len(ids["first"]) == 40
    assert ids["first"] == rough.solo([1], greedy(40, **own))
    assert ids["second"] == rough.solo([2], greedy(90, **other))
    assert ids["third"] == rough.solo([3], greedy(90, **own))
    rough.check_answers()


def test_dec_026_no_hidden_window_on_the_penalties(make: Make) -> None:
    x, y, last = 50, 51, 41
    table = blank_table(97)
    table[x, 1] = 5.0
    for token in range(1, 41):  # with `last`, 41 tokens after X
        table[token, token + 1] = 5.0
    table[last, x], table[last, y] = 5.0, 4.5
    bench = make(table)
    chain = list(range(1, 42))
    expected = [x, *chain, y]

    assert bench.ids([[last]], greedy(43, presence_penalty=1.0)) == [expected]
    assert bench.ids([[last]], greedy(43, frequency_penalty=1.0)) == [expected]
    assert bench.ids([[last]], greedy(43, repetition_penalty=1.3)) == [expected]
    assert bench.ids([[x, *chain]], greedy(1, repetition_penalty=1.3)) == [[y]]
    assert bench.ids([[last]], greedy(43)) == [[x, *chain, x]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fusion": False},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"debug": True},
    ],
)
def test_dec_027_penalties_act_on_greedy_requests_on_every_path(
    make: Make, options: dict[str, Any]
) -> None:
    bench = make(two_row_table(5.0, 4.0), **options)
    params = greedy(8, frequency_penalty=1.5)
    expected = [A, B] * 4

    assert bench.ids([[A]], params) == [expected]
    assert bench.ids([[A]] * 16, params) == [expected] * 16
    mixed = [params, greedy(8), SamplingParams(seed=1, max_tokens=8)] * 4
    assert bench.ids([[A]] * 12, mixed)[::3] == [expected] * 4
    for stream in bench.stream([[A]] * 2, params):
        assert stream.ids() == expected


def test_dec_028_prompt_ids_outside_the_tokenizer_with_penalties_on(
    make: Make, ascii_tokenizer: Callable[..., Any]
) -> None:
    generator = torch.Generator().manual_seed(8)
    table = (torch.randint(-80, 81, (130, 130), generator=generator) / 16).float()
    tokenizer = ascii_tokenizer(special=["<s>", "</s>"])
    bench = make(table, model={"tokenizer": tokenizer, "num_rows": 138})
    params = greedy(8, repetition_penalty=1.1)
    neighbour = [(3 * place) % 128 for place in range(40)]
    alone = bench.solo(neighbour, params)

    padded, beside = bench.ids([[5, 133], neighbour], params)
    assert len(padded) == 8
    assert padded == bench.solo([5, 133], params)
    assert beside == alone

    for number, bad in enumerate(([5, 138], [5, -1])):
        with pytest.raises(ValueError, match="prompt_token_ids"):
            bench.generate([bad, neighbour], params)
        bench.add(f"running-{number}", neighbour, params)
        bench.step(3)
        with pytest.raises(ValueError, match="prompt_token_ids"):
            bench.add(f"bad-{number}", bad, params)
        done = bench.finish()
        assert list(done[f"running-{number}"].outputs[0].token_ids) == alone
    bench.check_answers()


def test_dec_029_bias_and_penalties_have_one_declared_order(make: Make) -> None:
    table = blank_table(97)
    table[A, A], table[A, B] = 2.0, 2.5
    bench = make(table)
    params = greedy(1, logit_bias={A: 2.0}, repetition_penalty=2.0)

    assert bench.ids([[A]], params) == [[B]]
    assert bench.ids([[A]] * 16, params) == [[B]] * 16
    order = [entry.stage for entry in bench.llm.explain(params).order]
    assert order.index("logit_bias") < order.index("repetition_penalty")
    assert bench.generate([[A]], params)[0].plan.order == bench.llm.explain(params).order
