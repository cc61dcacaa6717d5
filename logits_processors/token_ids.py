"""Token ids that a request names: their check, and their layout as index pairs for a group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.errors import ChainError


class Pairs(NamedTuple):
    """Places in the logits of a group, for `logits[pairs]`."""

    rows: Tensor  # [n] int64
    ids: Tensor  # [n] int64


def check_ids(field: str, ids: Iterable[int], size: int) -> None:
    """Refuse an id outside [0, size); an unchecked one would end a whole device."""
    for token in ids:
        if not 0 <= token < size:
            raise ChainError(
                f"{field} must be made of token ids in [0, {size}), got {token}",
                parameter=field,
                value=token,
            )


def pairs(lists: Sequence[Sequence[int]], device: torch.device) -> Pairs:
    """Return the place of every id in `lists`, one list a row."""
    lengths = torch.tensor([len(ids) for ids in lists], dtype=torch.int64)
    flat = torch.tensor([token for ids in lists for token in ids], dtype=torch.int64)
    rows = torch.arange(len(lists)).repeat_interleave(lengths)
    return Pairs(rows.to(device), flat.to(device))


def bans(places: Pairs) -> tuple[Pairs, Tensor]:
    """Return `places` with -inf to be added at each."""
    return places, torch.full((len(places.ids),), -torch.inf, device=places.ids.device)
