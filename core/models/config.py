"""What the rest of the house knows of a model: its facts, where it came from, and two methods.

Nothing here knows a file format or an architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import ValidationError

if TYPE_CHECKING:
    from ..stage import AttentionStep
    from .gguf import GGUFFile

SourceKind = Literal["embedded", "gguf", "folder", "hub"]
Implementation = Literal["decodekit", "transformers"]

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts of a loaded model that the engine plans with.

    `num_kv_heads` and `head_dim` are the same in every layer. `max_position` is the longest
    sequence in tokens. `config` is the raw configuration, after `hf_overrides`.
    """

    architecture: str  # as config.json spells it, such as "LlamaForCausalLM"
    model_type: str
    vocab_size: int  # columns of the logits; may exceed the tokenizer's
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    dtype: torch.dtype
    device: torch.device
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]  # of config.json, then those that generation_config.json adds
    num_parameters: int  # tied weights counted once
    weight_bytes: int  # what the weights take in memory, shared storage counted once
    config: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model was found and which of the two implementations runs it."""

    kind: SourceKind
    name: str  # what the user asked for; the embedded model's own name if nothing
    path: Path  # a folder, or the GGUF file
    implementation: Implementation


class Embeds(NamedTuple):
    """Input embeddings of some flat rows, in place of those of their token ids."""

    rows: Tensor  # int64 [n], which of the T rows
    values: Tensor  # [n, hidden]


class CausalLM(Protocol):
    """A decoder-only language model over flat tokens; the caller holds `torch.inference_mode`."""

    @property
    def spec(self) -> ModelSpec:
        """The model's facts."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionStep,
        embeds: Embeds | None = None,
    ) -> Tensor:
        """Return the final hidden states [T, hidden] of tokens [T] int64 at positions [T] int64.

        Rows of several sequences follow each other without padding; `attention` knows which row
        belongs to which. What it is given may be strided; the last dimension is contiguous.
        `embeds` replaces the embeddings of some rows.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab], in the model's dtype, of hidden states [R, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What `load_model` hands back."""

    model: CausalLM
    spec: ModelSpec
    generation_config: dict[str, Any]  # generation_config.json as it stands; empty if there is none
    source: ModelSource
    gguf: GGUFFile | None = None  # the parsed file, so that the tokenizer need not parse it again


def token_ids_of(value: object) -> tuple[int, ...]:
    """Return the ids in a config's `eos_token_id`, which is an int, a list or None."""
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(token, int) for token in value):
        return tuple(value)
    raise ValidationError(
        f"eos_token_id must be a token id or a list of token ids, got {value!r}",
        parameter="eos_token_id",
        value=value,
    )


def eos_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end tokens of both files, the model's own first, each once."""
    both = token_ids_of(config.get("eos_token_id")) + token_ids_of(
        generation_config.get("eos_token_id")
    )
    return tuple(dict.fromkeys(both))


def optional_id(value: object) -> int | None:
    """Return a token id as it stands in a config; None if unset (some configs write -1)."""
    return value if isinstance(value, int) and value >= 0 else None
