"""A checkpoint that behaves as a table: the next token's logits depend on the last token alone.

Every number is chosen by the test, and each logit is a sum with one non-zero term, so it has the
same bits in any batch: a difference between two runs is a fault of state or logic, never rounding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HEAD_DIM = 32


def blank_table(num_tokens: int, low: float = -30.0) -> Tensor:
    """Return a table [from, to] of `num_tokens` tokens with every logit at `low`."""
    return torch.full((num_tokens, num_tokens), low)


def flat_table(num_tokens: int, num_best: int = 64) -> Tensor:
    """Return a table in which every token leads to `num_best` equally likely ones, ids 0, 1, ..."""
    table = blank_table(num_tokens)
    table[:, :num_best] = 0.0
    return table


def spelling_table(num_tokens: int, path: Sequence[int]) -> Tensor:
    """Return a table that writes `path` token by token, each winning by 30.

    The path may not give a token two followers; its last token leads back to its first.
    """
    table = blank_table(num_tokens)
    followers: dict[int, int] = {}
    for token, after in zip(path, [*path[1:], path[0]], strict=True):
        if followers.setdefault(token, after) != after:
            raise ValueError(f"token {token} would need two followers")
        table[token, after] = 0.0
    return table


def write_table_model(
    folder: Path,
    table: Tensor,
    *,
    num_rows: int | None = None,
    eos_token_id: int | list[int] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    context: int = 4096,
    tokenizer: Any = None,
) -> Path:
    """Write a Llama checkpoint that computes `table` [n, n], and return `folder`.

    `num_rows`: rows of the head, more than n pads the vocabulary (with logits -30). `tokenizer`: a
    transformers tokenizer to save beside it. Raises ValueError if n is above 1024.
    """
    from safetensors.torch import save_file

    known = table.shape[0]
    rows = known if num_rows is None else num_rows
    width = next((size for size in (256, 1024) if size >= rows), None)
    if width is None:
        raise ValueError(f"a table has at most 1024 tokens, got {rows}")
    root = width**0.5
    head = torch.full((rows, width), 0.0)
    head[:, :known] = -30.0 / root
    head[:known, :known] = table.T / root
    embedding = torch.zeros(rows, width)
    embedding[:, :rows] = torch.eye(rows) * root
    weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(width),
        **_idle_layer(width),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = _config(rows, width, context, eos_token_id)
    (folder / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(dict(generation_config)))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer(
    extra: Sequence[str] = (),
    special: Sequence[str] = (),
    *,
    eos: str | None = None,
    bos: str | None = None,
    chat_template: str | None = None,
) -> Any:
    """Return a byte-level tokenizer: 256 byte tokens (ids 0..255), then `extra`, then `special`.

    `extra` are plain tokens of several bytes; text is never encoded to them, since there are no
    merges, but they decode as themselves. `eos` and `bos` name special tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = byte_alphabet()
    words = [*alphabet, *("".join(alphabet[b] for b in text.encode()) for text in extra)]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokens = [AddedToken(text, normalized=False, special=True) for text in special]
    backend.add_special_tokens(tokens)
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=backend,
        eos_token=eos,
        bos_token=bos,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def byte_alphabet() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte 0..255 (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain}
    table.update({byte: chr(256 + place) for place, byte in enumerate(others)})
    return [table[byte] for byte in range(256)]


def _idle_layer(width: int) -> dict[str, Tensor]:
    """Return one decoder layer that adds nothing to the residual stream."""
    generator = torch.Generator().manual_seed(0)
    prefix = "model.layers.0."
    attention = {
        f"{prefix}self_attn.{name}_proj.weight": torch.randn(width, width, generator=generator) / 64
        for name in "qkv"
    }
    return {
        **attention,
        f"{prefix}self_attn.o_proj.weight": torch.zeros(width, width),
        f"{prefix}mlp.gate_proj.weight": torch.zeros(32, width),
        f"{prefix}mlp.up_proj.weight": torch.zeros(32, width),
        f"{prefix}mlp.down_proj.weight": torch.zeros(width, 32),
        f"{prefix}input_layernorm.weight": torch.ones(width),
        f"{prefix}post_attention_layernorm.weight": torch.ones(width),
    }


def _config(rows: int, width: int, context: int, eos: int | list[int] | None) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": rows,
        "hidden_size": width,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": width // HEAD_DIM,
        "num_key_value_heads": width // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-12,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
