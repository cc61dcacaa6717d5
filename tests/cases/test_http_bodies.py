"""Bodies and errors as OpenAI's clients know them: DEC-080, 081, 083 to 086 and 088."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import openai
import pytest

from decodekit.plugins.author.table_model import byte_tokenizer, flat_table

if TYPE_CHECKING:
    from tests.cases.conftest import MakeSite, Site

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TALK = [{"role": "user", "content": "hi"}]
IGNORED = "X-Decodekit-Ignored"
JSON = {"Content-Type": "application/json"}
Writes = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    "turn",
    [
        {"content": ""},
        {"content": None, "tool_calls": True},
        {"tool_calls": True},
        {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ],
    ids=str,
)
def test_dec_080_empty_content_in_the_history_over_http(
    byte_site: Site, turn: dict[str, Any]
) -> None:
    if turn.get("tool_calls"):
        function = {"name": "look", "arguments": "{}"}
        turn = {**turn, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    talk = [*TALK, {"role": "assistant", **turn}, {"role": "user", "content": "so?"}]
    answer = byte_site.chat(messages=talk, max_tokens=2, return_token_ids=True)

    prompt = bytes(answer["prompt_token_ids"]).decode()
    assert "None" not in prompt
    assert prompt.count("[assistant]") == 2


def test_dec_081_null_means_absent(byte_site: Site) -> None:
    names = """temperature top_p top_k max_tokens n stop seed logit_bias logprobs
        presence_penalty frequency_penalty repetition_penalty stream stream_options response_format
        tools tool_choice top_logprobs min_p bad_words chain""".split()
    body = dict.fromkeys(names)
    more: dict[str, Any] = {"seed": 11, "max_tokens": 9}
    plain = byte_site.chat(**more)
    nulls = byte_site.chat(**{**body, **more})

    assert nulls["choices"] == plain["choices"]
    assert byte_site.post(CHAT, {**body, "messages": TALK, "max_tokens": 2}).status_code == 200


BAD_BODIES: dict[str, Any] = {
    "messages missing": {},
    "messages empty": {"messages": []},
    "unknown role": {"messages": [{"role": "wizard", "content": "a"}]},
    "wrong type": {"messages": "hi"},
    "wrong type of a number": {"messages": TALK, "temperature": "hot"},
    "a part of no type": {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", BAD_BODIES)
def test_dec_083_a_bad_body_is_a_400(byte_site: Site, fault: str, stream: bool) -> None:
    error = byte_site.refused(CHAT, {**BAD_BODIES[fault], "stream": stream})

    assert error["message"] and error["type"] in ("BadRequestError", "Bad Request")


@pytest.mark.parametrize("stream", [False, True])
def test_dec_083_an_unknown_model_is_a_404(byte_site: Site, stream: bool) -> None:
    for path, body in ((CHAT, {"messages": TALK}), (COMPLETIONS, {"prompt": "a"})):
        error = byte_site.refused(path, {**body, "model": "nobody", "stream": stream}, status=404)
        assert (error["type"], error["param"]) == ("NotFoundError", "model")


def test_dec_083_broken_json_other_types_and_other_methods(byte_site: Site) -> None:
    for raw in (b"{", b"[1]", b"nul", b'{"a": \xff}', b"[" * 100_000):
        answer = byte_site.http.post(
            CHAT, content=raw, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "BadRequestError"
    assert byte_site.http.post(CHAT, content=b"{}").status_code == 400
    wrong = byte_site.http.get(CHAT)
    assert wrong.status_code == wrong.json()["error"]["code"] == 405
    assert byte_site.http.get("/v1/nothing").json()["error"]["code"] == 404


def test_dec_083_the_official_client_raises_its_own_errors(byte_site: Site) -> None:
    url = f"{byte_site.server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="nobody", messages=TALK)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model="T", messages=TALK, temperature=0, n=2  # type: ignore[arg-type]
            )  # fmt: skip
    assert missing.value.param == "model"
    assert refused.value.param == "n"
    assert refused.value.type == "BadRequestError"


OUT_OF_RANGE: list[tuple[str, str]] = [
    ("temperature", "-1"), ("temperature", "NaN"), ("temperature", "Infinity"),
    ("temperature", "1e999"), ("top_p", "0"), ("top_p", "1.5"), ("top_p", "-0.1"),
    ("top_k", "-5"), ("top_k", "1.5"), ("min_p", "2"), ("presence_penalty", "3"),
    ("frequency_penalty", "-3"), ("repetition_penalty", "0"), ("max_tokens", "-1"),
    ("seed", "1e30"), ("seed", "99999999999999999999999"),
]  # fmt: skip


def test_dec_084_values_out_of_range_stop_at_the_door(byte_site: Site) -> None:
    long: dict[str, Any] = {"prompt": [3], "seed": 2, "max_tokens": 250, "ignore_eos": True,
                            "return_token_ids": True}  # fmt: skip
    lone = byte_site.complete(**long)["choices"][0]["token_ids"]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(byte_site.complete(**long)))
    thread.start()

    for name, value in OUT_OF_RANGE:
        raw = f'{{"messages": {json.dumps(TALK)}, "{name}": {value}}}'
        answer = byte_site.http.post(
            CHAT, content=raw, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400, (name, value)
        error = answer.json()["error"]
        assert name in error["message"] and error["param"] == name, (name, value, error)
    thread.join()
    assert found[0]["choices"][0]["token_ids"] == lone
    byte_site.check_answers()


def test_dec_085_max_completion_tokens(make_site: MakeSite) -> None:
    template = "{{ messages[0].content }}"
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>", chat_template=template)
    site = make_site(flat_table(257), model={"tokenizer": tokenizer}, max_model_len=64)
    lengths = []
    for body in (
        {"max_completion_tokens": 7},
        {"max_tokens": 7},
        {"max_completion_tokens": 7, "max_tokens": 9},
        {},
    ):
        answer = site.chat(messages=TALK, **body)
        assert answer["choices"][0]["finish_reason"] == "length"
        lengths.append(answer["usage"]["completion_tokens"])

    assert lengths == [7, 7, 7, 64 - 2]


@pytest.mark.parametrize("stream", [False, True])
def test_dec_086_surrogates_are_refused_and_nul_is_text(byte_site: Site, stream: bool) -> None:
    def send(path: str, raw: str) -> Any:
        body = raw[:-1] + f', "max_tokens": 2, "stream": {json.dumps(stream)}}}'
        return byte_site.http.post(path, content=body.encode(),
                                   headers={"Content-Type": "application/json"})  # fmt: skip

    message = '{"messages": [{"role": "user", "content": "a%s"}]}'
    for path, raw in (
        (CHAT, message % r"\ud800"),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "stop": "' + r'\udc00"}'),
        (COMPLETIONS, r'{"prompt": "\ud83d"}'),
    ):
        answer = send(path, raw)
        assert answer.status_code == 400
        assert "surrogate" in answer.json()["error"]["message"]
        assert "Error" not in answer.json()["error"]["message"]
    for text in (r"\u0000", r"\ud83d\ude42"):
        assert send(CHAT, message % text).status_code == 200
        assert send(COMPLETIONS, f'{{"prompt": "a{text}"}}').status_code == 200


def test_dec_088_fields_without_effect_are_named(byte_site: Site) -> None:
    body = {"messages": TALK, "max_tokens": 2}
    plain = byte_site.post(CHAT, body)
    with_user = byte_site.post(CHAT, {**body, "user": "me"})
    invented = byte_site.post(CHAT, {**body, "user": "me", "flux_capacity": 1, "a b\n": 2})

    assert plain.status_code == with_user.status_code == invented.status_code == 200
    assert IGNORED not in plain.headers
    assert {"flux_capacity", "a%20b%0A"} <= set(invented.headers[IGNORED].split(", "))


def test_dec_088_a_near_miss_is_refused_with_the_suggestion(byte_site: Site) -> None:
    meant_by = {
        "topp": "top_p",
        "max-tokens": "max_tokens",
        "Temperature": "temperature",
        "temprature": "temperature",
        "seeds": "seed",
    }
    for name, meant in meant_by.items():
        error = byte_site.refused(CHAT, {"messages": TALK, name: 1})
        assert error["param"] == name
        assert f"did you mean {meant!r}" in error["message"]


def test_dec_088_strict_fields_refuses_what_is_unknown(make_site: MakeSite) -> None:
    site = make_site(flat_table(257), model={"tokenizer": byte_tokenizer()},
                     settings={"strict_fields": True})  # fmt: skip
    error = site.refused(COMPLETIONS, {"prompt": "a", "flux_capacity": 1})

    assert error["param"] == "flux_capacity"
    assert site.post(COMPLETIONS, {"prompt": "a", "user": "me"}).status_code == 200


def test_dec_088_known_fields_act_or_are_refused(byte_site: Site, writes: Writes) -> None:
    [scored] = byte_site.complete(prompt="a", logprobs=1, max_tokens=2)["choices"]
    assert len(scored["logprobs"]["tokens"]) == 2
    [best] = byte_site.complete(prompt="a", best_of=3, max_tokens=2, seed=1)["choices"]
    assert best["index"] == 0
    error = byte_site.refused(COMPLETIONS, {"prompt": "a", "length_penalty": 2.0})
    assert error["param"] == "length_penalty"
    beams = byte_site.post(
        COMPLETIONS, {"prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 2}
    )
    if beams.status_code != 200:
        assert beams.json()["error"]["param"] == "use_beam_search"
