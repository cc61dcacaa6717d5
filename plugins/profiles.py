"""The named default chains. Names that no installed stage has are skipped."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.hookspecs import hookimpl
from ..core.stage import Profile

DEFAULT = Profile(
    name="default",
    order=(
        "vocab_padding",
        "grammar",
        "allowed_tokens",
        "suppress_tokens",
        "bad_words",
        "min_tokens",
        "thinking_budget",
        "logit_bias",
        "per_request",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "temperature",
        "min_p",
        "top_k",
        "top_p",
    ),
    picker="race",
    greedy="greedy",
    description="vLLM's order: masks, biases, penalties, temperature, min-p, top-k, top-p.",
    notes=(
        "top_k 1 keeps the lowest id of a tie, so that it is greedy",
        "raw log-probs are taken before every stage, a grammar included",
    ),
)


@hookimpl
def decodekit_profiles() -> Iterable[Profile]:
    return [DEFAULT]
