"""Loads processors of vLLM's batch interface: classes, "module:Class" names, entry points."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from .errors import PluginImportError, ValidationError
from .param_rules import shown
from .vllm_host import ProcessorHost, stage_of
from .vllm_processors import LogitsProcessor

if TYPE_CHECKING:
    from .config import EngineConfig
    from .models.config import ModelSpec
    from .registry import Registry
    from .tokenizer import Tokenizer

GROUP = "vllm.logits_processors"  # the entry-point group
PREFIX = "vllm."  # of the stages' names
METHODS = ("is_argmax_invariant", "update_state", "apply")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@dataclass(frozen=True, slots=True)
class ModelView:
    """vLLM's `model_config`, as far as processors read it."""

    model: str
    max_model_len: int
    dtype: torch.dtype
    vocab_size: int
    tokenizer: str
    hf_config: Any

    def get_vocab_size(self) -> int:
        """Width of the logits."""
        return self.vocab_size


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """vLLM's `scheduler_config`."""

    max_num_seqs: int
    max_num_batched_tokens: int


class ConfigView:
    """vLLM's `vllm_config`: the parts by its names, and every field of our own EngineConfig."""

    def __init__(self, config: EngineConfig, model: ModelView) -> None:
        self._config = config
        self.model_config = model
        self.scheduler_config = SchedulerView(config.max_num_seqs, config.max_num_batched_tokens)
        self.speculative_config = None
        self.lora_config = None
        self.additional_config: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_config"), name)


@dataclass(eq=False, slots=True)
class Processors:
    """The processors of one engine."""

    registry: Registry
    view: ConfigView
    device: torch.device
    hosts: dict[str, ProcessorHost] = field(default_factory=dict)  # by the name of their stage

    def attach(self, kind: type[Any]) -> str:
        """Make a `kind` and put its stage in every default chain; return the stage's name."""
        base = PREFIX + _HUMP.sub("_", kind.__name__).lower().strip("_")
        name, number = base, 2
        while name in self.registry.stages:
            name, number = f"{base}_{number}", number + 1
        host = ProcessorHost(kind, self.view, self.device)
        earlier = [
            other
            for other, known in self.hosts.items()
            if known.is_argmax_invariant is host.is_argmax_invariant
        ]
        self.registry.register(stage_of(host, name, earlier))
        self.hosts[name] = host
        return name

    def active(self) -> Iterator[ProcessorHost]:
        """The processors whose stage has not been taken out."""
        stages = self.registry.stages
        return (host for name, host in self.hosts.items() if name in stages)

    def validate(self, params: Any) -> None:
        """Let each processor refuse the parameters of a request; ValidationError."""
        for host in self.active():
            host.validate(params)


def attach_processors(
    config: EngineConfig,
    registry: Registry,
    spec: ModelSpec,
    *,
    tokenizer: Tokenizer | None,
    hf_config: Any,
    max_model_len: int,
) -> Processors:
    """Load what `config` asks for: entry points first, then the listed ones in order."""
    model = ModelView(
        model=config.model or "",
        max_model_len=max_model_len,
        dtype=spec.dtype,
        vocab_size=spec.vocab_size,
        tokenizer=config.tokenizer or config.model or "",
        hf_config=hf_config,
    )
    processors = Processors(registry, ConfigView(config, model), spec.device)
    kinds = from_entry_points() if config.vllm_entry_points else []
    kinds += [load_processor(item) for item in config.logits_processors]
    for kind in dict.fromkeys(kinds):
        processors.attach(kind)
    return processors


def is_processor(thing: object) -> bool:
    """Say whether `thing` is a class with vLLM's interface, from whichever base."""
    return isinstance(thing, type) and (
        issubclass(thing, LogitsProcessor)
        or all(callable(getattr(thing, name, None)) for name in METHODS)
    )


def load_processor(item: object) -> type[Any]:
    """Return the class of one entry of `logits_processors`.

    PluginImportError (a RuntimeError) if it cannot be imported, ValidationError if it is none.
    """
    thing = _import(item) if isinstance(item, str) else item
    if isinstance(thing, type) and is_processor(thing):
        return thing
    raise ValidationError(
        f"logits_processors must be made of LogitsProcessor classes or 'module:Class' names, got "
        f"{shown(item)}",
        parameter="logits_processors",
        value=item,
    )


def from_entry_points() -> list[type[Any]]:
    """Return the installed processors of vLLM's group, sorted by distribution and name."""
    found = metadata.entry_points(group=GROUP)
    kinds = []
    for point in sorted(
        found, key=lambda point: (point.dist.name if point.dist else "", point.name)
    ):
        try:
            thing = point.load()
        except Exception as error:
            raise PluginImportError(
                f"the entry point {point.name!r} of {GROUP} cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
        kinds.append(load_processor(thing))
    return kinds


def _import(name: str) -> object:
    module, _, path = name.partition(":")
    if not module or not path:
        raise ValidationError(
            f"logits_processors must name a class as 'module:Class', got {name!r}",
            parameter="logits_processors",
            value=name,
        )
    try:
        thing: object = importlib.import_module(module)
        for part in path.split("."):
            thing = getattr(thing, part)
    except Exception as error:
        raise PluginImportError(
            f"the logits processor {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return thing
