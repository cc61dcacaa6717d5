"""Prompt lookup: guess that what followed the last words before follows them again.

The last n tokens are searched in prompt and output, n from `prompt_lookup_max` down to
`prompt_lookup_min`; of the longest that stood somewhere before, the latest place counts, and what
followed there is the guess, as far as tokens are known. Source: prompt lookup decoding (Saxena
2023); transformers' PromptLookupCandidateGenerator takes the first place instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import Field, model_validator

from ...core.hookspecs import hookimpl
from ...core.proposer import Proposer, Speaker

LONGEST = 5
SHORTEST = 2


class PromptLookup(Proposer):
    """Copies what followed the same words before, in the prompt or the answer."""

    name = "ngram"
    aliases = ("prompt_lookup", "[ngram]")

    class Params(Proposer.Params):
        """Words of `prompt_lookup_min` to `prompt_lookup_max` tokens are looked for."""

        prompt_lookup_max: int = Field(default=None, ge=1, le=64)  # type: ignore[assignment]
        prompt_lookup_min: int = Field(default=None, ge=1, le=64)  # type: ignore[assignment]
        model: None = None  # vLLM's key, which this method leaves empty

        @model_validator(mode="before")
        @classmethod
        def _settle(cls, values: Any) -> Any:
            """Fill the bound that was not given, so that it fits the other one."""
            given = {key: value for key, value in dict(values).items() if value is not None}
            if given.get("model") in ("ngram", "[ngram]"):
                del given["model"]
            high, low = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
            if high is None:
                given["prompt_lookup_max"] = max(LONGEST, low) if isinstance(low, int) else LONGEST
            if low is None:
                given["prompt_lookup_min"] = min(SHORTEST, high) if isinstance(high, int) else 2
            return given

        @model_validator(mode="after")
        def _fits(self) -> PromptLookup.Params:
            if self.prompt_lookup_min > self.prompt_lookup_max:
                raise ValueError(
                    f"prompt_lookup_min must be at most prompt_lookup_max "
                    f"({self.prompt_lookup_max}), got {self.prompt_lookup_min}"
                )
            return self

    def __init__(self, bound: Params, speaker: Speaker) -> None:
        super().__init__(bound, speaker)
        self._sizes = range(bound.prompt_lookup_max, bound.prompt_lookup_min - 1, -1)
        self._known: list[int] = []  # the tokens whose words are in the index
        # For each word that has a follower: where the follower of its latest place stands.
        self._index: dict[tuple[int, ...], int] = {}

    def propose(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], k: int
    ) -> Sequence[int]:
        known = self._known
        self._follow(prompt_ids, output_ids)
        for size in self._sizes:
            place = self._index.get(tuple(known[-size:])) if size < len(known) else None
            if place is not None:
                return known[place : place + k]
        return ()

    def _follow(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Bring the index up to all tokens but the last, which nothing follows yet."""
        known, done = self._known, len(self._known)
        start = len(prompt_ids)
        if done > start + len(output_ids) or known[start:] != output_ids[: max(done - start, 0)]:
            known.clear()  # the sequence took tokens back
            self._index.clear()
            done = 0
        known += [*prompt_ids[done:], *output_ids[max(done - start, 0) :]]
        index = self._index
        for end in range(max(done, 1), len(known)):
            for size in self._sizes:
                if size <= end:
                    index[tuple(known[end - size : end])] = end


@hookimpl
def decodekit_proposers() -> Iterable[type[Proposer]]:
    return [PromptLookup]
