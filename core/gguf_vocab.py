"""The byte-level BPE tokenizer that a GGUF file's metadata describes, built without transformers.

Only vocabularies of type "gpt2" whose pre-tokenizer is known exactly are built; others are refused
by name, since a nearly right split gives wrong ids without a sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from .errors import ValidationError
from .tokenizer import ChatTemplates, Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
_NAMED = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Split(NamedTuple):
    """How one value of tokenizer.ggml.pre cuts a text before the merges."""

    steps: list[Any]  # pre-tokenizers, in order
    composes: bool = False  # NFC first, as the model's own tokenizer does
    ignores_merges: bool = False  # a piece that is a token is taken whole
    adds_bos: bool = False  # where the file does not say


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Build the tokenizer from GGUF keys; raises ValidationError for a kind that is not known.

    Reads `tokenizer.ggml.*` (model, pre, tokens, token_type, merges, *_token_id, add_bos_token,
    add_eos_token) and `tokenizer.chat_template*`.
    """
    split = _split_of(metadata)
    tokens = cast("Sequence[str]", metadata["tokenizer.ggml.tokens"])
    kinds = cast("Sequence[int]", metadata.get("tokenizer.ggml.token_type", [1] * len(tokens)))
    named = _named_ids(metadata, len(tokens))
    backend = _backend(metadata, split, tokens)
    special = {i for i, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL)}
    special.update(i for name, i in named.items() if name in ("bos", "eos"))
    backend.add_special_tokens(
        [AddedToken(tokens[i], normalized=False, special=True) for i in sorted(special)]
    )
    backend.add_tokens(
        [
            AddedToken(tokens[i], normalized=False)
            for i, kind in enumerate(kinds)
            if kind == _USER_DEFINED and i not in special
        ]
    )
    _add_ends(backend, metadata, split, tokens, named)
    texts = {f"{name}_token": tokens[i] for name, i in named.items()}
    template = _chat_templates(metadata)
    extra = [tokens[i] for i in sorted(special - set(named.values()))]
    return Tokenizer(
        backend,
        hf_factory=lambda: _hf(backend, texts, extra, template, metadata),
        special_tokens=texts,
        token_ids={name: named.get(name) for name in _NAMED},
        special_ids=special,
        vocab_size=len(tokens),
        max_token_id=len(tokens) - 1,
        chat_template=template,
        end_ids=_ids_of(metadata, ("eot", "eom"), len(tokens)).values(),
    )


def _split_of(metadata: Mapping[str, object]) -> _Split:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValidationError(
            f"the GGUF file's tokenizer.ggml.model is {model!r}, and only 'gpt2' (byte-level BPE)"
            " is read from GGUF; give tokenizer= a folder or a hub name",
            parameter="tokenizer",
            value=model,
        )
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    splits = {
        "gpt-2": _Split([last]),
        "smollm": _Split([digits, last]),
        "qwen2": _Split(_worded(r"\p{N}"), composes=True),
        "llama-bpe": _Split(_worded(r"\p{N}{1,3}"), ignores_merges=True, adds_bos=True),
    }
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in splits:
        raise ValidationError(
            f"the GGUF file's tokenizer.ggml.pre is {pre!r}, and known are"
            f" {', '.join(sorted(splits))}; give tokenizer= a folder or a hub name",
            parameter="tokenizer",
            value=pre,
        )
    return splits[pre]


def _worded(numbers: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(_WORDS % numbers), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _backend(metadata: Mapping[str, object], split: _Split, tokens: Sequence[str]) -> Backend:
    lines = cast("Sequence[str]", metadata["tokenizer.ggml.merges"])
    merges = [cast("tuple[str, str]", tuple(line.split(" ", 1))) for line in lines]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.ignores_merges))
    if split.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(split.steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_ends(
    backend: Backend,
    metadata: Mapping[str, object],
    split: _Split,
    tokens: Sequence[str],
    named: Mapping[str, int],
) -> None:
    """Make `encode` put BOS and EOS around a text if the file says so."""
    wants = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", split.adds_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    used = {name: named[name] for name, wanted in wants.items() if wanted and name in named}
    if not used:
        return
    first = [tokens[used["bos"]]] if "bos" in used else []
    last = [tokens[used["eos"]]] if "eos" in used else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{t}:1" for t in first), "$B:1", *(f"{t}:1" for t in last)],
        special_tokens=[(tokens[i], i) for i in set(used.values())],
    )


def _named_ids(metadata: Mapping[str, object], num_tokens: int) -> dict[str, int]:
    found = _ids_of(metadata, tuple(_NAMED.values()), num_tokens)
    return {name: found[key] for name, key in _NAMED.items() if key in found}


def _ids_of(
    metadata: Mapping[str, object], keys: tuple[str, ...], num_tokens: int
) -> dict[str, int]:
    found = {}
    for key in keys:
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        # Converters write 2**32 - 1 or another id past the vocabulary for "none".
        if isinstance(value, int) and 0 <= value < num_tokens:
            found[key] = value
    return found


def _chat_templates(metadata: Mapping[str, object]) -> ChatTemplates:
    default = cast("str | None", metadata.get("tokenizer.chat_template"))
    names = cast("Sequence[str]", metadata.get("tokenizer.chat_templates") or ())
    named = {name: cast(str, metadata[f"tokenizer.chat_template.{name}"]) for name in names}
    if not named:
        return default
    return named if default is None else {"default": default, **named}


def _hf(
    backend: Backend,
    special_tokens: Mapping[str, str],
    extra: list[str],
    template: ChatTemplates,
    metadata: Mapping[str, object],
) -> Any:
    from transformers import PreTrainedTokenizerFast

    architecture = metadata.get("general.architecture")
    context = metadata.get(f"{architecture}.context_length")
    length = {"model_max_length": context} if isinstance(context, int) else {}
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=backend,  # copied by transformers
        extra_special_tokens=extra,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **special_tokens,
        **length,
    )
