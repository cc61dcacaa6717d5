"""What a stage class must be before it may run: its name, API range and declarations."""

from __future__ import annotations

import re
from typing import Any

from .params import FIELDS, RequestParams
from .stage import STAGE_API, ApiRange, CutStage, Form, Kind, Picker, Stage, StageParams

NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")
SPECULATION = ("any-history", "sequential", "no")
RESERVED = frozenset({"stage", "id"})  # keys of a chain entry that are no parameters


def fault_of(
    stage: type[Stage], *, is_built_in: bool = False, is_local: bool = False
) -> str | None:
    """Return why `stage` may not be used, or None.

    A local stage (handed over in this process, or from a file) may have any free name; one from an
    installed distribution is called `dist.stage`.
    """
    if STAGE_API not in stage.api:
        return _api_fault(stage.api)
    for find in (_name_fault, _params_fault, _method_fault, _caps_fault):
        reason = find(stage)
        if reason is not None:
            return reason
    if not is_built_in:
        return _guest_fault(stage, is_local)
    return None


def _api_fault(theirs: ApiRange) -> str:
    ours = _range(ApiRange(STAGE_API, STAGE_API))
    other = "a newer" if theirs.low > STAGE_API else "an older"
    return (
        f"it is written for stage API {_range(theirs)} and this decodekit has {ours}; "
        f"{other} decodekit with stage API {_range(theirs)} will run it"
    )


def _range(api: ApiRange) -> str:
    return str(api.low) if api.low == api.high else f"{api.low} to {api.high}"


def _name_fault(stage: type[Stage]) -> str | None:
    for name in (stage.name, *stage.aliases):
        if not NAME.fullmatch(name):
            return f"the name {name!r} is not made of lower-case words, as in 'acme.top_a'"
    for alias in stage.aliases:
        if alias in FIELDS:
            return f"its alias {alias!r} is a request field"
    for field in stage.fields:
        if field not in RequestParams.__dataclass_fields__:
            return f"it expands the request field {field!r}, which does not exist"
    return None


def _params_fault(stage: type[Stage]) -> str | None:
    model: Any = stage.Params
    if not (isinstance(model, type) and issubclass(model, StageParams)):
        return "its Params is no StageParams"
    if not model.model_config.get("frozen") or model.model_config.get("extra") != "forbid":
        return "its Params must stay frozen and forbid unknown names"
    taken = RESERVED & model.model_fields.keys()
    if taken:
        return f"its parameter {min(taken)!r} has a name that chain entries use themselves"
    for own in stage.fields.values():
        if own not in model.model_fields:
            return f"it maps a request field to {own!r}, which is no parameter of it"
    return None


def _method_fault(stage: type[Stage]) -> str | None:
    if issubclass(stage, Picker):
        missing = "pick" if stage.pick is Picker.pick else None
    elif stage.kind is Kind.FORWARD:
        missing = None
    elif issubclass(stage, CutStage):
        own = stage.keep is not CutStage.keep or stage.transform is not CutStage.transform
        missing = None if own else "keep"
    else:
        missing = "transform" if stage.transform is Stage.transform else None
    return missing and f"it does not implement {missing}"


def _caps_fault(stage: type[Stage]) -> str | None:
    caps, form, kind = stage.caps, stage.form, stage.kind
    has_state = stage.open is not Stage.open or stage.rebuild is not Stage.rebuild
    contradictions = (
        (
            issubclass(stage, Picker) != (kind is Kind.PICK),
            "kind PICK and class Picker go together",
        ),
        (
            issubclass(stage, Picker) != (form is Form.PICKER),
            "form PICKER and class Picker go together",
        ),
        (
            form is Form.TRUNCATION and not issubclass(stage, CutStage),
            "form TRUNCATION needs the class CutStage",
        ),
        (issubclass(stage, CutStage) and kind is not Kind.CUT, "a CutStage is of kind CUT"),
        (caps.keeps_top_segment and kind is not Kind.CUT, "keeps_top_segment is for kind CUT"),
        (
            caps.monotone and form is not Form.ELEMENTWISE,
            "monotone needs form ELEMENTWISE, since the stage may be given part of a row",
        ),
        (caps.stateful and not has_state, "stateful needs open or rebuild"),
        (caps.spec not in SPECULATION, f"spec is {caps.spec!r}, not one of {SPECULATION}"),
        (stage.mandatory and kind is not Kind.MASK, "only a MASK may be mandatory"),
    )
    for is_broken, reason in contradictions:
        if is_broken:
            return f"its declarations contradict each other: {reason}"
    return None


def _guest_fault(stage: type[Stage], is_local: bool) -> str | None:
    if stage.fields:
        return "only built-in stages expand request fields"
    if is_local:
        return None
    if stage.mandatory:
        return "an installed plugin cannot make its stage mandatory"
    if stage.automatic:
        return "an installed plugin cannot put its stage into every default chain"
    for name in (stage.name, *stage.aliases):
        if "." not in name:
            return (
                f"the name {name!r} has no prefix; call it 'dist.{name}', bare names are built-in"
            )
    return None
