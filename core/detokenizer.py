"""The one text path: token ids of a sequence to text, bit by bit, and its cut at stop strings.

`Detokenizer` makes text, `StopMatcher` finds stop strings in it, `TextStream` joins both and is
what the engine holds for each sequence. None of them knows requests, logits or the device.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from copy import copy
from typing import NamedTuple

from .spelling import REPLACEMENT
from .stage import TextStop
from .tokenizer import Tokenizer

_CONTEXT = 8  # prompt or context tokens looked at; four suffice for one UTF-8 character


class StopHit(NamedTuple):
    """Where and on what a text stopped."""

    stop: str  # the stop string, as the caller wrote it
    end: int  # length of the text that is kept, in characters
    num_tokens: int  # output tokens up to and with the one that completed the match


class Detokenizer:
    """Turns the output tokens of one sequence into text as they come.

    The pieces returned, joined, are decode(prompt + output) without decode(prompt): a leading
    space depends on what went before, and a character that the prompt left half spelled is
    completed by the output. An unfinished UTF-8 sequence is held back until it is complete, broken
    (then it is U+FFFD, one for each maximal part as in the Unicode standard) or `finish` is called.
    Ids outside the vocabulary are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._window: _Window | None = None
        if tokenizer.spelling.kind == "opaque":
            apart = skip_special_tokens or spaces_between_special_tokens
            self._window = _Window(tokenizer, self._visible(prompt_ids), apart)
            return
        # Byte-wise decoding never puts a space between tokens, so there is none to take away.
        tail = self._visible(prompt_ids)
        self._is_start = not tail and tokenizer.spelling.changes_start
        raw = b"".join([tokenizer.token_bytes(i) for i in tail])
        self._pending = raw[utf_8_decode(raw, "replace", False)[1] :]
        self._num_prompt_bytes = len(self._pending)  # of `_pending`, those of the prompt

    def push(self, token_ids: Iterable[int]) -> str:
        """Take further output tokens; return the text that they complete, perhaps ""."""
        if self._window is not None:
            return "".join([self._window.push(i) for i in token_ids if self._is_visible(i)])
        text = ""
        piece_of, skip = self._tokenizer.piece, self._skip
        for token_id in token_ids:
            if token_id in skip:
                continue
            piece = self._start(token_id) if self._is_start else piece_of(token_id)
            if not piece:
                continue
            if isinstance(piece, str) and not self._pending:
                text += piece
            else:
                text += self._join(piece.encode() if isinstance(piece, str) else piece)
        return text

    def finish(self) -> str:
        """Return what was held back: U+FFFD for an unfinished character. Call it once, last."""
        if self._window is not None:
            return self._window.finish()
        own = len(self._pending) > self._num_prompt_bytes
        self._pending = b""
        return REPLACEMENT if own else ""

    def clone(self) -> Detokenizer:
        """An independent copy, for a sequence that forks."""
        twin = copy(self)
        if self._window is not None:
            twin._window = self._window.clone()
        return twin

    def _is_visible(self, token_id: int) -> bool:
        return token_id not in self._skip and self._tokenizer.has_token(token_id)

    def _visible(self, ids: Sequence[int]) -> list[int]:
        """The last few ids that have a text; a long invisible tail is walked, not decoded."""
        tail: list[int] = []
        for token_id in reversed(ids):
            if self._is_visible(token_id):
                tail.append(token_id)
                if len(tail) == _CONTEXT:
                    break
        return tail[::-1]

    def _start(self, token_id: int) -> str | bytes:
        """The first piece of a whole text, without the space that the decoder drops there."""
        tokenizer = self._tokenizer
        if not tokenizer.has_token(token_id):
            return ""
        if tokenizer.spelling.drops_first_marks:
            self._is_start = False
            return tokenizer.first_piece(token_id)
        piece = tokenizer.piece(token_id)
        self._is_start = not piece
        return piece.removeprefix(" ") if isinstance(piece, str) else piece

    def _join(self, raw: bytes) -> str:
        """Append bytes to those held back; return the characters that are settled by it."""
        raw = self._pending + raw
        if self._num_prompt_bytes:
            raw = self._settle_prompt(raw)
        text, num_used = utf_8_decode(raw, "replace", False)
        self._pending = raw[num_used:]
        if num_used:
            self._num_prompt_bytes = 0
        return text

    def _settle_prompt(self, raw: bytes) -> bytes:
        """Drop the prompt's bytes if the output does not continue them: they are not its text."""
        try:
            utf_8_decode(raw, "strict", False)
        except UnicodeDecodeError as error:
            if error.start == 0 and error.end == self._num_prompt_bytes:
                self._num_prompt_bytes = 0
                return raw[error.end :]
        return raw


class _Window:
    """Incremental decoding through the library: decode a short window twice, keep the difference.

    For vocabularies in which a token's text depends on its neighbours. Text that ends in U+FFFD is
    held back, as it may be half a character.
    """

    def __init__(self, tokenizer: Tokenizer, tail: list[int], spaces_between: bool) -> None:
        self._tokenizer = tokenizer
        self._ids = tail  # ids[:read] have been given out; the rest awaits completion
        self._read = len(tail)
        self._spaces_between = spaces_between
        self._last_was_added = False

    def push(self, token_id: int) -> str:
        added = self._tokenizer.added_tokens.get(token_id)
        neighbours = self._last_was_added and added is not None
        self._last_was_added = added is not None
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT):
            return ""
        self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
        if neighbours and added is not None and not self._spaces_between:
            return added
        return text

    def finish(self) -> str:
        text = self._new_text() if self._read < len(self._ids) else ""
        self._read = len(self._ids)
        return text

    def clone(self) -> _Window:
        twin = copy(self)
        twin._ids = list(self._ids)
        return twin

    def _new_text(self) -> str:
        decode = self._tokenizer.decode_opaque
        before = decode(self._ids[: self._read]) if self._read else ""
        return decode(self._ids)[len(before) :]


class StopMatcher:
    """Finds stop strings in a text that arrives token by token.

    Literal and case-sensitive. Of several matches the one that starts first wins; of those that
    start together, the first of the list. Characters that the first `min_tokens` tokens produced
    are never part of a match. `held_back` is the number of final characters that an unfinished
    text may not show, so that no part of a stop string leaks.
    """

    def __init__(
        self,
        stops: Sequence[str],
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        text_stops: Sequence[TextStop] = (),
    ) -> None:
        self.stops = tuple(stops)
        self.include = include_stop_str_in_output
        self.min_tokens = min_tokens
        self._text_stops = tuple(text_stops)
        self.is_needed = bool(self.stops or self._text_stops)
        self._overlap = max((len(stop) for stop in self.stops), default=1) - 1
        self.held_back = 0 if self.include else self._overlap
        for rule in self._text_stops:
            self._overlap = max(self._overlap, rule.span - 1)
            self.held_back = max(self.held_back, 0 if rule.include else rule.span - 1)
        self._tail = ""  # the last characters that a match may begin in
        self._length = 0  # of the text so far

    def feed(self, text: str, num_tokens: int) -> StopHit | None:
        """Take the text that output token number `num_tokens` (1 for the first) added, or ""."""
        start = self._length - len(self._tail)
        self._length += len(text)
        if num_tokens <= self.min_tokens or not self.is_needed or not text:
            return None
        window = self._tail + text
        self._tail = window[-self._overlap :] if self._overlap else ""
        best, position = None, len(window)
        hit: StopHit | None = None
        for stop in self.stops:
            found = window.find(stop, 0, position + len(stop))
            if 0 <= found < position:
                best, position = stop, found
        for rule in self._text_stops:
            place = rule.find(window, 0)
            if place is not None and place[0] < position:
                position = place[0]
                best = None
                hit = StopHit(rule.detail, start + place[rule.include], num_tokens)
        if best is None:
            return hit
        end = start + position + (len(best) if self.include else 0)
        return StopHit(best, end, num_tokens)


def special_stop_ids(tokenizer: Tokenizer, stops: Sequence[str]) -> dict[int, str]:
    """Ids of special tokens whose whole text is one of `stops`, with that stop string.

    Their text may be skipped, so that a search in it would never find them.
    """
    wanted = set(stops)
    added = tokenizer.added_tokens
    return {i: added[i] for i in tokenizer.special_ids if added.get(i) in wanted}


class TextStream:
    """The text of one sequence: push tokens, read `text` or `delta()`, `finish` at the end.

    While unfinished, the last characters that could begin a stop string are withheld from both
    views. Joined deltas equal the final `text`. With `tokenizer` None (no detokenisation) the text
    is always "" and stop strings are not allowed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int] = (),
        *,
        stops: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        num_hidden: int = 0,
        text_stops: Sequence[TextStop] = (),
    ) -> None:
        assert tokenizer is not None or not stops, "stop strings need text"
        self._num_hidden = num_hidden  # first characters that are not part of it
        self.num_tokens = 0  # output tokens taken
        self.hit: StopHit | None = None
        self.is_finished = False
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        self._special_stops: dict[int, str] = {}
        self._matcher = StopMatcher(stops, include_stop_str_in_output, min_tokens, text_stops)
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt_ids,
                skip_special_tokens=skip_special_tokens,
                spaces_between_special_tokens=spaces_between_special_tokens,
            )
            if stops:
                self._special_stops = special_stop_ids(tokenizer, stops)
        self._pieces: list[str] = []  # the whole text
        self._unread: list[str] = []  # its part that delta() has not given out
        self._length = 0
        self._num_read = 0

    def push(self, token_ids: Sequence[int], *, last_ends: bool = False) -> StopHit | None:
        """Take output tokens in order; return the hit if a stop string is complete.

        Tokens after the hit's are not taken: `hit.num_tokens` says how many output tokens stay.
        `last_ends` tells that the last id is an end id or stop id: its text is left out, unless
        stop strings are included in the output. A stop string wins over it.
        """
        assert not self.is_finished, "the text is finished"
        if self._detokenizer is None:
            self.num_tokens += len(token_ids)
            return None
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            is_hidden = last_ends and index == last and not self._matcher.include
            text = "" if is_hidden else self._detokenizer.push((token_id,))
            if self._num_hidden:
                text, hidden = text[self._num_hidden :], min(self._num_hidden, len(text))
                self._num_hidden -= hidden
            if text:
                self._append(text)
            hit = self._matcher.feed(text, self.num_tokens) if self._matcher.is_needed else None
            if hit is None and token_id in self._special_stops:
                hit = self._special_hit(token_id)
            if hit is not None:
                self._stop(hit)
                return hit
        return None

    def finish(self) -> None:
        """End the text: unfinished characters and withheld ones come out. Harmless if repeated."""
        if not self.is_finished and self._detokenizer is not None:
            self._append(self._detokenizer.finish())
        self.is_finished = True

    @property
    def whole(self) -> str:
        """All that is written so far, what is withheld included."""
        return self._whole()

    def read_as(self, other: TextStream) -> None:
        """Count as given out what `other`, which has the same beginning, has given out."""
        self._num_read = other._num_read
        self._unread = [self._whole()[self._num_read :]]

    @property
    def text(self) -> str:
        """All that may be shown so far; after `finish` or a hit, the final text."""
        return self._whole()[: self._num_visible]

    def delta(self) -> str:
        """What may be shown and has not been returned by an earlier call."""
        num_new = self._num_visible - self._num_read
        if num_new <= 0:
            return ""
        unread = "".join(self._unread)
        self._unread = [unread[num_new:]] if num_new < len(unread) else []
        self._num_read += num_new
        return unread[:num_new]

    def clone(self) -> TextStream:
        """An independent copy, for a sequence that forks."""
        twin = copy(self)
        if self._detokenizer is not None:
            twin._detokenizer = self._detokenizer.clone()
        twin._matcher = copy(self._matcher)
        twin._pieces = list(self._pieces)
        twin._unread = list(self._unread)
        return twin

    @property
    def _num_visible(self) -> int:
        if self.is_finished:
            return self._length
        return max(0, self._length - self._matcher.held_back)

    def _append(self, text: str) -> None:
        self._pieces.append(text)
        self._unread.append(text)
        self._length += len(text)

    def _special_hit(self, token_id: int) -> StopHit | None:
        """Stop on a special token whose text is not in the stream, so that no search finds it."""
        if self.num_tokens <= self._matcher.min_tokens or self._detokenizer is None:
            return None
        stop = self._special_stops[token_id]
        self._append(self._detokenizer.finish())
        if self._matcher.include:  # asked for by name, so it shows though special tokens do not
            self._append(stop)
        return StopHit(stop, self._length, self.num_tokens)

    def _stop(self, hit: StopHit) -> None:
        kept = self._whole()[: hit.end]
        self._unread = [kept[self._num_read :]]
        self._pieces = [kept]
        self._length = len(kept)
        self.hit = hit
        self.is_finished = True

    def _whole(self) -> str:
        if len(self._pieces) != 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]


class TokenTexts:
    """Texts of single tokens, as observers may ask for them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: object) -> TokenTexts:
        """Return this object, which never changes: a copied record shares it."""
        return self

    def decoded_tokens(self, ids: Sequence[int], context_ids: Sequence[int]) -> list[str]:
        """Return the text of each of `ids` as the next token after `context_ids`."""
        return decoded_tokens(self._tokenizer, ids, context_ids)

    def ids(self, text: str) -> list[int]:
        """Return the ids of `text`, with no special token added."""
        return self._tokenizer.encode(text, add_special_tokens=False)


def decoded_tokens(
    tokenizer: Tokenizer, ids: Sequence[int], context_ids: Sequence[int]
) -> list[str]:
    """Text of each of `ids` as the next token after `context_ids`, for log-probability entries.

    A token that alone ends in U+FFFD is read together with the tokens before it that do too; if
    the result still ends so, its text is "". So the texts of a sequence's tokens join to its text
    wherever that is valid UTF-8. Special tokens show their own text; ids outside the vocabulary "".
    """
    if tokenizer.spelling.kind == "opaque":
        return [_decoded_opaque(tokenizer, i, context_ids) for i in ids]
    texts = []
    carried: bytes | None = None
    for token_id in ids:
        piece = tokenizer.piece(token_id)
        if isinstance(piece, bytes):
            if carried is None:
                carried = _carried(tokenizer, context_ids)
            text = (carried + piece).decode("utf-8", "replace")
            piece = "" if text.endswith(REPLACEMENT) else text
        texts.append(piece)
    return texts


def _carried(tokenizer: Tokenizer, context_ids: Sequence[int]) -> bytes:
    """Bytes at the end of the context that no token's text has shown yet."""
    run: list[bytes] = []
    for token_id in reversed(context_ids[-_CONTEXT:]):
        piece = tokenizer.piece(token_id)
        if isinstance(piece, str) or not piece.decode("utf-8", "replace").endswith(REPLACEMENT):
            break
        run.append(piece)
    carried = b""
    for piece in reversed(run):
        carried += piece
        if not carried.decode("utf-8", "replace").endswith(REPLACEMENT):
            carried = b""
    return carried


def _decoded_opaque(tokenizer: Tokenizer, token_id: int, context_ids: Sequence[int]) -> str:
    text = tokenizer.text_of_token(token_id)
    context = [i for i in context_ids[-_CONTEXT:] if tokenizer.has_token(i)]
    for size in range(1, len(context) + 1):
        if not text.endswith(REPLACEMENT):
            break
        tail = context[-size:]
        whole = tokenizer.decode_opaque([*tail, token_id])
        shown = tokenizer.decode_opaque(tail).rstrip(REPLACEMENT)
        text = whole[len(shown) :]
    return "" if text.endswith(REPLACEMENT) else text
