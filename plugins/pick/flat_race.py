"""Draws a token by its probability with noise on every alive token: argmax of l_i + g_i, g = -ln E.

E is exponential and addressed by the token's id, so l_i + g_i is the Gumbel-max form, and which
other tokens are alive moves no number. Ties go to the lowest id. Unlike `race`, whose noise depends
on how many tokens are kept, two runs that share a seed draw the same token wherever they agree on
it: the coupling that speculative drafts and vocabularies in shards want, at the price of noise for
the whole vocabulary where no truncation ran.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...core.batch import PickView, Ranking, RowView
from ...core.hookspecs import hookimpl
from ...core.stage import Caps, Picker

NO_ID = torch.iinfo(torch.int64).max


class FlatRace(Picker):
    """A draw whose noise belongs to tokens."""

    name = "flat_race"
    caps = Caps(random=True, spec="any-history")

    def pick(self, view: PickView, rows: RowView) -> Tensor:
        values, ids = candidates(view)
        return winner(values, ids, rows.exponential(ids))


def candidates(view: PickView) -> tuple[Tensor, Tensor]:
    """Return logits and ids of all that may be chosen, float32 and int64 [rows, n]."""
    if view.ranking is not None:
        return view.ranking.values, view.ranking.ids
    logits = view.logits
    return logits, torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)


def ranked(view: PickView) -> Ranking:
    """Return all that may be chosen in rank order."""
    return Ranking.of_row(view.logits) if view.ranking is None else view.ranking


def winner(values: Tensor, ids: Tensor, times: Tensor) -> Tensor:
    """Return the id with the greatest value - ln time in each row, the lowest of equals."""
    scores = values - times.log()  # float64
    best = scores.amax(1, keepdim=True)
    return ids.masked_fill(scores < best, NO_ID).amin(1)


@hookimpl
def decodekit_pickers() -> Iterable[type[Picker]]:
    return [FlatRace]
