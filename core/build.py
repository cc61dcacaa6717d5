"""Build the parts of an engine from its configuration: model, cache, plugins, tokenizer."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .chain import ChainRunner
from .config import EngineConfig
from .errors import ValidationError, did_you_mean
from .further import FurtherModel, check_tokenizers
from .kv_cache import BlockPool
from .models.config import LoadedModel, ModelSpec
from .models.loader import load_model
from .parsers import find_parser
from .plan import Planner
from .presets import Preset, Presets
from .proposer import ProposerContext
from .reasoning import ReasoningConfig, ReasoningMarkers, markers_of
from .registry import Registry
from .runner import Runner
from .scheduler import Scheduler
from .speculation import Speculation
from .stage import AttentionBackend, KVLayout
from .tokenizer import Tokenizer, load_tokenizer
from .vllm_load import Processors, attach_processors

log = logging.getLogger("decodekit")

CPU_CACHE_BYTES = 4 * 2**30  # the most that the cache takes of a CPU's memory unless asked


@dataclass(slots=True)
class Parts:
    """Everything an engine is made of."""

    config: EngineConfig
    loaded: LoadedModel
    spec: ModelSpec
    registry: Registry
    tokenizer: Tokenizer | None
    max_model_len: int
    pool: BlockPool
    scheduler: Scheduler
    chain: ChainRunner
    runner: Runner
    planner: Planner
    eos_ids: tuple[int, ...]  # the tokenizer's own first
    tokenizer_size: int  # ids that may be generated: the tokenizer's, or all without one
    speculation: Speculation
    further: tuple[FurtherModel, ...]  # models beside the engine's own
    processors: Processors  # those of vLLM's interface
    presets: Presets  # by name, for requests that name one
    preset: Preset | None  # the engine's own


def build(config: EngineConfig) -> Parts:
    """Load the model and set everything up; raises before any request can be lost."""
    presets = Presets.load(config.preset_file)
    registry = Registry.load(
        plugins=config.plugins or (), autoload=config.plugin_autoload, strict=config.strict_plugins
    )
    _check_grammar_backend(config, registry)
    config = _with_reasoning(config, registry)
    loaded = load_weights(config)
    spec = loaded.spec
    tokenizer = None if config.skip_tokenizer_init else _tokenizer(config, loaded)
    max_model_len = _model_len(config, spec)
    backend_type, layout = _cache_layout(config, registry, spec)
    eos_ids = _end_ids(spec, tokenizer, loaded)
    size = spec.vocab_size
    if tokenizer is not None:
        size = min(tokenizer.max_token_id + 1, size)
    beside = _Beside(config, backend_type, spec, tokenizer)
    facts = ProposerContext(spec.vocab_size, size, max_model_len, eos_ids, tokenizer)
    speculation = Speculation(registry, config.speculative_config, facts, beside.load)
    num_blocks = _num_blocks(config, backend_type, layout, max_model_len, beside.bytes_per_block)
    beside.allocate(num_blocks)
    max_model_len = _fitted(config, max_model_len, num_blocks)
    pool = BlockPool(num_blocks, config.block_size, caches_prefixes=config.enable_prefix_caching)
    scheduler = Scheduler(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chunked_prefill=config.enable_chunked_prefill,
        by_priority=config.scheduling_policy == "priority",
    )
    speculation.max_model_len = max_model_len
    chain = ChainRunner(
        max_slots=config.max_num_seqs,
        vocab_size=spec.vocab_size,
        tokenizer_size=size,
        device=spec.device,
        fusion=config.fusion,
        debug=config.debug,
    )
    backend = backend_type(replace(layout, num_blocks=num_blocks))
    planner = Planner(
        registry,
        profile=config.profile,
        vocab_size=spec.vocab_size,
        tokenizer_size=size,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        max_model_len=max_model_len,
        device=spec.device,
        logprobs_mode=config.logprobs_mode,
        reasoning=_reasoning(config, tokenizer),
        structured_outputs_config=config.structured_outputs_config,
        plan_review=config.plan_review,
    )
    processors = attach_processors(
        config,
        registry,
        spec,
        tokenizer=tokenizer,
        hf_config=getattr(loaded.model, "config", None),
        max_model_len=max_model_len,
    )
    return Parts(
        config=config,
        loaded=loaded,
        spec=spec,
        registry=registry,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        pool=pool,
        scheduler=scheduler,
        chain=chain,
        runner=Runner(loaded.model, backend, chain),
        planner=planner,
        eos_ids=eos_ids,
        tokenizer_size=size,
        speculation=speculation,
        further=tuple(beside.models),
        processors=processors,
        presets=presets,
        preset=None if config.preset is None else presets.find(config.preset),
    )


def load_weights(config: EngineConfig) -> LoadedModel:
    """Load the model that `config` names to the default device."""
    return load_model(
        config.model,
        dtype=config.dtype,
        device=default_device(),
        revision=config.revision,
        hf_overrides=config.hf_overrides,
        trust_remote_code=config.trust_remote_code,
        hf_token=config.hf_token,
        load_format=config.load_format,
        seed=config.seed,
        model_impl=config.model_impl,
    )


def default_device() -> torch.device:
    """Return the accelerator if there is one that torch can use, else the CPU.

    DECODEKIT_DEVICE (such as "cpu") chooses otherwise.
    """
    asked = os.environ.get("DECODEKIT_DEVICE")
    if asked:
        return torch.device(asked)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_memory() -> int | None:
    """Return the accelerator's memory in bytes, None on a CPU."""
    device = default_device()
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


# --- parts ----------------------------------------------------------------------------------------


def _tokenizer(config: EngineConfig, loaded: LoadedModel) -> Tokenizer:
    gguf = loaded.gguf
    return load_tokenizer(
        loaded.source.path,
        tokenizer=config.tokenizer,
        tokenizer_mode=config.tokenizer_mode,
        revision=config.tokenizer_revision or config.revision,
        trust_remote_code=config.trust_remote_code,
        hf_token=config.hf_token,
        metadata=gguf.metadata if gguf is not None else None,
    )


def _reasoning(config: EngineConfig, tokenizer: Tokenizer | None) -> ReasoningMarkers | None:
    """Tokenise where reasoning begins and ends, once an engine."""
    if config.reasoning_config is None:
        return None
    if tokenizer is None:
        raise ValidationError(
            "reasoning_config needs the tokenizer, which is off (skip_tokenizer_init)",
            parameter="reasoning_config",
            value=config.reasoning_config,
        )
    return markers_of(config.reasoning_config, tokenizer, tuple(tokenizer.added_tokens))


def _with_reasoning(config: EngineConfig, registry: Registry) -> EngineConfig:
    """Take where reasoning begins and ends from the parser that `config` names."""
    if not config.reasoning_parser:
        return config
    parser = find_parser("reasoning_parser", config.reasoning_parser, registry.reasoning_parsers)
    if config.reasoning_config is not None:
        return config
    return replace(config, reasoning_config=ReasoningConfig(parser.start, parser.end))


def _check_grammar_backend(config: EngineConfig, registry: Registry) -> None:
    """Refuse a name that no plugin has; whether it is installed counts when it is asked for."""
    asked = config.structured_outputs_config.backend
    backends = registry.constraint_backends
    known = ["auto", *backends, *(name for one in backends.values() for name in one.aliases)]
    if asked not in known:
        raise ValidationError(
            f"structured_outputs_config.backend must be one of {', '.join(known)}, got {asked!r}"
            f"{did_you_mean(asked, known)}",
            parameter="structured_outputs_config",
            value=asked,
        )


def _end_ids(spec: ModelSpec, tokenizer: Tokenizer | None, loaded: LoadedModel) -> tuple[int, ...]:
    """Unite the end ids of tokenizer, model and generation config, the tokenizer's own first."""
    ids: list[int] = []
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    more = list(spec.eos_token_ids)
    if tokenizer is not None:
        more += sorted(tokenizer.end_ids)
    return tuple(dict.fromkeys(ids + more))


def _model_len(config: EngineConfig, spec: ModelSpec) -> int:
    asked = config.max_model_len
    if asked is None or asked == -1:
        return spec.max_position
    if asked > spec.max_position:
        raise ValidationError(
            f"max_model_len is {asked}, but the model was made for at most {spec.max_position} "
            "tokens",
            parameter="max_model_len",
            value=asked,
        )
    return asked


class _Beside:
    """The models that run beside the engine's own."""

    def __init__(
        self,
        config: EngineConfig,
        backend: type[AttentionBackend],
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.models: list[FurtherModel] = []
        self._config = config
        self._backend = backend
        self._spec = spec
        self._tokenizer = tokenizer

    def load(self, model: str, *, revision: str | None = None) -> FurtherModel:
        """Load a model with the engine's tokenizer; ValidationError if it has another."""
        config = replace(self._config, model=model, revision=revision, hf_overrides=None)
        made = FurtherModel(
            partial(load_weights, config),
            self._backend,
            partial(_layout, config),
            max_tokens=config.max_num_batched_tokens,
        )
        own, other = self._tokenizer, None
        if own is not None:
            bare = replace(config, tokenizer=None, tokenizer_revision=None)
            other = _tokenizer(bare, made.loaded)
        check_tokenizers(model, own, other, (self._spec.vocab_size, made.vocab_size))
        reason = self._backend.unsupported(made.layout)
        if reason is not None:
            raise ValidationError(
                f"attention backend {self._backend.name!r} cannot serve model {model!r} ({reason})",
                parameter="speculative_config.model",
                value=model,
            )
        self.models.append(made)
        return made

    @property
    def bytes_per_block(self) -> int:
        """Memory of one block of each of them."""
        return sum(model.bytes_per_block for model in self.models)

    def allocate(self, num_blocks: int) -> None:
        """Make their caches."""
        for model in self.models:
            model.allocate(num_blocks)


def _layout(config: EngineConfig, spec: ModelSpec) -> KVLayout:
    return KVLayout(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_blocks=0,
        block_size=config.block_size,
        dtype=spec.dtype,
        device=spec.device,
    )


def _cache_layout(
    config: EngineConfig, registry: Registry, spec: ModelSpec
) -> tuple[type[AttentionBackend], KVLayout]:
    layout = _layout(config, spec)
    reasons = []
    for backend in registry.attention_backends:
        reason = backend.unsupported(layout)
        if reason is None:
            return backend, layout
        reasons.append(f"{backend.name}: {reason}")
    listed = "; ".join(reasons) or "no attention plugin is loaded"
    raise ValidationError(f"no attention backend can serve this model ({listed})")


def _num_blocks(
    config: EngineConfig,
    backend: type[AttentionBackend],
    layout: KVLayout,
    max_model_len: int,
    beside: int,
) -> int:
    """Return how many blocks fit the memory meant for the cache, and no more than can be used.

    `beside`: bytes that further models take for each block.
    """
    block_bytes = backend.bytes_per_block(layout) + beside
    useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    if config.kv_cache_memory_bytes is not None:
        blocks = config.kv_cache_memory_bytes // block_bytes
    else:
        blocks = _cache_bytes(config, layout.device) // block_bytes
    blocks = min(blocks, useful)
    if blocks < 1:
        raise ValidationError(
            f"the cache has no room for one block of {config.block_size} tokens "
            f"({block_bytes} bytes); raise kv_cache_memory_bytes or gpu_memory_utilization",
            parameter="kv_cache_memory_bytes",
            value=config.kv_cache_memory_bytes,
        )
    return blocks


def _cache_bytes(config: EngineConfig, device: torch.device) -> int:
    """Return the memory left for the cache: a share of what is there, less what is taken."""
    share = config.gpu_memory_utilization
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(int(total * share) - (total - free), 0)
    return min(CPU_CACHE_BYTES, int(_free_memory() * share))


def _free_memory() -> int:
    """Return the bytes of memory that a program could take without swapping."""
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _fitted(config: EngineConfig, max_model_len: int, num_blocks: int) -> int:
    """Check that one sequence of the full length fits; -1 ("auto") shortens the length instead."""
    room = num_blocks * config.block_size
    if room >= max_model_len:
        return max_model_len
    if config.max_model_len == -1:
        return room
    if config.max_model_len is None:
        log.warning(
            "max_model_len is %d (the model allows %d), as the cache holds no more tokens",
            room,
            max_model_len,
        )
        return room
    raise ValidationError(
        f"max_model_len is {max_model_len}, but the cache holds {room} tokens; ask for at most "
        f"{room}, or raise kv_cache_memory_bytes or gpu_memory_utilization",
        parameter="max_model_len",
        value=max_model_len,
    )


def generation_defaults(loaded: LoadedModel, config: EngineConfig) -> dict[str, Any]:
    """Return generation_config as `config` wants it read: the model's, a folder's, or none."""
    from .generation_config import read_generation_config

    return read_generation_config(
        config.generation_config, loaded.generation_config, config.override_generation_config
    )
