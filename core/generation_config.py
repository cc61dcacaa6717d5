"""Sampling defaults from generation_config.json, and which of its values count."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config_rules import GENERATION_KEYS
from .errors import ValidationError
from .params import SamplingParams

LAYER = "generation_config"  # in a plan's provenance
log = logging.getLogger("decodekit")

# The values that transformers itself takes where a file says nothing; None where it has none.
NEUTRAL: Mapping[str, object] = {
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
}


def read_generation_config(
    source: str, of_model: Mapping[str, Any], override: Mapping[str, Any]
) -> dict[str, Any]:
    """Return sampling fields by our names.

    `source` is "auto" (the model's file), "vllm" (none) or a folder; `override` is applied last,
    whatever the source. A value that equals transformers' own default counts as unset, except in
    `override`.
    """
    raw = dict(of_model) if source == "auto" else {}
    if source not in ("auto", "vllm"):
        raw = _from_folder(source)
    fields = {
        name: raw[key]
        for key, name in GENERATION_KEYS.items()
        if raw.get(key) is not None and raw[key] != NEUTRAL.get(key)
    }
    for key, value in override.items():
        if key in GENERATION_KEYS and value is not None:
            fields[GENERATION_KEYS[key]] = value
    return fields


def default_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Return fresh parameters with `fields` set."""
    params = SamplingParams(**fields)
    params.note_layer(fields, LAYER)
    return params


def announce(fields: Mapping[str, Any]) -> None:
    """Say once which defaults the model's own configuration sets."""
    if fields:
        listed = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        log.warning(
            "generation_config sets these defaults: %s (generation_config='vllm' turns them off)",
            listed,
        )


def _from_folder(source: str) -> dict[str, Any]:
    path = Path(source)
    path = path if path.suffix == ".json" else path / "generation_config.json"
    if not path.is_file():
        raise ValidationError(
            f"generation_config is {source!r}, but there is no {path}; "
            "allowed are 'auto', 'vllm' and a folder with generation_config.json",
            parameter="generation_config",
            value=source,
        )
    found: dict[str, Any] = json.loads(path.read_text())
    return found
