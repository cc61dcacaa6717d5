"""Port: what becomes of another system's settings, collected one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .errors import ValidationError
from .param_rules import as_int, as_real, shown

# Flat field -> stage, for the entries of a chain that has to be written.
STAGE_OF = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
}
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")

Rule = Callable[..., None]
RULES: dict[str, Rule] = {}  # by the name that the tables call


def rule(function: Rule) -> Rule:
    """Enter a function into the table of rules."""
    RULES[function.__name__] = function
    return function


class Port:
    """Collects fields, stages, a picker, an order and notes; `finish` writes the chain."""

    def __init__(
        self,
        dialect: str,
        table: Mapping[str, Any],
        settings: Mapping[str, Any],
        given: frozenset[str],
    ) -> None:
        self.dialect = dialect
        self.table = table
        self.settings = settings  # by the dialect's own names, defaults included
        self.given = given  # those that were not assumed
        self.fields: dict[str, Any] = {}
        self.stages: dict[str, dict[str, Any]] = {}  # instance -> its entry in a chain
        self.picker: dict[str, Any] | None = None
        self.order: list[str] = list(table["order"])
        self.is_ordered = False  # the user gave an order of his own
        self.is_greedy = False
        self._notes: dict[str, None] = {}
        self._later: list[Callable[[], object]] = []
        self._last: list[Callable[[], object]] = []

    def note(self, sentence: str) -> None:
        """Keep a sentence for the user."""
        self._notes[sentence] = None

    def refuse(self, key: str, value: object, allowed: str) -> NoReturn:
        """Raise the sentence for a value that cannot be read."""
        raise ValidationError(
            f"{key} of {self.dialect} must be {allowed}, got {shown(value)}",
            parameter=key,
            value=value,
        )

    def number(self, key: str, value: object) -> float:
        """Return a number, or raise the sentence."""
        return as_real(key, value, f"a number, as in {self.dialect}")

    def whole(self, key: str, value: object) -> int:
        """Return an integer, or raise the sentence."""
        return as_int(key, value, f"an integer, as in {self.dialect}")

    def later(self, act: Callable[[], object]) -> None:
        """Call `act` once every setting was seen."""
        self._later.append(act)

    def last(self, act: Callable[[], object]) -> None:
        """Call `act` after all that was put off by `later`."""
        self._last.append(act)

    def set(self, key: str, target: str, value: Any) -> None:
        """Give `value` to "field" or "stage.parameter"; `key` is the setting that it comes from."""
        stage, dot, parameter = target.partition(".")
        if dot:
            self.stage(stage, **{parameter: value})
            return
        if self.fields.get(target, value) != value:
            raise ValidationError(
                f"{key}={shown(value)} contradicts another setting that gives {target} "
                f"{shown(self.fields[target])}",
                parameter=key,
                value=value,
            )
        self.fields[target] = value

    def stage(self, name: str, instance: str | None = None, **parameters: Any) -> None:
        """Give parameters to a stage of the chain; `instance` tells two of one stage apart."""
        entry = self.stages.setdefault(instance or name, {"stage": name})
        if instance is not None:
            entry["id"] = instance
        entry.update(parameters)

    def drop_stages(self, *names: str) -> list[str]:
        """Take these stages out, and the fields that fill them; return those that were there."""
        gone = []
        for name in names:
            instances = [key for key, entry in self.stages.items() if entry["stage"] == name]
            for key in instances:
                del self.stages[key]
            fields = [field for field, stage in STAGE_OF.items() if stage == name]
            fields = [field for field in fields if self.fields.pop(field, None) is not None]
            if instances or fields:
                gone.append(name)
        return gone

    def set_options(self, name: str, options: Mapping[str, Any]) -> None:
        """Set one kind of structured output; a second one is refused."""
        if "structured_outputs" in self.fields:
            raise ValidationError(
                f"{name} contradicts another setting that constrains the output", parameter=name
            )
        self.fields["structured_outputs"] = dict(options)

    def finish(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the fields of SamplingParams and the notes."""
        for act in (*self._later, *self._last):
            act()
        fields = self.fields
        profile = self.table.get("profile")
        if profile is not None:
            fields["profile"] = profile
        if self.is_greedy:
            fields["temperature"] = 0.0
        if self.picker is not None and fields.get("temperature") != 0.0:
            fields["picker"] = self.picker
        elif self.picker is not None:
            self.note(f"{self.picker['picker']} is not used, since the request is greedy")
        if self.stages or self.is_ordered:
            fields["chain"] = self._chain()
        return fields, tuple(self._notes)

    def _chain(self) -> list[Any]:
        """Every stage that something fills, in the system's order."""
        flat = {stage for field, stage in STAGE_OF.items() if field in self.fields}
        if self.fields.get("temperature") == 0.0:
            flat.discard("temperature")  # that asks for the greedy pick, and no stage
        entries: dict[str, list[Any]] = {}
        for entry in self.stages.values():
            is_bare = len(entry) == 1
            entries.setdefault(entry["stage"], []).append(entry["stage"] if is_bare else entry)
        for stage in flat - self.stages.keys():  # an instance with a name of its own is another
            entries.setdefault(stage, []).append(stage)
        place = {name: i for i, name in enumerate(self.order)}
        names = sorted(entries, key=lambda name: (place.get(name, -1), name))
        return [entry for name in names for entry in entries[name]]
