"""Replay bundles: one JSON file that reproduces a run, or says what differs.

`output.to_bundle().save("run.json")` writes one, `LLM.replay("run.json")` and `decodekit replay`
run it again. It holds the prompt's ids, the parameters, the key of the noise (so that a request
without a seed comes again too), the plan with its fingerprint, the tokens, the versions of what
ran, and a cheap digest of the model's files.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from .bundle_fields import read_fields, to_json, written_fields
from .errors import ValidationError

if TYPE_CHECKING:
    from .outputs import RequestOutput
    from .params import RequestParams

FORMAT = 1
PACKAGE = __name__.rpartition(".")[0].rpartition(".")[0]
LIBRARIES = ("torch", "triton", "transformers", "tokenizers")
# What of an engine's configuration decides on tokens, and can make the engine again.
SETTINGS = (
    "profile", "fusion", "dtype", "load_format", "seed", "model_impl", "tokenizer",
    "skip_tokenizer_init", "max_model_len", "logprobs_mode", "reasoning_config", "hf_overrides",
)  # fmt: skip
_IDS = re.compile(r"^( *\"\w+\": )\[\s+((?:-?\d+,\s+)*-?\d+)\s+\]", re.MULTILINE)
_EDGE = 1 << 16  # bytes read at either end of a file of weights
_PROBES, _PROBE = 32, 1 << 12  # pieces in between, and the bytes of each


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a bundle says of the engine; keeps no part of it alive."""

    model: Mapping[str, Any]
    path: Path  # of the model's files
    settings: Mapping[str, Any]
    plugins: Mapping[str, str]  # those that are no built-ins, each with its version

    @classmethod
    def of(cls, parts: Any) -> EngineFacts:
        """Take the facts from an engine's parts."""
        source, spec = parts.loaded.source, parts.spec
        model = {
            "name": source.name,
            "kind": source.kind,
            "implementation": source.implementation,
            "architecture": spec.architecture,
            "dtype": str(spec.dtype).removeprefix("torch."),
            "device": spec.device.type,
            "vocab_size": spec.vocab_size,
            "tokenizer_size": parts.tokenizer_size,
            "num_parameters": spec.num_parameters,
        }
        settings = {name: getattr(parts.config, name) for name in SETTINGS}
        plugins = {
            info.name: f"{info.distribution} {info.version}" if info.distribution else "in process"
            for info in parts.registry.plugins()
            if not info.built_in and info.state == "active"
        }
        return cls(model, source.path, settings, plugins)

    def described(self) -> dict[str, Any]:
        """Return the facts as JSON data; settings that JSON cannot hold are named in words."""
        return {
            "model": {**self.model, "digest": model_digest(self.path)},
            "engine": to_json(self.settings, lenient=True),
            "plugins": dict(self.plugins),
            "versions": versions(),
        }


@dataclass(slots=True)
class RunRecord:
    """What a request leaves in its output for a bundle."""

    params: RequestParams
    key: int
    facts: EngineFacts
    has_embeds: bool = False
    lengths: dict[int, int] = field(default_factory=dict)  # of sequences told in parts, by index


@dataclass(frozen=True)
class Bundle:
    """One recorded run. `data` is what stands in the file."""

    data: Mapping[str, Any]

    @classmethod
    def of(cls, output: RequestOutput) -> Self:
        """Record the run behind an output; ValueError where the output is not whole."""
        run = output._run
        if run is None or output.plan is None:
            raise ValueError(
                "this output does not know its run: it was made by hand, copied to another "
                "process, or comes from an engine of another kind"
            )
        for part in output.outputs:
            if len(part.token_ids) < run.lengths.get(part.index, 0):
                raise ValueError(
                    "this output is a part (output_kind=DELTA); join the parts with "
                    "`output.add(next_output, aggregate=True)` first"
                )
        fields, left_out = written_fields(run.params)
        if run.has_embeds:
            left_out["prompt"] = "embeddings"
        return cls(
            {
                "decodekit_bundle": FORMAT,
                **run.facts.described(),
                "prompt": output.prompt,
                "prompt_token_ids": output.prompt_token_ids,
                "params": fields,
                "left_out": left_out,
                "key": f"{run.key:#018x}",
                "seed": run.params.seed,
                "plan": to_json(output.plan.to_dict(), lenient=True),
                "outputs": [
                    {
                        "index": part.index,
                        "token_ids": list(part.token_ids),
                        "text": part.text,
                        "finish_reason": part.finish_reason,
                        "stop_reason": part.stop_reason,
                        "error": part.error,
                    }
                    for part in output.outputs
                ],
            }
        )

    @classmethod
    def read(cls, source: Bundle | Mapping[str, Any] | str | Path) -> Bundle:
        """Return a bundle from itself, its data or its file; ValidationError if it is none."""
        if isinstance(source, Bundle):
            return source
        data: Any = source
        if not isinstance(source, Mapping):
            try:
                data = json.loads(Path(source).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ValidationError(
                    f"bundle {str(source)!r} cannot be read: {error}",
                    parameter="bundle",
                    value=str(source),
                ) from error
        known = data.get("decodekit_bundle") if isinstance(data, Mapping) else None
        if known != FORMAT:
            raise ValidationError(
                f"bundle must be a replay bundle of format {FORMAT}, got "
                + (f"format {known!r}" if known is not None else "something else"),
                parameter="bundle",
                value=known,
            )
        return cls(data)

    def save(self, path: str | Path) -> None:
        """Write the file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def to_json(self) -> str:
        """Return the file's text; a list of ids is one line of it."""
        text = json.dumps(self.data, indent=1, ensure_ascii=False, allow_nan=False)
        return _IDS.sub(lambda ids: f"{ids[1]}[{' '.join(ids[2].split())}]", text)

    @property
    def key(self) -> int:
        """The 64-bit key of the run's noise."""
        return int(self.data["key"], 16)

    @property
    def fields(self) -> dict[str, Any]:
        """Keywords of SamplingParams for the same run."""
        return read_fields(self.data["params"])

    @property
    def left_out(self) -> Mapping[str, str]:
        """The fields that JSON cannot hold, and what stands in them."""
        found: Mapping[str, str] = self.data["left_out"]
        return found


def versions() -> dict[str, str]:
    """Return the versions of what decides on tokens; a library that is missing is left out."""
    found = {"decodekit": own_version(), "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def own_version() -> str:
    """Return the version of this package."""
    return str(import_module(PACKAGE).__version__)


def model_digest(path: Path) -> str | None:
    """Return a digest of a model's configuration and of samples of its weights; None without files.

    Reads about 300 kB a file. Other weights nearly always have another digest.
    """
    try:
        if path.is_file():
            files = [path]
        else:
            files = sorted(
                each
                for each in path.iterdir()
                if each.name == "config.json" or each.suffix in (".safetensors", ".bin")
            )
        marks = tuple((each, each.stat().st_size, each.stat().st_mtime_ns) for each in files)
        return _digest(marks) if marks else None
    except OSError:
        return None


@lru_cache(maxsize=16)
def _digest(marks: tuple[tuple[Path, int, int], ...]) -> str:
    digest = blake2b(digest_size=12)
    for path, size, _ in marks:
        digest.update(f"{path.name if len(marks) > 1 else ''} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_EDGE))
            for place in range(1, _PROBES):
                file.seek(size * place // _PROBES)
                digest.update(file.read(_PROBE))
            file.seek(max(size - _EDGE, 0))
            digest.update(file.read(_EDGE))
    return digest.hexdigest()
