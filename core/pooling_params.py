"""The parameters of pooling requests (embed, classify, ...), so that code that builds them loads.

No engine path uses them.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from .param_rules import (
    Rule,
    count,
    flag,
    mapping,
    one_of,
    real,
    refuse,
    refuse_type,
    token_ids,
)
from .params import RequestOutputKind
from .structured_params import KnownKeywords, apply_rules

TASKS = ("embed", "classify", "token_embed", "token_classify", "plugin")
_WHOLE_PROMPT_TASKS = ("token_embed", "token_classify", "plugin")


@dataclass
class PoolingParams(KnownKeywords):
    """How a pooled result is made; `dimensions` truncates a matryoshka embedding."""

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        if self.task == "score":
            warnings.warn(
                "the pooling task 'score' is deprecated: use 'classify'",
                DeprecationWarning,
                stacklevel=3,
            )
            self.task = "classify"
        apply_rules(self, _RULES)
        if self.dimensions is not None and self.task in ("classify", "token_classify"):
            refuse("dimensions", self.dimensions, f"None for the task {self.task!r}")
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.task in _WHOLE_PROMPT_TASKS

    def clone(self) -> PoolingParams:
        """Return an independent copy."""
        from copy import deepcopy

        return deepcopy(self)


@dataclass
class PoolerConfig(KnownKeywords):
    """The engine's defaults for pooling requests."""

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    logit_bias: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        apply_rules(self, _CONFIG_RULES)


def _final_only(value: Any) -> RequestOutputKind:
    if value is RequestOutputKind.FINAL_ONLY:
        return value
    if not isinstance(value, RequestOutputKind):
        refuse_type("output_kind", value, "RequestOutputKind.FINAL_ONLY")
    refuse("output_kind", value, "RequestOutputKind.FINAL_ONLY for a pooling request")


def _optional_real(value: Any) -> float | None:
    if value is None:
        return None
    bias: float = real("logit_bias", -math.inf, math.inf)(value)
    return bias


_RULES: dict[str, Rule] = {
    "use_activation": flag("use_activation", optional=True),
    "dimensions": count("dimensions", 1, optional=True),
    "step_tag_id": count("step_tag_id", 0, optional=True),
    "returned_token_ids": token_ids("returned_token_ids"),
    "task": one_of("task", (None, *TASKS)),
    "requires_token_ids": flag("requires_token_ids"),
    "skip_reading_prefix_cache": flag("skip_reading_prefix_cache", optional=True),
    "extra_kwargs": mapping("extra_kwargs"),
    "output_kind": _final_only,
}
_CONFIG_RULES: dict[str, Rule] = {
    "task": one_of("task", (None, *TASKS)),
    "pooling_type": one_of("pooling_type", (None, "CLS", "LAST", "MEAN", "ALL", "STEP")),
    "seq_pooling_type": one_of("seq_pooling_type", (None, "CLS", "LAST", "MEAN")),
    "tok_pooling_type": one_of("tok_pooling_type", (None, "ALL", "STEP")),
    "use_activation": flag("use_activation", optional=True),
    "dimensions": count("dimensions", 1, optional=True),
    "enable_chunked_processing": flag("enable_chunked_processing"),
    "max_embed_len": count("max_embed_len", 1, optional=True),
    "logit_bias": _optional_real,
    "step_tag_id": count("step_tag_id", 0, optional=True),
    "returned_token_ids": token_ids("returned_token_ids"),
}
