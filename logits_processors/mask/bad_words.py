"""Bans token sequences: for each sequence s, l of s[-1] = -inf if the history ends with s[:-1].

Words are tokenised when bound, bare and after a space, as vLLM's `bad_words` means them; `scope`
"output" (vLLM) matches generated tokens only, "both" (transformers'
`NoBadWordsLogitsProcessor`) the prompt too. Only the last token is masked, so the beginning of a
sequence still appears, and other tokenizations of the same text slip through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from pydantic import StrictInt
from torch import Tensor

from ...core.batch import RowView
from ...core.errors import ChainError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Form, Kind, Need, Stage, StageParams
from ..token_ids import Pairs, bans, check_ids, pairs

Sequences = tuple[tuple[int, ...], ...]
Endings = dict[int, list[tuple[int, ...]]]  # last token before the banned one -> sequences


class BadWords(Stage):
    """No listed word or id sequence is completed."""

    name = "bad_words"
    kind = Kind.MASK
    form = Form.ELEMENTWISE
    fields = {"bad_words": "words"}
    caps = Caps(needs=frozenset({Need.PROMPT, Need.OUTPUT}), spec="any-history")

    class Params(StageParams):
        """Words, or id sequences, or both mixed."""

        words: tuple[str | tuple[StrictInt, ...], ...] | None = None
        scope: Literal["output", "both"] = "output"

    class Bound(StageParams):
        """Every banned sequence, in ids."""

        sequences: Sequences
        scope: str

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        sequences: list[tuple[int, ...]] = []
        for word in params.words or ():
            forms = _spellings(word, ctx.tokenizer) if isinstance(word, str) else [word]
            for form in forms:
                _check_sequence(form, word, ctx.vocab_size)
                sequences.append(tuple(form))
        return cls.Bound(sequences=tuple(dict.fromkeys(sequences)), scope=params.scope)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return not (params.sequences if isinstance(params, cls.Bound) else params.words)

    def sparse(self, rows: RowView) -> tuple[Pairs, Tensor]:
        """Return places in row order, and -inf to be added there."""
        endings: list[Endings] = rows.cached(
            "endings", lambda: [_endings(params.sequences) for params in rows.params]
        )
        completed = [tuple(_completed(ending, rows, row)) for row, ending in enumerate(endings)]

        def build() -> tuple[Pairs, Tensor]:
            single = [[s[0] for s in p.sequences if len(s) == 1] for p in rows.params]
            both = zip(single, completed, strict=True)
            return bans(pairs([[*always, *now] for always, now in both], rows.device))

        # Mostly nothing is completed, and then the tensors of the last step serve again.
        return rows.cached("bans", build) if not any(completed) else build()

    def transform(self, logits: Tensor, rows: RowView) -> None:
        places: Pairs = rows.cached("single", lambda: _single_tokens(rows))
        logits[places] = -torch.inf
        endings: list[Endings] = rows.cached(
            "endings", lambda: [_endings(params.sequences) for params in rows.params]
        )
        completed = [_completed(ending, rows, row) for row, ending in enumerate(endings)]
        if any(completed):
            logits[pairs(completed, rows.device)] = -torch.inf


def _spellings(word: str, tokenizer: Any) -> Iterable[Sequence[int]]:
    if tokenizer is None:
        raise ChainError(
            f"bad_words has the text {word!r}, but the tokenizer is not loaded; give id sequences",
            parameter="bad_words",
            value=word,
        )
    forms: list[list[int]] = tokenizer.bad_word_sequences(word)
    return forms


def _check_sequence(form: Sequence[int], word: object, vocab_size: int) -> None:
    if not form:
        raise ChainError(
            f"bad_words must be made of words and sequences that are not empty, got {word!r}",
            parameter="bad_words",
            value=word,
        )
    check_ids("bad_words", form, vocab_size)


def _single_tokens(rows: RowView) -> Pairs:
    """Return the places that are banned at every step."""
    lists = [[s[0] for s in params.sequences if len(s) == 1] for params in rows.params]
    return pairs(lists, rows.device)


def _endings(sequences: Sequences) -> Endings:
    """Index the longer sequences, so that a step looks at those alone that may be complete."""
    index: Endings = {}
    for sequence in sequences:
        if len(sequence) > 1:
            index.setdefault(sequence[-2], []).append(sequence)
    return index


def _completed(endings: Endings, rows: RowView, row: int) -> list[int]:
    """Return the tokens that would complete a sequence in this row."""
    output = rows.output(row)
    with_prompt = rows.params[row].scope == "both"
    if output:
        last = output[-1]
    elif with_prompt:
        last = rows.prompt(row)[-1]
    else:
        return []
    banned = []
    for sequence in endings.get(last, ()):
        size = len(sequence) - 1
        tail = list(output[-size:])
        if with_prompt and len(tail) < size:
            tail = [*rows.prompt(row)[len(tail) - size :], *tail]
        if tail == list(sequence[:-1]):
            banned.append(sequence[-1])
    return banned


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [BadWords]
