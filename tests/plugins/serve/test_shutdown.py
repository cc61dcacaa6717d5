"""The end of a server: what runs finishes in its time, what is cut off is told, nothing hangs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from decodekit.plugins.serve.live import LiveServer

LONG = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}


def begun(server: LiveServer, count: int) -> None:
    """Wait until `count` requests run."""
    end = time.monotonic() + 30
    while len(server.engine.engine.requests) < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def ask(server: LiveServer, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={**LONG, **more}, timeout=60)


def test_running_requests_finish_before_the_server_ends(serve: Any) -> None:
    server = serve(drain_timeout=60.0)
    with ThreadPoolExecutor(2) as pool:
        running: list[Future[httpx.Response]] = [
            pool.submit(ask, server, max_tokens=60, stream=stream) for stream in (False, True)
        ]
        begun(server, 2)
        server.server.should_exit = True
        plain, streamed = (each.result() for each in running)
    server._thread.join(20)

    assert plain.json()["usage"]["completion_tokens"] == 60
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in streamed.text
    assert not server._thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        ask(server)


def test_what_does_not_finish_in_time_is_told_and_nothing_hangs(serve: Any) -> None:
    server = serve(drain_timeout=0.3)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(ask, server, stream=stream) for stream in (False, True)]
        begun(server, 2)
        server.server.should_exit = True
        plain, streamed = (each.result() for each in running)
    server._thread.join(20)

    assert plain.status_code == 503
    assert "shutting down" in plain.json()["error"]["message"]
    assert streamed.status_code == 200
    assert '"code":503' in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert not server._thread.is_alive()


def test_a_crowd_that_comes_and_goes_leaves_nothing(serve: Any) -> None:
    """Forty clients, of which each fourth leaves in mid-stream."""
    server = serve()

    def client(number: int) -> str:
        body = {"prompt": f"p{number}", "max_tokens": 30, "ignore_eos": True, "stream": True,
                "seed": number, "n": 1 + number % 2}  # fmt: skip
        with httpx.Client(base_url=server.url, timeout=60) as own:
            with own.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                if number % 4 == 0:
                    next(lines)
                    return "left"
                return "".join(lines)

    threads = threading.active_count()
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(client, range(40)))
    end = time.monotonic() + 10
    while server.engine.engine.requests or server.state.running:
        assert time.monotonic() < end
        time.sleep(0.02)

    assert sum(text.endswith("data: [DONE]") for text in texts) == 30
    assert server.engine.engine.parts.pool.num_used == 0
    assert not server.engine._streams
    assert not server.state.meters._last_token
    assert threading.active_count() <= threads + 4  # those of asyncio.to_thread stay
