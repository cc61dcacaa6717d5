"""The log of a row's total weight against float64."""

import pytest
import torch

from decodekit.kernels.reference.log_total import log_total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (9, 300), (5, 2000)])
def test_it_is_the_float64_value(
    shape: tuple[int, int], dtype: torch.dtype, rng: torch.Generator
) -> None:
    logits = (torch.randn(shape, generator=rng) * 8).to(dtype)
    before = logits.clone()

    found = log_total(logits)

    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found.double(), torch.logsumexp(logits.double(), 1), rtol=0, atol=1e-4
    )
    assert torch.equal(logits, before)


def test_dead_tokens_weigh_nothing_and_dead_rows_are_nan() -> None:
    inf = float("inf")
    logits = torch.tensor([[-inf, 2.0, -inf], [-inf] * 3, [inf, 0.0, 0.0]])

    found = log_total(logits)

    assert found[0] == 2.0
    assert found[1:].isnan().all()


def test_a_row_alone_equals_the_row_in_a_batch(rng: torch.Generator) -> None:
    logits = torch.randn(11, 513, generator=rng)

    together = log_total(logits)

    assert all(log_total(logits[row : row + 1]) == together[row] for row in range(11))
    assert log_total(logits[:0]).shape == (0,)
