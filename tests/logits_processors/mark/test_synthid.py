"""The SynthID-Text watermark and its detector."""

import pytest
import torch
from torch import Tensor
from transformers import SynthIDTextWatermarkLogitsProcessor

from decodekit.core.errors import ChainError, ValidationError
from decodekit.core.plan_text import shown_values
from decodekit.logits_processors.mark.synthid import SynthId, detect_synthid, synthid_values
from decodekit.plugins.author.rows import apply_stage

INF = float("inf")
VOCAB = 60
KEYS = [654, 400, 836, 123, 340, 443, 597, 160, 57, 29]
PARAMS = {"keys": KEYS, "ngram": 3, "history": 8}


def reference(history: int = 8) -> SynthIDTextWatermarkLogitsProcessor:
    return SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3,
        keys=KEYS,
        sampling_table_size=2**16,
        sampling_table_seed=0,
        context_history_size=history,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("alive", [VOCAB, 9])
def test_a_whole_generation_equals_transformers(alive: int, rng: torch.Generator) -> None:
    """Tokens from a set of three, so that contexts come back inside the remembered ones and out."""
    made = reference()
    output: list[int] = []
    skipped = 0
    for _ in range(60):
        logits = torch.randn(1, VOCAB, generator=rng) * 2
        logits[0, torch.randperm(VOCAB, generator=rng)[alive:]] = -INF
        history = torch.tensor([[1, 2, *output]])

        ours = apply_stage(SynthId, logits, [PARAMS], prompts=[[1, 2]], outputs=[output])
        theirs = made(history, logits.double())

        assert torch.equal(ours.isneginf(), logits.isneginf())
        assert torch.allclose(ours.softmax(1).double(), theirs.softmax(1), atol=1e-6)
        skipped += torch.equal(ours, logits)
        output.append(int(torch.randint(3, 6, (1,), generator=rng)))
    assert 10 < skipped < 50


def test_g_values_and_fresh_contexts_equal_transformers(rng: torch.Generator) -> None:
    ids = torch.randint(0, 4, (1, 90), generator=rng)
    made = reference(history=1024)

    fresh = made.compute_context_repetition_mask(ids)[0]

    found = synthid_values(ids[0].tolist(), KEYS, ngram=3)
    assert torch.equal(found, made.compute_g_values(ids)[0])
    score = detect_synthid(ids[0].tolist(), KEYS, ngram=3)
    assert score.num_scored == int(fresh.sum()) < 60
    assert score.mean_g == pytest.approx(float(found[fresh].double().mean()))


def test_marked_text_is_found_and_other_text_is_not(rng: torch.Generator) -> None:
    output: list[int] = []
    for _ in range(100):
        logits = torch.randn(1, VOCAB, generator=rng)
        marked = apply_stage(SynthId, logits, [{"keys": KEYS}], outputs=[output])
        output.append(int(torch.multinomial(marked.softmax(1), 1, generator=rng)))

    assert detect_synthid(output, KEYS).z_score > 5
    assert abs(detect_synthid(output, [key + 1 for key in KEYS]).z_score) < 4
    plain = torch.randint(0, VOCAB, (100,), generator=rng).tolist()
    assert abs(detect_synthid(plain, KEYS).z_score) < 4


def test_on_average_over_keys_the_distribution_stays(rng: torch.Generator) -> None:
    row = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]).log()
    keys = torch.randint(1, 2**40, (4000, 3), generator=rng).tolist()

    result = apply_stage(SynthId, row.expand(4000, 5), [{"keys": each} for each in keys])

    spread = result.softmax(1).std(0) / 4000**0.5
    error = (result.softmax(1).mean(0) - row.exp()).abs()
    assert bool((error < 4 * spread).all())
    assert float(spread.max()) > 1e-3


def exact(row: Tensor, ids: list[int], keys: list[int]) -> Tensor:
    p = row.double().softmax(0)
    for layer in range(len(keys)):
        ones = torch.stack([synthid_values([0, i], keys, ngram=2)[0, layer] for i in ids])
        p = p * (1 + ones - (p * ones).sum())
    return p


def test_few_alive_tokens_and_the_whole_row_give_the_same(rng: torch.Generator) -> None:
    few = torch.randn(1, 6, generator=rng)
    wide = torch.full((1, 400), -INF)
    wide[0, 100:106] = few
    params = {"keys": KEYS, "ngram": 2}

    result = apply_stage(SynthId, wide, [params], outputs=[[]])

    expected = exact(few[0], list(range(100, 106)), KEYS)
    assert torch.allclose(result[0, 100:106].double().softmax(0), expected, atol=1e-6)


def test_many_layers_kill_no_token() -> None:
    row = torch.tensor([[0.0, -60.0, -80.0]])

    result = apply_stage(SynthId, row, [{"keys": list(range(1, 31))}])

    assert bool(torch.isfinite(result).all())


def test_no_keys_is_identity_and_keys_are_not_shown() -> None:
    assert SynthId.is_identity(SynthId.validate({}))
    assert "836" not in str(shown_values(SynthId.validate({"keys": KEYS})))
    assert SynthId.structure(SynthId.validate({"keys": KEYS})) == 10


@pytest.mark.parametrize("bad", [{"keys": []}, {"keys": [2**63]}, {"keys": [1], "ngram": 1}])
def test_values_out_of_range_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ChainError, match="synthid"):
        SynthId(**bad)


def test_a_short_text_cannot_be_scored() -> None:
    with pytest.raises(ValidationError, match="at least 5 tokens"):
        detect_synthid([1, 2, 3], KEYS)
