"""From a name to a loaded model: find the files, read the config, choose the forward, fill it.

Nothing of transformers is imported for a GGUF file or for a folder that the lean forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from ..errors import ValidationError
from .config import (
    DTYPES,
    LoadedModel,
    ModelSource,
    ModelSpec,
    SourceKind,
    eos_ids,
    optional_id,
)
from .family import DecoderConfig, config_from_gguf, decoder_config, why_not_lean
from .layers import cpu_has_fast_bfloat16
from .llama import build_decoder, num_parameters
from .locate import locate, read_json
from .weights import (
    DummyWeights,
    GGUFWeights,
    SafetensorsWeights,
    WeightSource,
    safetensors_files,
    stored_dtype,
)

if TYPE_CHECKING:
    from .gguf import GGUFFile

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
ModelImpl = Literal["auto", "decodekit", "vllm", "transformers"]
HFOverrides = Mapping[str, Any] | Callable[[Any], Any]


def load_model(
    model: str | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    hf_overrides: HFOverrides | None = None,
    trust_remote_code: bool = False,
    hf_token: bool | str | None = None,
    load_format: str = "auto",
    seed: int = 0,
    config_format: str = "auto",
    model_impl: str = "auto",
) -> LoadedModel:
    """Load a model; `model` is a folder, a .gguf file, a hub name, or None for the embedded one.

    * `dtype="auto"`: on the CPU bfloat16 for bfloat16 checkpoints, else float32; on other devices
      bfloat16 for bfloat16 checkpoints, else float16, as vLLM. A GGUF file's weights have no
      float dtype of their own: bfloat16 where the device computes in it (any GPU; CPUs with
      AVX512-BF16 or AMX), else float32.
    * `hf_overrides`: a mapping merged into the config, nested mappings too; or a function from
      transformers' config object to one (not for GGUF).
    * `load_format="dummy"`: random weights from `seed` in place of the stored ones.
    * `model_impl`: "decodekit" (alias "vllm") forces the lean forward, "transformers" the other
      way; "auto" takes the lean one where it can run the model.

    Raises ValidationError for anything that cannot be loaded as asked.
    """
    _one_of("load_format", load_format, get_args(LoadFormat))
    _one_of("model_impl", model_impl, get_args(ModelImpl))
    _one_of("config_format", config_format, ("auto", "hf"))
    implementation = "decodekit" if model_impl == "vllm" else model_impl
    place = torch.device(device)
    kind, name, path = locate(
        model,
        revision=revision,
        hf_token=hf_token,
        with_pickles=implementation == "transformers",
        with_code=trust_remote_code,
    )
    if path.is_file():
        if implementation == "transformers" or load_format == "safetensors":
            asked = "model_impl" if implementation == "transformers" else "load_format"
            value = implementation if implementation == "transformers" else load_format
            raise ValidationError(
                f"{asked}={value!r} cannot load the GGUF file {path.name}", parameter=asked
            )
        return _load_gguf(kind, name, path, dtype, place, hf_overrides, load_format, seed)
    if load_format == "gguf":
        raise ValidationError(
            f"load_format='gguf' needs a .gguf file, got the folder {path}",
            parameter="load_format",
            value=load_format,
        )
    config = _folder_config(path, hf_overrides, trust_remote_code)
    generation_config = read_json(path / "generation_config.json")
    reason = why_not_lean(config)
    if implementation == "decodekit" or (implementation == "auto" and reason is None):
        return _load_lean(
            ModelSource(kind=kind, name=name, path=path, implementation="decodekit"),
            decoder_config(config),
            config,
            generation_config,
            _dtype(dtype, place, lambda: _checkpoint_dtype(config, path)),
            place,
            _folder_weights(path, config, load_format, seed),
        )
    return _load_transformers(
        ModelSource(kind=kind, name=name, path=path, implementation="transformers"),
        generation_config,
        _dtype(dtype, place, lambda: _checkpoint_dtype(config, path)),
        place,
        hf_overrides=hf_overrides,
        trust_remote_code=trust_remote_code,
        dummy=load_format == "dummy",
        seed=seed,
    )


def _load_gguf(
    kind: SourceKind,
    name: str,
    path: Path,
    dtype: str | torch.dtype,
    device: torch.device,
    hf_overrides: HFOverrides | None,
    load_format: str,
    seed: int,
) -> LoadedModel:
    from .dequant import dequantize
    from .gguf import read_gguf

    file = read_gguf(path)
    factors = file.tensors.get("rope_freqs.weight")
    config = config_from_gguf(
        file.metadata,
        has_output="output.weight" in file.tensors,
        frequency_factors=None if factors is None else dequantize(file, factors).tolist(),
    )
    if callable(hf_overrides):
        raise ValidationError(
            "hf_overrides must be a mapping for a GGUF file, which has no transformers config; "
            "got a function",
            parameter="hf_overrides",
        )
    config = merge(config, hf_overrides or {})
    shape = decoder_config(config)
    weights: WeightSource = DummyWeights(seed) if load_format == "dummy" else GGUFWeights(file)
    return _load_lean(
        ModelSource(kind=kind, name=name, path=path, implementation="decodekit"),
        shape,
        config,
        {},
        _dtype(dtype, device, lambda: None),
        device,
        weights,
        file,
    )


def _load_lean(
    source: ModelSource,
    shape: DecoderConfig,
    config: Mapping[str, Any],
    generation_config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    weights: WeightSource,
    gguf: GGUFFile | None = None,
) -> LoadedModel:
    count = num_parameters(shape)
    spec = ModelSpec(
        architecture=shape.architecture,
        model_type=shape.model_type,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position=shape.max_position,
        dtype=dtype,
        device=device,
        bos_token_id=optional_id(config.get("bos_token_id")),
        pad_token_id=optional_id(config.get("pad_token_id")),
        eos_token_ids=eos_ids(config, generation_config),
        num_parameters=count,
        weight_bytes=count * dtype.itemsize,
        config=config,
    )
    model = build_decoder(shape, spec, weights)
    leftover = weights.leftover()
    if leftover:
        raise ValidationError(
            f"{source.path} holds tensors that {shape.architecture} has no place for, such as "
            f"{', '.join(leftover[:3])}; model_impl='transformers' may know them",
            parameter="model",
            value=source.name,
        )
    return LoadedModel(model, spec, generation_config, source, gguf)


def _load_transformers(
    source: ModelSource,
    generation_config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    hf_overrides: HFOverrides | None,
    trust_remote_code: bool,
    dummy: bool,
    seed: int,
) -> LoadedModel:
    from .hf import build_transformers

    model = build_transformers(
        _transformers_config(source.path, hf_overrides, trust_remote_code),
        None if dummy else source.path,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        seed=seed,
        generation_config=generation_config,
    )
    return LoadedModel(model, model.spec, generation_config, source)


def _folder_config(
    path: Path, hf_overrides: HFOverrides | None, trust_remote_code: bool
) -> dict[str, Any]:
    """Return the folder's config as a mapping, overrides applied."""
    config = read_json(path / "config.json")
    if not config:
        raise ValidationError(
            f"{path} has no config.json; a model folder needs config.json and *.safetensors",
            parameter="model",
            value=str(path),
        )
    if callable(hf_overrides):
        changed: dict[str, Any] = _transformers_config(
            path, hf_overrides, trust_remote_code
        ).to_dict()
        return {"architectures": config.get("architectures"), **changed}
    return merge(config, hf_overrides or {})


def _transformers_config(
    path: Path, hf_overrides: HFOverrides | None, trust_remote_code: bool
) -> Any:
    """Return transformers' config object of a folder, overrides applied."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise ValidationError(
            f"transformers cannot read the config in {path}: {str(error).strip().splitlines()[0]}",
            parameter="model",
            value=str(path),
        ) from error
    if callable(hf_overrides):
        return hf_overrides(config)
    if hf_overrides:
        return type(config).from_dict(merge(config.to_dict(), hf_overrides))
    return config


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` laid over it; mappings inside are merged, not replaced."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        nested = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = merge(old or {}, value) if nested else value
    return merged


def _folder_weights(
    path: Path, config: Mapping[str, Any], load_format: str, seed: int
) -> WeightSource:
    if load_format == "dummy":
        return DummyWeights(seed)
    if not safetensors_files(path):
        pickles = any(path.glob("*.bin")) or any(path.glob("*.pt"))
        found = "only pickled weights (.bin)" if pickles else "no *.safetensors"
        remedy = "; model_impl='transformers' can read them" if pickles else ""
        raise ValidationError(
            f"{path} has {found}, and only safetensors are loaded here{remedy}",
            parameter="model",
            value=str(path),
        )
    return SafetensorsWeights(path, tied=bool(config.get("tie_word_embeddings", False)))


def _checkpoint_dtype(config: Mapping[str, Any], path: Path) -> torch.dtype | None:
    named = config.get("dtype") or config.get("torch_dtype")
    if isinstance(named, torch.dtype):
        return named
    return DTYPES.get(str(named).removeprefix("torch.")) or stored_dtype(path)


def _dtype(
    asked: str | torch.dtype, device: torch.device, stored: Callable[[], torch.dtype | None]
) -> torch.dtype:
    """Resolve `dtype`; `stored` gives the checkpoint's own, None if it has none (GGUF)."""
    if asked != "auto":
        return _named_dtype(asked)
    found = stored()
    on_cpu = device.type == "cpu"
    if found is None:
        fast = not on_cpu or cpu_has_fast_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    if found == torch.bfloat16:
        return torch.bfloat16
    return torch.float32 if on_cpu else torch.float16


def _named_dtype(asked: str | torch.dtype) -> torch.dtype:
    found = asked if isinstance(asked, torch.dtype) else DTYPES.get(asked)
    if found is None or found not in DTYPES.values():
        raise ValidationError(
            f"dtype must be one of auto, {', '.join(DTYPES)}; got {asked!r}",
            parameter="dtype",
            value=asked,
        )
    return found


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value in allowed:
        return
    raise ValidationError(
        f"{name} must be one of {', '.join(allowed)}; got {value!r}", parameter=name, value=value
    )
