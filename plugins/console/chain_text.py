"""A chain as typed in a shell: a list such as `temperature=0.7, top_p(p=0.9, min_keep=2)`, or JSON.

A bare value belongs to the stage's main parameter: the one that the stage's request field fills, or
its only one. `stage as id` names the instance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ...core.errors import ChainError
from ...core.registry import Registry
from ...core.stage import Stage

_ENTRY = re.compile(
    r"(?P<stage>[\w.-]+)\s*(?:\((?P<many>.*)\)|=(?P<one>.*?))?\s*(?:\s+as\s+(?P<id>[\w.#-]+))?",
    re.DOTALL,
)


def parse_chain(text: str, registry: Registry) -> list[Any]:
    """Return `text` as a value of `SamplingParams.chain`; ChainError if it is none."""
    if text.lstrip().startswith(("[", "{")):
        chain = _json(text)
        return chain if isinstance(chain, list) else [chain]
    return [_entry(part, registry) for part in _split(text)]


def installed_chain(text: str) -> list[Any]:
    """Return a chain over the stages of this installation, where there is no engine to ask."""
    if text.lstrip().startswith(("[", "{")):
        return parse_chain(text, Registry())
    return parse_chain(text, Registry.load())


def _entry(text: str, registry: Registry) -> str | dict[str, Any]:
    match = _ENTRY.fullmatch(text.strip())
    if match is None:
        raise ChainError(
            f"chain entry {text.strip()!r} is none of: stage, stage=value, stage(name=value, ...)",
            parameter="chain",
            value=text,
        )
    name = match["stage"]
    params: dict[str, Any] = {}
    if match["one"] is not None:
        params[_main_parameter(registry.stage(name))] = _value(match["one"])
    elif match["many"] is not None:
        for part in _split(match["many"]):
            own, equals, value = part.partition("=")
            if not equals:
                raise ChainError(
                    f"chain entry {name!r} has {part.strip()!r} where name=value is expected",
                    parameter="chain",
                    value=text,
                )
            params[own.strip()] = _value(value)
    if match["id"]:
        params["id"] = match["id"]
    return {"stage": name, **params} if params else name


def _main_parameter(stage: type[Stage]) -> str:
    names = list(dict.fromkeys(stage.fields.values())) or list(stage.Params.model_fields)
    if len(names) == 1:
        return names[0]
    known = ", ".join(stage.Params.model_fields) or "none"
    raise ChainError(
        f"stage {stage.name!r} takes no bare value; write {stage.name}(name=value) with one of its "
        f"parameters (known: {known})",
        parameter="chain",
        value=stage.name,
    )


def _split(text: str) -> Iterator[str]:
    """Cut at commas that stand outside brackets and quotes; empty parts are left out."""
    part, depth, quote = "", 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            if part.strip():
                yield part
            part = ""
            continue
        part += char
    if part.strip():
        yield part


def _value(text: str) -> Any:
    """Read a JSON value; what is none is a word, with or without single quotes."""
    text = text.strip()
    try:
        return json.loads(text)
    except ValueError:
        return text.strip("'")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ChainError(
            f"chain is not valid JSON: {error}", parameter="chain", value=text
        ) from None
