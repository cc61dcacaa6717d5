"""Any other decoder that transformers can build, with our attention put in its place.

Our function is registered in transformers' attention interface under the name `decodekit`; a model
loaded with that name calls it in every layer with the queries, keys and values of the flat batch.
The step in force stands in a holder of the model, hung on its attention modules, so several
models live in one process.

What cannot run so is refused: by what its config says (`unsupported`), and by a probe at load
that compares a few tokens with transformers' own eager attention (`hf_probe.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ValidationError
from .config import Embeds, ModelSpec, eos_ids, optional_id
from .hf_probe import Shapes, probe

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig

    from ..stage import AttentionStep

ATTENTION_NAME = "decodekit"
_HOLDER = "_decodekit_holder"
# Variants whose frequencies depend on the longest sequence of a batch beyond the trained length.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class StepHolder:
    """Carries the attention step of the forward in progress to the model's attention modules."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step: AttentionStep | None = None


def attention_forward(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, d]
    key: Tensor,  # [1, kv_heads, T, d]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What transformers' attention modules call; [1, T, heads, d] and no weights come back.

    The keywords that change the result are named; `_` takes the rest of what transformers hands
    to every implementation (output flags, position ids, lengths of its own packing).
    """
    holder: StepHolder | None = getattr(module, _HOLDER, None)
    layer = getattr(module, "layer_idx", None)
    if holder is None or holder.step is None or not isinstance(layer, int):
        raise ValidationError(
            f"{type(module).__name__} called attention outside a decodekit step",
            parameter="model_impl",
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    for wrong, what in (
        (attention_mask is not None, "a mask of its own"),
        (position_bias is not None, "a position bias"),
        (not causal, "attention that isn't causal"),
        (query.shape[0] != 1, "a batch dimension"),
    ):
        if wrong:
            raise ValidationError(
                f"{type(module).__name__} asks for {what}, which paged attention does not have",
                parameter="model",
            )
    mixed = holder.step.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return mixed.unsqueeze(0), None


def _no_mask(*_: object, **__: object) -> None:
    """Transformers' mask for our attention: none is built, the step knows who sees whom."""
    return None


def register_attention() -> None:
    """Make `attn_implementation="decodekit"` known to transformers; doing it twice is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


class TransformersDecoder:
    """A `CausalLM` around a transformers model."""

    def __init__(self, model: Any, spec_of: Callable[[Shapes], ModelSpec]) -> None:
        """Probe the model and refuse it if it cannot run on our attention.

        `spec_of` makes the specification from the shapes that the probe saw.
        """
        self._model = model
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._finish = _head_arithmetic(model.config)
        self._holder = StepHolder()
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, _HOLDER, self._holder)
        self.spec = spec_of(probe(model, self.forward, self.logits, ATTENTION_NAME))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionStep,
        embeds: Embeds | None = None,
    ) -> Tensor:
        """Return the final hidden states [T, hidden]."""
        self._holder.step = attention
        try:
            out = self._decoder(
                **self._inputs(token_ids, embeds),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
            )
        finally:
            self._holder.step = None
        hidden: Tensor = out[0]
        return hidden[0]

    def _inputs(self, token_ids: Tensor, embeds: Embeds | None) -> dict[str, Tensor]:
        if embeds is None:
            return {"input_ids": token_ids.unsqueeze(0)}
        table = self._model.get_input_embeddings()
        values: Tensor = table(token_ids)
        values = values.index_copy(0, embeds.rows, embeds.values.to(values.dtype))
        return {"inputs_embeds": values.unsqueeze(0)}

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab] of `forward`'s rows."""
        return self._finish(self._head(hidden))


def _head_arithmetic(config: Any) -> Callable[[Tensor], Tensor]:
    """What known architectures do with the output layer's product; the probe checks it."""
    divide = getattr(config, "logits_scaling", None)  # Granite
    multiply = getattr(config, "logit_scale", None)  # Cohere
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and 3

    def finish(logits: Tensor) -> Tensor:
        if divide is not None:
            logits = logits / divide
        if multiply is not None:
            logits = logits * multiply
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    return finish


def unsupported(config: PretrainedConfig, model_class: type[Any] | None) -> str | None:
    """Return why a model of this config cannot run on our attention, or None.

    `model_class` is None for a class that comes with the checkpoint (`trust_remote_code`).
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    other = sorted(kinds - {"full_attention", "sliding_attention"})
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if config.get_text_config() is not config:
        return "it is a multimodal model"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "it uses ALiBi position biases"
    if getattr(model_class, "_is_stateful", False):
        return "it keeps a recurrent state instead of a key/value cache"
    if other:
        return f"it has layers of type {', '.join(other)}"
    if getattr(config, "add_cross_attention", False):
        return "it has cross-attention"
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share keys and values"
    if getattr(config, "quantization_config", None):
        return "its weights are quantised"
    if model_class is not None and not getattr(model_class, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention interface"
    return None


def class_of(config: PretrainedConfig) -> type[Any] | None:
    """Return transformers' causal-LM class for a config, or None if it has none of its own."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple) else found


def build_transformers(
    config: PretrainedConfig,
    folder: Path | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    seed: int,
    generation_config: Mapping[str, Any],
) -> TransformersDecoder:
    """Load a model from `folder`, or make one with random weights if that is None."""
    from transformers import AutoModelForCausalLM

    model_class = class_of(config)
    has_remote = trust_remote_code and bool(getattr(config, "auto_map", None))
    if model_class is None and not has_remote:
        raise _refusal(config, "transformers has no causal language model for it")
    reason = unsupported(config, None if has_remote else model_class)
    if reason is not None:
        raise _refusal(config, reason)
    register_attention()
    chosen: dict[str, Any] = {
        "attn_implementation": ATTENTION_NAME,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
    }
    if folder is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            from_config: Callable[..., Any] = AutoModelForCausalLM.from_config
            model = from_config(config, **chosen)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, **chosen)
    model = model.to(device).eval().requires_grad_(False)
    return TransformersDecoder(
        model, lambda shapes: _spec(model, shapes, dtype, device, generation_config)
    )


def _spec(
    model: Any,
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
    generation_config: Mapping[str, Any],
) -> ModelSpec:
    config = model.config
    weights = {p.untyped_storage().data_ptr(): p for p in model.parameters()}.values()
    raw = config.to_dict()
    return ModelSpec(
        architecture=type(model).__name__,
        model_type=config.model_type,
        vocab_size=shapes.vocab_size,
        hidden_size=shapes.hidden_size,
        num_layers=shapes.num_layers,
        num_heads=shapes.num_heads,
        num_kv_heads=shapes.num_kv_heads,
        head_dim=shapes.head_dim,
        max_position=context_length(config),
        dtype=dtype,
        device=device,
        bos_token_id=optional_id(config.bos_token_id),
        pad_token_id=optional_id(config.pad_token_id),
        eos_token_ids=eos_ids(raw, generation_config),
        num_parameters=sum(p.numel() for p in weights),
        weight_bytes=sum(p.numel() * p.element_size() for p in weights),
        config=raw,
    )


def context_length(config: Any) -> int:
    """Return how far the model can read with frequencies that don't depend on the batch.

    Dynamic NTK and LongRoPE change the frequencies of a whole batch once one sequence passes the
    trained length, so such models end there.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise _refusal(config, "its config has no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        trained = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        return min(longest, int(trained or longest))
    return longest


def _refusal(config: PretrainedConfig, reason: str) -> ValidationError:
    names = getattr(config, "architectures", None) or [config.model_type]
    return ValidationError(f"{names[0]} cannot be run: {reason}", parameter="model", value=names[0])
