"""Log-probabilities of the chosen tokens and their alternatives."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit.core.batch import TapView
from decodekit.core.logprobs import FlatLogprobs
from decodekit.core.stage import Tap
from decodekit.plugins.author.rows import make_context
from decodekit.plugins.observe.logprobs import Logprobs, Order

INF = float("inf")
OBSERVER = Logprobs()


class Letters:
    """Texts of tokens: the id, and how much context was given."""

    def decoded_tokens(self, ids: Sequence[int], context_ids: Sequence[int]) -> list[str]:
        return [f"{token}|{','.join(map(str, context_ids))}" for token in ids]


def order_of(count: int | None, vocab: int = 10, **given: Any) -> Order | None:
    size = given.pop("tokenizer_size", vocab)
    engine = given.pop("engine", "raw_logprobs")
    request = {
        "logprobs": count,
        "logprob_token_ids": None,
        "logprobs_mode": None,
        "flat_logprobs": False,
        **given,
    }
    context = make_context(
        vocab,
        tokenizer_size=size,
        logprobs_mode=engine,
        request=SimpleNamespace(**request),
    )
    return OBSERVER.bind(context)


def observe(logits: Tensor, tokens: list[list[int]], count: int | None, **given: Any) -> list[Any]:
    """Run steps over rows `logits` [rows, vocab]; return each row's result."""
    texts = given.pop("texts", None)
    order = order_of(count, logits.shape[1], **given)
    assert order is not None
    records = [OBSERVER.open(order, texts) for _ in range(len(logits))]
    for step in tokens:
        measured = OBSERVER.measure(order, _taps(order, logits), torch.tensor(step))
        host = {name: value.numpy() for name, value in measured.items()}
        for row, record in enumerate(records):
            values = {name: value[row] for name, value in host.items()}
            OBSERVER.record(record, step[row], values)
    return [OBSERVER.result(record) for record in records]


def _taps(order: Order, logits: Tensor) -> dict[Tap, TapView]:
    """Show rows that later taps see with less and less alive."""
    rows = {Tap.RAW: logits, Tap.MASKED: logits.clone(), Tap.FINAL: logits.clone()}
    if len(order.points) > 1:
        rows[Tap.MASKED][:, 0] = rows[Tap.FINAL][:, :2] = -INF
    return {tap: TapView(rows[tap]) for tap in OBSERVER.taps(order)}


def test_unasked_is_unbound() -> None:
    assert order_of(None) is None


@pytest.mark.parametrize("count", [1, 4, 10])
def test_alternatives_are_distinct_sorted_and_truly_ranked(
    count: int, rng: torch.Generator
) -> None:
    logits = torch.randn(20, 10, generator=rng)
    chosen = [row % 10 for row in range(20)]

    results = observe(logits, [chosen], count)

    for row, result in enumerate(results):
        (entries,) = result["logprobs"]
        truth = logits[row].log_softmax(0)
        best = logits[row].argsort(descending=True).tolist()[:count]
        ids = list(entries)
        assert ids[0] == chosen[row]
        assert ids[1:] == [token for token in best if token != chosen[row]]
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(truth[token]), abs=1e-5)
            assert entry.rank == 1 + int((logits[row] > logits[row, token]).sum())
            assert entry.decoded_token is None


def test_the_stated_number_of_entries_comes_back() -> None:
    row = torch.arange(10.0)[None]

    counts = {
        (asked, chosen): len(observe(row, [[chosen]], asked)[0]["logprobs"][0])
        for asked in (0, 2, 9, -1)
        for chosen in (9, 1)
    }

    assert counts == {
        (0, 9): 1,
        (0, 1): 1,
        (2, 9): 2,
        (2, 1): 3,
        (9, 9): 9,
        (9, 1): 9,
        (-1, 9): 10,
        (-1, 1): 10,
    }


def test_the_sampled_tokens_rank_is_true_outside_the_list() -> None:
    logits = torch.arange(30.0, 0.0, -1.0)[None]

    (result,) = observe(logits, [[8]], 2)

    (entries,) = result["logprobs"]
    assert list(entries) == [8, 0, 1]
    assert entries[8].rank == 9


def test_ties_share_a_rank_and_are_listed_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0, 2.0]])

    (result,) = observe(logits, [[4]], 6)

    (entries,) = result["logprobs"]
    assert list(entries) == [4, 1, 2, 3, 5, 0]
    assert [entry.rank for entry in entries.values()] == [3, 1, 1, 3, 3, 6]


def test_ids_past_the_tokenizer_count_nowhere() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, 50.0, 60.0]])

    (result,) = observe(logits, [[0]], -1, tokenizer_size=3)

    (entries,) = result["logprobs"]
    assert list(entries) == [0, 1, 2]
    truth = logits[0, :3].log_softmax(0)
    assert [entry.rank for entry in entries.values()] == [2, 1, 3]
    assert entries[0].logprob == pytest.approx(float(truth[0]), abs=1e-6)


def test_dead_tokens_are_minus_infinity_and_fill_only_what_the_alive_leave() -> None:
    logits = torch.tensor([[-INF, 1.0, -INF, 2.0]])

    (two,) = observe(logits, [[3]], 2, logprobs_mode=("final",))
    (three,) = observe(logits, [[3]], 3, logprobs_mode=("final",))

    assert list(two["logprobs"][0]) == [3, 1]
    assert list(three["logprobs"][0]) == [3, 1, 0]
    assert three["logprobs"][0][0].logprob == -INF
    assert three["logprobs"][0][0].rank == 3
    alive = [entry.logprob for entry in two["logprobs"][0].values()]
    assert sum(map(math.exp, alive)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("mode", "tap", "is_logit"),
    [
        ("raw", Tap.RAW, False),
        ("masked", Tap.MASKED, False),
        ("final", Tap.FINAL, False),
        ("raw_logprobs", Tap.RAW, False),
        ("raw_logits", Tap.RAW, True),
        ("masked_logits", Tap.MASKED, True),
        ("processed_logprobs", Tap.FINAL, False),
        ("processed_logits", Tap.FINAL, True),
    ],
)
def test_each_mode_reads_its_tap(mode: str, tap: Tap, is_logit: bool) -> None:
    asked = order_of(1, logprobs_mode=(mode,))
    default = order_of(1, engine=mode)

    for order in (asked, default):
        assert order is not None
        (point,) = order.points
        assert (point.tap, point.is_logit) == (tap, is_logit)
        assert OBSERVER.taps(order) == {tap}


def test_a_logits_mode_reports_logits() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.5]])

    (result,) = observe(logits, [[2]], 1, logprobs_mode=("raw_logits",))

    (entries,) = result["logprobs"]
    assert {token: entry.logprob for token, entry in entries.items()} == {2: 2.5, 1: 4.0}


def test_the_cumulative_value_is_the_sum_over_the_chosen(rng: torch.Generator) -> None:
    logits = torch.randn(1, 10, generator=rng)

    (result,) = observe(logits, [[3], [9], [0]], 0)

    truth = logits[0].log_softmax(0)[[3, 9, 0]].sum()
    assert result["cumulative_logprob"] == pytest.approx(float(truth), abs=1e-5)
    assert len(result["logprobs"]) == 3


def test_texts_are_asked_with_the_tokens_before() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.5]])

    (result,) = observe(logits, [[2], [0]], 1, texts=Letters())

    texts = [[entry.decoded_token for entry in step.values()] for step in result["logprobs"]]
    assert texts == [["2|", "1|"], ["0|2", "1|2"]]


def test_the_flat_form_has_the_same_content(rng: torch.Generator) -> None:
    logits = torch.randn(2, 10, generator=rng)
    steps = [[1, 2], [3, 3]]

    listed = observe(logits, steps, 3, texts=Letters())
    flat = observe(logits, steps, 3, texts=Letters(), flat_logprobs=True)

    for one, other in zip(listed, flat, strict=True):
        assert isinstance(other["logprobs"], FlatLogprobs)
        assert other["logprobs"] == one["logprobs"]


def test_reading_in_between_changes_nothing() -> None:
    order = order_of(1, 3)
    logits = TapView(torch.tensor([[1.0, 4.0, 2.5]]))
    record = OBSERVER.open(order, Letters())
    measured = OBSERVER.measure(order, {Tap.RAW: logits}, torch.tensor([2]))
    values = {name: value[0].numpy() for name, value in measured.items()}

    lengths = []
    for _ in range(3):
        OBSERVER.record(record, 2, values)
        lengths.append(len(OBSERVER.result(record)["logprobs"]))
        OBSERVER.result(record)

    assert lengths == [1, 2, 3]
    assert list(OBSERVER.result(record)["logprobs"][2].values())[0].decoded_token == "2|2,2"


def test_values_do_not_depend_on_the_batch(rng: torch.Generator) -> None:
    logits = torch.randn(9, 1009, generator=rng) * 3
    order = order_of(5, 1009)
    tokens = torch.arange(9) * 7

    together = OBSERVER.measure(order, {Tap.RAW: TapView(logits)}, tokens)

    for row in range(9):
        part = slice(row, row + 1)
        alone = OBSERVER.measure(order, {Tap.RAW: TapView(logits[part])}, tokens[part])
        for name, value in alone.items():
            assert torch.equal(value[0], together[name][row])


def test_listed_ids_come_alone_or_after_the_best_with_true_ranks(rng: torch.Generator) -> None:
    logits = torch.randn(6, 30, generator=rng)
    asked = (3, 29, 3, 11)

    alone = observe(logits, [[5] * 6], None, logprob_token_ids=asked)
    beside = observe(logits, [[5] * 6], 4, logprob_token_ids=asked)

    for row in range(6):
        truth = logits[row].log_softmax(0)
        best = logits[row].argsort(descending=True).tolist()[:4]
        (entries,), (more,) = alone[row]["logprobs"], beside[row]["logprobs"]
        assert list(entries) == [5, 3, 29, 11]
        assert list(more) == list(dict.fromkeys([5, *best, 3, 29, 11]))
        for token, entry in (*entries.items(), *more.items()):
            assert entry.logprob == pytest.approx(float(truth[token]), abs=1e-5)
            assert entry.rank == 1 + int((logits[row] > logits[row, token]).sum())
        assert alone[row]["cumulative_logprob"] == pytest.approx(float(truth[5]), abs=1e-5)


def test_ids_past_the_tokenizer_cannot_be_listed() -> None:
    with pytest.raises(ValueError, match=r"logprob_token_ids .* \[0, 8\), got 8"):
        order_of(None, tokenizer_size=8, logprob_token_ids=(2, 8))


@pytest.mark.parametrize("is_flat", [False, True])
def test_several_modes_at_once_each_have_their_list(is_flat: bool) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    modes = ("masked", "raw", "processed_logits")

    (result,) = observe(logits, [[2], [3]], 1, logprobs_mode=modes, flat_logprobs=is_flat)

    masked, final = logits[0].clone(), logits[0].clone()
    masked[0] = final[:2] = -INF
    assert result["logprobs"][0][2].logprob == pytest.approx(float(masked.log_softmax(0)[2]))
    assert list(result["logprobs_at"]) == ["raw", "processed_logits"]
    raw, last = result["logprobs_at"].values()
    assert [list(position) for position in raw] == [[2, 0], [3, 0]]
    assert raw[1][3].logprob == pytest.approx(float(logits[0].log_softmax(0)[3]))
    assert [list(position) for position in last] == [[2], [3, 2]]
    assert last[1][3].logprob == 0.0
    assert isinstance(last, FlatLogprobs) is is_flat
    expected = masked.log_softmax(0)
    assert result["cumulative_logprob"] == pytest.approx(float(expected[2] + expected[3]))
