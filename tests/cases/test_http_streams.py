"""Streams and counts over HTTP: DEC-064, 065, 071, 073, 074, 077, 078, 079, 082, 110."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import openai
import pytest

from decodekit.plugins.author.table_model import blank_table, byte_tokenizer, flat_table

if TYPE_CHECKING:
    from tests.cases.conftest import MakeSite, Site

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
Writes = Callable[..., dict[str, Any]]
TALK = [{"role": "user", "content": "hi"}]


def pieces(events: list[dict[str, Any]], index: int = 0) -> list[str]:
    """What a choice got, piece by piece, on either route."""
    found = []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                found.append(choice["text"] if "text" in choice
                             else choice["delta"].get("content", ""))  # fmt: skip
    return found


def whole_text(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@pytest.fixture(scope="module")
def uneven(make_site: MakeSite) -> Site:
    """A table in which a token in three is the end, so that answers end at different places."""
    table = flat_table(257)
    table[:, 256] = 2.0
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>",
                               chat_template="{{ messages[0].content }}")  # fmt: skip
    return make_site(table, model={"tokenizer": tokenizer, "eos_token_id": 256})


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_dec_064_n_streamed_answers_are_kept_apart(uneven: Site, path: str) -> None:
    body: dict[str, Any] = {"n": 3, "max_tokens": 40, "seed": 3}
    body |= {"prompt": "a"} if path == COMPLETIONS else {"messages": TALK}
    plain = uneven.ask(path, **body)
    events = uneven.events(path, **body)

    ends = {c["index"]: place for place, event in enumerate(events) for c in event["choices"]
            if c["finish_reason"]}  # fmt: skip
    assert set(ends) == {0, 1, 2}
    assert len({len(whole_text(choice)) for choice in plain["choices"]}) > 1
    for choice in plain["choices"]:
        assert "".join(pieces(events, choice["index"])) == whole_text(choice)
    later = events[min(ends.values()) + 1 :]
    assert any(piece for index in range(3) for piece in pieces(later, index))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_dec_065_one_finish_reason_for_each_choice(uneven: Site, path: str) -> None:
    body: dict[str, Any] = {"n": 3, "max_tokens": 4, "seed": 8}
    body |= {"prompt": "a"} if path == COMPLETIONS else {"messages": TALK}
    reasons = []
    for seed in range(6):
        events = uneven.events(path, **{**body, "seed": seed})
        for index in range(3):
            own = [c for event in events for c in event["choices"] if c["index"] == index]
            ends = [place for place, choice in enumerate(own) if choice["finish_reason"]]
            assert ends == [len(own) - 1]
            reasons.append(own[-1]["finish_reason"])
            assert own[-1].get("text", "") == "" and not own[-1].get("delta")
    assert set(reasons) == {"stop", "length"}


@pytest.mark.parametrize("interval", [1, 5])
def test_dec_071_split_characters_over_http(
    byte_site: Site, make_site: MakeSite, writes: Writes, interval: int
) -> None:
    text = "ďá 你好 👍🏽 👨‍👩‍👧 ok"
    site = byte_site if interval == 1 else same_site(make_site, interval)
    body = writes(text)
    for path, more in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": TALK})):
        [plain] = site.ask(path, **body, **more)["choices"]
        deltas = pieces(site.events(path, **body, **more))
        assert whole_text(plain) == text
        assert "".join(deltas) == text
        assert not any("\ufffd" in delta for delta in deltas)
    several = site.events(COMPLETIONS, **body, prompt=["x"] * 16)
    assert all("".join(pieces(several, index)) == text for index in range(16))


def same_site(make_site: MakeSite, interval: int) -> Site:
    """The flat byte model, speaking every `interval` tokens."""
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>",
                               chat_template="{{ messages[0].content }}")  # fmt: skip
    model = {"tokenizer": tokenizer, "eos_token_id": 256}
    return make_site(flat_table(257), model=model, stream_interval=interval)


@pytest.mark.parametrize("limit", [3, 4, 5, 6])
def test_dec_073_the_limit_inside_a_character_over_http(
    byte_site: Site, writes: Writes, limit: int
) -> None:
    body = writes("hi🙂", max_tokens=limit)
    [plain] = byte_site.complete(prompt="x", **body)["choices"]
    events = byte_site.events(COMPLETIONS, prompt="x", **body)

    assert "".join(pieces(events)) == plain["text"]
    assert plain["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "length"
    assert plain["text"] == "hi🙂" if limit == 6 else plain["text"] in ("hi", "hi\ufffd")


def test_dec_073_the_end_inside_a_character_over_http(byte_site: Site, writes: Writes) -> None:
    body = writes([*"hi🙂".encode()[:4], 256], max_tokens=20)
    [plain] = byte_site.complete(prompt="x", **body)["choices"]
    events = byte_site.events(COMPLETIONS, prompt="x", **body)

    assert plain["finish_reason"] == "stop"
    assert plain["text"] in ("hi", "hi\ufffd")
    assert "".join(pieces(events)) == plain["text"]


def test_dec_074_invalid_bytes_over_http(byte_site: Site, writes: Writes) -> None:
    body = writes(b"a\xff\xc3b\x80c")
    [plain] = byte_site.complete(prompt="x", **body)["choices"]
    events = byte_site.events(COMPLETIONS, prompt="x", **body)

    assert plain["text"].replace("\ufffd", "") == "abc"
    assert plain["text"][0] == "a" and plain["text"][-1] == "c"
    assert "".join(pieces(events)) == plain["text"]


@pytest.mark.parametrize("interval", [1, 8])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_dec_077_streamed_and_plain_counts_agree(
    byte_site: Site, make_site: MakeSite, writes: Writes, interval: int, path: str
) -> None:
    site = byte_site if interval == 1 else same_site(make_site, interval)
    body = writes("wörds and 🙂🙂", return_token_ids=True)
    body |= {"prompt": "x"} if path == COMPLETIONS else {"messages": TALK}
    plain = site.ask(path, **body)
    at_end = site.events(path, **body, stream_options={"include_usage": True})
    always = site.events(
        path, **body, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )

    count = len(plain["choices"][0]["token_ids"])
    assert plain["usage"]["completion_tokens"] == count
    assert at_end[-1]["usage"] == plain["usage"]
    assert all("usage" not in event for event in at_end[:-1])
    counts = [event["usage"]["completion_tokens"] for event in always]
    assert counts == sorted(counts) and counts[-1] == count
    for event in always:
        usage = event["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_dec_078_usage_with_n_and_several_prompts(uneven: Site, is_streamed: bool) -> None:
    for body in (
        {"prompt": "ten tokens", "n": 3},
        {"prompt": ["four", "sixsix"], "n": 2},
    ):
        more = {"seed": 1, "max_tokens": 30, "return_token_ids": True}
        if is_streamed:
            events = uneven.events(
                COMPLETIONS, **body, **more, stream_options={"include_usage": True}
            )
            usage = events[-1]["usage"]
            count = sum(len(c["token_ids"] or ()) for e in events for c in e["choices"])
        else:
            answer = uneven.complete(**body, **more)
            usage = answer["usage"]
            count = sum(len(choice["token_ids"]) for choice in answer["choices"])
        assert usage["prompt_tokens"] == 10
        assert usage["completion_tokens"] == count


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_dec_079_the_usage_event(byte_site: Site, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 3}
    body |= {"prompt": "x"} if path == COMPLETIONS else {"messages": TALK}
    told = byte_site.events(path, **body, stream_options={"include_usage": True})

    assert told[-1]["choices"] == [] and told[-1]["usage"]["completion_tokens"] == 3
    assert sum("usage" in event for event in told) == 1
    for more in ({"stream_options": {"include_usage": False}}, {}):
        events = byte_site.events(path, **body, **more)
        assert not any("usage" in event for event in events)
    byte_site.refused(path, {**body, "stream_options": {"include_usage": True}})


def test_dec_082_the_shape_of_stream_events(byte_site: Site) -> None:
    body: dict[str, Any] = {"max_tokens": 5, "seed": 4, "ignore_eos": True}
    events = byte_site.chat_events(**body)

    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (
        len(events) - 1
    )
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert not events[-1]["choices"][0]["delta"].get("content")
    assert len({(event["id"], event["created"]) for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for event in events[1:-1]:
        assert event["choices"][0]["delta"]["content"]
    with openai.OpenAI(base_url=f"{byte_site.server.url}/v1", api_key="x") as client:
        stream = client.chat.completions.create(
            model="T", messages=TALK, stream=True, max_tokens=5, seed=4,  # type: ignore[arg-type]
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == byte_site.chat(**body)["choices"][0]["message"]["content"]


def test_dec_110_repetition_over_http(make_site: MakeSite) -> None:
    table = blank_table(257)
    table[ord("c"), ord("a")] = table[ord("a"), ord("b")] = table[ord("b"), ord("a")] = 0.0
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>")
    site = make_site(table, model={"tokenizer": tokenizer})
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "return_token_ids": True}
    detect = {"max_pattern_size": 4, "min_count": 3}

    for prompt in ("c", "abab"):
        [choice] = site.complete(prompt=prompt, repetition_detection=detect, **body)["choices"]
        assert len(choice["token_ids"]) == 6
        assert choice["finish_reason"] == "repetition"  # a documented one
    site.refused(
        COMPLETIONS,
        {"prompt": "c", "repetition_detection": {**detect, "min_count": 1}, **body},
    )
    [off] = site.complete(prompt="c", **body)["choices"]
    assert len(off["token_ids"]) == 100
