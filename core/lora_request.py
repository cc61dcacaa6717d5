"""LoRARequest: which adapter a request wants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .param_rules import Rule, count, flag, mapping, text
from .structured_params import KnownKeywords, apply_rules


@dataclass(unsafe_hash=True)
class LoRARequest(KnownKeywords):
    """An adapter by name, id (>= 1) and path; equal when all three are.

    Loading adapters is not part of this version; passing one to a request is refused there.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = field(default=None, compare=False)
    tensorizer_config_dict: dict[str, Any] | None = field(default=None, compare=False)
    load_inplace: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        apply_rules(self, _RULES)

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path


_RULES: dict[str, Rule] = {
    "lora_name": text("lora_name"),
    "lora_int_id": count("lora_int_id", 1),
    "lora_path": text("lora_path"),
    "base_model_name": text("base_model_name", optional=True),
    "tensorizer_config_dict": mapping("tensorizer_config_dict"),
    "load_inplace": flag("load_inplace"),
}
