"""PlanReport: what ran for a request, in which order, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One executed stage. `provenance` says of each parameter where its value came from.

    Sources are words such as "request", "chain", "generation_config", "default".
    """

    stage: str
    id: str
    kind: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        values = ", ".join(
            f"{name}={value!r}" + (f" [{source}]" if (source := self.provenance.get(name)) else "")
            for name, value in self.params.items()
        )
        label = self.stage if self.id in ("", self.stage) else f"{self.stage} as {self.id}"
        return f"{label}({values})"


@dataclass(frozen=True, slots=True)
class DroppedStep:
    """A stage that was asked for, or stands in the profile, and does not run."""

    stage: str  # its id in the chain
    reason: str
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The plan of one request, as data and as text.

    `fingerprint` is equal for two requests that run the same stages with the same values.
    """

    fingerprint: str
    order: tuple[PlanStep, ...]
    dropped: tuple[DroppedStep, ...] = ()
    notes: tuple[str, ...] = ()
    profile: str = "default"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; parameter values are kept as they are."""
        return {
            "fingerprint": self.fingerprint,
            "profile": self.profile,
            "order": [
                {**asdict(step), "params": dict(step.params), "provenance": dict(step.provenance)}
                for step in self.order
            ],
            "dropped": [{"stage": step.stage, "reason": step.reason} for step in self.dropped],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"plan {self.fingerprint} (profile {self.profile})"]
        lines += [f"  {i}. {step}" for i, step in enumerate(self.order, start=1)]
        lines += [f"  dropped {step}" for step in self.dropped]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
