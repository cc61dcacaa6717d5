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
from .stage import After, BindContext, Observer, Point, StageParams, Stop, Tap

if TYPE_CHECKING:
    from .params import RequestParams


Points = Mapping[Point, str]  # each with the observer that reads it; hashable


class BoundStop(NamedTuple):
    """The check of one stop for one request."""

    check: Any  # a Checker; a TextStop where bound, which the plan keeps apart
    respects_min_tokens: bool  # not asked before min_tokens
    name: str


def bind_stops(
    installed: Sequence[Stop], params: RequestParams, context: BindContext
) -> tuple[BoundStop, ...]:
    """Return the checks that this request asks for, in order."""
    stops: Iterable[Stop] = installed
    wishes: dict[str, list[StageParams]] = {}
    if params.stops:
        wishes = _wishes(params.stops, {stop.name: stop for stop in installed}, "stop")
        own = [stop for stop in params.stops if isinstance(stop, Stop)]
        stops = sorted([*installed, *own], key=lambda stop: (stop.rank, stop.name))
    checks: list[BoundStop] = []
    asked = [(each, wish) for each in stops for wish in wishes.get(each.name, [None])]
    for stop, wish in asked:
        check = _bound("stop", stop, context if wish is None else replace(context, wish=wish))
        if check is not None:
            checks.append(BoundStop(check, stop.respects_min_tokens, stop.name))
    return tuple(checks)


def bind_observers(
    installed: Sequence[Observer], params: RequestParams, context: BindContext
) -> tuple[tuple[Observer, Hashable], ...]:
    """Return the observers that this request asks for, each with its order."""
    observers: Iterable[Observer] = installed
    wishes: dict[str, list[StageParams]] = {}
    if params.observers:
        known = {observer.name: observer for observer in installed}
        wishes = _wishes(params.observers, known, "observer")
        observers = [*installed, *(own for own in params.observers if isinstance(own, Observer))]
    orders: list[tuple[Observer, Hashable]] = []
    for observer in observers:
        wish = wishes.get(observer.name)
        own = context if wish is None else replace(context, wish=wish[-1])
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


def _wishes(
    entries: Sequence[Any], installed: Mapping[str, Stop] | Mapping[str, Observer], kind: str
) -> dict[str, list[StageParams]]:
    """Return the parameters of each stop or observer that `entries` name, checked, in order."""
    wishes: dict[str, list[StageParams]] = {}
    for entry in entries:
        if isinstance(entry, Stop | Observer):
            continue
        given = dict(entry) if isinstance(entry, Mapping) else {kind: entry}
        name = given.pop(kind)
        if name not in installed:
            hint = did_you_mean(str(name), installed)
            raise ValidationError(
                f"unknown {kind} {name!r}{hint}", parameter=f"{kind}s", value=name
            )
        model = installed[name].Params
        for key in given:
            if key not in model.model_fields:
                hint = did_you_mean(key, model.model_fields)
                raise ValidationError(
                    f"{kind} {name!r} has no parameter {key!r}{hint}",
                    parameter=f"{kind}s",
                    value=entry,
                )
        try:
            wishes.setdefault(name, []).append(model(**given))
        except PydanticError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ValidationError(
                f"{kind} {name!r} cannot take {place}={first['input']!r}: {first['msg']}",
                parameter=f"{kind}s",
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
