"""Text to token ids and back: one wrapper over fast tokenizers, slow ones, and GGUF vocabularies.

Chat templates are in `chat.py`, incremental text in `detokenizer.py`. transformers is imported only
for folders and hub names, or when `Tokenizer.hf` is asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from tokenizers import Tokenizer as Backend

from .errors import ValidationError
from .param_rules import shown
from .spelling import SPACE_MARK, Spelling, spelling_of

ChatTemplates = str | dict[str, str] | None
Side = Literal["left", "right"]

_HF_KEYWORDS = frozenset(
    {"max_length", "truncation", "padding", "padding_side", "pad_to_multiple_of", "stride"}
)


def load_tokenizer(
    source: str | Path,
    *,
    tokenizer: str | Path | None = None,
    tokenizer_mode: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    hf_token: bool | str | None = None,
    metadata: Mapping[str, object] | None = None,
) -> Tokenizer:
    """Load the tokenizer of a GGUF file, a local folder or a hub name.

    `tokenizer` replaces `source`. `metadata` spares reading a GGUF file whose keys the caller
    has at hand; it belongs to `source` and is not used with `tokenizer`.
    """
    if tokenizer_mode not in ("auto", "hf"):
        raise ValidationError(
            f"tokenizer_mode must be 'auto' or 'hf', got {tokenizer_mode!r}",
            parameter="tokenizer_mode",
            value=tokenizer_mode,
        )
    if tokenizer is not None:
        source, metadata = tokenizer, None
    if metadata is None and is_gguf(source):
        from .models.gguf import read_gguf

        metadata = read_gguf(Path(source)).metadata
    if metadata is not None:
        from .gguf_vocab import tokenizer_from_gguf

        return tokenizer_from_gguf(metadata)

    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(
        str(source), revision=revision, trust_remote_code=trust_remote_code, token=hf_token
    )
    return tokenizer_from_hf(hf)


def is_gguf(source: str | Path) -> bool:
    """Say whether `source` is an existing file that begins with GGUF's magic."""
    path = Path(source)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def tokenizer_from_hf(hf: Any) -> Tokenizer:
    """Wrap a transformers tokenizer, slow or fast.

    A fast one's backend is copied: calls with truncation or padding leave settings behind in the
    original, which would then cut our prompts.
    """
    backend: Backend | None = None
    if hf.is_fast:
        backend = copy.deepcopy(hf.backend_tokenizer)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = hf.backend_tokenizer.encode_special_tokens
    special = {i for i, token in hf.added_tokens_decoder.items() if token.special}
    if backend is None:
        special.update(hf.all_special_ids)
    ids = hf.get_vocab().values()
    return Tokenizer(
        backend,
        hf_factory=lambda: hf,
        special_tokens=hf.special_tokens_map,
        token_ids={"bos": hf.bos_token_id, "eos": hf.eos_token_id, "pad": hf.pad_token_id},
        special_ids=special,
        vocab_size=len(hf),
        max_token_id=max(ids, default=-1),
        chat_template=hf.chat_template,
    )


class Tokenizer:
    """One vocabulary: encoding, exact bytes of a token, special ids, chat template.

    Safe to share between threads. Ids outside the vocabulary have no text and no bytes, and are
    left out of a decoding.
    """

    def __init__(
        self,
        backend: Backend | None,
        *,
        hf_factory: Callable[[], Any],
        special_tokens: Mapping[str, str],
        token_ids: Mapping[str, int | None],
        special_ids: Iterable[int],
        vocab_size: int,
        max_token_id: int,
        chat_template: ChatTemplates = None,
        end_ids: Iterable[int] = (),
    ) -> None:
        self.backend = backend  # None for a tokenizer that only transformers can run
        self.vocab_size = vocab_size  # number of tokens, as len() of a transformers tokenizer
        self.max_token_id = max_token_id  # at least vocab_size - 1, more if ids have holes
        self.special_tokens = dict(special_tokens)  # "bos_token" -> text, as templates see them
        self.bos_token_id = token_ids.get("bos")
        self.eos_token_id = token_ids.get("eos")
        self.pad_token_id = token_ids.get("pad")
        self.special_ids = frozenset(special_ids)  # left out by skip_special_tokens
        eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.end_ids = frozenset((*eos, *end_ids))  # all ids that this vocabulary says end a turn
        self.chat_template = chat_template
        self.spelling = Spelling("opaque") if backend is None else spelling_of(backend.decoder)
        self._hf_factory = hf_factory
        self._hf_lock = Lock()
        self._pieces: dict[int, str | bytes] = {}

    @property
    def is_fast(self) -> bool:
        """Whether the `tokenizers` library runs it."""
        return self.backend is not None

    @cached_property
    def hf(self) -> Any:
        """The same tokenizer as a live transformers object, made on first use."""
        return self._hf_factory()

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """Id to text of the tokens matched before the model splits a text, special or not."""
        if self.backend is None:
            return {i: str(token) for i, token in self.hf.added_tokens_decoder.items()}
        return {i: token.content for i, token in self.backend.get_added_tokens_decoder().items()}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; BOS and the like are added as the tokenizer decides."""
        if not isinstance(text, str):
            raise ValidationError(
                f"a prompt text must be a string, got {shown(text)}",
                parameter="prompt",
                value=text,
            )
        _refuse_surrogates(text)
        if self.backend is not None:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._hf_encode(text, add_special_tokens, {})

    def encode_prompt(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str | None = None,
        max_model_len: int | None = None,
        **tokenizer_kwargs: object,
    ) -> list[int]:
        """Encode a prompt under its tokenisation arguments.

        Truncation keeps the last `truncate_prompt_tokens` tokens (the first with side "right"),
        and the special tokens that the tokenizer adds count but are never cut off. Other keywords
        go to the transformers tokenizer; unknown ones are refused.
        """
        unknown = sorted(set(tokenizer_kwargs) - _HF_KEYWORDS)
        if unknown:
            raise ValidationError(
                f"tokenization_kwargs has an unknown key {unknown[0]!r}; known: add_special_tokens,"
                f" truncate_prompt_tokens, truncation_side, {', '.join(sorted(_HF_KEYWORDS))}",
                parameter="tokenization_kwargs",
                value=unknown[0],
            )
        limit = prompt_limit(truncate_prompt_tokens, max_model_len)
        side = truncation_side_of(truncation_side)
        if tokenizer_kwargs:
            _refuse_surrogates(text)
            ids = self._hf_encode(text, add_special_tokens, tokenizer_kwargs)
        else:
            ids = self.encode(text, add_special_tokens)
        if limit is None or len(ids) <= limit:
            return ids
        if tokenizer_kwargs or not add_special_tokens:
            return cut_ids(ids, limit, side)
        return self._truncated(text, ids, limit, side)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole list of ids; bytes that are no UTF-8 show as U+FFFD."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        kept = [i for i in ids if i not in skip and self.has_token(i)]
        if self.spelling.kind == "opaque":
            return self.decode_opaque(kept)
        pieces = [self.piece(i) for i in kept]
        if kept and self.spelling.drops_first_marks:
            pieces[0] = self.first_piece(kept[0])
        raw = b"".join(p.encode() if isinstance(p, str) else p for p in pieces)
        text = raw.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.spelling.strips_first_space else text

    def decode_opaque(self, ids: Sequence[int]) -> str:
        """Decode through the library, for vocabularies whose pieces have no bytes of their own."""
        if self.backend is not None:
            return self.backend.decode(ids, skip_special_tokens=False)
        text = self.hf.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def has_token(self, token_id: int) -> bool:
        """Whether the vocabulary holds this id."""
        if not 0 <= token_id <= self.max_token_id:
            return False
        if self.backend is not None:
            return self.backend.id_to_token(token_id) is not None
        return self.hf.convert_ids_to_tokens(token_id) is not None

    def piece(self, token_id: int) -> str | bytes:
        """What a token adds to a running text: str if it is whole UTF-8 by itself, else bytes."""
        piece = self._pieces.get(token_id)
        if piece is None:
            if not 0 <= token_id <= self.max_token_id:
                return ""  # not kept: a caller may send any number of such ids
            raw = self._spelled(token_id)
            try:
                piece = raw.decode("utf-8")
            except UnicodeDecodeError:
                piece = raw
            self._pieces[token_id] = piece
        return piece

    def first_piece(self, token_id: int) -> str | bytes:
        """`piece` for the first token of a text in a vocabulary that drops its space marks."""
        piece = self.piece(token_id)
        token = self._token(token_id)
        return token.replace(SPACE_MARK, "") if token and SPACE_MARK in token else piece

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token; b"" for an id outside the vocabulary.

        Raises ValueError for vocabularies that are neither byte-level nor sentencepiece-like: what
        a token adds to a text then depends on its neighbours.
        """
        if self.spelling.kind == "opaque":
            raise ValueError(
                "this tokenizer is neither byte-level nor sentencepiece-like, so that its tokens"
                " have no bytes of their own"
            )
        piece = self.piece(token_id)
        return piece.encode() if isinstance(piece, str) else piece

    def text_of_token(self, token_id: int) -> str:
        """Text of one token alone, special tokens included; U+FFFD where it is no whole text."""
        if not self.has_token(token_id):
            return ""
        if self.spelling.kind == "opaque":
            return self.added_tokens.get(token_id) or self.decode_opaque([token_id])
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def bad_word_sequences(self, word: str) -> list[list[int]]:
        """Id sequences that spell `word` bare and after a space, without repeats.

        A tokenizer that puts a space in front of every text has a third form: the word glued to
        what goes before it.
        """
        bare = word.lstrip()
        if not bare:
            raise ValidationError(
                f"bad_words entries must hold more than white space, got {word!r}",
                parameter="bad_words",
                value=word,
            )
        forms = [self.encode(bare, False), self.encode(" " + bare, False)]
        lead = self.encode("\n", False)
        glued = self.encode("\n" + bare, False)
        if self._puts_space_first and glued[: len(lead)] == lead:
            forms.append(glued[len(lead) :])
        return [form for i, form in enumerate(forms) if form and form not in forms[:i]]

    @cached_property
    def _puts_space_first(self) -> bool:
        ids = self.encode("a", add_special_tokens=False)
        token = self._token(ids[0]) if ids else None
        return token is not None and token.startswith(SPACE_MARK)

    def _token(self, token_id: int) -> str | None:
        if self.backend is not None:
            return self.backend.id_to_token(token_id)
        token: str | None = self.hf.convert_ids_to_tokens(token_id)
        return token

    def _spelled(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if self.spelling.kind == "byte_level" and token_id in self.added_tokens:
            return token.encode()  # an added token is plain text, not in the byte alphabet
        return self.spelling.bytes_of(token)

    def _hf_encode(self, text: str, special: bool, keywords: Mapping[str, object]) -> list[int]:
        with self._hf_lock:  # a transformers tokenizer keeps its settings between calls
            ids: list[int] = self.hf(text, add_special_tokens=special, **keywords)["input_ids"]
        return ids

    def _truncated(self, text: str, ids: list[int], limit: int, side: Side) -> list[int]:
        plain = self.encode(text, add_special_tokens=False)
        room = limit - (len(ids) - len(plain))
        if room < 0:
            return cut_ids(ids, limit, side)
        if self.backend is None:
            cut: list[int] = self.hf.build_inputs_with_special_tokens(cut_ids(plain, room, side))
            return cut
        encoding = self.backend.encode(text, add_special_tokens=False)
        encoding.truncate(room, direction=side)
        return self.backend.post_process(encoding, None, True).ids


def prompt_limit(truncate_prompt_tokens: int | None, max_model_len: int | None) -> int | None:
    """Number of prompt tokens to keep, or None for all; -1 stands for `max_model_len`."""
    k = truncate_prompt_tokens
    if k is None:
        return None
    allowed = "-1 or at least 1" if max_model_len is None else f"-1 or in [1, {max_model_len}]"
    whole = isinstance(k, int) and not isinstance(k, bool)
    if not whole or k == 0 or k < -1 or (max_model_len is not None and k > max_model_len):
        raise ValidationError(
            f"truncate_prompt_tokens must be {allowed}, got {k!r}",
            parameter="truncate_prompt_tokens",
            value=k,
        )
    return max_model_len if k == -1 else k


def truncation_side_of(side: str | None) -> Side:
    """Check a `truncation_side`; None is "left", which keeps the end of the prompt."""
    if side is None or side == "left":
        return "left"
    if side == "right":
        return "right"
    raise ValidationError(
        f"truncation_side must be 'left' or 'right', got {side!r}",
        parameter="truncation_side",
        value=side,
    )


def cut_ids(ids: list[int], limit: int, side: Side) -> list[int]:
    """Cut `ids` to `limit`, losing the side named."""
    if len(ids) <= limit:
        return ids
    return ids[len(ids) - limit :] if side == "left" else ids[:limit]


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValidationError(
            f"the prompt holds a lone surrogate at character {error.start}, which is no text;"
            " allowed is any Unicode text",
            parameter="prompt",
            value=text[error.start],
        ) from error
