"""From a constraint to the program that enforces it, as the mask stage asks when it is bound.

One `Programs` serves an engine. What cannot be done is refused here, when a request is made, in
one sentence; the compilation itself runs beside the engine.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

from ..core.constraint import GrammarSpec
from ..core.stage import BindContext
from ..core.structured_params import (
    StructuredOutputsConfig,
    StructuredOutputsParams,
    is_model_class,
    public_fields,
)
from .bits import Penalties
from .compiler import Compiler, Ticket
from .filler import Filler
from .spec import spec_of
from .vocabulary import vocabulary_of

MOST_SPECS = 256
_NAME = "structured"


def programs_of(ctx: BindContext) -> Programs:
    """Return the engine's programs, made at the first constraint."""
    found: Programs | None = ctx.shared.get(_NAME)
    if found is None:
        found = ctx.shared[_NAME] = Programs(ctx)
    return found


class Programs:
    """The grammars of one engine, and what their masks are filled with."""

    def __init__(self, ctx: BindContext) -> None:
        self._config = ctx.structured_outputs_config or StructuredOutputsConfig()
        self._vocabulary = vocabulary_of(ctx.tokenizer, ctx.vocab_size, ctx.eos_ids)
        self._specs: OrderedDict[Hashable, GrammarSpec] = OrderedDict()
        self._compiler: Compiler | None = None
        self._classes: dict[str, Any] = {}
        self.filler = Filler()
        self.penalties = Penalties(ctx.vocab_size)

    def order(
        self, wanted: StructuredOutputsParams, backends: Mapping[str, Any]
    ) -> tuple[GrammarSpec, Ticket]:
        """Return what is asked for and a claim on its program.

        Raises ValidationError if it cannot be enforced as asked.
        """
        spec = self._spec(wanted)
        ticket = self._compiler_of(backends).submit(
            spec,
            wanted.backend or self._config.backend,
            strict=wanted.strict,
            insist=wanted.backend is not None,
        )
        return spec, ticket

    def _spec(self, wanted: StructuredOutputsParams) -> GrammarSpec:
        mark = _mark(wanted)
        known = self._specs.get(mark)
        if known is None:
            known = spec_of(wanted, self._config)
            if len(self._specs) >= MOST_SPECS:
                self._specs.popitem(last=False)
        self._specs[mark] = known
        self._specs.move_to_end(mark)
        return known

    def _compiler_of(self, backends: Mapping[str, Any]) -> Compiler:
        """Return the compiler; another one after a plugin with a backend came or went."""
        if self._compiler is None or self._classes != backends:
            self._classes = dict(backends)
            settings = {
                "cache_bytes": self._config.cache_bytes,
                "compile_seconds": self._config.compile_timeout,
            }
            self._compiler = Compiler(self._vocabulary, self._classes, settings)
        return self._compiler


def _mark(wanted: StructuredOutputsParams) -> Hashable:
    """Return a key of what was asked for; a dict is spelled in its order, which has meaning."""
    values = [getattr(wanted, name) for name in public_fields(StructuredOutputsParams)]
    return tuple(value if _is_plain(value) else _spelled(value) for value in values)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | bool) or is_model_class(value)


def _spelled(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
