"""Sampling over HTTP: DEC-004, DEC-007, DEC-017, DEC-028, DEC-033, DEC-042, DEC-048, DEC-066."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from decodekit.plugins.author.table_model import blank_table, byte_tokenizer

if TYPE_CHECKING:
    from tests.cases.conftest import MakeSite, Site

COMPLETIONS = "/v1/completions"
ONE: dict[str, Any] = {"prompt": [1], "return_token_ids": True}
Writes = Callable[..., dict[str, Any]]


def texts_of(site: Site, count: int, **body: Any) -> list[str]:
    return [
        site.chat(max_tokens=16, temperature=1, ignore_eos=True, **body)["choices"][0]["message"][
            "content"
        ]
        for _ in range(count)
    ]


def ids_of(site: Site, **body: Any) -> list[int]:
    ids: list[int] = site.complete(**{**ONE, **body})["choices"][0]["token_ids"]
    return ids


def test_dec_004_no_seed_draws_anew_and_0_is_a_seed(byte_site: Site) -> None:
    assert len(set(texts_of(byte_site, 6))) > 1
    assert len(set(texts_of(byte_site, 3, seed=None))) > 1
    assert len(set(texts_of(byte_site, 3, seed=0))) == 1


def test_dec_007_a_seed_holds_in_a_chat_streamed_or_not(byte_site: Site) -> None:
    body = {"seed": 123, "temperature": 0.5, "max_tokens": 12}
    plain = [byte_site.chat(**body)["choices"][0]["message"]["content"] for _ in range(2)]
    streamed = [
        "".join(e["choices"][0]["delta"].get("content", "") for e in byte_site.chat_events(**body))
        for _ in range(2)
    ]
    other = byte_site.chat(**{**body, "seed": 124})["choices"][0]["message"]["content"]

    assert len({*plain, *streamed}) == 1
    assert other != plain[0]


def test_dec_017_top_p_over_http(byte_site: Site) -> None:
    body = {"seed": 3, "temperature": 1, "max_tokens": 8}
    whole = ids_of(byte_site, **body)

    assert byte_site.refused(COMPLETIONS, {**ONE, "top_p": 0})["param"] == "top_p"
    assert ids_of(byte_site, top_p=1, **body) == ids_of(byte_site, top_p=1.0, **body) == whole
    assert ids_of(byte_site, top_p=1e-6, **body) == [0] * 8  # the lowest id wins a tie


def test_dec_028_prompt_ids_outside_the_vocabulary_over_http(make_site: MakeSite) -> None:
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>")
    site = make_site(blank_table(257), model={"tokenizer": tokenizer, "num_rows": 265}, seed=1)
    body = {"repetition_penalty": 1.1, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    lone = site.complete(prompt=[*range(40)], **body)["choices"][0]["token_ids"]

    both = site.complete(prompt=[[1, 260], [*range(40)]], **body)["choices"]
    assert both[1]["token_ids"] == lone
    for token in (265, -1):
        site.refused(COMPLETIONS, {**body, "prompt": [1, token]})
    site.check_answers()


def test_dec_033_min_and_max_tokens_over_http(make_site: MakeSite) -> None:
    table = blank_table(257)
    table[:, 256] = 0.0  # the end token is favoured
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>")
    site = make_site(table, model={"tokenizer": tokenizer, "eos_token_id": 256})

    [whole] = site.complete(**ONE, min_tokens=8, max_tokens=8)["choices"]
    [short] = site.complete(**ONE, min_tokens=0, max_tokens=1)["choices"]
    assert (len(whole["token_ids"]), whole["finish_reason"]) == (8, "length")
    assert (short["token_ids"], short["finish_reason"]) == ([256], "stop")
    site.refused(COMPLETIONS, {**ONE, "min_tokens": 9, "max_tokens": 8})


@pytest.mark.parametrize("stop", [[""], "", 17, [17]], ids=repr)
def test_dec_042_odd_stops_are_refused_over_http(byte_site: Site, stop: Any) -> None:
    error = byte_site.refused(COMPLETIONS, {**ONE, "stop": stop})

    assert "stop" in error["message"]


def test_dec_042_stops_over_http(byte_site: Site, writes: Writes) -> None:
    body = {"prompt": "x", **writes("one five six")}
    by_stop = {
        repr(stop): byte_site.complete(**body, stop=stop)["choices"][0]["text"]
        for stop in ([], None, "five", ["five"], ["five", "five"])
    }

    assert by_stop["[]"] == by_stop["None"] == "one five six"
    assert by_stop["'five'"] == by_stop["['five']"] == by_stop["['five', 'five']"] == "one "


def test_dec_048_the_keys_of_logit_bias(byte_site: Site) -> None:
    body = {**ONE, "temperature": 0, "max_tokens": 2}
    neighbour: dict[str, Any] = {"prompt": [2], "seed": 1, "max_tokens": 120, "ignore_eos": True,
                                 "return_token_ids": True}  # fmt: skip
    lone = byte_site.complete(**neighbour)["choices"][0]["token_ids"]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(byte_site.complete(**neighbour)))
    thread.start()

    for key in ("AI", "-1", "257", "2.5"):
        error = byte_site.refused(COMPLETIONS, {**body, "logit_bias": {key: 5}})
        assert "logit_bias" in error["message"]
    assert ids_of(byte_site, **body, logit_bias={"3": 5}) == [3, 3]
    assert ids_of(byte_site, **body, logit_bias={}) == [0, 0]
    assert ids_of(byte_site, **body, logit_bias=None) == [0, 0]
    thread.join()
    assert found[0]["choices"][0]["token_ids"] == lone


@pytest.mark.parametrize(
    ("n", "temperature"), [(2, 0), (0, 1), (-1, 1), ("2", 1), (1_000_000, 1)], ids=repr
)
def test_dec_066_n_is_refused_over_http(byte_site: Site, n: Any, temperature: float) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        error = byte_site.refused(path, {**body, "n": n, "temperature": temperature})
        assert "n" in (error["param"], error["message"].split()[0].rstrip(":"))
