"""Completions: prompts in order, echo, log-probs and streams, against the Python API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from decodekit import LLM, SamplingParams
from decodekit.plugins.serve.live import LiveServer

Events = Callable[[str], list[dict[str, Any]]]
PATH = "/v1/completions"


def post(http: httpx.Client, **body: Any) -> Any:
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_prompts_times_n_stand_in_order(live: LiveServer, offline: LLM) -> None:
    """Row 11 of the checklist."""
    prompts = ["one", "two", "three"]
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x") as client:
        answer = client.completions.create(
            model="table", prompt=prompts, n=2, seed=4, max_tokens=6, temperature=1
        )

    outputs = offline.generate(prompts, SamplingParams(n=2, seed=4, max_tokens=6), use_tqdm=False)
    expected = [part.text for output in outputs for part in output.outputs]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 11
    assert answer.usage.completion_tokens == sum(
        len(part.token_ids) for output in outputs for part in output.outputs
    )


@pytest.mark.parametrize("prompt", ["ab", [97, 98], ["ab"], [[97, 98]]], ids=repr)
def test_every_form_of_a_prompt_gives_the_same(http: httpx.Client, prompt: Any) -> None:
    answer = post(http, prompt=prompt, seed=1, max_tokens=5)
    same = post(http, prompt="ab", seed=1, max_tokens=5)

    assert answer["choices"] == same["choices"]
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"


def test_a_stream_of_several_prompts_joins_to_the_plain_answer(
    http: httpx.Client, events_of: Events
) -> None:
    body = {"prompt": ["a", "bb", "ccc"], "n": 2, "seed": 2, "max_tokens": 8, "logprobs": 2,
            "echo": True, "stop": ["!"]}  # fmt: skip
    plain = post(http, **body)
    events = events_of(http.post(PATH, json={**body, "stream": True}).text)

    for choice in plain["choices"]:
        own = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            pieces = [v for c in own if c["logprobs"] for v in c["logprobs"][name]]
            assert pieces == choice["logprobs"][name]


def test_offsets_point_at_the_tokens_in_the_echoed_text(http: httpx.Client) -> None:
    """Row 10 of the checklist, with generated tokens behind."""
    [choice] = post(http, prompt="prompt", echo=True, logprobs=1, max_tokens=5, seed=3)["choices"]

    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token


def test_a_special_token_keeps_the_offset(http: httpx.Client) -> None:
    chain = [{"stage": "forced_tokens", "prefix": [97, 257, 98]}]
    [choice] = post(http, prompt="p", chain=chain, max_tokens=3, logprobs=0)["choices"]

    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "<x>", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1]


@pytest.mark.parametrize(
    "more",
    [{"suffix": "x"}, {"logprobs": -1}, {"prompt": None}, {"prompt_embeds": "AAAA"},
     {"max_tokens": 0}, {"prompt": [[1, 2], "a"]}, {"prompt": [1.5]}],
    ids=str,
)  # fmt: skip
def test_a_bad_completion_is_refused(http: httpx.Client, more: dict[str, Any]) -> None:
    answer = http.post(PATH, json={"prompt": "a", **more})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(more))


def test_rendered_completions_give_the_direct_answers(http: httpx.Client) -> None:
    body = {"prompt": ["x", "yy"], "seed": 6, "max_tokens": 4, "return_token_ids": True}
    direct = post(http, **body)["choices"]
    bodies = http.post(f"{PATH}/render", json=body).json()

    for own, choice in zip(bodies, direct, strict=True):
        answer = http.post("/inference/v1/generate", json=own).json()
        assert answer["choices"][0]["token_ids"] == choice["token_ids"]
