"""What a comparison measures on each column's texts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from .outcome import Outcome

NGRAM = 4  # of the repetition figure


@dataclass(frozen=True, slots=True)
class Figures:
    """One column. A share is between 0 and 1; None where nothing tells it."""

    texts: int
    errors: int
    length: float | None  # mean tokens
    ended: float | None  # share that the model ended itself, and max_tokens did not
    distinct_1: float | None  # different words over all words of the column
    distinct_2: float | None
    distinct_3: float | None
    repetition: float | None  # share of a text's 4-grams that it had before, mean over texts
    mean_logprob: float | None  # nats a token, before every stage
    agreement: float | None  # shared beginning with the first column's text, over the longer one
    identical: float | None  # share of texts that equal the first column's


LABELS = {
    "length": "length",
    "ended": "ended",
    "distinct_1": "distinct-1",
    "distinct_2": "distinct-2",
    "distinct_3": "distinct-3",
    "repetition": "repetition",
    "mean_logprob": "log-prob",
    "agreement": "agreement",
    "identical": "identical",
}


def figures_of(outcomes: Sequence[Outcome], reference: Sequence[Outcome]) -> Figures:
    """Measure a column's outcomes beside those of the first column.

    distinct-n is Li et al. 2016 (A diversity-promoting objective function), over the whole column;
    repetition is seq-rep-4 of Welleck et al. 2020 (Neural text generation with unlikelihood
    training).
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    pairs = _pairs(good, reference)
    return Figures(
        texts=len(good),
        errors=len(outcomes) - len(good),
        length=_mean(outcome.num_tokens for outcome in good),
        ended=_mean(outcome.finish_reason == "stop" for outcome in good),
        distinct_1=distinct(good, 1),
        distinct_2=distinct(good, 2),
        distinct_3=distinct(good, 3),
        repetition=_mean(
            share for outcome in good if (share := repetition(outcome.units)) is not None
        ),
        mean_logprob=_mean(
            outcome.mean_logprob for outcome in good if outcome.mean_logprob is not None
        ),
        agreement=_mean(agreement(ours.units, theirs.units) for ours, theirs in pairs),
        identical=_mean(list(ours.units) == list(theirs.units) for ours, theirs in pairs),
    )


def distinct(outcomes: Iterable[Outcome], size: int) -> float | None:
    """Return the share of different n-grams among all n-grams of these texts."""
    grams = [gram for outcome in outcomes for gram in ngrams(outcome.units, size)]
    return len(set(grams)) / len(grams) if grams else None


def repetition(units: Sequence[Hashable]) -> float | None:
    """Return the share of a text's 4-grams that stood in it before; None if it has none."""
    grams = ngrams(units, NGRAM)
    return 1 - len(set(grams)) / len(grams) if grams else None


def agreement(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> float:
    """Return the length of the shared beginning over that of the longer text; 1 if both are empty.

    A text that goes another way once goes on alone, so this tells how late two settings part.
    """
    longer = max(len(ours), len(theirs))
    return shared(ours, theirs) / longer if longer else 1.0


def shared(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> int:
    """Return how many units both begin with."""
    count = 0
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            break
        count += 1
    return count


def ngrams(units: Sequence[Hashable], size: int) -> list[tuple[Hashable, ...]]:
    """Return every run of `size` units."""
    return [tuple(units[place : place + size]) for place in range(len(units) - size + 1)]


def _pairs(
    outcomes: Iterable[Outcome], reference: Iterable[Outcome]
) -> list[tuple[Outcome, Outcome]]:
    """Put each outcome beside the reference of its prompt and seed, where there is a good one."""
    known = {
        (outcome.job.prompt, outcome.job.seed): outcome
        for outcome in reference
        if outcome.error is None
    }
    return [
        (outcome, known[place])
        for outcome in outcomes
        if (place := (outcome.job.prompt, outcome.job.seed)) in known
    ]


def _mean(values: Iterable[float]) -> float | None:
    listed = [float(value) for value in values]
    return fmean(listed) if listed else None
