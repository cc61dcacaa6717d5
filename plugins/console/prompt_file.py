"""Prompts from a file, standard input or options; a bad line becomes a record that says so."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ...core.errors import ValidationError, did_you_mean

PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
KEYS = (*PROMPT_KEYS, "params", "id")


@dataclass(slots=True)
class Record:
    """One prompt of the input, or what is wrong with its line."""

    index: int  # place in the input, from 0
    id: str | int
    line: int | None = None  # from 1; None for --prompt
    prompt: dict[str, Any] = field(default_factory=dict)  # one of PROMPT_KEYS and its value
    params: dict[str, Any] = field(default_factory=dict)  # SamplingParams fields of this line
    error: str | None = None

    def head(self) -> dict[str, Any]:
        """What an output record begins with."""
        where = {} if self.line is None else {"line": self.line}
        return {"index": self.index, "id": self.id, **where, **self.prompt}


def of_texts(texts: Iterable[str]) -> list[Record]:
    """Make records of the values of --prompt."""
    return [Record(i, i, prompt={"prompt": text}) for i, text in enumerate(texts)]


def of_file(path: Path, kind: str) -> list[Record]:
    """Read a file; `kind` "auto" goes by its name. ValidationError if it cannot be read."""
    if kind == "auto":
        kind = "jsonl" if path.suffix.lower() in (".jsonl", ".ndjson") else "text"
    try:
        with path.open(encoding="utf-8") as file:
            return of_lines(file, kind)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValidationError(
            f"input file {str(path)!r} cannot be read: {reason}", parameter="input", value=str(path)
        ) from error


def of_lines(lines: TextIO | Iterable[str], kind: str) -> list[Record]:
    """Read one record a line; blank lines are left out, and ids must not repeat."""
    records: list[Record] = []
    owners: dict[str | int, int] = {}
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        record = Record(len(records), len(records), line=number)
        if kind == "text":
            record.prompt = {"prompt": line}
        else:
            _read(line, record)
        first = owners.setdefault(record.id, number)
        if first != number:
            record.error = f"line {number}: id {record.id!r} was used by line {first}"
        records.append(record)
    return records


def _read(line: str, record: Record) -> None:
    """Fill `record` from a line of JSON, or note why that cannot be done."""
    try:
        values = json.loads(line)
    except ValueError as error:
        record.error = f"line {record.line}: not valid JSON: {error}"
        return
    reason = _fault(values)
    if reason is not None:
        record.error = f"line {record.line}: {reason}"
    if isinstance(values, dict):
        name = values.get("id")
        if isinstance(name, str | int) and not isinstance(name, bool):
            record.id = name
        record.prompt = {key: values[key] for key in PROMPT_KEYS if key in values}
        record.params = values.get("params") or {}


def _fault(values: object) -> str | None:
    if not isinstance(values, Mapping):
        return f"expected a JSON object, got {values!r}"
    for key in values:
        if key not in KEYS:
            return f"unknown key {key!r} (known: {', '.join(KEYS)}){did_you_mean(key, KEYS)}"
    given = [key for key in PROMPT_KEYS if key in values]
    if len(given) != 1:
        return f"expected one of {', '.join(PROMPT_KEYS)}, got {' and '.join(given) or 'none'}"
    if not isinstance(values.get("params") or {}, dict):
        return f"params must be a JSON object, got {values['params']!r}"
    name = values.get("id")
    if isinstance(name, bool) or not isinstance(name, str | int | None):
        return f"id must be a string or an integer, got {name!r}"
    return None
