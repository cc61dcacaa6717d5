"""The rules of single fields: each returns a value normalised, or refuses it in one sentence.

A rule is made once, when a class is defined, and called at construction and on assignment.
Nothing here knows which field belongs to which class.
"""

import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from reprlib import Repr
from typing import Any, NoReturn

from .errors import ParameterTypeError, ValidationError, did_you_mean

Rule = Callable[[Any], Any]

_short = Repr()
_short.maxstring = _short.maxother = 80


def shown(value: object) -> str:
    """`repr` of a user's value, cut so that a huge list or text does not flood the message."""
    return _short.repr(value)


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """Raise the sentence for a value out of range."""
    raise ValidationError(
        f"{name} must be {allowed}, got {shown(value)}", parameter=name, value=value
    )


def refuse_type(name: str, value: object, allowed: str) -> NoReturn:
    """Raise the sentence for a value of a wrong type; also a TypeError."""
    raise ParameterTypeError(
        f"{name} must be {allowed}, got {shown(value)}", parameter=name, value=value
    )


def refuse_unknown(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise for the first keyword that `owner` does not have; return when all are known."""
    for name in given:
        if name not in known:
            raise ParameterTypeError(
                f"{owner} has no parameter {name!r}{did_you_mean(name, known)}",
                parameter=name,
                value=None,
            )


def as_int(name: str, value: object, allowed: str) -> int:
    """A plain int from any integer type; bool is no number here."""
    if type(value) is int:
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    refuse_type(name, value, allowed)


def as_real(name: str, value: object, allowed: str) -> float:
    """A float from any real number type but bool; NaN is left to the range check."""
    if type(value) is float:
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            refuse(name, value, allowed)
    refuse_type(name, value, allowed)


def real(name: str, low: float, high: float, *, open_low: bool = False) -> Rule:
    """A finite number in [low, high], or (low, high] with `open_low`; NaN never passes."""
    left = "(" if open_low else "["
    allowed = f"a number in {left}{low:g}, {high:g}]"
    if high == math.inf:
        allowed = f"a finite number {'>' if open_low else '>='} {low:g}"
        if low == -math.inf:
            allowed = "a finite number"

    def check(value: Any) -> float:
        number = as_real(name, value, allowed)
        if low <= number <= high and math.isfinite(number) and not (open_low and number == low):
            return number
        refuse(name, value, allowed)

    return check


def count(
    name: str, low: int, *, also: int | None = None, optional: bool = False, high: int | None = None
) -> Rule:
    """An integer >= `low` and <= `high`, or `also`; None passes when `optional`."""
    allowed = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    if also is not None:
        allowed = f"{also} or {allowed}"
    if optional:
        allowed = f"None, {allowed}"

    def check(value: Any) -> int | None:
        if value is None and optional:
            return None
        number = as_int(name, value, allowed)
        if number == also or (number >= low and (high is None or number <= high)):
            return number
        refuse(name, value, allowed)

    return check


def flag(name: str, *, optional: bool = False) -> Rule:
    """True or False, or None when `optional`; 0 and 1 are refused, being counts elsewhere."""
    allowed = "None, True or False" if optional else "True or False"

    def check(value: Any) -> bool | None:
        if value is True or value is False or (value is None and optional):
            return value
        refuse_type(name, value, allowed)

    return check


def one_of(name: str, options: Sequence[str | None]) -> Rule:
    """One of the listed words; a near miss gets a suggestion."""
    words = [option for option in options if option is not None]
    allowed = "one of " + ", ".join(repr(option) for option in options)

    def check(value: Any) -> str | None:
        if (value is None or isinstance(value, str)) and value in options:
            return value
        if not isinstance(value, str):
            refuse_type(name, value, allowed)
        raise ValidationError(
            f"{name} must be {allowed}, got {shown(value)}{did_you_mean(value, words)}",
            parameter=name,
            value=value,
        )

    return check


def text(name: str, *, optional: bool = False, empty: bool = False) -> Rule:
    """A string, not blank unless `empty`; None passes when `optional`."""
    allowed = ("None or " if optional else "") + ("a string" if empty else "a non-empty string")

    def check(value: Any) -> str | None:
        if value is None and optional:
            return None
        if not isinstance(value, str):
            refuse_type(name, value, allowed)
        if not value and not empty:
            refuse(name, value, allowed)
        return value

    return check


def as_list(name: str, value: object, allowed: str) -> list[Any]:
    """A fresh list from a list, a tuple or a set; a set is sorted, to settle its order."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=lambda item: (type(item).__name__, item))
    refuse_type(name, value, allowed)


def token_ids(name: str, *, absent: list[int] | None = None, empty: bool = True) -> Rule:
    """A list of token ids >= 0, copied; None becomes a copy of `absent`."""
    allowed = f"a {'' if empty else 'non-empty '}list of token ids (integers >= 0)"

    def check(value: Any) -> list[int] | None:
        if value is None:
            return None if absent is None else list(absent)
        ids = as_list(name, value, allowed)
        if not ids and not empty:
            refuse(name, value, allowed)
        for i, item in enumerate(ids):
            ids[i] = as_int(name, item, allowed)
            if ids[i] < 0:
                refuse(name, item, allowed)
        return ids

    return check


def strings(name: str, *, bare: bool = False) -> Rule:
    """A list of non-empty strings, copied; None is empty; with `bare` a string is a list of one."""
    allowed = ("a string or " if bare else "") + "a list of non-empty strings"

    def check(value: Any) -> list[str]:
        if value is None:
            return []
        items = [value] if bare and isinstance(value, str) else as_list(name, value, allowed)
        for item in items:
            if not isinstance(item, str):
                refuse_type(name, item, allowed)
            if not item:
                refuse(name, value, allowed)
            if not _is_text(item):
                refuse(name, item, "made of text, in which no surrogate stands alone")
        return items

    return check


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def mapping(name: str, *, optional: bool = True) -> Rule:
    """A dict with string keys, copied one level deep; None passes when `optional`."""
    allowed = ("None or " if optional else "") + "a dict with string keys"

    def check(value: Any) -> dict[str, Any] | None:
        if value is None and optional:
            return None
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            refuse_type(name, value, allowed)
        return dict(value)

    return check
