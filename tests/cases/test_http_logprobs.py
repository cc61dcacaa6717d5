"""Log-probabilities over HTTP: DEC-044, DEC-054, DEC-057, DEC-059 to DEC-063."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.cases.conftest import Site

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
Writes = Callable[..., dict[str, Any]]

ENDINGS: dict[str, dict[str, Any]] = {
    "a stop string in mid-token": {"stop": "re go", "max_tokens": 30},
    "a stop token id": {"stop_token_ids": [ord("g")], "max_tokens": 30},
    "the end token": {"max_tokens": 30},
    "max_tokens": {"max_tokens": 7},
}


def joined(events: list[dict[str, Any]], *names: str) -> list[Any]:
    """The entries of a list inside each event's choice, joined."""
    found: list[Any] = []
    for event in events:
        value: Any = event["choices"][0]
        for name in names:
            value = (value or {}).get(name)
        found += value or []
    return found


@pytest.mark.parametrize("ending", ENDINGS)
def test_dec_044_ids_and_log_probs_agree_over_http(
    byte_site: Site, writes: Writes, ending: str
) -> None:
    body = {**writes([*b"there goes it", 256], logprobs=2, return_token_ids=True),
            **ENDINGS[ending]}  # fmt: skip
    chat = {**body, "logprobs": True, "top_logprobs": 2}
    plain = byte_site.complete(prompt="x", **body)
    streamed = byte_site.events(COMPLETIONS, prompt="x", **body)
    talk = byte_site.chat(**chat)
    talked = byte_site.chat_events(**chat)

    [choice] = plain["choices"]
    count = len(choice["token_ids"])
    assert plain["usage"]["completion_tokens"] == count
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(choice["logprobs"][name]) == count
        assert joined(streamed, "logprobs", name) == choice["logprobs"][name]
    [said] = talk["choices"]
    assert len(said["logprobs"]["content"]) == len(said["token_ids"]) == count
    assert joined(talked, "logprobs", "content") == said["logprobs"]["content"]
    assert joined(talked, "token_ids") == said["token_ids"]


@pytest.mark.parametrize("more", [{"top_k": 1, "echo": True}, {"allowed_token_ids": [65]}], ids=str)
@pytest.mark.parametrize("mode", ["raw", "final"])
def test_dec_054_minus_infinity_is_a_finite_number(
    byte_site: Site, more: dict[str, Any], mode: str
) -> None:
    body = {**more, "temperature": 1, "max_tokens": 3, "logprobs_mode": mode}
    [choice] = byte_site.complete(prompt="ab", logprobs=5, **body)["choices"]
    lowest = min(value for top in choice["logprobs"]["top_logprobs"] if top
                 for value in top.values())  # fmt: skip
    talk = {**body, "echo": False}
    [said] = byte_site.chat(logprobs=True, top_logprobs=5, **talk)["choices"]

    assert lowest >= -9999.0
    if mode == "final":
        assert lowest == -9999.0
        tops = [top["logprob"] for entry in said["logprobs"]["content"]
                for top in entry["top_logprobs"]]  # fmt: skip
        assert min(tops) == -9999.0


def test_dec_057_how_many_alternatives_a_chat_shows(byte_site: Site) -> None:
    for top, shown in ((5, 5), (0, 0), (None, 0)):
        body = {} if top is None else {"top_logprobs": top}
        [choice] = byte_site.chat(logprobs=True, max_tokens=3, **body)["choices"]
        entries = choice["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in entries] == [shown] * 3
        assert all(entry["logprob"] < 0 for entry in entries)


def test_dec_059_bytes_of_a_token_that_is_part_of_a_character(
    byte_site: Site, writes: Writes
) -> None:
    text = "a\N{SLIGHTLY SMILING FACE}\u4e16"
    body = writes(text, logprobs=True, top_logprobs=2)
    [choice] = byte_site.chat(**body)["choices"]
    streamed = joined(byte_site.chat_events(**body), "logprobs", "content")

    assert choice["message"]["content"] == text
    for content in (choice["logprobs"]["content"], streamed):
        assert len(content) == 8
        assert bytes(byte for entry in content for byte in entry["bytes"]) == text.encode()
        assert all(len(top["bytes"]) == 1 for entry in content for top in entry["top_logprobs"])


def test_dec_060_echoed_log_probs_do_not_depend_on_the_cache(byte_site: Site) -> None:
    prompts = ["abcdefghijklmno", "abcdefghijklmnop", "abcdefghijklmnopq", "a" * 33]
    seen: dict[str, list[Any]] = {}
    for order in (prompts, prompts[::-1]):
        for prompt in [*order, *order]:
            body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1}
            [choice] = byte_site.complete(**body)["choices"]
            logprobs = choice["logprobs"]["token_logprobs"]
            assert len(logprobs) == len(prompt) + 1
            assert logprobs[0] is None
            assert seen.setdefault(prompt, logprobs) == logprobs


def test_dec_061_prompt_log_probs_are_refused_with_stream(byte_site: Site) -> None:
    for count in (1, -1):
        byte_site.refused(COMPLETIONS, {"prompt": "abc", "stream": True, "prompt_logprobs": count})
    assert byte_site.events(COMPLETIONS, prompt="abc", prompt_logprobs=0, max_tokens=2)


def test_dec_062_scoring_a_prompt(byte_site: Site) -> None:
    body = {"echo": True, "logprobs": 1, "max_tokens": 0}
    prompts = ["score this", "and"]
    one = byte_site.complete(prompt=prompts[0], **body)
    two = byte_site.complete(prompt=prompts, **body)

    assert one["choices"][0] == two["choices"][0]
    assert two["usage"]["completion_tokens"] == 0
    for prompt, choice in zip(prompts, two["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert choice["text"] == prompt
        assert logprobs["tokens"] == list(prompt)
        assert logprobs["token_logprobs"][0] is None
        assert all(value < 0 for value in logprobs["token_logprobs"][1:])
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert prompt[offset : offset + len(token)] == token
    assert (
        "max_tokens" in byte_site.refused(COMPLETIONS, {"prompt": "a", "max_tokens": 0})["message"]
    )


def test_dec_062_scoring_streams_the_prompt_alone(byte_site: Site) -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    events = byte_site.events(COMPLETIONS, **body)

    assert "".join(event["choices"][0]["text"] for event in events) == "abc"
    [plain] = byte_site.complete(**body)["choices"]
    assert joined(events, "logprobs", "tokens") == plain["logprobs"]["tokens"]


@pytest.mark.parametrize("top", [21, 98, -2])
def test_dec_063_too_many_alternatives_are_refused_over_http(byte_site: Site, top: int) -> None:
    talk = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
    assert byte_site.refused(CHAT, {**talk, "top_logprobs": top})["param"] == "top_logprobs"
    assert byte_site.refused(COMPLETIONS, {"prompt": "a", "logprobs": top})["param"] == "logprobs"
    for token in (-1, 257):
        byte_site.refused(COMPLETIONS, {"prompt": "a", "logprob_token_ids": [token]})
    byte_site.check_answers()
