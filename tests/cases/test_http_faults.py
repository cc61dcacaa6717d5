"""What goes wrong while requests run, over HTTP: DEC-099 and DEC-102."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from torch import Tensor

from decodekit.core.batch import RowView
from decodekit.core.stage import Kind, Stage, StageParams
from decodekit.plugins.author.table_model import byte_tokenizer, flat_table

if TYPE_CHECKING:
    from tests.cases.conftest import MakeSite, Site

COMPLETIONS = "/v1/completions"


class Faulty(Stage):
    """Raises, or returns nonsense, at step 3."""

    name = "faulty"
    kind = Kind.BIAS

    class Params(StageParams):
        """How it fails."""

        how: str = "raise"

    @classmethod
    def bind(cls, params: Any, ctx: Any) -> Any:
        if params.how == "build":
            raise ValueError("cannot be built")
        return params

    def open(self, params: Any, sequence: Any) -> Any:
        return [0]

    def accept(self, state: Any, token: int) -> None:
        state[0] += 1

    def transform(self, logits: Tensor, rows: RowView) -> Any:
        for row in range(len(logits)):
            if rows.state(row)[0] >= 3:
                raise RuntimeError("on purpose")
        return logits


def test_dec_099_a_fault_in_a_stage_is_that_requests_alone(make_site: MakeSite) -> None:
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>")
    site = make_site(flat_table(257), model={"tokenizer": tokenizer}, plugins=[Faulty])
    bodies: list[dict[str, Any]] = [
        {"prompt": [i], "seed": i, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
        for i in range(7)
    ]
    solo = [site.complete(**body)["choices"][0]["token_ids"] for body in bodies]
    bad = {"prompt": [9], "max_tokens": 12, "chain": [{"stage": "faulty"}], "ignore_eos": True}

    with ThreadPoolExecutor(9) as pool:
        healthy = [pool.submit(site.complete, **body) for body in bodies]
        plain = pool.submit(site.post, COMPLETIONS, bad)
        streamed = pool.submit(site.events, COMPLETIONS, **bad)
        answer = plain.result()
        events = streamed.result()

    assert [each.result()["choices"][0]["token_ids"] for each in healthy] == solo
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert "faulty" in answer.json()["error"]["message"]
    assert events[-1]["error"]["code"] == 500
    site.refused(COMPLETIONS, {**bad, "chain": [{"stage": "faulty", "how": "build"}]})
    site.refused(COMPLETIONS, {**bad, "chain": [{"stage": "faulty", "who": "x"}]})
    site.check_answers()
    metrics = site.http.get("/metrics").text
    assert 'decodekit:plugin_errors_total{engine="0",model_name="T",plugin="faulty"} 2.0' in metrics


def test_dec_102_a_client_that_goes_away(make_site: MakeSite) -> None:
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>")
    site = make_site(flat_table(257), model={"tokenizer": tokenizer, "context": 8192})
    body = {"prompt": "abc", "max_tokens": 5000, "ignore_eos": True}

    async def leave(client: httpx.AsyncClient, stream: bool, n: int) -> None:
        with pytest.raises(httpx.TimeoutException):
            if not stream:
                await client.post(COMPLETIONS, json={**body, "n": n}, timeout=0.7)
                return
            more = {**body, "n": n, "stream": True}
            async with client.stream("POST", COMPLETIONS, json=more) as answer:
                end = time.monotonic() + 0.7
                async for _ in answer.aiter_lines():
                    if time.monotonic() > end:
                        raise httpx.TimeoutException("seen enough")

    async def all_leave() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=site.server.url, limits=limits, timeout=30) as client:
            await asyncio.gather(
                *(leave(client, stream, n) for stream in (True, False) for n in (1, 4)
                  for _ in range(5))
            )  # fmt: skip

    asyncio.run(all_leave())

    assert idle_within(site, 3.0)
    generated = site.count("generation_tokens")
    time.sleep(0.2)
    assert site.count("generation_tokens") == generated
    assert not site.server.state.running
    site.check_answers()


def idle_within(site: Site, seconds: float) -> bool:
    """Whether nothing runs and no cache is held soon."""
    end = time.monotonic() + seconds
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(site.count(name) for name in names):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
