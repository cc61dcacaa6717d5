"""Short lists in the chain are an optimisation: they choose the tokens that whole rows choose."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import SamplingParams
from decodekit.core.chain import ChainRunner
from decodekit.core.plan import Plan, Planner
from decodekit.core.registry import Registry

VOCAB = 3000
PLANNER = Planner(
    Registry.load(plugins=(), autoload=False),
    vocab_size=VOCAB,
    tokenizer_size=VOCAB,
    max_model_len=4096,
    device=torch.device("cpu"),
)
CUTS: list[dict[str, Any]] = [
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 1500},
    {"min_p": 0.001},
    {"min_p": 0.2},
    {"min_p": 0.02, "top_k": 200, "top_p": 0.95},
    {"top_k": 2000, "top_p": 0.999},
    {"chain": ["top_p", "temperature", "top_k"], "top_p": 0.8, "top_k": 30},
    {"chain": [{"stage": "top_p", "p": 0.9, "ties": "value"}, "temperature"]},
    {
        "chain": ["top_k", {"stage": "top_p", "p": 0.7, "min_keep": 3}],
        "top_k": 90,
        "temperature": 1,
    },
]


@dataclass(eq=False)
class ChainSequence:
    """As much of a sequence as the chain looks at."""

    plan: Plan
    key: int
    slot: int
    branch: int = 0
    prompt_ids: tuple[int, ...] = (1, 2, 3)
    output_ids: list[int] = field(default_factory=lambda: [4, 5])
    epoch: int = -1
    states: list[Any] = field(default_factory=list)
    request: Any = None


def run(logits: Tensor, cuts: list[dict[str, Any]], keys: list[int], *, fusion: bool) -> list[int]:
    """Return the token of each row of `logits`, row i with `cuts[i]` and `keys[i]`."""
    chain = ChainRunner(
        max_slots=len(logits),
        vocab_size=VOCAB,
        tokenizer_size=VOCAB,
        device=torch.device("cpu"),
        fusion=fusion,
    )
    sequences = []
    for row, given in enumerate(cuts):
        params = SamplingParams(**{"temperature": 1.3, **given}).snapshot()
        plan = PLANNER.admit(params, prompt_ids=(1, 2, 3))
        sequence = ChainSequence(plan, keys[row], row)
        sequence.request = SimpleNamespace(params=params, plan=plan)
        chain.open(sequence)
        sequences.append(sequence)
    result = chain.run(sequences, logits)
    assert result.errors == {}
    return result.tokens


def rows(count: int, spread: float, grid: float, generator: torch.Generator) -> Tensor:
    """Random rows; a grid of 1/16 has ties everywhere, one of 0 none."""
    logits = torch.randn(count, VOCAB, generator=generator) * spread
    return (logits / grid).round() * grid if grid else logits


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("spread", [0.05, 1.0, 5.0])
@pytest.mark.parametrize("grid", [0.0, 1 / 16])
def test_a_list_gives_the_token_of_the_whole_row(
    cut: dict[str, Any], spread: float, grid: float, rng: torch.Generator
) -> None:
    logits = rows(40, spread, grid, rng)

    listed = run(logits, [cut] * 40, list(range(40)), fusion=True)

    assert listed == run(logits, [cut] * 40, list(range(40)), fusion=False)
    assert cut == {"top_k": 1} or len(set(listed)) > 1


def test_rounding_that_makes_a_tie_is_broken_by_id_in_a_list_too() -> None:
    logits = torch.full((1, VOCAB), -300.0)
    logits[0, 5] = 1.98
    logits[0, 9] = torch.nextafter(logits[0, 5], torch.tensor(2.0))
    quotients = logits[0, [5, 9]] / torch.tensor(1.9)
    assert quotients[0] == quotients[1]
    cut = {"temperature": 1.9, "top_p": 0.2}

    tokens = [run(logits, [cut], [0], fusion=fusion) for fusion in (True, False)]

    assert tokens == [[5], [5]]


def test_rows_with_any_neighbours_draw_what_they_draw_alone(rng: torch.Generator) -> None:
    cuts = [CUTS[row % len(CUTS)] for row in range(64)]
    logits = rows(64, 2.0, 1 / 16, rng)
    order = torch.randperm(64, generator=rng).tolist()

    together = run(logits, cuts, list(range(64)), fusion=True)

    assert run(logits[order], [cuts[i] for i in order], order, fusion=True) == [
        together[i] for i in order
    ]
    for row in range(64):
        assert run(logits[row : row + 1], [cuts[row]], [row], fusion=True) == [together[row]]
