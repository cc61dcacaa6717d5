"""Prompt lookup: guess that what followed the last words before follows them again.

The last n tokens are searched in prompt and output, n from `prompt_lookup_max` down to
`prompt_lookup_min`; of the longest that stood somewhere before, the latest place counts, and what
followed there is the guess, as far as tokens are known. Source: prompt lookup decoding (Saxena
2023); transformers' PromptLookupCandidateGenerator takes the first place instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field, model_validator

from ...core.hookspecs import hookimpl
from ...core.proposer import Proposer, ProposerContext, Speaker

LONGEST = 5
SHORTEST = 2


class PromptLookup(Proposer):
    """Copies what followed the same words before, in the prompt or the answer."""

    name = "ngram"
    aliases = ("prompt_lookup", "[ngram]")

    class Params(Proposer.Params):
        """Words of `prompt_lookup_min` to `prompt_lookup_max` tokens are looked for."""

        prompt_lookup_max: int | None = Field(default=None, ge=1, le=64)
        prompt_lookup_min: int | None = Field(default=None, ge=1, le=64)
        model: Literal["ngram", "[ngram]"] | None = None  # how vLLM's older form names the method

        @model_validator(mode="after")
        def _fits(self) -> PromptLookup.Params:
            high, low = self.prompt_lookup_max, self.prompt_lookup_min
            if high is not None and low is not None and low > high:
                raise ValueError(
                    f"prompt_lookup_min must be at most prompt_lookup_max ({high}), got {low}"
                )
            return self

    @classmethod
    def bind(cls, params: Params, ctx: ProposerContext) -> range:
        """Return the lengths of the words that are looked for, longest first."""
        high, low = params.prompt_lookup_max, params.prompt_lookup_min
        high = max(LONGEST, low or 1) if high is None else high
        low = min(SHORTEST, high) if low is None else low
        return range(high, low - 1, -1)

    def __init__(self, bound: range, speaker: Speaker) -> None:
        super().__init__(bound, speaker)
        self._sizes = bound
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
