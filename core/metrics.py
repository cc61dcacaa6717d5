"""The values that `get_metrics` returns: named, labelled, of four kinds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Metric:
    """Base of every metric; names start with `decodekit:`."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass
class Histogram(Metric):
    """Observations by size; `buckets` maps an upper bound, as text, to a cumulative count.

    "+Inf" is always there and equals `count`.
    """

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass
class Vector(Metric):
    """A list of counts."""

    values: list[int]
