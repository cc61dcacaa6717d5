"""Chat completions: what the official client reads, plain and streamed, equals the Python API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from decodekit import LLM, SamplingParams
from decodekit.plugins.serve.live import LiveServer

Events = Callable[[str], list[dict[str, Any]]]
TALK: list[Any] = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"messages": TALK, "seed": 5, "max_tokens": 12}
FULL: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "frequency_penalty": 0.5}


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(http: httpx.Client, path: str = "/v1/chat/completions", **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(http: httpx.Client, path: str = "/v1/chat/completions", **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_the_official_client_gets_the_text_of_the_python_api(
    client: openai.OpenAI, offline: LLM
) -> None:
    answer = client.chat.completions.create(
        model="table", messages=TALK, seed=5, max_tokens=12, temperature=0.9,
        frequency_penalty=0.5, extra_body={"top_k": 40},
    )  # fmt: skip

    [expected] = offline.chat(TALK, SamplingParams(seed=5, max_tokens=12, **FULL), use_tqdm=False)
    [choice] = answer.choices
    assert choice.message.content == expected.outputs[0].text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "table"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids or ())
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_fields_at_top_level_act_as_those_of_extra_body(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    """Row 2 of the checklist."""
    one = client.chat.completions.create(
        model="table", messages=TALK, seed=5, max_tokens=12, extra_body={"top_k": 3, "min_p": 0.1}
    )
    two = post(http, **BODY, top_k=3, min_p=0.1)

    assert one.choices[0].message.content == two["choices"][0]["message"]["content"]


def test_a_stream_of_the_official_client_joins_to_the_plain_answer(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    plain = post(http, **BODY, **FULL)
    stream = client.chat.completions.create(
        model="table", messages=TALK, seed=5, max_tokens=12, temperature=0.9,
        frequency_penalty=0.5, stream=True, stream_options={"include_usage": True},
        extra_body={"top_k": 40},
    )  # fmt: skip
    chunks = list(stream)

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain["choices"][0]["message"]["content"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_n_answers_are_those_of_the_python_api(http: httpx.Client, offline: LLM) -> None:
    answer = post(http, **BODY, n=3)

    [expected] = offline.chat(TALK, SamplingParams(seed=5, max_tokens=12, n=3), use_tqdm=False)
    told = {choice["index"]: choice["message"]["content"] for choice in answer["choices"]}
    assert told == {part.index: part.text for part in expected.outputs}
    assert answer["usage"]["completion_tokens"] == 36


def test_log_probs_have_the_values_of_the_python_api(http: httpx.Client, offline: LLM) -> None:
    answer = post(http, **BODY, logprobs=True, top_logprobs=2, return_token_ids=True)

    [expected] = offline.chat(
        TALK, SamplingParams(seed=5, max_tokens=12, logprobs=2), use_tqdm=False
    )
    [choice] = answer["choices"]
    assert choice["token_ids"] == list(expected.outputs[0].token_ids)
    assert answer["prompt_token_ids"] == expected.prompt_token_ids
    content = choice["logprobs"]["content"]
    for entry, token, position in zip(
        content, choice["token_ids"], expected.outputs[0].logprobs or [], strict=True
    ):
        assert entry["logprob"] == pytest.approx(position[token].logprob)
        assert bytes(entry["bytes"]).decode() == entry["token"] == position[token].decoded_token
        assert len(entry["top_logprobs"]) == 2


def test_tokens_are_shown_as_ids_when_asked(http: httpx.Client) -> None:
    answer = post(http, **BODY, logprobs=True, return_tokens_as_token_ids=True,
                  return_token_ids=True)  # fmt: skip

    [choice] = answer["choices"]
    shown = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert shown == [f"token_id:{token}" for token in choice["token_ids"]]


def test_ids_that_were_listed_have_their_log_probs(http: httpx.Client) -> None:
    answer = post(http, **BODY, logprobs=True, logprob_token_ids=[65, 66])

    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert [other["token"] for other in entry["top_logprobs"]] == ["A", "B"]


def test_prompt_log_probs_come_by_position(http: httpx.Client) -> None:
    answer = post(http, **BODY, prompt_logprobs=1)

    told = answer["prompt_logprobs"]
    assert told[0] is None
    assert len(told) == answer["usage"]["prompt_tokens"]
    assert all(set(entry) == {"logprob", "rank", "decoded_token"}
               for position in told[1:] for entry in position.values())  # fmt: skip


def test_several_modes_of_log_probs_come_side_by_side(http: httpx.Client) -> None:
    answer = post(http, **BODY, logprobs=True, logprobs_mode=["raw", "final"], temperature=0.5)

    [choice] = answer["choices"]
    assert list(choice["logprobs_at"]) == ["final"]
    assert len(choice["logprobs_at"]["final"]["content"]) == 12


def test_echo_puts_the_assistants_last_message_first(http: httpx.Client, events_of: Events) -> None:
    talk = [*TALK, {"role": "assistant", "content": "I say "}]
    body = {"messages": talk, "seed": 5, "max_tokens": 4, "echo": True,
            "add_generation_prompt": False, "continue_final_message": True}  # fmt: skip
    plain = post(http, **body)
    streamed = http.post("/v1/chat/completions", json={**body, "stream": True}).text

    content = plain["choices"][0]["message"]["content"]
    assert content.startswith("I say ")
    assert len(content) == 10
    deltas = [e["choices"][0]["delta"].get("content", "") for e in events_of(streamed)]
    assert "".join(deltas) == content
    assert deltas[:2] == ["", "I say "]


def test_the_plan_is_told_on_request(http: httpx.Client) -> None:
    answer = post(http, **BODY, return_plan=True, chain=["top_k", "temperature"], top_k=3)

    plan = answer["choices"][0]["plan"]
    assert [step["stage"] for step in plan["order"]][:1] == ["top_k"]
    assert len(plan["fingerprint"]) > 8


def test_a_chain_of_the_request_acts(http: httpx.Client, offline: LLM) -> None:
    chain = [{"stage": "top_k", "k": 5}, {"stage": "temperature", "t": 0.5}]
    answer = post(http, **BODY, chain=chain)

    params = SamplingParams(seed=5, max_tokens=12, chain=chain)
    [expected] = offline.chat(TALK, params, use_tqdm=False)
    assert answer["choices"][0]["message"]["content"] == expected.outputs[0].text


def test_kept_sets_and_entropy_come_when_asked(http: httpx.Client, events_of: Events) -> None:
    body = {**BODY, "top_k": 3, "kept_set": True, "entropy": True}
    [choice] = post(http, **body)["choices"]
    streamed = events_of(http.post("/v1/chat/completions", json={**body, "stream": True}).text)

    joined = [ids for e in streamed for ids in e["choices"][0].get("kept_set", [])]
    assert joined == choice["kept_set"]
    assert len(choice["kept_set"]) == len(choice["entropy"]) == 12


def test_template_variables_of_the_request_win_over_the_servers(serve: Any) -> None:
    server = serve(default_chat_template_kwargs={"mood": "calm"})
    body = {"messages": TALK}
    texts = []
    for more in ({}, {"chat_template_kwargs": {"mood": "wild"}}):
        answer = httpx.post(f"{server.url}/tokenize", json={**body, **more}).json()
        texts.append(bytes(answer["tokens"]).decode())

    assert "mood:calm" in texts[0]
    assert "mood:wild" in texts[1]


def test_tools_are_shown_to_the_template_when_none_may_be_called(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    answer = post(http, **BODY, tools=[tool], tool_choice="none", return_token_ids=True)

    assert b"tools:1" in bytes(answer["prompt_token_ids"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": -2, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"use_beam_search": True, "n": 2, "stream": True}, "use_beam_search"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
        ({"guided_json": {}}, "guided_json"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"chain": ["top_q"]}, "chain"),
        ({"stream_options": {"include_usag": True}, "stream": True}, None),
        ({"repetition_detection": {"max_patern_size": 3}}, "max_patern_size"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_body_is_refused_before_anything_runs(
    http: httpx.Client, body: dict[str, Any], param: str | None
) -> None:
    error = refused(http, **{**BODY, **body})

    assert error["code"] == 400
    assert error["type"] in ("BadRequestError", "Bad Request")
    if param is not None:
        assert error["param"] == param


def test_batch_answers_stand_by_conversation(http: httpx.Client, offline: LLM) -> None:
    """Row 12 of the checklist."""
    talks = [[{"role": "user", "content": word}] for word in ("one", "two", "three")]
    answer = post(http, "/v1/chat/completions/batch", messages=talks, seed=9, max_tokens=6)

    expected = offline.chat(talks, SamplingParams(seed=9, max_tokens=6), use_tqdm=False)
    told = {choice["index"]: choice["message"]["content"] for choice in answer["choices"]}
    assert told == {i: output.outputs[0].text for i, output in enumerate(expected)}
    assert answer["usage"]["completion_tokens"] == 18
    assert answer["usage"]["prompt_tokens"] == sum(
        len(output.prompt_token_ids or ()) for output in expected
    )


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"stream": True}, {"tools": [{"a": 1}]}, {"best_of": 2}], ids=str
)
def test_a_batch_refuses_what_it_cannot_do(http: httpx.Client, more: dict[str, Any]) -> None:
    error = refused(http, "/v1/chat/completions/batch", messages=[TALK], max_tokens=2, **more)

    assert error["param"] == next(iter(more))


def test_one_bad_conversation_refuses_the_batch(http: httpx.Client) -> None:
    bad = [[{"role": "user", "content": "a"}], []]

    assert refused(http, "/v1/chat/completions/batch", messages=bad)["code"] == 400


def test_a_rendered_request_gives_the_direct_answer(http: httpx.Client) -> None:
    """Row 13 of the checklist."""
    body = {**BODY, "temperature": 0.8, "top_k": 20, "logit_bias": {"65": 3.0}, "stop": ["z"],
            "repetition_detection": {"max_pattern_size": 2, "min_count": 4}}  # fmt: skip
    direct = post(http, **body, return_token_ids=True)
    rendered = post(http, "/v1/chat/completions/render", **body)
    ids = post(http, "/inference/v1/generate", **rendered)

    assert rendered["sampling_params"]["logit_bias"] == {"65": 3.0}
    assert ids["choices"][0]["token_ids"] == direct["choices"][0]["token_ids"]
    assert ids["choices"][0]["finish_reason"] == direct["choices"][0]["finish_reason"]
