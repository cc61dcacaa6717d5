"""The phrase ban keeps its contract, and does what a plain search would."""

import random

import decodekit_phrase_ban
import pytest
import torch
from decodekit_phrase_ban import PhraseBan

from decodekit.plugins.author.toys import ByteTokens

LETTERS = "ab"


class Pieces(ByteTokens):
    """Tokens of one to three letters over a small alphabet, so that a text has many spellings."""

    texts = [""] + [a + b + c for a in ("", *LETTERS) for b in ("", *LETTERS) for c in LETTERS]

    def __init__(self):
        super().__init__(len(self.texts))

    def token_bytes(self, token_id):
        return self.texts[token_id].encode() if token_id < len(self.texts) else b""


SIZE = len(Pieces.texts)
PHRASES = ["aba", "bb", "abba"]
CONTEXT = {"tokenizer": Pieces()}
HISTORIES = [((0,), (1, 2)), ((0,), (2, 1, 2)), ((0,), (1, 2, 2, 1)), ((0,), (5, 9, 3))]


def test_it_keeps_every_law(decodekit_check):
    examples = [{"phrases": PHRASES}, {"phrases": ["ab"], "ignore_case": True}]
    decodekit_check(
        PhraseBan, examples=examples, sizes=(SIZE, 65), histories=HISTORIES, context=CONTEXT
    )


def test_what_is_banned_is_what_a_plain_search_finds(decodekit_apply):
    from decodekit.plugins.author.rows import make_context

    rng = random.Random(1)
    outputs = [[rng.randrange(SIZE) for _ in range(rng.randrange(6))] for _ in range(200)]
    context = make_context(SIZE, tokenizer=Pieces())

    after = decodekit_apply(
        PhraseBan,
        torch.zeros(200, SIZE),
        [{"phrases": PHRASES}] * 200,
        outputs=outputs,
        context=context,
    )

    for row, output in enumerate(outputs):
        before = "".join(Pieces.texts[token] for token in output)
        for token, piece in enumerate(Pieces.texts):
            ends = any(
                (before + piece).find(phrase, max(len(before) - len(phrase) + 1, 0)) >= 0
                for phrase in PHRASES
            )
            assert (after[row, token] == -torch.inf) == ends, (before, piece)


def test_large_and_small_letters_can_be_the_same(decodekit_apply):
    from decodekit.plugins.author.rows import make_context

    context = make_context(257, tokenizer=ByteTokens(257))
    params = [{"phrases": ["No"], "ignore_case": fold} for fold in (False, True)]
    outputs = [[ord("n")]] * 2

    after = decodekit_apply(
        PhraseBan, torch.zeros(2, 257), params, outputs=outputs, context=context
    )

    banned = [(row == -torch.inf).nonzero()[:, 0].tolist() for row in after]
    assert banned == [[], [ord("O"), ord("o")]]


def test_a_registry_lists_it(decodekit_plugins):
    assert "phrase_ban.phrases" in decodekit_plugins(decodekit_phrase_ban).stages


def test_an_empty_phrase_is_refused():
    with pytest.raises(ValueError, match="phrase_ban.phrases.phrases"):
        PhraseBan(phrases=[""])
