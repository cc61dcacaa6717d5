"""One text of a comparison and what is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .columns import Column


@dataclass(frozen=True, slots=True)
class Job:
    """One text to make: a prompt under a column's fields, with a seed."""

    prompt: int  # place among the prompts
    text: str  # the prompt
    column: Column
    seed: int


@dataclass(slots=True)
class Outcome:
    """A finished text. `units` are what n-grams are counted over: token ids, tokens or words."""

    job: Job
    text: str = ""
    units: Sequence[Any] = ()
    num_tokens: int = 0
    finish_reason: str | None = None
    mean_logprob: float | None = None  # of the tokens, before every stage
    error: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # what else to write down

    def to_dict(self) -> dict[str, Any]:
        """The line of `outputs.jsonl`."""
        job = self.job
        return {
            "prompt_index": job.prompt,
            "prompt": job.text,
            "column": job.column.name,
            "fields": dict(job.column.fields),
            "seed": job.seed,
            "text": self.text,
            "num_tokens": self.num_tokens,
            "finish_reason": self.finish_reason,
            "mean_logprob": self.mean_logprob,
            "error": self.error,
            **self.extra,
        }
