"""What each engine argument may hold, and how arguments bind one another."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from .errors import ValidationError, did_you_mean
from .param_rules import (
    Rule,
    as_int,
    as_list,
    count,
    flag,
    mapping,
    one_of,
    real,
    refuse,
    refuse_type,
    text,
)
from .params import SamplingParams
from .reasoning import reasoning_config
from .sampling_rules import LOGPROBS_MODES
from .structured_params import structured_outputs_config

DTYPES = {
    "auto": "auto",
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}

# generation_config.json key -> field of SamplingParams
GENERATION_KEYS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
_SIZE = re.compile(r"(\d+)(\.\d+)?([kKmMgGtT]?)")
_MODEL_LEN = "an integer >= 1, -1 or 'auto' (fit to memory), or text such as '25.6k' or '32K'"


def parse_size(name: str, value: object, allowed: str) -> int:
    """Read a size: k, m, g, t are powers of 1000; K, M, G, T of 1024, without a fraction."""
    if not isinstance(value, str):
        return as_int(name, value, allowed)
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        refuse(name, value, allowed)
    whole, fraction, unit = match.groups()
    power = "kmgt".find(unit.lower()) + 1 if unit else 0
    if not fraction:
        return int(whole) * int((1024 if unit.isupper() else 1000) ** power)
    digits = fraction[1:]
    scaled, rest = divmod(int(whole + digits) * int(1000**power), int(10 ** len(digits)))
    if unit.isupper() or rest:
        refuse(name, value, f"{allowed}, a whole number of units")
    return scaled


def check_together(args: Any) -> None:
    """Check the arguments whose ranges depend on one another; ValidationError otherwise."""
    tokens, rows, longest = args.max_num_batched_tokens, args.max_num_seqs, args.max_model_len
    if tokens is not None and rows is not None and tokens < rows:
        refuse("max_num_batched_tokens", tokens, f"at least max_num_seqs ({rows})")
    is_whole = args.enable_chunked_prefill is False
    if is_whole and tokens is not None and longest is not None and longest > tokens:
        refuse(
            "max_num_batched_tokens",
            tokens,
            f"at least max_model_len ({longest}) with enable_chunked_prefill=False",
        )
    if args.offload_group_size and args.offload_num_in_group > args.offload_group_size:
        refuse(
            "offload_num_in_group",
            args.offload_num_in_group,
            f"at most offload_group_size ({args.offload_group_size})",
        )
    if args.max_cpu_loras is not None and args.max_cpu_loras < args.max_loras:
        refuse("max_cpu_loras", args.max_cpu_loras, f"at least max_loras ({args.max_loras})")


def _model(value: Any) -> str | None:
    allowed = "None, a model name, a folder or a GGUF file"
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        refuse_type("model", value, allowed)
    path = os.fspath(value)
    if not isinstance(path, str) or not path:
        refuse("model", value, allowed)
    return path


def _path(name: str) -> Rule:
    def check(value: Any) -> str | None:
        named: str | None = text(name, optional=True)(
            os.fspath(value) if isinstance(value, os.PathLike) else value
        )
        return named

    return check


def _dtype(value: Any) -> str:
    # A torch.dtype prints as "torch.float16"; reading the text keeps torch out of this file.
    given = str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value
    name: str = one_of("dtype", tuple(DTYPES))(given)
    return name


def _max_model_len(value: Any) -> int | None:
    if value is None:
        return None
    if value in (-1, "-1", "auto"):
        return -1
    length = parse_size("max_model_len", value, _MODEL_LEN)
    if length < 1:
        refuse("max_model_len", value, _MODEL_LEN)
    return length


def _kv_cache_memory_bytes(value: Any) -> int | None:
    allowed = "None or a number of bytes >= 1, also as text such as '4G'"
    if value is None:
        return None
    size = parse_size("kv_cache_memory_bytes", value, allowed)
    if size < 1:
        refuse("kv_cache_memory_bytes", value, allowed)
    return size


def _seed(value: Any) -> int:
    allowed = "an integer in [-2^63, 2^64 - 1]"
    seed = as_int("seed", value, allowed)
    if not -(2**63) <= seed < 2**64:
        refuse("seed", value, allowed)
    return seed


def _served_model_name(value: Any) -> str | list[str] | None:
    if value is None or isinstance(value, str):
        name: str | None = text("served_model_name", optional=True)(value)
        return name
    names = as_list("served_model_name", value, "a name or a list of names")
    return [text("served_model_name")(name) for name in names]


def _override_generation_config(value: Any) -> dict[str, Any]:
    """The known keys, with values that SamplingParams accepts; None is unset."""
    given: dict[str, Any] = mapping("override_generation_config", optional=False)(value)
    given = {key: item for key, item in given.items() if item is not None}
    known = (*GENERATION_KEYS, "eos_token_id")
    for key in given:
        if key not in known:
            raise ValidationError(
                f"override_generation_config has no key {key!r} (known: {', '.join(known)})"
                f"{did_you_mean(key, known)}",
                parameter="override_generation_config",
                value=key,
            )
    SamplingParams(**{GENERATION_KEYS[k]: v for k, v in given.items() if k in GENERATION_KEYS})
    return given


def _plugins(value: Any) -> list[Any] | None:
    if value is None:
        return None
    entries = as_list("plugins", value, "a list of names, paths, Stage classes or plugin modules")
    for item in entries:
        if item is None or isinstance(item, (bool, int, float, dict)) or item == "":
            refuse_type("plugins", item, "made of names, paths, Stage classes or plugin modules")
    return entries


def _hf_overrides(value: Any) -> Any:
    if value is None or isinstance(value, Mapping) or callable(value):
        return value
    refuse_type("hf_overrides", value, "None, a dict or a callable of the model's config")


def _logits_processors(value: Any) -> list[Any] | None:
    allowed = "None or a list of LogitsProcessor classes and 'module:Class' names"
    if value is None:
        return None
    entries = as_list("logits_processors", value, allowed)
    for entry in entries:
        if not isinstance(entry, (str, type)):
            refuse_type("logits_processors", entry, allowed)
    return entries


def _hf_token(value: Any) -> bool | str | None:
    if value is None or isinstance(value, (bool, str)):
        return value
    refuse_type("hf_token", "<hidden>", "None, True, False or a string")


_FLAGS = (
    "skip_tokenizer_init",
    "trust_remote_code",
    "enforce_eager",
    "enable_return_routed_experts",
    "disable_custom_all_reduce",
    "enable_sleep_mode",
    "enable_lora",
    "fully_sharded_loras",
    "enable_prompt_embeds",
    "disable_log_stats",
    "plugin_autoload",
    "vllm_entry_points",
    "strict_plugins",
    "plan_review",
    "fusion",
    "batch_invariant",
    "debug",
)
_OPTIONAL_FLAGS = ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling")
_COUNTS_FROM_1 = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "offload_num_in_group",
    "offload_prefetch_step",
    "block_size",
    "stream_interval",
    "max_loras",
)
_OPTIONAL_TEXTS = ("quantization", "revision", "tokenizer_revision", "preset")
_TEXTS = ("tokenizer_mode", "generation_config", "profile", "kv_cache_dtype", "lora_dtype")
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def _max_lora_rank(value: Any) -> int:
    allowed = "one of " + ", ".join(map(str, _LORA_RANKS))
    rank = as_int("max_lora_rank", value, allowed)
    if rank not in _LORA_RANKS:
        refuse("max_lora_rank", value, allowed)
    return rank


ENGINE_RULES: dict[str, Rule] = {
    "model": _model,
    "tokenizer": _path("tokenizer"),
    "chat_template": _path("chat_template"),
    "generation_config": _path("generation_config"),
    "preset_file": _path("preset_file"),
    "runner": one_of("runner", ("auto", "generate", "pooling", "draft")),
    "convert": one_of("convert", ("auto", "none", "embed", "classify")),
    "dtype": _dtype,
    "seed": _seed,
    "gpu_memory_utilization": real("gpu_memory_utilization", 0.0, 1.0, open_low=True),
    "kv_cache_memory_bytes": _kv_cache_memory_bytes,
    "cpu_offload_gb": real("cpu_offload_gb", 0.0, math.inf),
    "mm_processor_cache_gb": real("mm_processor_cache_gb", 0.0, math.inf),
    "offload_group_size": count("offload_group_size", 0),
    "max_model_len": _max_model_len,
    "max_num_seqs": count("max_num_seqs", 1, optional=True),
    "max_num_batched_tokens": count("max_num_batched_tokens", 1, optional=True),
    "max_cpu_loras": count("max_cpu_loras", 1, optional=True),
    "max_lora_rank": _max_lora_rank,
    "max_logprobs": count("max_logprobs", 0, also=-1),
    "max_logprob_token_ids": count("max_logprob_token_ids", 0, also=-1),
    "logprobs_mode": one_of("logprobs_mode", tuple(LOGPROBS_MODES)),
    "scheduling_policy": one_of("scheduling_policy", ("fcfs", "priority")),
    "load_format": one_of("load_format", ("auto", "safetensors", "gguf", "dummy")),
    "model_impl": one_of("model_impl", ("auto", "decodekit", "vllm", "transformers")),
    "served_model_name": _served_model_name,
    "override_generation_config": _override_generation_config,
    "plugins": _plugins,
    "hf_overrides": _hf_overrides,
    "hf_token": _hf_token,
    "logits_processors": _logits_processors,
    "reasoning_parser": text("reasoning_parser", empty=True),
    "reasoning_config": reasoning_config,
    "speculative_config": mapping("speculative_config"),
    "structured_outputs_config": structured_outputs_config,
    "allowed_local_media_path": text("allowed_local_media_path", empty=True),
}
ENGINE_RULES |= {name: flag(name) for name in _FLAGS}
ENGINE_RULES |= {name: flag(name, optional=True) for name in _OPTIONAL_FLAGS}
ENGINE_RULES |= {name: count(name, 1) for name in _COUNTS_FROM_1}
ENGINE_RULES |= {name: text(name, optional=True) for name in _OPTIONAL_TEXTS}
ENGINE_RULES |= {name: text(name) for name in _TEXTS if name not in ENGINE_RULES}
