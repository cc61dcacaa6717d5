"""Draws a token by its probability, with addressed noise: the argmax of ln(weight) - ln(E).

A row whose chain has a truncation and whose kept set has at most 1,024 tokens races over those
tokens; every other row draws a segment of 256 tokens first and then a token inside it. Which of the
two a row takes is part of the meaning, since they read other noise, and depends on the row alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...core.batch import PickView, Ranking, RowView
from ...core.hookspecs import hookimpl
from ...core.stage import Caps, Picker
from ...kernels.ops import race_list, race_segments, rank_top

LONGEST_LIST = 1024


class Race(Picker):
    """The default draw."""

    name = "race"
    kernel = "race"
    aliases = ("gumbel",)
    caps = Caps(random=True, spec="any-history")

    def pick(self, view: PickView, rows: RowView) -> Tensor:
        ranking = view.ranking
        if not view.has_cut:
            return _race_rows(view.logits, rows)
        if ranking is not None and ranking.values.shape[1] <= LONGEST_LIST:
            return _race_list(ranking, rows)
        return _race_either(view, rows)


def _race_list(ranking: Ranking, rows: RowView) -> Tensor:
    group = rows.rows
    return race_list(ranking.values, ranking.ids, group.keys, rows.positions, group.branches)


def _race_rows(logits: Tensor, rows: RowView) -> Tensor:
    return race_segments(logits, rows.rows.keys, rows.positions, rows.rows.branches)


def _race_either(view: PickView, rows: RowView) -> Tensor:
    """Decide row by row, where some may have kept more than a list holds."""
    logits = view.logits
    num_kept = (logits > -torch.inf).sum(1)
    is_short = num_kept <= LONGEST_LIST
    group = rows.rows
    address = (group.keys, rows.positions, group.branches)
    tokens = torch.empty_like(group.keys)
    short = is_short.nonzero()[:, 0]
    if len(short):
        width = int(num_kept[short].amax().clamp(min=1))
        listed = rank_top(logits[short], width)
        part = (column[short] for column in address)
        tokens[short] = race_list(listed.values, listed.ids, *part)
    long = (~is_short).nonzero()[:, 0]
    if len(long):
        part = (column[long] for column in address)
        tokens[long] = race_segments(logits[long], *part)
    return tokens


@hookimpl
def decodekit_pickers() -> Iterable[type[Picker]]:
    return [Race]
