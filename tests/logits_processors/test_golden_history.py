"""Methods that read the history, beside transformers' or a brute-force form, on random histories.

The table of rows tried and rows that differ is printed (pytest -s).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    WatermarkLogitsProcessor,
)

from decodekit.core.stage import Stage
from decodekit.logits_processors.bias.dry import Dry
from decodekit.logits_processors.bias.length_decay import LengthDecay
from decodekit.logits_processors.bias.penalties import RepetitionPenalty
from decodekit.logits_processors.bias.sequence_bias import SequenceBias
from decodekit.logits_processors.force.forced_tokens import ForcedTokens
from decodekit.logits_processors.mark.green_list import GreenList
from decodekit.logits_processors.mask.no_repeat_ngram import NoRepeatNGram
from decodekit.plugins.author.rows import apply_stage, make_context

INF = float("inf")
VOCAB = 13
ROWS = 1000
EOS = [0, 5]
BIASES = {(3,): 1.5, (4, 2): -2.0, (1, 1, 2): 4.0, (7, 2): -0.75, (6, 5, 4, 3, 2): 9.0}
Reference = Callable[[list[int], list[int], Tensor], Tensor]


class Golden(NamedTuple):
    """A method and what its reference makes of (prompt, output, scores [1, vocab])."""

    label: str
    stage: type[Stage]
    params: dict[str, Any]
    reference: Reference
    vocab: int = VOCAB
    rows: int = ROWS


def processor(made: Any) -> Reference:
    return lambda prompt, output, scores: made(torch.tensor([prompt + output]), scores)


def encoder(make: Callable[[Tensor], Any]) -> Reference:
    return lambda prompt, output, scores: make(torch.tensor([prompt]))(
        torch.tensor([prompt + output]), scores
    )


def decay(prompt: list[int], output: list[int], scores: Tensor) -> Tensor:
    made = ExponentialDecayLengthPenalty((4, 1.3), EOS, len(prompt))
    return made(torch.tensor([prompt + output]), scores)


def forced_end(prompt: list[int], output: list[int], scores: Tensor) -> Tensor:
    made = ForcedEOSTokenLogitsProcessor(len(prompt) + 6, EOS, device="cpu")
    return made(torch.tensor([prompt + output]), scores)


def forced_start(prompt: list[int], output: list[int], scores: Tensor) -> Tensor:
    length = 1 + len(output)  # the reference means the first position after one start token
    return ForcedBOSTokenLogitsProcessor(7)(torch.zeros(1, length).long(), scores)


def dry(prompt: list[int], output: list[int], scores: Tensor) -> Tensor:
    """The definition, with allowed length 2, base 1.5 and the breakers (9) and (8, 3)."""
    tokens = (prompt + output)[-20:]
    heads = {9: [()], 8: [(3,)]}
    limit = len(tokens)
    for at in reversed(range(len(tokens))):
        tails = [t for t in heads.get(tokens[at], []) if tokens[at + 1 :][: len(t)] == list(t)]
        if tails:
            limit = len(tokens) - 1 - at - max(map(len, tails))
            break
    longest: dict[int, int] = {}
    for at in range(len(tokens) - 1):
        length = 0
        while length <= at and tokens[at - length] == tokens[-1 - length]:
            length += 1
        following = tokens[at + 1]
        longest[following] = max(longest.get(following, 0), min(length, limit))
    result = scores.clone()
    for token, length in longest.items():
        if length >= 2 and token != 9:
            result[0, token] -= 0.8 * 1.5 ** (length - 2)
    return result


CASES = [
    Golden("n = 3", NoRepeatNGram, {"n": 3}, processor(NoRepeatNGramLogitsProcessor(3))),
    Golden("n = 1", NoRepeatNGram, {"n": 1}, processor(NoRepeatNGramLogitsProcessor(1))),
    Golden(
        "of the prompt",
        NoRepeatNGram,
        {"n": 2, "scope": "prompt"},
        encoder(lambda ids: EncoderNoRepeatNGramLogitsProcessor(2, ids)),
    ),
    Golden(
        "as a hallucination filter",
        RepetitionPenalty,
        {"penalty": 1 / 1.4, "scope": "prompt"},
        encoder(lambda ids: EncoderRepetitionPenaltyLogitsProcessor(1.4, ids)),
    ),
    Golden("", SequenceBias, {"bias": BIASES}, processor(SequenceBiasLogitsProcessor(BIASES))),
    Golden("", LengthDecay, {"start": 4, "factor": 1.3}, decay),
    Golden("the first token", ForcedTokens, {"prefix": [7]}, forced_start),
    Golden("the last token", ForcedTokens, {"eos_at_end": True}, forced_end),
    Golden(
        "",
        Dry,
        {
            "multiplier": 0.8,
            "base": 1.5,
            "allowed_length": 2,
            "range": 20,
            "breakers": [[9], [8, 3]],
        },
        dry,
    ),
    Golden(
        "left hash",
        GreenList,
        {"gamma": 0.4, "delta": 1.5, "key": 77},
        processor(WatermarkLogitsProcessor(VOCAB, "cpu", 0.4, 1.5, 77)),
    ),
    Golden(
        "self hash",
        GreenList,
        {"gamma": 0.4, "context": 3, "key": 77, "scheme": "selfhash"},
        processor(WatermarkLogitsProcessor(47, "cpu", 0.4, 2.0, 77, "selfhash", 3)),
        vocab=47,
        rows=60,  # the reference permutes the vocabulary 40 times a row
    ),
]


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    lines = [f"{'method':44} {'rows':>5} {'differ':>7}"]
    yield lines
    print("\n" + "\n".join(lines))


@pytest.fixture(scope="module")
def histories() -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(8)

    def tokens(least: int, most: int) -> list[int]:
        size = int(torch.randint(least, most, (1,), generator=generator))
        span = int(torch.randint(2, VOCAB, (1,), generator=generator))  # few tokens repeat often
        return torch.randint(0, span + 1, (size,), generator=generator).tolist()

    return [(tokens(1, 25), tokens(0, 12)) for _ in range(ROWS)]


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{case.stage.name} {case.label}".strip() for case in CASES]
)
def test_a_history_method_gives_what_its_reference_gives(
    case: Golden,
    histories: Sequence[tuple[list[int], list[int]]],
    table: list[str],
    rng: torch.Generator,
) -> None:
    logits = torch.randn(case.rows, case.vocab, generator=rng) * 3
    histories = histories[: case.rows]
    context = make_context(
        case.vocab, eos_ids=tuple(EOS), stop_ids=tuple(EOS), request=SimpleNamespace(max_tokens=6)
    )

    result = apply_stage(
        case.stage,
        logits,
        [case.params] * case.rows,
        prompts=[prompt for prompt, _ in histories],
        outputs=[output for _, output in histories],
        context=context,
    )

    wrong = changed = 0
    for row, (prompt, output) in enumerate(histories):
        expected = case.reference(prompt, output, logits[row : row + 1].clone())[0]
        wrong += not torch.allclose(result[row], expected, rtol=1e-6, atol=1e-6)
        changed += not torch.equal(expected, logits[row])
    table.append(f"{case.stage.name + ' ' + case.label:44} {case.rows:5} {wrong:7}")
    assert wrong == 0
    assert changed > case.rows // 20


def test_the_histories_repeat_enough_to_matter(
    histories: Sequence[tuple[list[int], list[int]]],
) -> None:
    lengths = [len(prompt) + len(output) for prompt, output in histories]

    assert min(lengths) < 3
    assert max(lengths) > 30
    assert math.fsum(len(set(a + b)) for a, b in histories) < math.fsum(lengths) / 2
