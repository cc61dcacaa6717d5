"""Logits processors, as callables of a request and as stages: DEC-097, 098, 100 and 101."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from decodekit import Caps, Kind, Order, RowView, SamplingParams, Stage
from decodekit.plugins.author.table_model import flat_table

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make

A, B, X, Y, Z, COMMA = 10, 11, 60, 61, 62, 63


class Recorder:
    """A callable that keeps the output ids of each of its calls."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        self.seen.append(list(output_ids))
        return logits


def prefixes(ids: Sequence[int]) -> list[list[int]]:
    return [list(ids[:count]) for count in range(len(ids))]


def test_dec_097_processors_see_the_true_history(rough: Bench) -> None:
    def run(count: int) -> None:
        recorders = [Recorder() for _ in range(count)]
        params = [
            SamplingParams(
                logits_processors=[each], seed=seed, max_tokens=40, temperature=float(seed % 2)
            )
            for seed, each in enumerate(recorders)
        ]
        found = rough.ids([[3 + number] for number in range(count)], params)
        for recorder, ids in zip(recorders, found, strict=True):
            assert len(ids) == 40
            assert recorder.seen == prefixes(ids)

    run(1)
    run(8)


class Watcher(Stage):
    """A stage that keeps the history of each step of each sequence it runs on."""

    name = "dec_watcher"
    seen: dict[tuple[int, int], list[list[int]]] = {}

    def transform(self, logits: Tensor, rows: RowView) -> None:
        for row, source in enumerate(rows.rows.sources):
            self.seen.setdefault((source.key, source.branch), []).append(list(rows.output(row)))


def test_dec_097_stages_see_the_true_history(rough: Bench) -> None:
    bench = rough.fresh(plugins=[Watcher])
    params = [SamplingParams(chain=["dec_watcher"], seed=seed, max_tokens=40) for seed in range(8)]
    Watcher.seen.clear()

    found = bench.ids([[3 + number] for number in range(8)], params)

    assert sorted(Watcher.seen.values()) == sorted(prefixes(ids) for ids in found)


class CommaState:
    """Where a sequence stands; every living one is counted."""

    alive: weakref.WeakSet[CommaState] = weakref.WeakSet()

    def __init__(self) -> None:
        self.last: list[int] = []
        self.is_due = False
        self.was_forced = False
        self.alive.add(self)


class CommaOnce(Stage):
    """Forces a comma once, after the letters xyz."""

    name = "dec_comma_once"
    kind = Kind.BIAS
    caps = Caps(stateful=True)

    def open(self, params: Any, prompt: Sequence[int]) -> CommaState:
        return CommaState()

    def accept(self, state: CommaState, tokens: Sequence[int]) -> None:
        for token in tokens:
            state.was_forced |= state.is_due
            state.last = [*state.last, token][-3:]
            state.is_due = state.last == [X, Y, Z] and not state.was_forced

    def fork(self, state: CommaState) -> CommaState:
        twin = CommaState()
        twin.last, twin.is_due, twin.was_forced = list(state.last), state.is_due, state.was_forced
        return twin

    def transform(self, logits: Tensor, rows: RowView) -> None:
        for row, state in enumerate(rows.states):
            if state.is_due:
                logits[row] = -torch.inf
                logits[row, COMMA] = 0.0


def comma_callable(output_ids: list[int], logits: Tensor) -> Tensor:
    """The same rule read off the history."""
    places = [p for p in range(len(output_ids) - 2) if output_ids[p : p + 3] == [X, Y, Z]]
    if places and places[0] + 3 == len(output_ids):
        logits = torch.full_like(logits, -torch.inf)
        logits[COMMA] = 0.0
    return logits


def letters_table() -> Tensor:
    """x, y and z often follow each other; a comma comes by itself never."""
    table = flat_table(97, 60)
    table[:, X] = 3.0
    table[X, Y] = table[Y, Z] = 6.0
    return table


def check_commas(ids: Sequence[int]) -> bool:
    """One comma, right after the first xyz, or none where there is no xyz before the end."""
    places = [p for p in range(len(ids) - 3) if list(ids[p : p + 3]) == [X, Y, Z]]
    commas = [place for place, token in enumerate(ids) if token == COMMA]
    assert commas == [place + 3 for place in places[:1]]
    return bool(commas)


@pytest.mark.parametrize(
    "fields",
    [{"chain": ["dec_comma_once"]}, {"logits_processors": [comma_callable]}],
    ids=["stage", "callable"],
)
def test_dec_098_state_belongs_to_one_sequence(make: Make, fields: dict[str, Any]) -> None:
    bench = make(letters_table(), plugins=[CommaOnce])

    def params(count: int, **more: Any) -> SamplingParams:
        return SamplingParams(max_tokens=count, **fields, **more)

    same = bench.ids([[1]] * 50, [params(30, seed=seed) for seed in range(50)])
    children = bench.all_ids([[1]] * 4, [params(30, seed=seed, n=5) for seed in range(4)])
    found = [*same, *(ids for answers in children for ids in answers)]
    for wave in range(3):
        for number in range(6):
            each = params(3 + 7 * number, seed=number, n=1 + number % 2)
            bench.add(f"{wave}-{number}", [1], each)
        bench.step(9)
    done = bench.finish()
    found += [part.token_ids for output in done.values() for part in output.outputs]
    forced = [check_commas(ids) for ids in found]
    assert sum(forced) > 60

    del done
    gc.collect()
    assert len(CommaState.alive) == 0


class Steps:
    """Two callables, adding 10 to B and halving everything, that record what B was after each."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, output_ids: list[int], logits: Tensor) -> Tensor:
        logits[B] += 10.0
        self.values.append(float(logits[B]))
        return logits

    def halve(self, output_ids: list[int], logits: Tensor) -> Tensor:
        logits /= 2.0
        self.values.append(float(logits[B]))
        return logits


class AddTen(Stage):
    """Adds 10 to B."""

    name = "dec_add_ten"
    order = Order(before=("dec_halve",))
    values: list[float] = []

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits[:, B] += 10.0
        self.values += logits[:, B].tolist()


class Halve(Stage):
    """Halves everything."""

    name = "dec_halve"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits /= 2.0
        AddTen.values.extend(logits[:, B].tolist())


def two_rows() -> Tensor:
    """From A and B: A 4.0, B 2.0."""
    table = flat_table(97, 0)
    table[[A, B], A], table[[A, B], B] = 4.0, 2.0
    return table


@pytest.mark.parametrize("mixed", [False, True])
def test_dec_100_processors_act_on_greedy_batches_in_their_declared_order(
    make: Make, mixed: bool
) -> None:
    bench = make(two_rows(), plugins=[AddTen, Halve])
    others = [SamplingParams(seed=s, temperature=float(mixed), max_tokens=3) for s in range(6)]

    def run(params: SamplingParams) -> list[int]:
        return bench.ids([[A]] * 7, [*others[:3], params, *others[3:]])[3]

    for names, values in ((("add", "halve"), [12.0, 6.0]), (("halve", "add"), [1.0, 11.0])):
        steps = Steps()
        callables = [getattr(steps, name) for name in names]
        found = run(SamplingParams(temperature=0.0, max_tokens=3, logits_processors=callables))
        assert found == [B] * 3
        assert steps.values == values * 3
    for chain, values in (
        (["dec_add_ten", "dec_halve"], [12.0, 6.0]),
        (["dec_halve", "dec_add_ten"], [1.0, 11.0]),
    ):
        AddTen.values.clear()
        found = run(SamplingParams(temperature=0.0, max_tokens=3, chain=chain))
        assert found == [B] * 3
        assert AddTen.values == values * 3


class FiveTokens:
    """Counts its steps, and lets no more than four different tokens come."""

    def __init__(self) -> None:
        self.num_steps = 0

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        self.num_steps += 1
        different = sorted(set(output_ids))
        if len(different) == 4:
            only = torch.full_like(logits, -torch.inf)
            only[different] = logits[different]
            return only
        return logits


class FiveTokensState:
    """Of one sequence: its steps and its different tokens."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.different: list[int] = []


class FiveTokensStage(Stage):
    """The same with a state of tokens; keeps the last state of each sequence for the test."""

    name = "dec_five_tokens"
    kind = Kind.MASK
    caps = Caps(stateful=True)
    last: dict[int, FiveTokensState] = {}

    def open(self, params: Any, prompt: Sequence[int]) -> FiveTokensState:
        state = self.last[prompt[0]] = FiveTokensState()
        return state

    def accept(self, state: FiveTokensState, tokens: Sequence[int]) -> None:
        for token in tokens:
            state.num_steps += 1
            if token not in state.different:
                state.different.append(token)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        for row, state in enumerate(rows.states):
            if len(state.different) == 4:
                gone = torch.ones(logits.shape[1], dtype=torch.bool)
                gone[state.different] = False
                logits[row].masked_fill_(gone, -torch.inf)


@pytest.mark.parametrize("kind", ["callable", "stage"])
def test_dec_101_processors_and_preemption(
    make: Make, small_pool: Callable[[Bench, int], Bench], kind: str
) -> None:
    large = make(flat_table(97), plugins=[FiveTokensStage])
    small = small_pool(large, 80)  # 16 requests of 151 tokens want 160 blocks

    def run(bench: Bench) -> tuple[list[list[int]], list[int]]:
        FiveTokensStage.last.clear()
        counters = [FiveTokens() for _ in range(16)]
        params = [
            SamplingParams(seed=seed, max_tokens=150, logits_processors=[counter])
            if kind == "callable"
            else SamplingParams(seed=seed, max_tokens=150, chain=["dec_five_tokens"])
            for seed, counter in enumerate(counters)
        ]
        ids = bench.ids([[number] for number in range(16)], params)
        states: list[Any] = counters
        if kind == "stage":
            states = [FiveTokensStage.last[number] for number in range(16)]
        return ids, [state.num_steps for state in states]

    expected, _ = run(large)
    found, steps = run(small)

    assert small.count("num_preemptions") > 0
    assert found == expected
    assert steps == [150] * 16
    assert all(len(set(ids)) == 4 for ids in found)
