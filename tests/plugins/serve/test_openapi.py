"""The served OpenAPI document is true: bodies made by it meet no 5xx and no undocumented answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode, checks

from decodekit.core.params import FIELD_NAMES
from decodekit.plugins.serve.live import LiveServer
from decodekit.plugins.serve.settings import ServeSettings

# Left out: they stop the server's work for all tests that follow.
STOPPING = ("/sleep", "/pause")
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]
BOUNDED = settings(
    max_examples=8,
    phases=(Phase.generate,),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
ONLY_IN_PYTHON = {
    "logits_processors", "output_tensors", "output_kind", "skip_clone", "detokenize",
    "output_text_buffer_length",
}  # fmt: skip
Events = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def short(table_folder: str) -> Iterator[LiveServer]:
    """A server with a short context and few answers a request, so that nothing runs long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODEKIT_MAX_N_SEQUENCES", "3")
        own = ServeSettings(served_model_name=["table"])
        with LiveServer(table_folder, settings=own, max_model_len=48, max_num_seqs=16) as server:
            yield server


@pytest.fixture(scope="module")
def api(short: LiveServer) -> Any:
    """The document as schemathesis reads it."""
    schema = schemathesis.openapi.from_url(f"{short.url}/openapi.json")
    return schema.exclude(path=list(STOPPING))


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name)
def test_random_requests_get_documented_answers(api: Any, mode: GenerationMode) -> None:
    """Each endpoint gets bodies that its schema allows, then bodies that it does not."""
    seen = 0
    for result in api.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # what has no body cannot be wrong

        @BOUNDED
        @given(case=operation.as_strategy(generation_mode=mode))
        def probe(case: Any) -> None:
            case.call_and_validate(checks=CHECKS)

        probe()
        seen += 1
    assert seen > 8


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.5, 1, 1.7]),
    "top_p": st.sampled_from([0.3, 1]),
    "top_k": st.sampled_from([-1, 0, 1, 50, 9999]),
    "min_p": st.sampled_from([0, 0.2]),
    "frequency_penalty": st.sampled_from([-2, 0.5]),
    "presence_penalty": st.sampled_from([2, 0]),
    "repetition_penalty": st.sampled_from([0.8, 1.4]),
    "n": st.sampled_from([1, 2, 3]),
    "seed": st.sampled_from([0, -5, 2**63]),
    "stop": st.sampled_from(["a", ["x", "y"], []]),
    "stop_token_ids": st.just([65]),
    "min_tokens": st.sampled_from([0, 2]),
    "logit_bias": st.sampled_from([{}, {"65": 100, "66": -100}]),
    "bad_words": st.just(["b"]),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "logprobs_mode": st.sampled_from(["raw", "final", ["raw", "final"]]),
    "logprob_token_ids": st.just([3, 4]),
    "prompt_logprobs": st.sampled_from([0, 2]),
    "kept_set": st.booleans(),
    "entropy": st.booleans(),
    "return_token_ids": st.booleans(),
    "return_plan": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "truncate_prompt_tokens": st.sampled_from([-1, 2]),
    "cache_salt": st.just("salt"),
    "priority": st.sampled_from([-3, 3]),
    "user": st.just("somebody"),
    "trace": st.sampled_from(["off", "summary", "tokens"]),
}
CHAT_ONLY = {
    "logprobs": st.booleans(),
    "echo": st.booleans(),
    "chat_template_kwargs": st.just({"mood": "calm"}),
}
COMPLETION_ONLY = {
    "logprobs": st.sampled_from([0, 3]),
    "echo": st.booleans(),
}


@pytest.mark.parametrize(
    ("path", "prompt", "more", "answer"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, CHAT_ONLY,
         "ChatCompletion"),
        ("/v1/completions", {"prompt": ["ab", "cd"]}, COMPLETION_ONLY, "Completion"),
    ],
    ids=["chat", "completions"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_any_mix_of_good_fields_is_answered(
    short: LiveServer,
    events_of: Events,
    path: str,
    prompt: dict[str, Any],
    more: dict[str, Any],
    answer: str,
) -> None:
    """The answer fits its schema, and under a seed the stream joins to it."""
    document = httpx.get(f"{short.url}/openapi.json").json()
    schema = {"$ref": f"#/components/schemas/{answer}", "components": document["components"]}
    fields = st.fixed_dictionaries({"max_tokens": st.sampled_from([1, 6])},
                                   optional={**FIELDS, **more})  # fmt: skip

    with httpx.Client(base_url=short.url, timeout=60) as client:

        @settings(BOUNDED, max_examples=25)
        @given(fields=fields)
        def probe(fields: dict[str, Any]) -> None:
            body = {**prompt, "seed": 7, **fields}
            plain = client.post(path, json={**body, "min_tokens": 0})
            assert plain.status_code == 200, (body, plain.text)
            jsonschema.validate(plain.json(), schema)
            if body.get("prompt_logprobs"):
                return
            streamed = client.post(path, json={**body, "min_tokens": 0, "stream": True})
            assert joined(events_of(streamed.text)) == whole(plain.json())

        probe()


def whole(answer: dict[str, Any]) -> dict[int, tuple[str, str]]:
    """Index -> text and finish reason."""
    return {
        choice["index"]: (
            choice["text"] if "text" in choice else choice["message"]["content"],
            choice["finish_reason"],
        )
        for choice in answer["choices"]
    }


def joined(events: list[dict[str, Any]]) -> dict[int, tuple[str, str]]:
    """The same from a stream."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    return {index: (text, reasons[index]) for index, text in texts.items()}


def test_every_json_field_of_a_request_is_served(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for name in ("ChatRequest", "CompletionRequest"):
        served = set(document["components"]["schemas"][name]["properties"])
        assert set(FIELD_NAMES) - ONLY_IN_PYTHON - served == set()
