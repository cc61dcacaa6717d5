"""Names, health, sleep, pause and caches."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import openai
import pytest

import decodekit
from decodekit.plugins.serve.live import LiveServer

BODY = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "return_token_ids": True}


def test_models_are_listed_by_every_served_name(live: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x") as client:
        listed = client.models.list().data
        one = client.models.retrieve("other")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nobody")

    assert [card.id for card in listed] == ["table", "other"]
    assert one.id == "other"
    assert listed[0].model_dump()["max_model_len"] == 4096


def test_the_second_name_stands_in_the_answer_that_asked_for_it(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={**BODY, "model": "other"}).json()["model"] == "other"
    assert http.post("/v1/completions", json=BODY).json()["model"] == "table"


def test_health_ping_and_version(http: httpx.Client) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = http.request(method, path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert http.get("/version").json() == {"version": decodekit.__version__}


def test_sleep_wake_and_the_same_greedy_text(serve: Any) -> None:
    """Row 18 of the checklist."""
    server = serve(engine={"enable_sleep_mode": True})
    with httpx.Client(base_url=server.url) as client:
        before = client.post("/v1/completions", json=BODY).json()["choices"]
        for level in (1, 2):
            slept = client.post("/sleep", params={"level": level})
            assert (slept.status_code, slept.content) == (200, b"")
            assert client.get("/is_sleeping").json() == {"is_sleeping": True}
            assert client.get("/health").status_code == 200
            state = ("weights_offloaded", "discard_all")[level - 1]
            assert f'sleep_state="{state}"}} 1.0' in client.get("/metrics").text
            asleep = client.post("/v1/completions", json=BODY)
            assert asleep.status_code == 503
            assert "/wake_up" in asleep.json()["error"]["message"]
            assert client.post("/wake_up", params={"tags": ["weights"]}).status_code == 200
            assert client.get("/is_sleeping").json() == {"is_sleeping": True}
            assert client.post("/wake_up").status_code == 200
            assert client.get("/is_sleeping").json() == {"is_sleeping": False}
            assert client.post("/v1/completions", json=BODY).json()["choices"] == before


@pytest.mark.parametrize(
    ("path", "query"),
    [("/sleep", "level=1"), ("/sleep", "level=7"), ("/sleep", "level=0&mode=x"),
     ("/wake_up", "tags=x"), ("/pause", "mode=x"), ("/reset_prefix_cache", "reset_external=true"),
     ("/reset_prefix_cache", "reset_running_requests=maybe")],
)  # fmt: skip
def test_bad_control_calls_are_refused(http: httpx.Client, path: str, query: str) -> None:
    """The shared server has no sleep mode."""
    answer = http.post(f"{path}?{query}")

    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_paused_server_goes_on_where_it_stopped(serve: Any) -> None:
    server = serve()
    url = f"{server.url}/v1/completions"
    expected = httpx.post(url, json=BODY).json()["choices"]
    assert httpx.post(f"{server.url}/pause?mode=keep").json() == {"status": "paused"}
    assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": True}
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(httpx.post(url, json=BODY, timeout=30)))
    thread.start()
    time.sleep(0.3)
    assert not found
    assert httpx.post(f"{server.url}/resume").json() == {"status": "resumed"}
    thread.join()

    assert found[0].json()["choices"] == expected


def test_the_prefix_cache_is_forgotten(serve: Any) -> None:
    server = serve(enable_prompt_tokens_details=True)
    body = {**BODY, "prompt": "a" * 40}

    def cached() -> int:
        usage = httpx.post(f"{server.url}/v1/completions", json=body).json()["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached() == 0
    assert cached() == 32
    assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 200
    assert cached() == 0


def test_a_dead_engine_is_told_by_health_and_by_answers(serve: Any) -> None:
    server = serve()
    server.engine.engine.die("on purpose")

    assert httpx.get(f"{server.url}/health").status_code == 503
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    server._thread.join(10)
    assert server.server.is_engine_dead


def test_the_control_endpoints_can_be_taken_away(serve: Any) -> None:
    server = serve(control_endpoints=False)

    for path in ("/sleep", "/pause", "/abort_requests", "/reset_prefix_cache"):
        assert httpx.post(server.url + path).status_code == 404
    assert httpx.post(f"{server.url}/v1/completions", json=BODY).status_code == 200
