"""Beam search: lengths, the truly best, ends and stops, and width."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from decodekit.core.errors import ValidationError
from decodekit.plugins.author.table_model import byte_tokenizer
from decodekit.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make

END = 6
LOW = -30.0


def rows(size: int, **known: dict[int, float]) -> Tensor:
    """A table of log-probabilities: `t3={4: -0.5}` for what follows token 3, the rest nothing."""
    table = torch.full((size, size), LOW)
    for name, row in known.items():
        rest = 1.0 - sum(math.exp(value) for value in row.values())
        for token, value in row.items():
            table[int(name[1:]), token] = value
        table[int(name[1:]), size - 1] = math.log(max(rest, 1e-12))
    return table


def test_dec_067_length_normalisation_counts_generated_tokens_only(make: Make) -> None:
    """An answer of -1.0 (two tokens and the end) beside one of -1.8 (six and the end)."""
    short, long = 1, 2
    table = rows(
        16,
        t0={short: -0.5, long: -0.95},
        t1={3: -0.25},
        t3={END: -0.25},
        t2={4: -0.17},
        t4={5: -0.17},
        t5={7: -0.17},
        t7={8: -0.17},
        t8={9: -0.085},
        t9={END: -0.085},
    )
    bench = make(table, model={"eos_token_id": END})
    rankings = []
    for penalty, prompt in itertools.product((0.0, 1.0, 2.0), ([0], [0] * 200)):
        params = BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=penalty)
        [output] = bench.llm.beam_search([prompt], params)
        found = [
            (beam.tokens[len(prompt) :], beam.score)
            for beam in output.sequences
            if beam.tokens[-1] == END
        ]
        rankings.append(found)
        best = found[0][0]
        assert len(best) == (3 if penalty == 0 else 7)
        for tokens, score in found[:2]:
            total = -1.0 if len(tokens) == 3 else -1.8
            assert score == pytest.approx(total / (len(tokens) - 1) ** penalty, abs=2e-2)
    for one, other in zip(rankings[::2], rankings[1::2], strict=True):
        assert [tokens for tokens, _ in one] == [tokens for tokens, _ in other]
        assert [score for _, score in one] == pytest.approx([s for _, s in other], abs=1e-4)


def test_dec_068_beams_are_the_true_best_sequences_with_their_own_scores(make: Make) -> None:
    generator = torch.Generator().manual_seed(8)
    table = (torch.randint(-48, 49, (6, 6), generator=generator) / 16).float()
    logprobs = torch.log_softmax(table.double(), 1)

    def total(start: int, tokens: tuple[int, ...]) -> float:
        path = (start, *tokens)
        return float(sum(logprobs[a, b] for a, b in itertools.pairwise(path)))

    bench = make(table)
    [output] = bench.llm.beam_search([[0]], BeamSearchParams(beam_width=36, max_tokens=3))
    right = sorted(itertools.product(range(6), repeat=3), key=lambda path: -total(0, path))[:36]
    assert [tuple(beam.tokens[1:]) for beam in output.sequences] == right
    for beam in output.sequences:
        own = total(0, tuple(beam.tokens[1:]))
        assert beam.cum_logprob == pytest.approx(own, abs=1e-3)
        steps = [entries[token].logprob for entries, token in
                 zip(beam.logprobs, beam.tokens[1:], strict=True)]  # fmt: skip
        assert sum(steps) == pytest.approx(own, abs=1e-3)

    prompts = [[0], [3, 1], [5], [2] * 9]
    outputs = bench.llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=5))
    for prompt, each in zip(prompts, outputs, strict=True):
        assert len(each.sequences) == 4
        assert len({tuple(beam.tokens) for beam in each.sequences}) == 4
        assert all(beam.tokens[: len(prompt)] == prompt for beam in each.sequences)

    ended = make(table, model={"eos_token_id": 4})
    [output] = ended.llm.beam_search([[0]], BeamSearchParams(beam_width=36, max_tokens=3))
    every = [
        path[: path.index(4) + 1] if 4 in path else path
        for path in itertools.product(range(6), repeat=3)
    ]
    scored = {path: total(0, path) / max(len(path) - (path[-1] == 4), 1) for path in every}
    right_ended = sorted(scored, key=lambda path: -scored[path])[:36]
    assert [tuple(beam.tokens[1:]) for beam in output.sequences] == right_ended


def test_dec_069_beam_search_obeys_end_and_stop(make: Make) -> None:
    """Token by token a, b, c, d; the end is best after four tokens."""
    letters = [ord(letter) for letter in "abcd"]
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>")
    end = 256
    table = torch.full((257, 257), 0.0)
    for place, token in enumerate(letters):
        table[token, (letters[1:] + [end])[place]] = 9.0
    table[ord("x"), letters[0]] = 9.0
    bench = make(table, model={"tokenizer": tokenizer, "eos_token_id": end})

    def best(**fields: Any) -> Any:
        own = {name: fields.pop(name) for name in ("ignore_eos",) if name in fields}
        given = SamplingParams(temperature=0.0, **fields) if fields else None
        params = BeamSearchParams(beam_width=3, max_tokens=8, sampling_params=given, **own)
        [output] = bench.llm.beam_search(["x"], params)
        assert len(output.sequences) == 3
        return output.sequences[0]

    ended = best()
    assert (ended.tokens[1:], ended.finish_reason) == ([*letters, end], "stop")
    by_id = best(stop_token_ids=[ord("c")])
    assert by_id.tokens[1:] == letters[:3]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", ord("c"))
    by_text = best(stop=["bc"])
    assert by_text.tokens[1:] == letters[:3]
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", "bc")
    on = best(ignore_eos=True)
    assert len(on.tokens) == 1 + 8
    assert on.finish_reason == "length"


def test_dec_070_wide_beams(flat: Bench) -> None:
    for width in (32, 64):
        [output] = flat.llm.beam_search([[1]], BeamSearchParams(beam_width=width, max_tokens=3))
        assert len({tuple(beam.tokens) for beam in output.sequences}) == width
    wide = flat.fresh(max_num_seqs=256)
    for width in (97, 200):
        [output] = wide.llm.beam_search([[1]], BeamSearchParams(beam_width=width, max_tokens=3))
        assert len({tuple(beam.tokens) for beam in output.sequences}) == width
    with pytest.raises(ValidationError, match="beam_width must be at most max_num_seqs"):
        flat.llm.beam_search([[1]], BeamSearchParams(beam_width=200, max_tokens=3))
    flat.check_answers()
