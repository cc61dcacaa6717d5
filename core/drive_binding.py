"""Which driver a request asks for, with checked parameters, at admission."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .driver import Adjusted, Driver
from .driver_stages import own_stages
from .errors import ValidationError, did_you_mean
from .stage import BindContext, Stage, StageParams

if TYPE_CHECKING:
    from .request_params import RequestParams


@dataclass(frozen=True, slots=True)
class BoundDriver:
    """A request's driver as its plan has it."""

    kind: type[Driver]
    bound: Any
    context: BindContext
    width: int
    start: int
    adjusted: Adjusted
    stages: tuple[Stage, ...] = ()  # that it adds to the chain
    trim: int = 0  # tokens of the prompt's end that its lanes write again

    @property
    def values(self) -> Mapping[str, Any]:
        """The parameters that are set, for a report."""
        params = self.bound
        return params.model_dump(exclude_none=True) if isinstance(params, StageParams) else {}


def bind_driver(
    drivers: Mapping[str, type[Driver]], params: RequestParams, context: BindContext
) -> BoundDriver | None:
    """Return the driver that a request asks for, by `driver` or by flat fields; None for none."""
    kind, given = _asked(drivers, params)
    if kind is None:
        return None
    checked = kind.validate(given)
    bound = kind.bind(checked, context)
    adjusted = kind.adjust(bound, params)
    return BoundDriver(
        kind=kind,
        bound=bound,
        context=dataclasses.replace(context, request=adjusted.params),
        width=kind.width(bound, context),
        start=kind.start(bound, context),
        adjusted=adjusted,
        stages=own_stages(kind, bound, context),
        trim=kind.trim(bound, context),
    )


def _asked(
    drivers: Mapping[str, type[Driver]], params: RequestParams
) -> tuple[type[Driver] | None, Mapping[str, object]]:
    entry = params.driver
    if entry is None:
        for kind in drivers.values():
            fields = kind.of_fields(params)
            if fields is not None:
                return kind, fields
        return None, {}
    if isinstance(entry, type) and issubclass(entry, Driver):
        return entry, {}
    given: dict[str, object] = {}
    if isinstance(entry, Mapping):
        given = dict(entry)
        entry = given.pop("driver")
    names = {name: kind for kind in drivers.values() for name in (kind.name, *kind.aliases)}
    if entry not in names:
        known = ", ".join(drivers) or "none"
        raise ValidationError(
            f"driver must be one of {known}, got {entry!r}{did_you_mean(str(entry), names)}",
            parameter="driver",
            value=entry,
        )
    return names[entry], given
