"""Aborts and leaks: DEC-102 to DEC-104."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from decodekit import AsyncLLM, SamplingParams
from decodekit.core.request import Request
from decodekit.core.request import Sequence as TokenSequence
from decodekit.plugins.author.table_model import flat_table
from decodekit.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make


def metric(engine: Any, name: str) -> float:
    return next(m.value for m in engine.get_metrics() if m.name == f"decodekit:{name}")


async def until(condition: Callable[[], bool]) -> bool:
    """Wait for `condition`, three seconds of it at most."""
    for _ in range(300):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False


def test_dec_102_a_client_that_goes_away(make: Make) -> None:
    bench = make(flat_table(97), model={"context": 8192}, blocks=7000)
    engine = AsyncLLM(str(bench.folder), **bench.options)

    async def consume(params: SamplingParams) -> None:
        async for _ in engine.generate({"prompt_token_ids": [1, 2, 3]}, params):
            pass

    async def leave() -> None:
        clients = [
            asyncio.create_task(
                consume(SamplingParams(max_tokens=5000, n=n, output_kind=kind, seed=seed))
            )
            for seed in range(5)
            for n in (1, 4)
            for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)
        ]
        assert len(clients) == 20
        assert await until(lambda: metric(engine, "generation_tokens") > 200)
        assert metric(engine, "num_requests_running") > 0
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        assert await until(
            lambda: (
                metric(engine, "num_requests_running") == 0
                and metric(engine, "num_requests_waiting") == 0
                and metric(engine, "kv_cache_usage_perc") == 0
            )
        )
        count = metric(engine, "generation_tokens")
        await asyncio.sleep(0.1)
        assert metric(engine, "generation_tokens") == count < 5000

    _finish(engine, leave())


def _finish(engine: AsyncLLM, work: Awaitable[None]) -> None:
    async def run() -> None:
        await work

    try:
        asyncio.run(run())
    finally:
        engine.shutdown()


def test_dec_103_abort_at_any_moment_twice_or_for_nobody(rough: Bench) -> None:
    """Greedy on the table, so that every answer is known by hand."""
    bench = rough.fresh(max_num_seqs=16, max_num_batched_tokens=24)  # prefill in chunks
    random_ = random.Random(103)
    prompts: dict[str, list[int]] = {}
    limits: dict[str, int] = {}
    for number in range(500):
        name = f"a{number}"
        prompts[name] = [random_.randrange(97) for _ in range(random_.randrange(1, 40))]
        limits[name] = random_.randrange(1, 9)
    neighbours = {f"n{number}": [number, 3] for number in range(20)}
    drawn = [SamplingParams(seed=number, max_tokens=12) for number in range(20)]
    pairs = zip(neighbours.values(), drawn, strict=True)
    alone = [bench.solo(prompt, each) for prompt, each in pairs]

    order = [*prompts, *neighbours]
    random_.shuffle(order)
    doomed: list[tuple[int, str]] = []  # step at which it is aborted, some again later
    for place, name in enumerate(order):
        if name in neighbours:
            bench.add(name, neighbours[name], drawn[int(name[1:])])
            continue
        bench.add(name, prompts[name], SamplingParams(temperature=0.0, max_tokens=limits[name]))
        about = place // 2  # roughly when its turn comes: before, in prefill, at its end, after
        doomed += [(max(0, about + random_.randrange(-40, 60)), name)]
        doomed += [(doomed[-1][0] + random_.choice([0, 1, 30]), name)]
    step = 0
    while bench.engine.has_unfinished_requests():
        for when, name in doomed:
            if when == step:
                bench.engine.abort_request(name)
        bench.engine.abort_request([f"nobody-{step}"])
        bench.step()
        step += 1
    bench.engine.abort_request(order)
    done = bench.finish()

    assert set(done) == set(order)
    for name, right in zip(neighbours, alone, strict=True):
        assert list(done[name].outputs[0].token_ids) == right
    reasons: dict[str | None, int] = {}
    lengths: set[int] = set()
    for name, prompt in prompts.items():
        part = done[name].outputs[0]
        path = bench.path(prompt[-1], limits[name])
        reasons[part.finish_reason] = reasons.get(part.finish_reason, 0) + 1
        if part.finish_reason == "abort":
            lengths.add(len(part.token_ids))
            assert len(part.token_ids) < limits[name]
            assert list(part.token_ids) == path[: len(part.token_ids)]
        else:
            assert list(part.token_ids) == path
    assert set(reasons) == {"abort", "length"}
    assert min(reasons.values()) > 50
    assert {0, 1, 2, 3} <= lengths  # queued, in prefill, and on the way
    bench.check_answers()


def _resident() -> int:
    """Resident memory in pages."""
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc for memory")
def test_dec_104_nothing_is_left_after_n_requests(make: Make) -> None:
    bench = make(flat_table(97))
    engine = bench.engine

    def run(first: int) -> None:
        """50 requests of four answers; every other one is aborted."""
        names = [f"leak-{first + number}" for number in range(50)]
        for number, name in enumerate(names, first):
            params = SamplingParams(n=4, logprobs=20, max_tokens=2)
            bench.add(name, [number % 97, number // 97], params)
        for place, name in enumerate(names):
            if place % 10 == 0:
                bench.step()
            if place % 2:
                engine.abort_request(name)
        done = bench.finish()
        assert len(done) == 50
        assert {part.finish_reason for part in done[names[1]].outputs} <= {"abort", "length"}
        del done

    def left() -> list[Any]:
        gc.collect()
        objects = gc.get_objects()
        requests = [each for each in objects if type(each) is Request]
        requests += [each.request for each in objects if type(each) is TokenSequence]
        return [each.request_id for each in requests if each.request_id.startswith("leak-")]

    for first in range(0, 500, 50):
        run(first)
    gc.collect()
    early = _resident()
    for first in range(500, 2000, 50):
        run(first)
    gc.collect()
    late = _resident()

    assert late <= early * 1.05
    assert left() == []
    assert not engine.requests
    assert not engine.has_unfinished_requests()
    scheduler = engine.parts.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    bench.check_answers()
