"""The playground: it is served, stays on its own server, and works in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from decodekit import request_schema
from decodekit.plugins.serve.live import LiveServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def test_the_page_and_its_script_are_served(http: httpx.Client) -> None:
    page, script = http.get("/"), http.get("/page.js")

    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    assert "http://" not in page.text + script.text
    assert "https://" not in page.text + script.text


def test_the_schema_is_that_of_the_engine(live: LiveServer, http: httpx.Client) -> None:
    parts = live.engine.engine.parts

    told = http.get("/v1/schema").json()

    assert told == request_schema(parts.registry, presets=parts.presets)


def test_the_page_needs_no_key_and_the_schema_does(serve: Any) -> None:
    server = serve(api_key=["secret"])

    with httpx.Client(base_url=server.url) as client:
        assert client.get("/").status_code == 200
        assert client.get("/page.js").status_code == 200
        assert client.get("/v1/schema").status_code == 401


def test_the_page_can_be_left_out(serve: Any) -> None:
    server = serve(disable_playground=True)

    with httpx.Client(base_url=server.url) as client:
        assert client.get("/").status_code == 404
        assert client.get("/v1/schema").status_code == 200


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, live: LiveServer) -> Iterator[Any]:
    page = browser.new_page()
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    page.goto(live.url)
    page.wait_for_selector("#model option", state="attached")
    yield page
    page.close()
    assert broken == []


def names(page: Any) -> list[str]:
    return [each.inner_text() for each in page.locator("#chain .name").all()]


@pytest.mark.slow
def test_an_answer_shows_its_probabilities_and_its_trace(page: Any) -> None:
    page.fill("#field-max_tokens", "6")
    page.check("#own-chain")

    page.click("#send")
    page.wait_for_selector("#token table")

    assert page.locator("#text .token").count() == 6
    assert page.locator("#token .bar").count() >= 8
    stages = page.locator("#token table").first.locator("td:first-child").all_inner_texts()
    assert [each.removesuffix(" ★") for each in stages] == ["temperature", "top_k", "top_p"]


@pytest.mark.slow
def test_stages_are_dragged_added_and_sorted(page: Any) -> None:
    page.check("#own-chain")

    page.locator("#chain .handle").nth(2).drag_to(page.locator("#chain li").nth(0))
    dragged = names(page)
    page.select_option("#add", "min_p")
    added = names(page)
    page.click("#sort")

    assert dragged == ["top_p", "temperature", "top_k"]
    assert added == [*dragged, "min_p"]
    assert names(page) == ["temperature", "min_p", "top_k", "top_p"]


@pytest.mark.slow
def test_a_refusal_is_shown(page: Any) -> None:
    page.fill("#field-temperature", "-1")

    page.click("#send")
    page.wait_for_selector("#error:not(:empty)")

    assert "temperature must be" in page.locator("#error").inner_text()
