"""Results as lines of JSON, one a prompt; read again to go on where a run has stopped."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import ValidationError
from ...core.outputs import CompletionOutput, RequestOutput
from .prompt_file import PROMPT_KEYS, Record
from .session import set_values

MINUS_INFINITY = -9999.0  # JSON has no infinity; OpenAI's servers write this


def record_of(record: Record, output: RequestOutput, *, with_ids: bool) -> dict[str, Any]:
    """Describe a finished request."""
    plan = output.plan
    steps = [] if plan is None else plan.order
    return {
        **record.head(),
        "outputs": [_completion(part, with_ids) for part in output.outputs],
        "chain": [
            {"stage": step.stage, **({} if step.id == step.stage else {"id": step.id})}
            | set_values(step)
            for step in steps
        ],
        "fingerprint": None if plan is None else plan.fingerprint,
    }


def failure_of(record: Record, error: str) -> dict[str, Any]:
    """Describe a record that could not be run."""
    return {**record.head(), "outputs": [], "error": error}


def has_failed(result: Mapping[str, Any]) -> bool:
    """Say whether a record, or one of its outputs, ended with an error."""
    return bool(result.get("error")) or any(part.get("error") for part in result.get("outputs", ()))


def dump(result: Mapping[str, Any]) -> str:
    """Write a record as one line, without its newline."""
    return json.dumps(result, ensure_ascii=False, allow_nan=False, default=repr)


def _completion(part: CompletionOutput, with_ids: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"index": part.index, "text": part.text}
    if with_ids:
        fields["token_ids"] = list(part.token_ids)
    fields.update(finish_reason=part.finish_reason, stop_reason=part.stop_reason, error=part.error)
    if part.complete is not None:  # the answer was constrained
        fields["complete"] = part.complete
        for name in ("parsed", "parse_error", "approximate", "choice_probs"):
            if getattr(part, name) is not None:
                fields[name] = getattr(part, name)
    if part.logprobs is not None:
        fields["cumulative_logprob"] = _finite(part.cumulative_logprob)
        fields["logprobs"] = [
            [
                {
                    "token_id": token,
                    "token": entry.decoded_token,
                    "logprob": _finite(entry.logprob),
                    "rank": entry.rank,
                }
                for token, entry in position.items()
            ]
            for position in part.logprobs
        ]
    return fields


def _finite(value: float | None) -> float | None:
    return MINUS_INFINITY if value is not None and math.isinf(value) else value


def resume(path: Path, records: Sequence[Record]) -> set[str | int]:
    """Prepare an output file for more lines; return the ids in it that are done.

    A last line that was cut short and records of failures are taken out of the file, so that they
    run again. ValidationError if the file holds something else, or results of other prompts.
    """
    if not path.exists():
        return set()
    text = path.read_text(encoding="utf-8", errors="replace")
    by_id = {record.id: record for record in records if record.error is None}
    kept: list[str] = []
    done: set[str | int] = set()
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            result = json.loads(line)
            name = result["id"]
        except (ValueError, TypeError, KeyError):
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValidationError(
                f"line {number} of {str(path)!r} is no result of `generate`; "
                "give another file to -o",
                parameter="output",
                value=str(path),
            ) from None
        if has_failed(result):
            continue
        record = by_id.get(name)
        if record is not None and record.prompt != {k: result.get(k) for k in record.prompt}:
            raise ValidationError(
                f"line {number} of {str(path)!r} has another {_key(record)} for id {name!r} than "
                "the input; --resume goes on with the same input only",
                parameter="resume",
                value=name,
            )
        kept.append(line if line.endswith("\n") else f"{line}\n")
        done.add(name)
    if "".join(kept) != text:
        _replace(path, kept)
    return done


def _key(record: Record) -> str:
    return next((key for key in PROMPT_KEYS if key in record.prompt), "prompt")


def _replace(path: Path, lines: Sequence[str]) -> None:
    """Rewrite a file so that a crash leaves either the old or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
