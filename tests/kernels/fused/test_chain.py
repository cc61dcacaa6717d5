"""A fused chain chooses what the stages choose one by one: under the interpreter, and on a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import SamplingParams
from decodekit.core.batch import RowView
from decodekit.core.chain import ChainRunner
from decodekit.core.fused import FusedChains
from decodekit.core.plan import Plan, Planner
from decodekit.core.registry import Registry
from decodekit.core.stage import Form, Stage, StageParams
from decodekit.kernels.dispatch import FusedChain
from decodekit.kernels.lang import INTERPRETED, tl, triton

VOCAB, KNOWN = 1400, 1390
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLANNER = Planner(
    Registry.load(plugins=(), autoload=False),
    vocab_size=VOCAB,
    tokenizer_size=KNOWN,
    max_model_len=4096,
    device=DEVICE,
)
pytestmark = [
    pytest.mark.skipif(
        not INTERPRETED and DEVICE.type == "cpu",
        reason="Triton has neither an interpreter nor a GPU",
    ),
    # NumPy warns where a kernel takes the logarithm of 0 and throws the result away.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse on the CPU too, and wait for the kernels."""
    monkeypatch.setattr(FusedChains, "possible", classmethod(lambda cls, device: True))
    monkeypatch.setenv("DECODEKIT_FUSED", "wait")


@dataclass(eq=False)
class ChainSequence:
    """As much of a sequence as the chain looks at."""

    plan: Plan
    key: int
    slot: int
    branch: int = 0
    prompt_ids: tuple[int, ...] = (1, 2, 3, 700)
    output_ids: list[int] = field(default_factory=lambda: [4, 5, 5, 701])
    epoch: int = -1
    states: list[Any] = field(default_factory=list)
    request: Any = None


class Run:
    """One step of a chain on rows, fused or not."""

    def __init__(self, rows: list[dict[str, Any]], *, fusion: bool) -> None:
        self.chain = ChainRunner(
            max_slots=len(rows),
            vocab_size=VOCAB,
            tokenizer_size=KNOWN,
            device=DEVICE,
            fusion=fusion,
        )
        self.sequences = []
        for row, given in enumerate(rows):
            params = SamplingParams(**given).snapshot()
            plan = PLANNER.admit(params, prompt_ids=(1, 2, 3, 700))
            sequence = ChainSequence(plan, 977 * row + 5, row)
            sequence.request = SimpleNamespace(params=params, plan=plan)
            self.chain.open(sequence)  # type: ignore[arg-type]
            self.sequences.append(sequence)

    def step(self, logits: Tensor) -> Any:
        """Choose a token for each row."""
        return self.chain.run(self.sequences, logits)  # type: ignore[arg-type]


CHAINS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 0.7, "min_p": 0.1, "top_k": 20, "top_p": 0.95},
    {
        "temperature": 1.0,
        "top_k": 9,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.5,
    },
    {"temperature": 1.0, "top_k": 9, "logit_bias": {5: 3.0, 1200: 90.0}},
    {"temperature": 0.9, "top_k": 12, "allowed_token_ids": [3, 4, 5, 64, 700, 1389]},
    {"temperature": 0.9, "chain": ["top_k", "temperature", "top_p"], "top_k": 15, "top_p": 0.8},
    {"temperature": 1.0, "chain": [{"stage": "top_k", "k": 6, "ties": "index"}]},
    {"temperature": 1.0, "chain": [{"stage": "top_p", "p": 0.4, "ties": "value"}]},
    {"temperature": 1.0, "chain": [{"stage": "top_p", "p": 0.3, "min_keep": 4}]},
    {"temperature": 1.0, "chain": [{"stage": "epsilon", "epsilon": 0.02}]},
    {"temperature": 1.0, "chain": [{"stage": "eta", "epsilon": 0.03}]},
    {"temperature": 1.0, "chain": [{"stage": "top_a", "a": 0.4}]},
    {"temperature": 1.0, "chain": ["p_less"]},
    {"temperature": 1.0, "chain": [{"stage": "top_n_sigma", "n": 1.5}]},
    {
        "temperature": 1.0,
        "chain": [{"stage": "top_k", "k": 20}, {"stage": "top_n_sigma", "n": 1.0}],
    },
    {"temperature": 1.0, "chain": [{"stage": "top_k", "k": 20}, {"stage": "eta", "epsilon": 0.2}]},
    {
        "temperature": 1.0,
        "chain": [
            {"stage": "top_k", "k": 20},
            {"stage": "xtc", "probability": 0.7, "threshold": 0.05},
        ],
    },
    {"temperature": 1.0, "chain": [{"stage": "top_k", "k": 20}, {"stage": "icdf", "skew": 0.3}]},
    {"temperature": 1.0, "chain": [{"stage": "icdf"}]},
]


def random_rows(count: int, spread: float, grid: float, generator: torch.Generator) -> Tensor:
    """Random rows; a grid of 1/8 has ties everywhere, one of 0 none."""
    logits = torch.randn(count, VOCAB, generator=generator) * spread
    return ((logits / grid).round() * grid if grid else logits).to(DEVICE)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of rows of each fused launch."""
    launches: list[int] = []
    run = FusedChain.run

    def note(self: FusedChain, logits: Tensor, batch: Any, *args: Any) -> Any:
        launches.append(len(batch.rows))
        return run(self, logits, batch, *args)

    monkeypatch.setattr(FusedChain, "run", note)
    yield launches


@pytest.mark.parametrize("given", CHAINS, ids=str)
@pytest.mark.parametrize("grid", [0.0, 1 / 8])
def test_a_fused_chain_chooses_what_its_stages_choose(
    given: dict[str, Any], grid: float, rng: torch.Generator, counted: list[int]
) -> None:
    logits = random_rows(3, 2.5, grid, rng)
    logits[:, 1200] += 4
    fused = Run([given] * 3, fusion=True).step(logits)
    plain = Run([given] * 3, fusion=False).step(logits)
    assert counted[-1] == 3, "the kernels did not run"
    assert fused.errors == {} and plain.errors == {}
    assert fused.tokens == plain.tokens
    assert fused.scores == pytest.approx(plain.scores, abs=1e-5)


def test_a_row_that_its_list_cannot_prove_is_left_to_the_stages(rng: torch.Generator) -> None:
    logits = random_rows(3, 0.01, 0.0, rng)  # a nucleus of hundreds
    given = {"temperature": 1.0, "top_p": 0.9}
    fused, plain = Run([given] * 3, fusion=True), Run([given] * 3, fusion=False)
    assert fused.step(logits).tokens == plain.step(logits).tokens


def test_a_row_with_nan_fails_alone(rng: torch.Generator) -> None:
    logits = random_rows(3, 2.0, 0.0, rng)
    logits[1, 7] = torch.nan
    given = {"temperature": 1.0, "top_k": 5}
    result = Run([given] * 3, fusion=True).step(logits)
    assert list(result.errors) == [1]
    assert result.errors[1].stage == "model"


def test_rows_of_several_programs_each_get_the_token_they_get_alone(rng: torch.Generator) -> None:
    chains = [CHAINS[0], CHAINS[2], CHAINS[6], CHAINS[2], CHAINS[0]]
    logits = random_rows(5, 2.5, 0.0, rng)
    together = Run(chains, fusion=True).step(logits).tokens
    plain = Run(chains, fusion=False).step(logits).tokens
    assert together == plain


@triton.jit
def push_away(y, ids, strength):  # type: ignore[no-untyped-def]
    return tl.where(ids % 3 == 0, y - strength, y)


class Thirds(Stage):
    """Lowers every third token; a user's stage with a kernel."""

    name = "thirds"
    form = Form.ELEMENTWISE
    kernel = push_away

    class Params(StageParams):
        """By how much."""

        strength: float = 1.0

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits[:, ::3] -= rows.column("strength")[:, None]


class Unfusable(Thirds):
    """Another meaning under an inherited kernel."""

    name = "unfusable"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits[:, ::2] -= rows.column("strength")[:, None]


@pytest.mark.parametrize(("stage", "is_fused"), [(Thirds, True), (Unfusable, False)])
def test_a_users_stage_is_inlined_where_it_gives_its_kernel(
    stage: type[Stage], is_fused: bool, rng: torch.Generator, counted: list[int]
) -> None:
    logits = random_rows(3, 2.0, 0.0, rng)
    given = {"temperature": 1.0, "chain": [stage(strength=2.5), {"stage": "top_k", "k": 9}]}
    fused = Run([given] * 3, fusion=True).step(logits)
    assert bool(counted) is is_fused
    assert fused.tokens == Run([given] * 3, fusion=False).step(logits).tokens
