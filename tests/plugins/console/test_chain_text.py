"""Chains as they are typed."""

from typing import Any

import pytest

from decodekit.core.errors import ChainError
from decodekit.core.registry import Registry
from decodekit.plugins.console.chain_text import parse_chain


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.load(autoload=False)


@pytest.mark.parametrize(
    ("text", "chain"),
    [
        ("temperature=0.7", [{"stage": "temperature", "t": 0.7}]),
        ("top_k=40,top_p=0.9", [{"stage": "top_k", "k": 40}, {"stage": "top_p", "p": 0.9}]),
        ("temperature", ["temperature"]),
        ("top_p(p=0.9, min_keep=2)", [{"stage": "top_p", "p": 0.9, "min_keep": 2}]),
        ("top_p(p=0.9,ties=value)", [{"stage": "top_p", "p": 0.9, "ties": "value"}]),
        ("top_p(p=0.9,ties='value')", [{"stage": "top_p", "p": 0.9, "ties": "value"}]),
        ("temperature=2 as late", [{"stage": "temperature", "t": 2, "id": "late"}]),
        ("temperature as late", [{"stage": "temperature", "id": "late"}]),
        ('logit_bias={"5": 1, "6": 2}', [{"stage": "logit_bias", "bias": {"5": 1, "6": 2}}]),
        ('["top_p", {"stage": "top_k", "k": 3}]', ["top_p", {"stage": "top_k", "k": 3}]),
        ('{"stage": "top_k", "k": 3}', [{"stage": "top_k", "k": 3}]),
        (" top_k = 2 , top_p, ", [{"stage": "top_k", "k": 2}, "top_p"]),
        ("", []),
    ],
)  # fmt: skip
def test_a_typed_chain_is_what_the_request_takes(
    text: str, chain: list[Any], registry: Registry
) -> None:
    assert parse_chain(text, registry) == chain


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("topp=0.9", "unknown stage 'topp'; did you mean 'top_p'?"),
        ("greedy=1", "stage 'greedy' takes no bare value"),
        ("top_p(0.9)", "has '0.9' where name=value is expected"),
        ("top_p(p=0.9", "is none of: stage, stage=value"),
        ("[1,", "chain is not valid JSON"),
    ],
)
def test_what_is_no_chain_is_refused_in_one_sentence(
    text: str, said: str, registry: Registry
) -> None:
    with pytest.raises(ChainError) as caught:
        parse_chain(text, registry)

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
