"""EngineArgs, what a user may say of an engine, and EngineConfig, what it runs with.

`EngineArgs` has vLLM's names and defaults; `resolve()` checks every range, refuses what this
version does not have, fills the defaults that depend on the device and freezes the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from .absent import check_engine_args
from .config_rules import DTYPES, ENGINE_RULES, check_together
from .pooling_params import PoolerConfig
from .reasoning import ReasoningConfig
from .request_params import FrozenDict
from .structured_params import KnownKeywords, StructuredOutputsConfig, apply_rules

__all__ = [
    "AsyncEngineArgs",
    "EngineArgs",
    "EngineConfig",
    "PoolerConfig",
    "ReasoningConfig",
    "StructuredOutputsConfig",
    "VllmConfig",
]

LARGE_DEVICE = 70 * 2**30  # bytes of device memory from which the larger defaults hold


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine's settings, checked and frozen. None means: decided when the model is loaded.

    `max_model_len` -1 is "as long as memory allows"; `model` None is the embedded model;
    `kv_cache_memory_bytes`, where set, wins over `gpu_memory_utilization`.
    """

    model: str | None
    tokenizer: str | None
    tokenizer_mode: str
    skip_tokenizer_init: bool
    trust_remote_code: bool
    revision: str | None
    tokenizer_revision: str | None
    hf_token: bool | str | None
    hf_overrides: Mapping[str, Any] | Callable[[Any], Any] | None
    load_format: str
    model_impl: str  # auto, decodekit (alias vllm) or transformers
    dtype: str  # auto, float16, bfloat16 or float32
    chat_template: str | None
    served_model_name: tuple[str, ...]  # empty: the model's own name
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    scheduling_policy: str
    stream_interval: int
    block_size: int  # tokens a KV block
    gpu_memory_utilization: float  # in (0, 1]
    kv_cache_memory_bytes: int | None
    enable_prefix_caching: bool
    enable_sleep_mode: bool
    enable_prompt_embeds: bool
    profiler_config: Any
    enforce_eager: bool
    seed: int
    max_logprobs: int  # -1: the whole vocabulary
    max_logprob_token_ids: int  # -1: no limit
    logprobs_mode: str
    generation_config: str
    override_generation_config: Mapping[str, Any]
    reasoning_parser: str
    reasoning_config: ReasoningConfig | None
    speculative_config: Mapping[str, Any] | None
    structured_outputs_config: StructuredOutputsConfig
    disable_log_stats: bool
    plugins: tuple[Any, ...] | None
    plugin_autoload: bool
    logits_processors: tuple[Any, ...]  # vLLM's: classes and "module:Class" names
    vllm_entry_points: bool
    strict_plugins: bool
    profile: str
    preset: str | None  # of requests that name none; its pinned fields hold for all
    preset_file: str | None
    plan_review: bool
    fusion: bool
    debug: bool


VllmConfig = EngineConfig


@dataclass
class EngineArgs(KnownKeywords):
    """Every public argument of an engine, with vLLM's name and default; checked when made.

    Raises ValidationError for a value out of range and ParameterTypeError for an unknown name.
    Defaults that depend on the device are None here and settled by `resolve`.
    """

    model: str | None = None
    _: KW_ONLY
    runner: str = "auto"
    convert: str = "auto"
    tokenizer: str | None = None
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    allowed_local_media_path: str = ""
    allowed_media_domains: list[str] | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    distributed_executor_backend: Any = None
    dtype: str = "auto"
    quantization: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    chat_template: str | None = None
    seed: int = 0
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | str | None = None
    cpu_offload_gb: float = 0
    offload_group_size: int = 0
    offload_num_in_group: int = 1
    offload_prefetch_step: int = 1
    offload_params: Any = None
    swap_space: float | None = None  # accepted, warned about, without effect
    enforce_eager: bool = False
    enable_return_routed_experts: bool = False
    disable_custom_all_reduce: bool = False
    hf_token: bool | str | None = None
    hf_overrides: dict[str, Any] | Callable[[Any], Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    pooler_config: Any = None
    structured_outputs_config: Any = None
    profiler_config: Any = None
    attention_config: Any = None
    compilation_config: Any = None
    logits_processors: list[Any] | None = None
    max_model_len: int | str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    max_logprobs: int = 20
    max_logprob_token_ids: int = 128  # ours: how many ids logprob_token_ids may list
    logprobs_mode: str = "raw_logprobs"
    scheduling_policy: str = "fcfs"
    async_scheduling: bool | None = None
    stream_interval: int = 1
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    served_model_name: str | list[str] | None = None
    enable_sleep_mode: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_dtype: str = "auto"
    fully_sharded_loras: bool = False
    default_mm_loras: dict[str, str] | None = None
    limit_mm_per_prompt: dict[str, Any] | None = None
    mm_processor_cache_gb: float = 4
    enable_prompt_embeds: bool = False
    reasoning_parser: str = ""
    reasoning_config: Any = None
    speculative_config: dict[str, Any] | None = None
    weight_transfer_config: Any = None
    kv_transfer_config: Any = None
    load_format: str = "auto"
    model_impl: str = "auto"
    disable_log_stats: bool = False
    plugins: list[Any] | None = None
    plugin_autoload: bool = True
    vllm_entry_points: bool = False  # ours: load the entry points "vllm.logits_processors"
    strict_plugins: bool = False
    profile: str = "default"
    preset: str | None = None
    preset_file: str | None = None
    plan_review: bool = True
    fusion: bool = True
    batch_invariant: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        if self.swap_space is not None:
            warnings.warn(
                "swap_space has no effect and will be removed: preempted requests are recomputed",
                DeprecationWarning,
                stacklevel=3,
            )
            self.swap_space = None
        self.validate()

    def validate(self) -> None:
        """Normalise and check every argument that has a range."""
        apply_rules(self, ENGINE_RULES)
        check_together(self)

    def resolve(self, *, device_memory_bytes: int | None = None) -> EngineConfig:
        """Check again, refuse what this version lacks, and return the settled configuration.

        `device_memory_bytes` is the memory of the accelerator, None on a CPU. Defaults for
        (max_num_seqs, max_num_batched_tokens): CPU (256, 2048), accelerator (256, 8192), with
        70 GiB or more (1024, 16384).
        """
        self.validate()
        check_engine_args(self)
        rows, tokens = _batch_defaults(device_memory_bytes)
        num_seqs = self.max_num_seqs or rows
        batched = self.max_num_batched_tokens or max(tokens, num_seqs)
        chunked = self.enable_chunked_prefill is not False
        longest = self.max_model_len if isinstance(self.max_model_len, int) else None
        if not chunked and self.max_num_batched_tokens is None and longest is not None:
            batched = max(batched, longest)  # a prompt has to fit into one step
        names = self.served_model_name
        settled = {
            name: getattr(self, name)
            for name in EngineConfig.__dataclass_fields__
            if name in self.__dataclass_fields__
        }
        settled.update(
            dtype=DTYPES[self.dtype],
            max_num_seqs=num_seqs if self.max_num_seqs else min(num_seqs, batched),
            max_num_batched_tokens=batched,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=self.enable_prefix_caching is not False,
            served_model_name=(names,) if isinstance(names, str) else tuple(names or ()),
            override_generation_config=FrozenDict(self.override_generation_config),
            structured_outputs_config=self.structured_outputs_config or StructuredOutputsConfig(),
            speculative_config=self.speculative_config and FrozenDict(self.speculative_config),
            logits_processors=tuple(self.logits_processors or ()),
            plugins=None if self.plugins is None else tuple(self.plugins),
        )
        return EngineConfig(**settled)

    def create_engine_config(self) -> EngineConfig:
        """`resolve()` under vLLM's name, for a CPU."""
        return self.resolve()


@dataclass(kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """The arguments of an asynchronous engine."""

    enable_log_requests: bool = False


def _batch_defaults(device_memory_bytes: int | None) -> tuple[int, int]:
    if device_memory_bytes is None:
        return 256, 2048
    return (1024, 16384) if device_memory_bytes >= LARGE_DEVICE else (256, 8192)
