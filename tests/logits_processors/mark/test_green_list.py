"""The green-list watermark and its detector."""

from types import SimpleNamespace

import pytest
import torch
from transformers import WatermarkDetector

from decodekit.core.errors import ChainError, ValidationError
from decodekit.core.plan_text import shown_values
from decodekit.logits_processors.mark.green_list import GreenList, detect_green_list
from decodekit.plugins.author.rows import apply_stage

INF = float("inf")
VOCAB = 50
KEY = 4242


def generate(length: int, rng: torch.Generator, **params: object) -> list[int]:
    """Sample from flat-ish rows through the stage."""
    output: list[int] = []
    for _ in range(length):
        logits = torch.randn(1, VOCAB, generator=rng)
        marked = apply_stage(GreenList, logits, [params], prompts=[[1, 2, 3]], outputs=[output])
        output.append(int(torch.multinomial(marked.softmax(1), 1, generator=rng)))
    return output


@pytest.mark.parametrize(("scheme", "context"), [("lefthash", 1), ("selfhash", 3)])
def test_the_detector_counts_what_that_of_transformers_counts(
    scheme: str, context: int, rng: torch.Generator
) -> None:
    reference = WatermarkDetector(
        SimpleNamespace(bos_token_id=-1, is_encoder_decoder=False, vocab_size=VOCAB),
        "cpu",
        {
            "greenlist_ratio": 0.3,
            "bias": 2.0,
            "hashing_key": KEY,
            "seeding_scheme": scheme,
            "context_width": context,
        },
        ignore_repeated_ngrams=True,
    )
    for _ in range(4):
        ids = torch.randint(0, VOCAB, (1, 80), generator=rng)
        found = detect_green_list(
            ids[0].tolist(),
            vocab_size=VOCAB,
            gamma=0.3,
            context=context,
            key=KEY,
            scheme=scheme,
            ignore_repeated=True,
        )
        expected = reference(ids, return_dict=True)

        assert found.num_scored == int(expected.num_tokens_scored[0])
        assert found.num_green == int(expected.num_green_tokens[0])
        assert found.z_score == pytest.approx(float(expected.z_score[0]))
        assert found.p_value == pytest.approx(float(expected.p_value[0]), rel=1e-5)


def test_marked_text_is_found_and_other_text_is_not(rng: torch.Generator) -> None:
    marked = generate(120, rng, delta=3.0, key=KEY)
    plain = torch.randint(0, VOCAB, (120,), generator=rng).tolist()

    assert detect_green_list(marked, vocab_size=VOCAB, key=KEY).z_score > 6
    assert abs(detect_green_list(marked, vocab_size=VOCAB, key=KEY + 1).z_score) < 4
    assert abs(detect_green_list(plain, vocab_size=VOCAB, key=KEY).z_score) < 4


def test_the_list_takes_a_share_gamma_and_adds_delta(rng: torch.Generator) -> None:
    logits = torch.randn(1, VOCAB, generator=rng)

    change = apply_stage(GreenList, logits, [{"gamma": 0.3, "delta": 1.25}]) - logits

    assert int((change > 1).sum()) == 15
    assert torch.allclose(change[change != 0], torch.tensor(1.25), atol=1e-6)


def test_a_short_history_is_not_marked() -> None:
    logits = torch.zeros(2, VOCAB)
    params = {"context": 3}

    result = apply_stage(GreenList, logits, [params] * 2, prompts=[[1], [1, 2]], outputs=[[4], [5]])

    assert torch.equal(result[0], logits[0])
    assert not torch.equal(result[1], logits[1])


def test_no_bonus_is_identity_and_the_key_is_not_shown() -> None:
    assert GreenList.is_identity(GreenList.validate({"delta": 0}))
    assert GreenList.is_identity(GreenList.validate({"delta": None}))
    assert not GreenList.is_identity(GreenList.validate({}))
    assert str(KEY) not in str(shown_values(GreenList.validate({"key": KEY})))


@pytest.mark.parametrize(
    "bad", [{"gamma": 0}, {"gamma": 1}, {"delta": -1}, {"context": 0}, {"scheme": "other"}]
)
def test_values_out_of_range_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ChainError, match="green_list"):
        GreenList(**bad)


def test_a_text_without_a_context_cannot_be_scored() -> None:
    with pytest.raises(ValidationError, match="at least 2 tokens"):
        detect_green_list([5], vocab_size=VOCAB)
