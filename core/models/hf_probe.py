"""A few tokens through a transformers model, with our attention and with its own.

The probe finds the shapes that the cache needs and proves that hidden states, output layer and
attention calls mean what we take them to mean. Windows are longer than the probe, so they are
compared with the config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ValidationError

if TYPE_CHECKING:
    from ..stage import AttentionStep

_NUM_TOKENS = 4
# Largest difference of logits, as a share of their range, that rounding explains.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


class Shapes(NamedTuple):
    """What the probe saw."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int


class ProbeStep:
    """An attention step for one sequence from its start: plain causal softmax, and a record."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.windows: list[int | None] = []
        self.shapes: set[tuple[int, int, int, int]] = set()  # heads, kv heads, d of k, d of v

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return causal attention [T, heads, d]; the window is recorded, not applied."""
        self.layers.append(layer)
        self.windows.append(window)
        self.shapes.add((q.shape[1], k.shape[1], k.shape[2], v.shape[2]))
        group = q.shape[1] // k.shape[1]
        keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q.float(), keys) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        if sinks is not None:
            column = sinks.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(dim=-1)[..., : keys.shape[0]]
        return torch.einsum("hts,shd->thd", weights, values).to(q.dtype)


def probe(
    model: Any,
    forward: Callable[[Tensor, Tensor, AttentionStep], Tensor],
    logits: Callable[[Tensor], Tensor],
    attention_name: str,
) -> Shapes:
    """Compare `logits(forward(...))` with the model's own; raise ValidationError if they differ."""
    device = model.device
    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    token_ids = torch.arange(_NUM_TOKENS, device=device) * 7 % vocab_size
    positions = torch.arange(_NUM_TOKENS, device=device)
    step = ProbeStep()
    with torch.inference_mode():
        hidden = forward(token_ids, positions, step)
        ours = logits(hidden).float()
        try:
            model.set_attn_implementation("eager")
            theirs = model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0].float()
        finally:
            model.set_attn_implementation(attention_name)
    _check_layers(model, step)
    allowed = _TOLERANCE.get(model.dtype, 0.1) * float(theirs.max() - theirs.min())
    difference = float((ours - theirs).abs().max())
    if not difference <= allowed:
        raise _refusal(
            model,
            f"its logits on our attention differ from its own by {difference:.3g} "
            f"(allowed {allowed:.3g})",
        )
    ((num_heads, num_kv_heads, head_dim, _),) = step.shapes
    return Shapes(
        num_layers=len(step.layers),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=int(hidden.shape[-1]),
        vocab_size=int(ours.shape[-1]),
    )


def _check_layers(model: Any, step: ProbeStep) -> None:
    if not step.layers or sorted(step.layers) != list(range(len(step.layers))):
        raise _refusal(model, f"its layers called attention as {step.layers}, not once each")
    if len(step.shapes) != 1:
        raise _refusal(model, "its layers have different numbers or sizes of heads")
    ((_, _, key_dim, value_dim),) = step.shapes
    if key_dim != value_dim:
        raise _refusal(model, f"its keys have {key_dim} values a head and its values {value_dim}")
    expected = expected_windows(model.config, len(step.layers))
    found = [window for _, window in sorted(zip(step.layers, step.windows, strict=True))]
    if expected is not None and found != expected:
        raise _refusal(model, f"its layers ask for windows {found}, its config for {expected}")


def expected_windows(config: Any, num_layers: int) -> list[int | None] | None:
    """Return the window of each layer that the config states, or None if it states no windows."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None:
        return [None] * num_layers
    if kinds is None:
        # Architectures without layer types use the window in every layer (Phi-3, StarCoder2).
        return [window] * num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _refusal(model: Any, reason: str) -> ValidationError:
    name = type(model).__name__
    return ValidationError(f"{name} cannot be run: {reason}", parameter="model", value=name)
