"""Other parameters near the given examples: a claim about parameters is tried over their range."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from ...core.errors import DecodekitError
from ...core.stage import Stage
from .trials import Bench, Row

MOST = 24  # for each example
LARGEST = 65  # vocabulary at which the range of parameters is tried
NEAR = 1e-6


def around(bench: Bench, size: int) -> list[dict[str, object]]:
    """Return the examples and variants of each parameter that can be bound at this vocabulary."""
    found: dict[str, dict[str, object]] = {}
    for example in bench.examples:
        mine = [dict(example)]
        for name, field in bench.stage.Params.model_fields.items():
            mine += [{**example, name: value} for value in _values(field, example.get(name))]
        for params in mine[: MOST + 1]:
            try:
                bench.bind(Row(torch.zeros(size), params))
            except DecodekitError:
                continue
            found.setdefault(repr(sorted(params.items(), key=lambda item: item[0])), params)
    return list(found.values())


def wide_runs(bench: Bench) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield sizes and parameters that act, with the whole range of parameters at small sizes."""
    for size in bench.sizes:
        examples = around(bench, size) if size <= LARGEST else bench.examples
        for params in examples:
            if bench.acts(params, size):
                yield size, params


def floats_of(bench: Bench, example: Mapping[str, object]) -> Iterator[tuple[str, list[float]]]:
    """Yield each float parameter that is given, with three values inside its range."""
    for name, field in bench.stage.Params.model_fields.items():
        given = example.get(name)
        if isinstance(given, float) and float in _types(field.annotation):
            values = [given, given * 0.9375, given * 0.8125]
            if all(_inside(field, value) for value in values):
                yield name, values


def _values(field: FieldInfo, given: object) -> Iterator[object]:
    kinds = _types(field.annotation)
    for kind in kinds:
        if get_origin(kind) is Literal:
            yield from (value for value in get_args(kind) if value != given)
    if bool in kinds:
        yield from (value for value in (True, False) if value != given)
        return
    if not {int, float} & kinds:
        return
    base = given if isinstance(given, int | float) else field.default
    tried: list[float] = []
    if isinstance(base, int | float):
        tried += [base / 2, base * 2, base + 1]
    low, high = _bounds(field)
    for bound, step in ((low, 1), (high, -1)):
        if bound is not None:
            tried += [bound, bound + step * (NEAR if float in kinds else 1)]
    if low is not None and high is not None:
        tried.append((low + high) / 2)
    for value in dict.fromkeys(tried):
        whole = float in kinds or value == int(value)
        if whole and value != given and _inside(field, value):
            yield float(value) if float in kinds else int(value)


def _types(annotation: Any) -> set[Any]:
    """Return the plain types that an annotation is made of."""
    origin = get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return {kind for part in get_args(annotation) for kind in _types(part)}
    if origin is typing.Annotated:
        return _types(get_args(annotation)[0])
    return {annotation}


def _bounds(field: FieldInfo) -> tuple[float | None, float | None]:
    low: float | None = None
    high: float | None = None
    for rule in _rules(field):
        if isinstance(rule, Ge | Gt):
            low = _number(rule.ge if isinstance(rule, Ge) else rule.gt)
        if isinstance(rule, Le | Lt):
            high = _number(rule.le if isinstance(rule, Le) else rule.lt)
    return low, high


def _inside(field: FieldInfo, value: float) -> bool:
    for rule in _rules(field):
        if (
            (isinstance(rule, Ge) and value < _number(rule.ge))
            or (isinstance(rule, Gt) and value <= _number(rule.gt))
            or (isinstance(rule, Le) and value > _number(rule.le))
            or (isinstance(rule, Lt) and value >= _number(rule.lt))
        ):
            return False
    return True


def _rules(field: FieldInfo) -> list[Any]:
    """Return the constraints of a field, also those inside `Annotated[float, ...] | None`."""
    found: list[Any] = list(field.metadata)
    for part in get_args(field.annotation):
        for rule in getattr(part, "__metadata__", ()):
            found += getattr(rule, "metadata", [rule])
    return found


def _number(value: Any) -> float:
    return float(value)


def examples_of(stage: type[Stage]) -> list[dict[str, object]]:
    """Return parameters to try a stage with when none are given.

    From `Field(examples=[...])` of its parameters, by place; where a required number has none, from
    the middle of its range. An empty dict if the stage can be had without any.
    """
    fields = stage.Params.model_fields
    given = {name: list(field.examples or ()) for name, field in fields.items()}
    count = max([len(values) for values in given.values()] + [1])
    found: list[dict[str, object]] = []
    for place in range(count):
        params: dict[str, object] = {}
        for name, field in fields.items():
            if given[name]:
                params[name] = given[name][min(place, len(given[name]) - 1)]
            elif field.is_required():
                params[name] = _likely(field)
        found.append(params)
    return found


def _likely(field: FieldInfo) -> object:
    """Return a value that a required parameter may have."""
    kinds = _types(field.annotation)
    for kind in kinds:
        if get_origin(kind) is Literal:
            return get_args(kind)[0]
    low, high = _bounds(field)
    if low is not None and high is not None:
        value = (low + high) / 2
    else:
        value = low + 1 if low is not None else (high or 2.0) - 1
    return value if float in kinds else int(value)
