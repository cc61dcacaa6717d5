"""What the operator decides for a served name: its preset, and which stages requests may name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import ValidationError
from ...core.params import SamplingParams
from ...core.presets import Preset, Presets
from .errors import bad
from .settings import ServeSettings


@dataclass(frozen=True, slots=True)
class Policy:
    """Presets by served name, and allow-lists; the name "" speaks of every other one."""

    presets: Mapping[str, Preset] = field(default_factory=dict)
    stages: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def preset(self, name: str) -> Preset | None:
        """Return the preset under which the model is served as `name`."""
        return self.presets.get(name)

    def check_stages(self, name: str, params: SamplingParams, registry: Any) -> None:
        """Refuse a stage that the request names itself and that `name` does not allow."""
        allowed = self.stages.get(name, self.stages.get(""))
        if allowed is None:
            return
        for asked, where in _asked(params, registry):
            if asked not in allowed:
                raise bad(
                    f"{where} needs the stage {asked!r}, which is not allowed for {name!r}; "
                    f"allowed: {', '.join(sorted(allowed))}",
                    where,
                )


def make_policy(settings: ServeSettings, names: Iterable[str], engine: Any) -> Policy:
    """Check the settings against the engine: presets, stages and served names must exist."""
    known = list(names)
    presets: Presets = engine.parts.presets
    chosen = {}
    for name, preset in settings.preset_of.items():
        _check_name("served_preset", name, known)
        chosen[name] = presets.find(preset)
    stages: dict[str, frozenset[str]] = {}
    for entry in settings.allowed_stages or ():
        name, found, listed = entry.rpartition("=")
        if found:
            _check_name("allowed_stages", name, known)
        own = {engine.parts.registry.stage(item.strip()).name for item in listed.split(",") if item}
        stages[name] = stages.get(name, frozenset()) | own
    return Policy(chosen, stages)


def _check_name(option: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise ValidationError(
            f"{option} names the model {name!r}, which is not served; served: {', '.join(known)}",
            parameter=option,
            value=name,
        )


def _asked(params: SamplingParams, registry: Any) -> Iterable[tuple[str, str]]:
    """Yield the stages that the request itself asks for, and the field that does."""
    own = params.own_fields
    if "chain" in own:
        for entry in params.chain or ():
            name = entry if isinstance(entry, str) else entry["stage"]
            if name in registry.stages or _has_alias(registry, name):
                yield registry.stage(name).name, "chain"
    if "picker" in own and params.picker is not None:
        name = params.picker if isinstance(params.picker, str) else params.picker["picker"]
        yield name, "picker"
    for name, (stage, _) in registry.fields.items():
        if name in own and getattr(params, name, None) not in (None, [], {}):
            yield stage.name, name


def _has_alias(registry: Any, name: str) -> bool:
    return any(name in stage.aliases for stage in registry.stages.values())
