"""The Gumbel watermark and its detector."""

import pytest
import torch
from torch import Tensor

from decodekit.core.batch import PickView, Ranking
from decodekit.core.errors import ChainError, ValidationError
from decodekit.core.plan_text import shown_values
from decodekit.kernels.ops import rank_top, uniform_for_ids
from decodekit.plugins.author.rows import make_rows
from decodekit.plugins.pick.keyed_gumbel import (
    PURPOSE,
    KeyedGumbel,
    context_key,
    detect_keyed_gumbel,
)

INF = float("inf")
KEY = 987654321
P = torch.tensor([0.05, 0.4, 0.05, 0.25, 0.25])


def pick(
    logits: Tensor,
    outputs: list[list[int]],
    *,
    key: int = KEY,
    context: int = 2,
    seed: int = 0,
    listed: int | None = None,
) -> list[int]:
    ranking = None
    if listed is not None:
        ranked = rank_top(logits, listed)
        ranking = Ranking(ranked.values, ranked.ids)
    view = PickView(
        ranking=ranking,
        dense=None if listed else logits,
        has_cut=listed is not None,
        vocab_size=logits.shape[1],
    )
    params = [{"key": key, "context": context}] * len(logits)
    made = make_rows(KeyedGumbel, params, vocab_size=logits.shape[1], outputs=outputs, seed=seed)
    return KeyedGumbel.prototype().pick(view, made.view).tolist()


def generate(length: int, rng: torch.Generator, seed: int = 0) -> list[int]:
    output: list[int] = []
    for _ in range(length):
        logits = torch.randn(1, 60, generator=rng)
        output += pick(logits, [output], seed=seed)
    return output


def test_it_is_the_argmax_of_r_to_the_one_over_p(rng: torch.Generator) -> None:
    logits = torch.randn(50, 40, generator=rng) * 2
    outputs = [[row, row + 1] for row in range(50)]
    keys = torch.tensor([context_key(KEY, output) for output in outputs])
    zero = torch.zeros_like(keys)
    r = 1 - uniform_for_ids(keys, zero, zero, PURPOSE, torch.arange(40).expand(50, 40))

    expected = (r ** (1 / logits.double().softmax(1))).argmax(1)

    assert pick(logits, outputs) == expected.tolist()
    assert pick(logits, outputs, listed=40) == expected.tolist()


def test_over_contexts_tokens_come_by_their_probability() -> None:
    outputs = [[row, 3] for row in range(8000)]

    tokens = torch.tensor(pick(P.log().expand(8000, 5), outputs))

    counts = torch.bincount(tokens, minlength=5).double()
    assert float(((counts - P * 8000) ** 2 / (P * 8000)).sum()) < 23.5


def test_the_context_decides_and_not_the_request() -> None:
    rows = torch.zeros(2, 5000)

    assert pick(rows, [[1, 2], [1, 2]], seed=1) == pick(rows, [[9, 1, 2], [5, 1, 2]], seed=77)
    assert pick(rows, [[1, 2], [1, 3]])[0] != pick(rows, [[1, 2], [1, 3]])[1]
    assert pick(rows, [[1, 2], [1, 2]], key=1) != pick(rows, [[1, 2], [1, 2]], key=2)


def test_a_repeated_and_a_short_context_draw_with_the_requests_noise() -> None:
    rows = torch.zeros(1, 5000)
    repeated = [1, 2, 7, 1, 2]

    assert pick(rows, [repeated], seed=1) != pick(rows, [repeated], seed=2)
    assert pick(rows, [repeated], seed=1) == pick(rows, [repeated], seed=1)
    assert pick(rows, [[]], seed=1, context=3) != pick(rows, [[]], seed=2, context=3)


def test_marked_text_is_found_and_other_text_is_not(rng: torch.Generator) -> None:
    marked = generate(80, rng)
    plain = torch.randint(0, 60, (80,), generator=rng).tolist()

    found = detect_keyed_gumbel(marked, key=KEY, context=2)

    assert found.num_scored == 78
    assert found.score > 2 * found.num_scored
    assert found.p_value < 1e-10
    assert detect_keyed_gumbel(marked, key=KEY + 1, context=2).p_value > 1e-4
    assert detect_keyed_gumbel(plain, key=KEY, context=2).p_value > 1e-4


def test_the_detector_counts_a_context_once() -> None:
    ids = [1, 2, 3, 1, 2, 4, 1, 2]

    assert detect_keyed_gumbel(ids, key=KEY, context=2).num_scored == 5
    assert detect_keyed_gumbel(ids, key=KEY, context=2, prompt_ids=[8, 9]).num_scored == 7


def test_other_text_has_a_uniform_p_value(rng: torch.Generator) -> None:
    values = torch.tensor(
        [
            detect_keyed_gumbel(
                torch.randint(0, 1000, (20,), generator=rng).tolist(), key=KEY, context=1
            ).p_value
            for _ in range(300)
        ]
    )

    for share in (0.1, 0.5, 0.9):
        assert abs(float((values < share).float().mean()) - share) < 0.1


def test_the_key_is_needed_and_not_shown() -> None:
    with pytest.raises(ChainError, match="needs the parameter 'key'"):
        KeyedGumbel()
    assert str(KEY) not in str(shown_values(KeyedGumbel.validate({"key": KEY})))


@pytest.mark.parametrize("bad", [{"key": -1}, {"key": 2**64}, {"key": 1, "context": 0}])
def test_values_out_of_range_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ChainError, match="keyed_gumbel"):
        KeyedGumbel(**bad)


def test_a_short_text_cannot_be_scored() -> None:
    with pytest.raises(ValidationError, match="more than 4 tokens"):
        detect_keyed_gumbel([1, 2, 3, 4], key=KEY)
