"""Checks of a request that need the vocabulary, the tokenizer or the engine's limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .errors import ValidationError
from .param_rules import refuse, shown


def check_request(
    params: Any,
    *,
    vocab_size: int,
    max_logprobs: int,
    max_logprob_token_ids: int = -1,
    tokenizer: Any = None,
    tokenizer_size: int | None = None,
) -> None:
    """Check parameters (either form) against one model; ValidationError names the field.

    `max_logprobs` and `max_logprob_token_ids` -1 are no limit. `tokenizer` is needed for
    constraints. `tokenizer_size`, else the tokenizer's length, bounds `allowed_token_ids`.
    """
    for name in ("logprobs", "prompt_logprobs"):
        _check_num_logprobs(name, getattr(params, name), vocab_size, max_logprobs)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    known = vocab_size if tokenizer_size is None else tokenizer_size
    if tokenizer_size is None and hasattr(tokenizer, "__len__"):
        known = len(tokenizer)
    _check_ids("allowed_token_ids", params.allowed_token_ids, known)
    _check_ids("stop_token_ids", params.stop_token_ids, max(vocab_size, known))
    _check_ids("logprob_token_ids", params.logprob_token_ids, vocab_size)
    listed = len(params.logprob_token_ids or ())
    if 0 <= max_logprob_token_ids < listed:
        raise ValidationError(
            f"logprob_token_ids must list at most max_logprob_token_ids ({max_logprob_token_ids}) "
            f"ids, got {listed}",
            parameter="logprob_token_ids",
            value=listed,
        )
    for ids in params.bad_words_token_ids or ():
        _check_ids("bad_words", ids, max(vocab_size, known))
    if params.structured_outputs is not None and tokenizer is None:
        raise ValidationError(
            "structured_outputs needs the tokenizer, got an engine with skip_tokenizer_init",
            parameter="structured_outputs",
            value=None,
        )


def check_prompt(prompt_ids: Sequence[int], *, vocab_size: int, max_model_len: int) -> None:
    """Refuse a prompt that is empty, has an unknown id or leaves no room for one more token."""
    if not len(prompt_ids):
        raise ValidationError("prompt must not be empty", parameter="prompt", value=prompt_ids)
    for bad in (min(prompt_ids), max(prompt_ids)):
        if not 0 <= bad < vocab_size:
            refuse("prompt_token_ids", bad, f"made of ids in [0, {vocab_size})")
    if len(prompt_ids) >= max_model_len:
        raise ValidationError(
            f"prompt must be shorter than max_model_len ({max_model_len}) tokens, "
            f"got {len(prompt_ids)}",
            parameter="prompt",
            value=len(prompt_ids),
        )


def vocab_size_of(model_config: Any) -> int:
    """The vocabulary size of a model config, vLLM's way or as a plain attribute."""
    getter = getattr(model_config, "get_vocab_size", None)
    return int(getter() if getter is not None else model_config.vocab_size)


def integer_keys(bias: Mapping[Any, Any]) -> dict[int, Any]:
    """Turn the text keys of a `logit_bias` from JSON into ids; ValidationError names the key."""
    converted = {}
    for key, value in bias.items():
        try:
            token = int(key) if isinstance(key, str) else key
        except ValueError:
            refuse("logit_bias", key, "keyed by token ids (integers >= 0)")
        converted[token] = value
    return converted


def bad_word_ids(words: Iterable[str], tokenizer: Any) -> list[list[int]]:
    """Tokenise each word bare and with one leading space; equal forms are kept once.

    A leading space of the word itself is dropped first. `tokenizer.encode(text,
    add_special_tokens=False)` is all that is asked of the tokenizer.
    """
    forms: list[list[int]] = []
    for word in words:
        stripped = word.lstrip()
        texts = (stripped, f" {stripped}") if stripped else (word,)
        tokenised = [list(tokenizer.encode(t, add_special_tokens=False)) for t in texts]
        if not any(tokenised):
            raise ValidationError(
                f"bad_words must be words that the tokenizer can write, got {shown(word)}",
                parameter="bad_words",
                value=word,
            )
        forms += [ids for ids in tokenised if ids and ids not in forms]
    return forms


def _check_num_logprobs(name: str, asked: int | None, vocab_size: int, limit: int) -> None:
    if asked is None or limit == -1:
        return
    wanted = vocab_size if asked == -1 else asked
    if wanted > limit:
        whole = f" ({wanted}, the whole vocabulary)" if asked == -1 else ""
        raise ValidationError(
            f"{name} must be at most max_logprobs ({limit}), got {asked}{whole}",
            parameter=name,
            value=asked,
        )


def _check_ids(name: str, ids: Iterable[int] | None, size: int) -> None:
    for token in ids or ():
        if not 0 <= token < size:
            refuse(name, token, f"made of token ids in [0, {size})")
