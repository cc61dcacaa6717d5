"""vLLM's module paths under our name: `from vllm.x import Y` works as `from decodekit.x import Y`.

One table and an import finder that puts the real module under the other name, so that both names
give the same class and a pickle records the real one. The face installs the finder.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = __name__.partition(".")[0]

# vLLM's path below the package -> our module in `core`; `adapters` is a name of our own.
ALIASES: dict[str, str] = {
    "adapters": "adapters",
    "beam_search": "outputs",
    "config": "config",
    "config.model": "config",
    "config.pooler": "pooling_params",
    "config.reasoning": "reasoning",
    "config.structured_outputs": "structured_params",
    "config.vllm": "config",
    "engine.arg_utils": "config",
    "engine.async_llm_engine": "async_llm",
    "engine.llm_engine": "engine",
    "entrypoints.llm": "llm",
    "inputs": "inputs",
    "inputs.data": "inputs",
    "logprobs": "logprobs",
    "lora.request": "lora_request",
    "outputs": "outputs",
    "pooling_params": "pooling_params",
    "sampling_params": "params",
    "sequence": "outputs",
    "v1.engine.async_llm": "async_llm",
    "v1.engine.exceptions": "errors",
    "v1.engine.llm_engine": "engine",
    "v1.metrics.reader": "metrics",
    "v1.metrics.stats": "outputs",
    "v1.sample.logits_processor": "vllm_processors",
    "v1.sample.logits_processor.builtin": "vllm_processors",
    "v1.sample.logits_processor.interface": "vllm_processors",
    "v1.sample.logits_processor.state": "vllm_processors",
}

# Paths that only lead to others, and those of the table that also do.
_PARENTS = {
    path.rsplit(".", depth)[0] for path in ALIASES for depth in range(1, path.count(".") + 1)
}


def install() -> None:
    """Put the finder behind the ordinary ones, once a process."""
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(AliasFinder())


class AliasFinder(MetaPathFinder):
    """Finds the paths of the table; every other name is left to the finders before it."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        package, _, below = fullname.partition(".")
        if package != PACKAGE or (below not in ALIASES and below not in _PARENTS):
            return None
        return ModuleSpec(fullname, _AliasLoader(ALIASES.get(below)), is_package=below in _PARENTS)


class _AliasLoader(Loader):
    """Loads the real module, or for a path with children a package that answers for it."""

    def __init__(self, real: str | None) -> None:
        self._real = None if real is None else f"{PACKAGE}.core.{real}"
        self._spec: ModuleSpec | None = None  # the real module's own, set by create_module

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if self._real is None or spec.submodule_search_locations is not None:
            return None
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if self._spec is not None:
            module.__spec__ = self._spec  # the import system has just put the alias's there
        elif self._real is not None:
            real = importlib.import_module(self._real)
            names = getattr(real, "__all__", None) or [
                name for name in vars(real) if not name.startswith("_")
            ]
            vars(module).update({name: getattr(real, name) for name in names})
