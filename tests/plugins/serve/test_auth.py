"""Keys, CORS and the size of bodies."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from decodekit.plugins.serve.auth import OPEN_PATHS
from decodekit.plugins.serve.settings import keys_of_environment

BODY = {"prompt": "a", "max_tokens": 1}
HEALTH = {"/health", "/ping", "/version", "/metrics"}
PAGE = {path for path in OPEN_PATHS if path.startswith("/page") or path == "/"}  # holds no data


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_endpoint_but_health_needs_a_key(serve: Any) -> None:
    """Row 5 of the checklist."""
    server = serve(api_key=["one", "two"])
    assert OPEN_PATHS == HEALTH | PAGE
    with httpx.Client(base_url=server.url) as client:
        paths = client.get("/openapi.json", headers=bearer("one")).json()["paths"]
        for path, methods in paths.items():
            for method in methods:
                answer = client.request(method, path.replace("{model}", "table"))
                assert (answer.status_code == 401) is (path not in OPEN_PATHS), path
                if answer.status_code == 401 and not path.startswith("/v1/messages"):
                    assert answer.json() == {"error": "Unauthorized"}
        for key in ("one", "two"):
            assert client.post("/v1/completions", json=BODY, headers=bearer(key)).status_code == 200
        wrong = [bearer("three"), {"Authorization": "Bearer"}, {"Authorization": "Basic one"}]
        for headers in [*wrong, {"x-api-key": "one"}]:
            answer = client.post("/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == 401
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="bad", max_retries=0) as wrong:
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def test_the_key_may_be_asked_for_under_v1_only(serve: Any) -> None:
    server = serve(api_key=["one"], auth_v1_only=True)

    assert httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}).status_code == 200
    assert httpx.post(f"{server.url}/v1/completions", json=BODY).status_code == 401


def test_the_key_may_come_from_the_environment() -> None:
    assert keys_of_environment({}) == []
    assert keys_of_environment({"VLLM_API_KEY": "v"}) == ["v"]
    assert keys_of_environment({"VLLM_API_KEY": "v", "DECODEKIT_API_KEY": "d"}) == ["d"]


def test_a_browser_may_ask_before_it_has_a_key(serve: Any) -> None:
    server = serve(api_key=["one"], allowed_origins=["https://a.example"])
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
               "Access-Control-Request-Headers": "authorization"}  # fmt: skip
    asked = httpx.options(f"{server.url}/v1/completions", headers=headers)
    refused = httpx.post(f"{server.url}/v1/completions", json=BODY,
                         headers={"Origin": "https://a.example"})  # fmt: skip
    other = httpx.options(f"{server.url}/v1/completions",
                          headers={**headers, "Origin": "https://b.example"})  # fmt: skip

    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "https://a.example"
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    assert other.status_code == 400


def test_a_body_over_the_limit_is_refused_before_it_is_read(serve: Any) -> None:
    server = serve(max_body_bytes=1000)
    url = f"{server.url}/v1/completions"
    whole = httpx.post(url, json={"prompt": "a" * 2000})

    def pieces() -> Any:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"a" * 100
        yield b'"}'

    chunked = httpx.post(url, content=pieces(), headers={"Content-Type": "application/json"})
    for answer in (whole, chunked):
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "RequestEntityTooLargeError"
    assert httpx.post(url, json=BODY).status_code == 200
