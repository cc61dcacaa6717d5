"""The dense double computes what torch's own attention computes, sequence by sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from decodekit.core.stage import AttentionStep
from decodekit.plugins.author.toys import DenseAttention

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3


def tokens(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k, v of `count` tokens."""
    q = torch.randn(count, HEADS, DIM, generator=rng)
    k, v = torch.randn(2, count, KV_HEADS, DIM, generator=rng)
    return q, k, v


def torchs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention [T, heads, d] by torch under a mask [T, n] of what is seen."""
    batch = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*batch, attn_mask=mask, scale=SCALE, enable_gqa=True)
    return out[0].transpose(0, 1)


def test_it_is_an_attention_step() -> None:
    assert isinstance(DenseAttention(), AttentionStep)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_a_whole_text_equals_torch(window: int | None, rng: torch.Generator) -> None:
    q, k, v = tokens(7, rng)
    back = torch.arange(7).unsqueeze(1) - torch.arange(7)
    seen = (back >= 0) & (back < (window or 7))
    attention = DenseAttention()
    attention.begin([7])

    out = attention.attend(0, q, k, v, scale=SCALE, window=window)

    torch.testing.assert_close(out, torchs(q, k, v, seen))


def test_chunks_and_neighbours_change_nothing(rng: torch.Generator) -> None:
    first, second = tokens(6, rng), tokens(5, rng)
    whole = DenseAttention()
    whole.begin([6])
    expected_first = whole.attend(3, *first, scale=SCALE, window=4)
    whole.begin([5], [9])
    expected_second = whole.attend(3, *second, scale=SCALE, window=4)

    mixed = DenseAttention()
    parts = []
    for a, b in ((slice(0, 2), slice(0, 4)), (slice(2, 6), slice(4, 5))):
        counts = [a.stop - a.start, b.stop - b.start]
        mixed.begin(counts, [2, 5])
        flat = [torch.cat((x[a], y[b])) for x, y in zip(first, second, strict=True)]
        parts.append(mixed.attend(3, *flat, scale=SCALE, window=4).split(counts))

    torch.testing.assert_close(torch.cat((parts[0][0], parts[1][0])), expected_first)
    torch.testing.assert_close(torch.cat((parts[0][1], parts[1][1])), expected_second)


def test_positions_go_on_where_a_sequence_stands(rng: torch.Generator) -> None:
    attention = DenseAttention()
    assert attention.begin([3, 1], [7, 8]).tolist() == [0, 1, 2, 0]
    attention.attend(0, *tokens(4, rng), scale=SCALE)

    assert attention.begin([1, 2], [8, 7]).tolist() == [1, 3, 4]
    assert (attention.length(7), attention.length(8), attention.length(1)) == (3, 1, 0)


def test_a_softcap_bounds_the_scores(rng: torch.Generator) -> None:
    q, k, v = tokens(2, rng)
    attention = DenseAttention()
    attention.begin([2])

    out = attention.attend(0, q, k, v, scale=SCALE, softcap=0.5)

    for head in range(HEADS):
        scores = SCALE * (k[:, head // 2] @ q[1, head])
        weights = torch.softmax(0.5 * torch.tanh(scores / 0.5), dim=0)
        torch.testing.assert_close(out[1, head], weights @ v[:, head // 2])


def test_a_sink_takes_its_share_and_gives_nothing(rng: torch.Generator) -> None:
    q, k, v = tokens(1, rng)
    sinks = torch.tensor([-torch.inf, 0.0, 1.0, 2.0])
    attention = DenseAttention()
    attention.begin([1])

    out = attention.attend(0, q, k, v, scale=SCALE, sinks=sinks)

    for head in range(HEADS):
        score = SCALE * (k[0, head // 2] @ q[0, head])
        share = torch.sigmoid(score - sinks[head])
        torch.testing.assert_close(out[0, head], share * v[0, head // 2])
