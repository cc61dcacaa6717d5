"""The rows that authors test their stages with."""

import pytest
import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.batch import RowView
from decodekit.core.errors import ChainError
from decodekit.core.stage import Caps, Need, Stage, StageParams
from decodekit.plugins.author.rows import apply_stage, make_context, make_rows


class Probe(Stage):
    """Adds `shift` and what its state counted; `slow` is structural."""

    name = "probe"
    caps = Caps(needs=frozenset({Need.COUNTS, Need.OUTPUT, Need.PROMPT}), stateful=True)

    class Params(StageParams):
        """A number and a switch."""

        shift: float = Field(default=0.0, ge=0)
        slow: bool = False

    @classmethod
    def is_identity(cls, params: StageParams) -> bool:
        return params == cls.Params()

    @classmethod
    def structure(cls, params: StageParams) -> bool:
        return bool(params.model_dump()["slow"])

    def open(self, params: StageParams, prompt: object) -> list[int]:
        return []

    def accept(self, state: list[int], tokens: object) -> None:
        assert isinstance(tokens, list)
        state.extend(tokens)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits += rows.column("shift")[:, None]
        for row, state in enumerate(rows.states):
            logits[row] += 100 * len(state)


def test_columns_states_and_history_stand_in_row_order() -> None:
    made = make_rows(
        Probe,
        [{"shift": 1.5}, {"shift": 2.5}, {"shift": 0.5}],
        vocab_size=6,
        prompts=[[1], [2, 3], [4]],
        outputs=[[5, 5], [], [0]],
    )

    assert made.view.column("shift").tolist() == [1.5, 2.5, 0.5]
    assert list(made.view.states) == [[5, 5], [], [0]]
    assert made.view.host_positions.tolist() == [2, 0, 1]
    assert [made.view.prompt(row) for row in range(3)] == [(1,), (2, 3), (4,)]
    assert made.view.output(0) == [5, 5]
    seen = made.view.seen
    assert [set(ids.tolist()) for ids in seen.ids] == [{1, 5}, {2, 3}, {0, 4}]


def test_slots_are_not_row_numbers() -> None:
    made = make_rows(Probe, [{"shift": 1.0}] * 3, vocab_size=6)

    assert made.view.slots.tolist() != [0, 1, 2]
    assert len(set(made.view.slots.tolist())) == 3


def test_apply_stage_groups_structures_skips_identities_and_leaves_its_input() -> None:
    logits = torch.zeros(3, 2)

    result = apply_stage(
        Probe,
        logits,
        [{"shift": 1.0}, {}, {"shift": 2.0, "slow": True}],
        outputs=[[1], [1], []],
    )

    assert result[:, 0].tolist() == [101.0, 0.0, 2.0]
    assert not bool(logits.any())


def test_rows_of_different_structure_are_not_one_group() -> None:
    with pytest.raises(ValueError, match="one structure"):
        make_rows(Probe, [{"shift": 1.0}, {"slow": True}], vocab_size=4)


def test_parameters_are_validated_as_in_a_request() -> None:
    with pytest.raises(ChainError, match="probe.shift"):
        make_rows(Probe, [{"shift": -1}], vocab_size=4)


def test_noise_is_that_of_the_keys() -> None:
    ids = torch.arange(8).repeat(2, 1)
    one = make_rows(Probe, [{}] * 2, vocab_size=8, keys=[5, 6]).view.uniform(ids)
    other = make_rows(Probe, [{}] * 2, vocab_size=8, keys=[6, 5]).view.uniform(ids)

    assert torch.equal(one, other.flip(0))
    assert not torch.equal(one[0], one[1])


def test_the_context_can_be_changed() -> None:
    context = make_context(9, tokenizer_size=7, eos_ids=(3,))

    assert (context.vocab_size, context.tokenizer_size, context.eos_ids) == (9, 7, (3,))
