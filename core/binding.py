"""Ask stages, stops and observers about one request; what they raise names them and refuses it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError as PydanticError

from .draft import Draft
from .errors import ChainError, DecodekitError, ValidationError, did_you_mean
from .plan_report import DroppedStep
from .plan_text import describe, shown_values
from .request_params import FrozenDict
from .stage import After, BindContext, Checker, Observer, Point, StageParams, Stop, Tap

if TYPE_CHECKING:
    from .params import RequestParams


Points = Mapping[Point, str]  # each with the observer that reads it; hashable


class BoundStop(NamedTuple):
    """The check of one stop for one request."""

    check: Checker
    respects_min_tokens: bool  # not asked before min_tokens
    name: str


def bind_stops(
    installed: Sequence[Stop], params: RequestParams, context: BindContext
) -> tuple[BoundStop, ...]:
    """Return the checks that this request asks for, in order."""
    stops: Iterable[Stop] = installed
    if params.stops:
        own = _objects(params.stops, "stop", Stop, {stop.name for stop in installed})
        stops = sorted([*installed, *own], key=lambda stop: (stop.rank, stop.name))
    checks: list[BoundStop] = []
    for stop in stops:
        check = _bound("stop", stop, context)
        if check is not None:
            checks.append(BoundStop(check, stop.respects_min_tokens, stop.name))
    return tuple(checks)


def bind_observers(
    installed: Sequence[Observer], params: RequestParams, context: BindContext
) -> tuple[tuple[Observer, Hashable], ...]:
    """Return the observers that this request asks for, each with its order."""
    observers: Iterable[Observer] = installed
    wishes: dict[str, StageParams] = {}
    if params.observers:
        wishes = _wishes(params.observers, {observer.name: observer for observer in installed})
        observers = [*installed, *(own for own in params.observers if isinstance(own, Observer))]
    orders: list[tuple[Observer, Hashable]] = []
    for observer in observers:
        wish = wishes.get(observer.name)
        own = context if wish is None else replace(context, wish=wish)
        order = _bound("observer", observer, own)
        if order is not None:
            orders.append((observer, order))
    return tuple(orders)


def watched_points(observers: Iterable[tuple[Observer, Hashable]]) -> Points:
    """Return the points that change what a chain may leave out: after a stage, and at the end.

    Each `After` comes with the observer that reads it.
    """
    points: dict[Point, str] = {}
    for observer, order in observers:
        for point in observer.taps(order):
            if point is Tap.FINAL or isinstance(point, After):
                points.setdefault(point, observer.name)
            elif not isinstance(point, Tap):
                raise ValidationError(
                    f"observer {observer.name!r} must tap at a Tap or After(instance), "
                    f"got {point!r}",
                    parameter="observers",
                    value=point,
                )
    return FrozenDict(points)


def refuse_unknown_points(
    points: Points, instances: Sequence[str], dropped: Iterable[DroppedStep]
) -> None:
    """Raise ValidationError for an observer that looks after a stage that does not run.

    `instances` are those of the chain in order, the picker's last.
    """
    *body, picker = instances
    for point, observer in points.items():
        if not isinstance(point, After) or point.instance in body:
            continue
        name = point.instance
        reasons = [step.reason for step in dropped if step.stage == name]
        if name == picker:
            reason = "is the picker, which leaves no logits; use Tap.FINAL for what it chose from"
        elif reasons:
            reason = f"does not run: {reasons[0]}"
        else:
            reason = (
                f"is no stage of this request (they are: {', '.join(body) or 'none'})"
                f"{did_you_mean(name, body)}"
            )
        raise ValidationError(
            f"observer {observer!r} taps after {name!r}, which {reason}",
            parameter="observers",
            value=name,
        )


def _wishes(entries: Sequence[Any], installed: Mapping[str, Observer]) -> dict[str, StageParams]:
    """Return the parameters of each observer that `entries` name, checked."""
    wishes: dict[str, StageParams] = {}
    for entry in entries:
        if isinstance(entry, Observer):
            continue
        given = dict(entry) if isinstance(entry, Mapping) else {"observer": entry}
        name = given.pop("observer")
        if name not in installed:
            hint = did_you_mean(str(name), installed)
            raise ValidationError(
                f"unknown observer {name!r}{hint}", parameter="observers", value=name
            )
        try:
            wishes[name] = installed[name].Params(**given)
        except PydanticError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ValidationError(
                f"observer {name!r} cannot take {place}={first['input']!r}: {first['msg']}",
                parameter="observers",
                value=first["input"],
            ) from None
    return wishes


def bind_stage(draft: Draft, context: BindContext) -> Any:
    """Return what the stage makes of its checked parameters; ChainError otherwise."""
    params = draft.check()
    return ask(draft, lambda given: draft.stage.bind(given, context), params)


def ask(draft: Draft, question: Callable[[Any], Any], params: Any) -> Any:
    """Ask a stage's own code; what it raises becomes one sentence about the stage and its field."""
    try:
        return question(params)
    except ValidationError as error:
        draft.blame(error)
    except Exception as error:
        values = describe(shown_values(draft.check()))
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        field = next(iter(draft.flat.values()), "chain")
        raise ChainError(
            f"stage {draft.stage.name!r} ({draft.instance}) cannot be bound"
            f"{f' with {values}' if values else ''}: {reason}",
            parameter=field,
        ) from error


def _bound(kind: str, plugin: Stop | Observer, context: BindContext) -> Any:
    try:
        return plugin.bind(context)
    except DecodekitError:
        raise
    except Exception as error:
        raise ValidationError(
            f"{kind} {plugin.name!r} cannot be bound: {type(error).__name__}: {error}",
            parameter=f"{kind}s",
        ) from error


def _objects(entries: Sequence[Any], kind: str, base: type, known: set[str]) -> list[Any]:
    """Return the objects among a request's own stops or observers; names must be installed ones.

    An installed one is asked for every request, so that naming it adds nothing.
    """
    own = []
    for entry in entries:
        if isinstance(entry, base):
            own.append(entry)
            continue
        name = entry.get(kind) if isinstance(entry, Mapping) else entry
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise ValidationError(
                f"unknown {kind} {name!r}{hint}", parameter=f"{kind}s", value=name
            )
        if isinstance(entry, Mapping) and len(entry) > 1:
            extra = next(key for key in entry if key != kind)
            raise ValidationError(
                f"{kind} {name!r} has no parameter {extra!r}", parameter=f"{kind}s", value=entry
            )
    return own
