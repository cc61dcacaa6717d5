"""How a plan's parameters read: long values cut, secrets hidden, and what a bind changed."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from pydantic import SecretBytes, SecretStr

from .stage import StageParams

HIDDEN = "<hidden>"
MOST_ITEMS = 16
MOST_LETTERS = 80
Scalar = (int, float, str, bool, type(None))


def shown_values(params: StageParams, bound: Any = None) -> dict[str, Any]:
    """Return what to show of each parameter that is set.

    `bound` is what `bind` made of them; where it is of the same class its plain values count. A
    field declared with `Field(repr=False)`, or of a pydantic secret type, is hidden.
    """
    shown: dict[str, Any] = {}
    for name, field in type(params).model_fields.items():
        value = getattr(params, name)
        if type(bound) is type(params) and isinstance(getattr(bound, name), Scalar):
            value = getattr(bound, name)
        if value is None:
            continue
        is_secret = field.repr is False or isinstance(value, SecretStr | SecretBytes)
        shown[name] = HIDDEN if is_secret else _short(value)
    return shown


def describe(values: Mapping[str, Any]) -> str:
    """Write `shown_values` as "t=0.7, min_keep=1"."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def changes(instance: str, asked: StageParams, bound: Any) -> list[str]:
    """Return a note for each plain value that `bind` changed."""
    if bound is asked or type(bound) is not type(asked):
        return []
    before, after = shown_values(asked), shown_values(bound)
    notes = []
    for name in type(asked).model_fields:
        old, new = getattr(asked, name), getattr(bound, name)
        if isinstance(old, Scalar) and isinstance(new, Scalar) and old != new:
            was, is_ = before.get(name, "off"), after.get(name, "off")
            notes.append(f"{instance}.{name} {was} became {is_}")
    return notes


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= MOST_LETTERS else f"{value[:MOST_LETTERS]}..."
    if isinstance(value, Scalar):
        return value
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"<{type(value).__name__} {list(shape)}>"
    if callable(value):
        return f"<{getattr(value, '__qualname__', type(value).__qualname__)}>"
    if isinstance(value, Sized) and len(value) > MOST_ITEMS:
        return f"<{len(value)} items>"
    if isinstance(value, Mapping):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_short(item) for item in value]
    return value
