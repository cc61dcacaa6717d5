"""Where a model's reasoning begins and ends: the setting as text, and as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import ValidationError
from .param_rules import refuse_type, refuse_unknown, text

START, END = "<think>", "</think>"
NAMES = {
    "reasoning_start_str": "start",
    "think_start_str": "start",
    "reasoning_end_str": "end",
    "think_end_str": "end",
}


class ReasoningConfig:
    """The strings around a model's reasoning, under vLLM's older or newer names.

    The end may hold a sentence that leads over to the answer, before or after the model's own
    marker. Raises ValidationError for an empty string and for two names of one thing that differ.
    """

    def __init__(
        self,
        reasoning_start_str: str | None = None,
        reasoning_end_str: str | None = None,
        *,
        think_start_str: str | None = None,
        think_end_str: str | None = None,
    ) -> None:
        self.reasoning_start_str = _either(
            "start", reasoning_start_str, think_start_str, default=START
        )
        self.reasoning_end_str = _either("end", reasoning_end_str, think_end_str, default=END)

    @property
    def think_start_str(self) -> str:
        """The start under its older name."""
        return self.reasoning_start_str

    @property
    def think_end_str(self) -> str:
        """The end under its older name."""
        return self.reasoning_end_str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReasoningConfig) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.reasoning_start_str, self.reasoning_end_str))

    def __repr__(self) -> str:
        return (
            f"ReasoningConfig(reasoning_start_str={self.reasoning_start_str!r}, "
            f"reasoning_end_str={self.reasoning_end_str!r})"
        )


def reasoning_config(value: Any) -> ReasoningConfig | None:
    """Normalise the engine argument: None, a dict of the names, or an object that has them."""
    if value is None or isinstance(value, ReasoningConfig):
        return value
    if isinstance(value, Mapping):
        refuse_unknown("reasoning_config", value, NAMES)
        return ReasoningConfig(**value)
    given = {name: getattr(value, name, None) for name in NAMES}
    if not any(isinstance(item, str) for item in given.values()):
        refuse_type(
            "reasoning_config", value, f"None, a dict or an object with some of {', '.join(NAMES)}"
        )
    return ReasoningConfig(**{name: item for name, item in given.items() if item is not None})


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The same in token ids; none is empty."""

    start: tuple[int, ...]
    end: tuple[int, ...]  # what is written to end the reasoning
    closing: tuple[int, ...]  # what shows that it has ended: the model's own marker inside `end`


class MarkerTokenizer(Protocol):
    """What is asked of a tokenizer here."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


def markers_of(
    config: ReasoningConfig, tokenizer: MarkerTokenizer, added_ids: Sequence[int] = ()
) -> ReasoningMarkers:
    """Tokenise `config`.

    `added_ids` are the tokenizer's added tokens: where the end holds some, the last of them is the
    model's own marker, by which a reasoning that ends by itself is recognised; otherwise the whole
    end is.
    """
    ids = {
        "start": tuple(tokenizer.encode(config.reasoning_start_str, add_special_tokens=False)),
        "end": tuple(tokenizer.encode(config.reasoning_end_str, add_special_tokens=False)),
    }
    for part, found in ids.items():
        if not found:
            raise ValidationError(
                f"reasoning_config's {part} must be text that the tokenizer can write, got "
                f"{getattr(config, f'reasoning_{part}_str')!r}",
                parameter="reasoning_config",
                value=config,
            )
    added = set(added_ids)
    own = [token for token in ids["end"] if token in added]
    return ReasoningMarkers(ids["start"], ids["end"], tuple(own[-1:]) or ids["end"])


def _either(part: str, newer: Any, older: Any, *, default: str) -> str:
    rule = text(f"reasoning_{part}_str", optional=True)
    first, second = rule(newer), text(f"think_{part}_str", optional=True)(older)
    if first is not None and second is not None and first != second:
        raise ValidationError(
            f"reasoning_{part}_str and think_{part}_str are one setting, "
            f"got {first!r} and {second!r}",
            parameter="reasoning_config",
            value=second,
        )
    chosen: str = first or second or default
    return chosen
