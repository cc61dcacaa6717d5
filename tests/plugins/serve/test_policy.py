"""What the operator decides: lengths, presets, stages, fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from decodekit.core.errors import ValidationError
from decodekit.plugins.serve.settings import ServeSettings

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TALK = [{"role": "user", "content": "hi"}]
OPEN: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture
def presets(tmp_path: Path) -> str:
    """Two presets, one with a pinned temperature."""
    path = tmp_path / "own.json"
    path.write_text(
        json.dumps(
            {
                "calm": {"temperature": 0.2, "max_tokens": 5, "pinned": ["temperature"]},
                "wild": {"temperature": 1.8, "top_k": 7},
            }
        )
    )
    return str(path)


def count(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["completion_tokens"]
    return tokens


def test_lengths_have_a_default_and_a_hard_limit(serve: Any) -> None:
    server = serve(default_max_tokens=7, max_tokens_limit=20)
    with httpx.Client(base_url=server.url) as client:
        for path, body in ((CHAT, {"messages": TALK}), (COMPLETIONS, {"prompt": "a"})):
            assert count(client.post(path, json={**body, **OPEN})) == 7
            assert count(client.post(path, json={**body, **OPEN, "max_tokens": 20})) == 20
            refused = client.post(path, json={**body, **OPEN, "max_tokens": 21})
            assert refused.status_code == 400
            assert "20" in refused.json()["error"]["message"]
        assert (
            count(client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": None, **OPEN})) == 20
        )


def test_the_configs_length_is_a_default_and_where_it_was_chosen_a_cap(serve: Any) -> None:
    server = serve(engine={"override_generation_config": {"max_new_tokens": 9}})
    with httpx.Client(base_url=server.url) as client:
        assert count(client.post(CHAT, json={"messages": TALK, **OPEN})) == 9
        cut = client.post(CHAT, json={"messages": TALK, **OPEN, "max_tokens": 30})
        assert count(cut) == 9
        assert "from 30 to 9" in cut.headers["X-Decodekit-Note"]


def test_a_preset_of_the_request_and_of_the_served_name(serve: Any, presets: str) -> None:
    server = serve(
        served_model_name=["a", "b"],
        served_preset=["b=calm"],
        engine={"preset_file": presets},
    )
    with httpx.Client(base_url=server.url) as client:

        def plan(**body: Any) -> dict[str, Any]:
            answer = client.post(CHAT, json={"messages": TALK, "return_plan": True, **OPEN, **body})
            assert answer.status_code == 200, answer.text
            told = answer.json()["choices"][0]["plan"]["order"]
            return {step["stage"]: step for step in told}

        assert "temperature" not in plan(model="a", max_tokens=2)
        wild = plan(model="a", preset="wild", max_tokens=2)
        assert wild["temperature"]["params"]["t"] == 1.8
        assert "preset wild" in wild["temperature"]["provenance"].values()
        calm = plan(model="b")
        assert calm["temperature"]["params"]["t"] == 0.2
        assert count(client.post(CHAT, json={"messages": TALK, "model": "b", **OPEN})) == 5
        pinned = client.post(CHAT, json={"messages": TALK, "model": "b", "temperature": 1})
        assert pinned.status_code == 400
        assert "pinned" in pinned.json()["error"]["message"]
        unknown = client.post(CHAT, json={"messages": TALK, "preset": "wlid"})
        assert "did you mean 'wild'" in unknown.json()["error"]["message"]
        cards = client.get("/v1/models").json()["data"]
        assert [card["preset"] for card in cards] == [None, "calm"]


def test_stages_that_are_not_allowed_are_refused(serve: Any) -> None:
    server = serve(served_model_name=["a", "b"], allowed_stages=["temperature,top_p", "b=top_k"])
    with httpx.Client(base_url=server.url) as client:

        def ask(**body: Any) -> httpx.Response:
            return client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1, **body})

        assert ask(model="a", temperature=0.5, top_p=0.9).status_code == 200
        for body in ({"top_k": 3}, {"chain": ["top_k", "temperature"]}, {"min_p": 0.1}):
            refused = ask(model="a", **body)
            assert refused.status_code == 400
            assert "is not allowed" in refused.json()["error"]["message"]
        assert ask(model="b", top_k=3).status_code == 200
        assert ask(model="b", temperature=0.5).status_code == 400


@pytest.mark.parametrize(
    ("own", "engine"),
    [
        ({"served_preset": ["nobody=chat"]}, {}),
        ({"served_preset": ["table=chta"]}, {}),
        ({"allowed_stages": ["top_q"]}, {}),
        ({"allowed_stages": ["nobody=top_k"]}, {}),
        ({"middleware": ["no.such.thing"]}, {}),
        ({}, {"preset_file": "/nowhere.toml"}),
    ],
    ids=str,
)
def test_a_bad_policy_is_refused_before_anything_is_served(
    serve: Any, own: dict[str, Any], engine: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        serve(engine=engine, **own)


@pytest.mark.parametrize(
    "own",
    [{"max_tokens_limit": 0}, {"default_max_tokens": 9, "max_tokens_limit": 3},
     {"served_preset": ["x"]}, {"chat_template_content_format": "xml"}, {"api_key": [""]},
     {"enable_log_outputs": True}, {"drain_timeout": -1.0}, {"strct_fields": True}],
    ids=str,
)  # fmt: skip
def test_settings_are_checked_when_they_are_made(own: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ServeSettings(**own)


def test_templates_come_from_requests_only_where_they_are_trusted(serve: Any) -> None:
    server = serve(trust_request_chat_template=True)
    url = f"{server.url}/tokenize"
    own = httpx.post(url, json={"messages": TALK, "chat_template": "{{ messages[0].content }}!"})
    file = httpx.post(url, json={"messages": TALK, "chat_template": "/etc/hostname"})

    assert bytes(own.json()["tokens"]) == b"hi!"
    assert file.status_code == 400


def test_usage_and_ids_are_told_where_the_server_says_so(serve: Any) -> None:
    server = serve(enable_force_include_usage=True, enable_request_id_headers=True)
    answer = httpx.post(
        server.url + CHAT,
        json={"messages": TALK, "max_tokens": 2, "stream": True},
        headers={"X-Request-Id": "mine"},
    )

    assert answer.headers["X-Request-Id"] == "mine"
    lines = [line for line in answer.text.split("\n") if line.startswith("data: {")]
    assert all('"usage":{' in line and '"id":"chatcmpl-mine"' in line for line in lines)


def test_requests_and_answers_are_logged_where_asked(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "decodekit.serve")
    server = serve(enable_log_requests=True, enable_log_outputs=True, max_log_len=3)
    body = {"prompt": "secrets", "max_tokens": 9, "flux_capacity": 1, "ignore_eos": True}
    answer = httpx.post(server.url + COMPLETIONS, json=body).json()

    lines = [record.getMessage() for record in caplog.records]
    assert any("flux_capacity" in line for line in lines)
    assert any(f"request {answer['id']}: prompt 'sec'" in line for line in lines)
    [told] = [line for line in lines if line.startswith("answer")]
    assert repr([answer["choices"][0]["text"][:3]]) in told
