"""Attention over a paged cache in plain torch: pages in, pages out, and the softmax between.

A cache of one layer is `[kv_heads, num_blocks, block_size, head_dim]`: pages of one head are
neighbours, so gathering a table gives each sequence's keys without another copy.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def write_pages(cache: Tensor, places: Tensor, values: Tensor) -> None:
    """Store `values` [T, kv_heads, d] at flat token places [T] (block * block_size + offset)."""
    heads, blocks, size, width = cache.shape
    cache.view(heads, blocks * size, width).index_copy_(1, places, values.transpose(0, 1))


def read_pages(cache: Tensor, tables: Tensor) -> Tensor:
    """Return pages of `tables` [B, n] as [B, kv_heads, n * block_size, d], a view."""
    heads, _, size, width = cache.shape
    batch, count = tables.shape
    pages = cache.index_select(1, tables.reshape(-1))
    return pages.view(heads, batch, count * size, width).transpose(0, 1)


def attend_grouped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention of q [B, heads, n, d] over k, v [B, kv_heads, c, d], [B, heads, n, d].

    `bias` is added to the scores and broadcasts to [B, 1, n, c] (-inf hides a key). Query heads
    share key heads in order (grouped queries). softcap: s -> cap * tanh(s / cap) before the bias
    (Gemma 2). sinks [heads]: one more score a row that takes mass and gives no value (gpt-oss).
    """
    if softcap is None and sinks is None:
        return _fused(q, k, v, bias, scale, causal)
    batch, heads, num_queries, width = q.shape
    group = heads // k.shape[1]
    shape = (batch, k.shape[1], group, num_queries)
    scores = torch.einsum("bhgnd,bhcd->bhgnc", q.view(*shape, width).float(), k.float()) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.float().unsqueeze(1)
    if causal:
        hidden = torch.ones(num_queries, k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        extra = sinks.float().view(1, k.shape[1], group, 1, 1).expand(*shape, 1)
        scores = torch.cat([scores, extra], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[2]]
    out = torch.einsum("bhgnc,bhcd->bhgnd", weights, v.float())
    return out.reshape(batch, heads, num_queries, width).to(q.dtype)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool
) -> Tensor:
    batch, heads, num_queries, width = q.shape
    kv_heads = k.shape[1]
    if num_queries == 1:
        # One query a head: the query heads of a group are as good as a longer query.
        group = heads // kv_heads
        out = scaled_dot_product_attention(
            q.view(batch, kv_heads, group, width), k, v, attn_mask=bias, scale=scale
        )
        return out.reshape(batch, heads, 1, width)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=heads != kv_heads
    )
