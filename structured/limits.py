"""How large a grammar may be; a larger one is refused when the request is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from ..core.errors import ValidationError


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest sizes that are accepted, in characters unless the name says otherwise."""

    schema: int = 1_000_000
    schema_depth: int = 64  # subschemas inside one another
    properties: int = 10_000  # of one whole schema
    choices: int = 10_000
    regex: int = 20_000
    repetition: int = 100_000  # one {m,n}
    nested_repetition: int = 10_000  # product of {m,n} inside one another
    grammar: int = 1_000_000


LIMITS = Limits()


def check(field: str, limit: str, value: int, largest: int) -> None:
    """Refuse a `value` above `largest`; the sentence names the field, the limit and both."""
    if value > largest:
        over(field, limit, value, largest)


def over(field: str, limit: str, value: int, largest: int) -> NoReturn:
    """Raise the sentence for a value over its limit."""
    raise ValidationError(
        f"{field} is over the limit of {largest:,} {limit}, got {value:,}",
        parameter=field,
        value=value,
    )
