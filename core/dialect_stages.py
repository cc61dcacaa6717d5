"""Rules for settings that make up a stage, a picker or an order together.

What depends on other settings is put off with `port.later`, so that their order does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .errors import did_you_mean
from .porting import PENALTIES, RULES, STAGE_OF, Port, rule

CUTS = ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "tail_free", "top_a")
WHOLE_TEXT = 10**6  # a window from here on is none
REPLACES_ALL = ("llama.cpp", "koboldcpp", "ollama")  # mirostat stands alone there
# KoboldCpp's numbers of its samplers, in the order that `sampler_order` permutes.
KOBOLD_SAMPLERS: tuple[tuple[str, ...], ...] = (
    ("top_k",),
    ("top_a",),
    ("top_p",),
    ("tail_free",),
    ("typical_p",),
    ("temperature", "dynamic_temperature", "quadratic"),
    ("repetition_penalty", "presence_penalty"),
)


# --- values that need another ---------------------------------------------------------------------


def with_(port: Port, key: str, value: Any, main: str, target: str) -> None:
    """A parameter of a stage that the setting `main` asks for."""
    stage, _, parameter = target.partition(".")

    def act() -> None:
        if stage in port.stages:
            port.stage(stage, **{parameter: value})
        elif key in port.given:
            port.note(f"{key} is not used, since {main} is off")

    port.later(act)


RULES["with"] = with_


@rule
def with_picker(port: Port, key: str, value: Any, main: str, parameter: str) -> None:
    """A parameter of the picker that the setting `main` asks for."""

    def act() -> None:
        if port.picker is not None:
            port.picker[parameter] = value
        elif key in port.given:
            port.note(f"{key} is not used, since {main} is off")

    port.later(act)


@rule
def with_dynatemp(port: Port, key: str, value: Any) -> None:
    with_(port, key, value, "dynatemp_range", "dynamic_temperature.exponent")


@rule
def with_dynamic(port: Port, key: str, value: Any) -> None:
    parameter = key.removeprefix("dynatemp_")
    with_(port, key, value, "dynamic_temperature", f"dynamic_temperature.{parameter}")


@rule
def dynatemp_range(port: Port, key: str, value: Any) -> None:
    """A range around the temperature, which the dynamic one then replaces."""
    spread = port.number(key, value)
    assumed = port.table.get("defaults", {}).get("temperature", 1.0)
    middle = port.number("temperature", port.settings.get("temperature", assumed))
    if middle > 0:
        low, high = max(middle - spread, 0.0), middle + spread
        port.stage("dynamic_temperature", low=low, high=high)
        port.later(lambda: port.fields.pop("temperature", None))


@rule
def dynamic_temperature(port: Port, key: str, value: Any) -> None:
    """Replaces the plain temperature."""
    port.stage("dynamic_temperature", low=1.0, high=1.0)

    def act() -> None:
        if port.fields.pop("temperature", None) is not None:
            port.note("temperature is not used, since dynamic_temperature takes its place")

    port.later(act)


@rule
def penalty_window(port: Port, key: str, value: Any) -> None:
    """How far back the penalties look: -1 all the way; 0 switches them off in llama.cpp."""
    size = port.whole(key, value)
    if size == 0 and port.dialect == "koboldcpp":
        port.refuse(key, value, "1 or more, or be left out")

    def act() -> None:
        if size == 0:
            port.drop_stages(*PENALTIES)
        else:
            _windows(port, last_n=None if size < 0 else size)

    port.later(act)


@rule
def penalty_window_all(port: Port, key: str, value: Any) -> None:
    """How far back the penalties look; 0 is all the way."""
    size = port.whole(key, value)
    port.later(lambda: _windows(port, last_n=size if size > 0 else None))


@rule
def sustain(port: Port, key: str, value: Any) -> None:
    """How long the penalties keep their strength."""
    size = port.whole(key, value)
    if 0 <= size < WHOLE_TEXT:
        port.later(lambda: _windows(port, sustain=size))


@rule
def decay(port: Port, key: str, value: Any) -> None:
    """How long the penalties fade after that."""
    size = port.whole(key, value)
    limit = port.settings.get("rep_sustain_range", WHOLE_TEXT)
    if size > 0 and 0 <= limit < WHOLE_TEXT:
        port.later(lambda: _windows(port, decay=size))


def _windows(port: Port, **parameters: Any) -> None:
    for name in PENALTIES:
        if name in port.fields:
            port.stage(name, **parameters)


@rule
def min_keep(port: Port, key: str, value: Any) -> None:
    """The least that llama.cpp's truncations leave; its top-k does not know it."""

    def act() -> None:
        for name in ("typical_p", "top_p", "min_p", "xtc"):
            if name in port.stages or name in port.fields:
                port.stage(name, min_keep=value)

    port.later(act)


@rule
def breakers(port: Port, key: str, value: Any) -> None:
    """DRY's sequence breakers: a list, or the inside of a JSON list as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value if value.lstrip().startswith("[") else f"[{value}]")
        except ValueError:
            port.refuse(key, value, "a list of texts, or texts in quotes with commas between")
    with_(port, key, list(value), "dry_multiplier", "dry.breakers")


# --- pickers and orders ---------------------------------------------------------------------------


def _left_out(port: Port, names: list[str], reason: str) -> None:
    port.note(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} left out, as {reason}")


@rule
def mirostat(port: Port, key: str, value: Any) -> None:
    """Chooses in place of the draw, and alone where that system has it so."""
    if value not in (1, 2):
        port.refuse(key, value, "0, 1 or 2")
    port.picker = {"picker": "mirostat", "mode": value}

    def act() -> None:
        gone = port.drop_stages(*CUTS, "dry", *PENALTIES)
        if gone:
            _left_out(port, gone, f"mirostat stands alone in {port.dialect}")

    if port.dialect in REPLACES_ALL:
        port.last(act)


@rule
def adaptive(port: Port, key: str, value: Any) -> None:
    """Off below 0."""
    if port.number(key, value) >= 0:
        port.picker = {"picker": "adaptive_p", "target": value}


@rule
def adaptive_below_1(port: Port, key: str, value: Any) -> None:
    """Off at 1."""
    if port.number(key, value) < 1:
        port.picker = {"picker": "adaptive_p", "target": value}


@rule
def temperature_last(port: Port, key: str, value: Any) -> None:
    """Cuts look at the row before it is heated or cooled."""
    heats = ("temperature", "dynamic_temperature", "quadratic")
    port.order = [name for name in port.order if name not in heats]
    port.order += heats if port.dialect != "exllamav3" else heats[:1]
    port.is_ordered = True


@rule
def samplers(port: Port, key: str, value: Any) -> None:
    """A list of the system's names: their order, and in llama.cpp all that is on."""
    known: Mapping[str, list[str]] = port.table["samplers"]
    names = value.replace(";", "\n").split() if isinstance(value, str) else list(value)
    for name in names:
        if name not in known:
            port.refuse(
                key, name, f"made of {', '.join(known)}{did_you_mean(str(name), list(known))}"
            )
    listed = [stage for name in names for stage in known[name]]
    governed = {stage for stages in known.values() for stage in stages}
    before = [name for name in port.order if name not in listed]
    if port.dialect == "llama.cpp":
        off = [name for name in before if name in governed]
        before = [name for name in before if name not in governed]

        def act() -> None:
            gone = port.drop_stages(*off)
            if port.picker is not None and port.picker["picker"] == "adaptive_p":
                if "adaptive_p" not in listed:
                    port.picker = None
                    gone.append("adaptive_p")
            asked = [name for name in gone if name in port.given or name not in STAGE_OF]
            if asked:
                _left_out(port, asked, f"{key} does not list {'it' if len(asked) == 1 else 'them'}")

        port.last(act)
    port.order = [*before, *listed]
    port.is_ordered = True


@rule
def sampler_order(port: Port, key: str, value: Any) -> None:
    """KoboldCpp's numbers."""
    numbers = list(value)
    if sorted(numbers) not in (list(range(6)), list(range(7))):
        port.refuse(key, value, "a permutation of 0 to 6")
    listed = [stage for number in numbers for stage in KOBOLD_SAMPLERS[number]]
    place = port.order.index("top_k") if "top_k" in port.order else 0
    head = [name for name in port.order[:place] if name not in listed]
    tail = [name for name in port.order[place:] if name not in listed]
    first_pen = [] if 6 in numbers else ["repetition_penalty", "presence_penalty"]
    head = [name for name in head if name not in first_pen]
    port.order = [*head, *first_pen, *listed, *tail]
    port.is_ordered = True
