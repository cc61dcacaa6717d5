"""The operations of the device, by their public names.

Each has its meaning in `reference/`; a caller of this file need not know which implementation
runs.
"""

from __future__ import annotations

from .fused.blocks import divide, small_float
from .reference.attention import attend_grouped, read_pages, write_pages
from .reference.mass import (
    ONE,
    num_segments,
    row_total,
    row_weights,
    segment_mass,
    segment_max,
    segment_view,
    token_mass,
)
from .reference.noise import (
    Purpose,
    exponential_for_ids,
    purpose_of,
    request_key,
    seed_key,
    uniform_for_ids,
)
from .reference.race import race_list, race_segments
from .reference.ranked import Ranked, rank_all, rank_top
from .reference.statistics import (
    RowCollision,
    RowEntropy,
    RowSpread,
    row_collision,
    row_entropy,
    row_spread,
)

__all__ = [
    "ONE",
    "Purpose",
    "Ranked",
    "RowCollision",
    "RowEntropy",
    "RowSpread",
    "attend_grouped",
    "divide",
    "exponential_for_ids",
    "num_segments",
    "purpose_of",
    "race_list",
    "race_segments",
    "rank_all",
    "rank_top",
    "read_pages",
    "request_key",
    "row_collision",
    "row_entropy",
    "row_spread",
    "row_total",
    "row_weights",
    "seed_key",
    "segment_mass",
    "segment_max",
    "segment_view",
    "small_float",
    "token_mass",
    "uniform_for_ids",
    "write_pages",
]
