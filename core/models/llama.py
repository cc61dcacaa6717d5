"""The lean decoder: Llama, Mistral, Qwen2 and Qwen3 over flat tokens, told apart by their config.

A layer is: norm, one packed q+k+v product, (q/k norm), one rotation of the q+k slab, attention,
output product, add; norm, one packed gate+up product, silu * up, down product, add.

The residual stream, norms and rotation are float32 in every dtype. In bfloat16 that keeps the
embedded model's logits two to three times closer to float32 than a bfloat16 stream does, for two
casts a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import Embeds, ModelSpec
from .family import DecoderConfig
from .layers import Linear, gate_times_up_, make_linear
from .rope import Rope, rotate_
from .weights import WeightSource

if TYPE_CHECKING:
    from ..stage import AttentionStep


@dataclass(slots=True)
class DecoderLayer:
    """The weights of one layer; q and k rows are in rope's pair order."""

    attention_norm: Tensor  # [hidden] float32
    qkv: Linear  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim], pair order
    output: Linear
    mlp_norm: Tensor  # [hidden] float32
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear
    window: int | None


class LeanDecoder:
    """A `CausalLM`. Made by `build_decoder`; holds no cache and no state between calls."""

    def __init__(
        self,
        config: DecoderConfig,
        spec: ModelSpec,
        embedding: Tensor,
        layers: list[DecoderLayer],
        final_norm: Tensor,
        head: Linear,
    ) -> None:
        self.config = config
        self.spec = spec
        self._embedding = embedding  # [vocab, hidden]
        self._layers = layers
        self._final_norm = final_norm  # [hidden] float32
        self._head = head
        self._rope = Rope(config.rope, spec.device)
        self._scale = config.head_dim**-0.5
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._shape = (self._num_rotated + config.num_kv_heads, config.head_dim)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionStep,
        embeds: Embeds | None = None,
    ) -> Tensor:
        """Return the normed final hidden states [T, hidden] in the model's dtype."""
        rotation = self._rope.rotation(positions)  # [T, 1, head_dim / 2]
        hidden = F.embedding(token_ids, self._embedding).float()  # [T, hidden], ours to add into
        if embeds is not None:
            hidden.index_copy_(0, embeds.rows, embeds.values.float())
        for index, layer in enumerate(self._layers):
            normed = self._norm(hidden, layer.attention_norm)
            hidden.add_(layer.output(self._attend(index, layer, normed, rotation, attention)))
            normed = self._norm(hidden, layer.mlp_norm)
            hidden.add_(layer.down(gate_times_up_(layer.gate_up(normed))))
        return self._norm(hidden, self._final_norm)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        normed = F.rms_norm(hidden, weight.shape, weight, self.config.norm_eps)
        return normed.to(self.spec.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab] of `forward`'s rows."""
        return self._head(hidden)

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        normed: Tensor,
        rotation: Tensor,
        attention: AttentionStep,
    ) -> Tensor:
        heads = layer.qkv(normed).view(-1, *self._shape)  # [T, heads + 2 kv_heads, d]
        slab = heads[:, : self._num_rotated]
        if layer.qk_norm is not None:
            slab = F.rms_norm(slab, slab.shape[-1:], None, self.config.norm_eps) * layer.qk_norm
        slab = rotate_(slab, rotation)
        mixed = attention.attend(
            index,
            slab[:, : self.config.num_heads],
            slab[:, self.config.num_heads :],
            heads[:, self._num_rotated :],
            scale=self._scale,
            window=layer.window,
        )
        return mixed.flatten(1)


def build_decoder(config: DecoderConfig, spec: ModelSpec, source: WeightSource) -> LeanDecoder:
    """Fill a decoder from `source`, tensor by tensor, so that at most one layer is held twice."""
    reader = _Reader(config, source, spec.dtype, spec.device)
    embedding = reader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = [reader.layer(index) for index in range(config.num_layers)]
    final_norm = reader.norm("model.norm.weight")
    if config.tie_embeddings:
        head = make_linear(embedding, shared=True)
    else:
        weight = reader.take("lm_head.weight", config.vocab_size, config.hidden_size)
        head = make_linear(weight)
    return LeanDecoder(config, spec, embedding, layers, final_norm, head)


def num_parameters(config: DecoderConfig) -> int:
    """Count the parameters that `build_decoder` reads, tied embeddings once."""
    hidden, rows = config.hidden_size, config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    layer = 2 * hidden + hidden * (2 * rows + 2 * kv_rows) + 3 * hidden * config.intermediate_size
    layer += (rows + 2 * kv_rows) * config.qkv_bias + hidden * config.output_bias
    layer += (2 * config.intermediate_size + hidden) * config.mlp_bias
    layer += 2 * config.head_dim * config.has_qk_norm
    table = config.vocab_size * hidden
    return config.num_layers * layer + hidden + (1 if config.tie_embeddings else 2) * table


class _Reader:
    """Takes tensors from a source, checks, casts and packs them."""

    def __init__(
        self, config: DecoderConfig, source: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.source = source
        self.dtype = dtype
        self.device = device

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def take(self, name: str, *shape: int, pair_heads: int | None = None) -> Tensor:
        out = self.new(*shape)
        self.source.fill(name, out, pair_heads=pair_heads)
        return out

    def norm(self, name: str) -> Tensor:
        out = torch.empty(self.config.hidden_size, dtype=torch.float32, device=self.device)
        self.source.fill(name, out)
        return out

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        rows = config.num_heads * config.head_dim
        return DecoderLayer(
            attention_norm=self.norm(prefix + "input_layernorm.weight"),
            qkv=self._qkv(prefix + "self_attn."),
            qk_norm=self._qk_norm(prefix + "self_attn.") if config.has_qk_norm else None,
            output=self._linear(prefix + "self_attn.o_proj", hidden, rows, config.output_bias),
            mlp_norm=self.norm(prefix + "post_attention_layernorm.weight"),
            gate_up=self._gate_up(prefix + "mlp."),
            down=self._linear(prefix + "mlp.down_proj", hidden, inner, config.mlp_bias),
            window=config.windows[index],
        )

    def _linear(self, name: str, out: int, into: int, has_bias: bool) -> Linear:
        bias = self.take(name + ".bias", out) if has_bias else None
        return make_linear(self.take(name + ".weight", out, into), bias)

    def _qkv(self, prefix: str) -> Linear:
        config = self.config
        counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)

        def rows(suffix: str, *into: int) -> Tensor:
            packed = self.new(sum(counts) * config.head_dim, *into)
            parts = torch.split(packed, [count * config.head_dim for count in counts])
            for name, count, part in zip("qkv", counts, parts, strict=True):
                pair_heads = None if name == "v" else count
                self.source.fill(f"{prefix}{name}_proj.{suffix}", part, pair_heads=pair_heads)
            return packed

        bias = rows("bias") if config.qkv_bias else None
        return make_linear(rows("weight", config.hidden_size), bias)

    def _gate_up(self, prefix: str) -> Linear:
        inner = self.config.intermediate_size

        def rows(suffix: str, *into: int) -> Tensor:
            packed = self.new(2 * inner, *into)
            self.source.fill(f"{prefix}gate_proj.{suffix}", packed[:inner])
            self.source.fill(f"{prefix}up_proj.{suffix}", packed[inner:])
            return packed

        bias = rows("bias") if self.config.mlp_bias else None
        return make_linear(rows("weight", self.config.hidden_size), bias)

    def _qk_norm(self, prefix: str) -> Tensor:
        config = self.config
        q = self.take(prefix + "q_norm.weight", config.head_dim, pair_heads=1)
        k = self.take(prefix + "k_norm.weight", config.head_dim, pair_heads=1)
        return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))
