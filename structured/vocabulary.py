"""The bytes of every token id, built once a tokenizer and handed to every grammar backend.

Control tokens hold a marker that UTF-8 never contains, so that no text grammar can reach them and
yet a structural tag can name them by id.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from ..core.constraint import Vocabulary
from ..core.errors import ValidationError
from ..core.spelling import Spelling

MARKER = b"\xff\xfe"  # followed by the id in decimal

_SENTENCEPIECE = Spelling("marked", has_byte_tokens=True)
_made: WeakKeyDictionary[Any, dict[tuple[int, frozenset[int]], Vocabulary]] = WeakKeyDictionary()
_lock = Lock()


def vocabulary_of(
    tokenizer: Any, vocab_size: int | None = None, end_ids: Iterable[int] = ()
) -> Vocabulary:
    """Return the vocabulary of `tokenizer` (a `core.tokenizer.Tokenizer`), cached with it.

    vocab_size: width of the logits, by default the tokenizer's own size; ids past the tokenizer
        are padding and never legal.
    end_ids: ids that the model's configuration names as ends of a text, beside the tokenizer's.

    Raises ValidationError if there is no tokenizer, or if its tokens have no bytes of their own.
    """
    if tokenizer is None:
        raise ValidationError(
            "structured_outputs needs the tokenizer, but the engine was made without one",
            parameter="structured_outputs",
        )
    known = tokenizer.max_token_id + 1
    width = known if vocab_size is None else vocab_size
    ends = frozenset(end_ids) | tokenizer.end_ids
    with _lock:  # one thread builds, the others wait for it
        made = _made.setdefault(tokenizer, {})
        if (width, ends) not in made:
            made[width, ends] = _build(tokenizer, width, ends)
        return made[width, ends]


def marker(token_id: int) -> bytes:
    """The bytes that stand for a control id; part of no UTF-8 text."""
    return MARKER + str(token_id).encode()


def _build(tokenizer: Any, width: int, ends: frozenset[int]) -> Vocabulary:
    spell, controls = _speller(tokenizer)
    controls = frozenset(i for i in controls | ends if 0 <= i < width)
    size = min(tokenizer.max_token_id + 1, width)
    tokens = [marker(i) if i in controls else spell(i) for i in range(size)]
    tokens += [marker(i) if i in controls else b"" for i in range(size, width)]
    texts = {_control_text(tokenizer, i): i for i in sorted(controls, reverse=True)}
    texts.pop("", None)
    return Vocabulary(
        tokens=tuple(tokens),
        control_ids=controls,
        eos_ids=tuple(sorted(i for i in ends if 0 <= i < width)),
        tokenizer_size=size,
        encode=_encoder(tokenizer, tokens, controls),
        control_texts=texts,
    )


def _speller(tokenizer: Any) -> tuple[Callable[[int], bytes], frozenset[int]]:
    """Return id -> bytes, and the control ids beside the tokenizer's ends."""
    special = frozenset(tokenizer.special_ids)
    if tokenizer.spelling.kind != "opaque":
        return tokenizer.token_bytes, special
    hf = None if tokenizer.is_fast else tokenizer.hf
    pieces = getattr(hf, "sp_model", None)
    if pieces is not None:
        control = {i for i in range(len(pieces)) if pieces.is_control(i) or pieces.is_unknown(i)}
        return _sentencepiece(tokenizer, hf), special | control
    tekken = _tekken(hf)
    if tekken is not None:
        first_text = int(tekken.num_special_tokens)
        return tekken.id_to_byte_piece, special | frozenset(range(first_text))
    if hf is not None and _is_bytes_vocabulary(hf, tokenizer.max_token_id + 1, special):
        return (lambda i: _raw(hf, i)), special
    kind = type(tokenizer.hf).__name__
    raise ValidationError(
        f"structured_outputs needs a tokenizer whose tokens have bytes of their own (byte-level, "
        f"sentencepiece, tekken or tiktoken), and {kind} is none of these",
        parameter="structured_outputs",
        value=kind,
    )


def _sentencepiece(tokenizer: Any, hf: Any) -> Callable[[int], bytes]:
    def spell(token_id: int) -> bytes:
        added = tokenizer.added_tokens.get(token_id)
        token = added if added is not None else hf.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        return token.encode() if added is not None else _SENTENCEPIECE.bytes_of(token)

    return spell


def _tekken(hf: Any) -> Any:
    """The byte vocabulary inside a tokenizer of mistral_common, or None."""
    inner = getattr(getattr(hf, "tokenizer", None), "instruct_tokenizer", None)
    inner = getattr(inner, "tokenizer", None)
    return inner if hasattr(inner, "id_to_byte_piece") else None


def _is_bytes_vocabulary(hf: Any, size: int, special: frozenset[int]) -> bool:
    """Whether tokens are handed out as bytes, as tokenizers built on tiktoken do."""
    first = next((i for i in range(size) if i not in special), None)
    return first is not None and isinstance(hf.convert_ids_to_tokens(first), bytes)


def _raw(hf: Any, token_id: int) -> bytes:
    token = hf.convert_ids_to_tokens(token_id)
    if token is None:
        return b""
    return token if isinstance(token, bytes) else str(token).encode()


def _control_text(tokenizer: Any, token_id: int) -> str:
    text: str = tokenizer.added_tokens.get(token_id) or ""
    return text


# --- spelling a text as the model does -----------------------------------------------------------


def _encoder(
    tokenizer: Any, tokens: Sequence[bytes], controls: frozenset[int]
) -> Callable[[str], list[int]]:
    """Return text -> ids for a text that goes on with another: no space put in front, no control.

    What the tokenizer would change (a normaliser, a control token's own text) is spelled by the
    longest tokens that fit.
    """
    plain = _plain_encode(tokenizer)
    adds_space = _joined(tokens, plain("a")) == b" a"
    lead = plain("\n") if adds_space else []
    longest = _Longest(tokens, controls)

    def encode(text: str) -> list[int]:
        wanted = text.encode()
        ids = plain("\n" + text) if adds_space else plain(text)
        if ids[: len(lead)] == lead:
            ids = ids[len(lead) :]
        if _joined(tokens, ids) == wanted and controls.isdisjoint(ids):
            return ids
        return longest.spell(wanted)

    return encode


def _plain_encode(tokenizer: Any) -> Callable[[str], list[int]]:
    """The tokenizer's encoding in which the text of a special token is only text."""
    if tokenizer.backend is None:
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    backend = copy.deepcopy(tokenizer.backend)
    backend.encode_special_tokens = True
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)


def _joined(tokens: Sequence[bytes], ids: Iterable[int]) -> bytes:
    return b"".join(tokens[i] if i < len(tokens) else MARKER for i in ids)


class _Longest:
    """Spells bytes by the longest token at each place; made at the first use."""

    def __init__(self, tokens: Sequence[bytes], controls: frozenset[int]) -> None:
        self._tokens = tokens
        self._controls = controls
        self._ids: dict[bytes, int] | None = None
        self._longest = 0

    def spell(self, text: bytes) -> list[int]:
        """Return ids whose bytes are `text`, or [] if there are none."""
        if self._ids is None:
            ids = {t: i for i, t in enumerate(self._tokens) if t and i not in self._controls}
            self._longest = max(map(len, ids), default=0)
            self._ids = ids
        spelled, place = [], 0
        while place < len(text):
            for size in range(min(self._longest, len(text) - place), 0, -1):
                token = self._ids.get(text[place : place + size])
                if token is not None:
                    break
            else:
                return []
            spelled.append(token)
            place += size
        return spelled
