"""Token ids in and out: generate, tokenize, detokenize, abort."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from decodekit import LLM, SamplingParams
from decodekit.plugins.serve.live import LiveServer

Events = Callable[[str], list[dict[str, Any]]]
GENERATE = "/inference/v1/generate"


def test_ids_are_continued_as_in_python(
    http: httpx.Client, offline: LLM, events_of: Events
) -> None:
    fields = {"seed": 3, "max_tokens": 8, "top_k": 30, "n": 2, "logprobs": 1}
    body = {"token_ids": [5, 6, 7], "sampling_params": fields, "request_id": "mine"}
    answer = http.post(GENERATE, json=body).json()
    events = events_of(http.post(GENERATE, json={**body, "stream": True}).text)

    [expected] = offline.generate([[5, 6, 7]], SamplingParams(**fields), use_tqdm=False)
    assert answer["request_id"] == "mine"
    for choice, part in zip(answer["choices"], expected.outputs, strict=True):
        assert choice["token_ids"] == list(part.token_ids)
        assert len(choice["logprobs"]["content"]) == len(part.token_ids)
        assert choice["finish_reason"] == part.finish_reason
        streamed = [t for e in events for c in e["choices"] if c["index"] == part.index
                    for t in c["token_ids"]]  # fmt: skip
        assert streamed == list(part.token_ids)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"tempreature": 1}, "temperature"), ({"logits_processors": []}, "logits_processors"),
     ({"top_p": 3}, "top_p"), ({"max_tokens": 0}, "max_tokens"), ({"logprobs": 50}, "logprobs")],
    ids=str,
)  # fmt: skip
def test_bad_sampling_params_are_refused(
    http: httpx.Client, fields: dict[str, Any], named: str
) -> None:
    answer = http.post(GENERATE, json={"token_ids": [1], "sampling_params": fields})

    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


def test_a_tokens_only_server_needs_no_tokenizer(serve: Any) -> None:
    server = serve(tokens_only=True, engine={"skip_tokenizer_init": True})
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "seed": 1, "logprobs": 0}}
    answer = httpx.post(server.url + GENERATE, json=body).json()

    assert len(answer["choices"][0]["token_ids"]) == 3
    assert answer["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 404
    stopped = {**body, "sampling_params": {"stop": ["a"]}}
    assert httpx.post(server.url + GENERATE, json=stopped).status_code == 400


def test_text_goes_to_ids_and_back(http: httpx.Client, offline: LLM) -> None:
    told = http.post("/tokenize", json={"prompt": "häh<x>", "return_token_strs": True}).json()
    own = offline.get_tokenizer()("häh<x>")["input_ids"]

    assert told["tokens"] == own
    assert told["count"] == len(own) == len(told["token_strs"])
    assert told["max_model_len"] == 4096
    back = http.post("/detokenize", json={"tokens": own}).json()
    assert back == {"prompt": "häh<x>"}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": []}),
     ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [258]}),
     ("/detokenize", {"tokens": "a"})],
    ids=str,
)  # fmt: skip
def test_bad_tokenizer_calls_are_refused(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    assert http.post(path, json=body).status_code == 400


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_is_aborted_by_the_id_of_its_answer(
    live: LiveServer, http: httpx.Client, is_streamed: bool
) -> None:
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "request_id": "long"}
    found: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: found.append(
            httpx.post(f"{live.url}/v1/completions", json={**body, "stream": is_streamed},
                       timeout=60)
        )
    )  # fmt: skip
    thread.start()
    end = time.monotonic() + 20
    while "cmpl-long" not in live.state.running or not live.engine.engine.requests:
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.1)

    again = http.post("/v1/completions", json=body)
    assert http.post("/abort_requests", json={"request_ids": ["nobody", "long"]}).status_code == 200
    thread.join()

    assert again.status_code == 400
    assert "already running" in again.json()["error"]["message"]
    assert '"finish_reason":"abort"' in found[0].text
