"""Beams and empty answers over HTTP: DEC-069 and DEC-087."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from decodekit.plugins.author.table_model import byte_tokenizer, flat_table

if TYPE_CHECKING:
    from tests.cases.conftest import MakeSite, Site

Writes = Callable[..., dict[str, Any]]
END = 256


@pytest.fixture(scope="module")
def spelling(make_site: MakeSite) -> Site:
    """After x come a, b, c and d, each better than all else, and then the end."""
    letters = [ord(letter) for letter in "abcd"]
    table = torch.full((257, 257), 0.0)
    for token, after in zip([ord("x"), *letters], [*letters, END], strict=True):
        table[token, after] = 9.0
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>")
    return make_site(table, model={"tokenizer": tokenizer, "eos_token_id": END})


@pytest.mark.parametrize(
    ("more", "text", "reason", "stop_reason"),
    [
        ({}, "abcd", "stop", END),
        ({"stop_token_ids": [ord("c")]}, "ab", "stop", ord("c")),
        ({"stop": ["bc"]}, "a", "stop", "bc"),
    ],
    ids=["end token", "stop id", "stop string"],
)
def test_dec_069_beams_obey_end_and_stop_over_http(
    spelling: Site, more: dict[str, Any], text: str, reason: str, stop_reason: Any
) -> None:
    body = {"prompt": "x", "use_beam_search": True, "n": 3, "max_tokens": 8, "temperature": 0}
    choices = spelling.complete(**body, **more)["choices"]

    assert [choice["index"] for choice in choices] == [0, 1, 2]
    best = choices[0]
    assert (best["text"], best["finish_reason"]) == (text, reason)
    assert best["stop_reason"] == stop_reason


def test_dec_069_beams_run_on_where_ends_are_ignored(spelling: Site) -> None:
    body = {"prompt": "x", "use_beam_search": True, "n": 3, "max_tokens": 8, "temperature": 0}
    [best, *_] = spelling.complete(**body, ignore_eos=True, return_token_ids=True)["choices"]

    assert len(best["token_ids"]) == 8
    assert best["finish_reason"] == "length"
    spelling.refused("/v1/completions", {**body, "stream": True})


def test_dec_087_content_is_always_there(make_site: MakeSite, writes: Writes) -> None:
    special = ["<end>", "<think>", "</think>"]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    tokenizer = byte_tokenizer(special=special, eos="<end>", chat_template=template)
    site = make_site(
        flat_table(259),
        model={"tokenizer": tokenizer, "eos_token_id": END},
        reasoning_parser="deepseek_r1",
    )
    [cut] = site.chat(**writes("thinking"))["choices"]
    [empty] = site.chat(**writes([258, END], max_tokens=9))["choices"]
    [whole] = site.chat(**writes([*b"so", 258, *b"yes", END], max_tokens=9))["choices"]

    assert cut["finish_reason"] == "length"
    assert cut["message"]["content"] in (None, "")
    assert cut["message"]["reasoning"] == "thinking"
    assert (empty["message"]["content"], empty["finish_reason"]) == ("", "stop")
    assert (whole["message"]["reasoning"], whole["message"]["content"]) == ("so", "yes")


def test_dec_087_an_answer_that_is_empty_at_once_has_its_content(
    byte_site: Site, writes: Writes
) -> None:
    [choice] = byte_site.chat(**writes([END], max_tokens=5))["choices"]

    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "stop"
