"""vLLM's processor interface: state follows the rows, adapters run over their own row."""

from typing import Any

import pytest

from decodekit.core.params import SamplingParams
from decodekit.core.vllm_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    BatchUpdateBuilder,
    MoveDirectionality,
    process_dict_updates,
)

P = SamplingParams()
ONE_WAY, SWAP = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP


def named(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> str | None:
    return str(prompt[0]) if prompt else None


def test_no_update_changes_nothing() -> None:
    state = {0: "a"}

    assert process_dict_updates(state, None, named) is False
    assert state == {0: "a"}


def test_rows_are_removed_then_added_then_moved() -> None:
    state = {0: "a", 1: "b", 2: "c", 3: "d"}
    update = BatchUpdate(3, [1], [(1, P, [7], []), (2, P, [], [])], [(3, 0, ONE_WAY), (0, 1, SWAP)])

    assert process_dict_updates(state, update, named) is True
    assert state == {1: "d", 0: "7"}


def test_an_update_of_rows_without_state_reports_no_change() -> None:
    update = BatchUpdate(2, [4], [(1, P, None, [])], [(0, 1, SWAP)])
    state: dict[int, str] = {}

    assert process_dict_updates(state, update, named) is False


def test_a_swap_with_an_empty_row_moves_the_one() -> None:
    state = {2: "c"}

    process_dict_updates(state, BatchUpdate(3, [], [], [(0, 2, SWAP)]), named)

    assert state == {0: "c"}


class Adapter(AdapterLogitsProcessor):
    """Bans the last token of the output; with extra_args["whole"], also the first of the prompt."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        asked = (params.extra_args or {}).get("ban")
        if asked == "last":
            return lambda output, row: row.index_fill(0, row.new_tensor(output[-1:]).long(), -9.0)
        if asked == "whole":
            return lambda prompt, output, row: row + prompt[0]
        return None


def test_an_adapter_runs_each_callable_over_its_row_with_the_live_output() -> None:
    torch = pytest.importorskip("torch")
    adapter, output = Adapter(None, torch.device("cpu"), False), [1]
    last = SamplingParams(extra_args={"ban": "last"})
    whole = SamplingParams(extra_args={"ban": "whole"})
    adapter.update_state(BatchUpdate(3, [], [(0, last, [5], output), (2, whole, [4], [])], []))
    output.append(2)

    logits = adapter.apply(torch.zeros(3, 3))

    assert logits.tolist() == [[0, 0, -9], [0, 0, 0], [4, 4, 4]]


def test_three_parameters_need_prompt_ids() -> None:
    adapter = Adapter(None, None, False)  # type: ignore[arg-type]
    whole = SamplingParams(extra_args={"ban": "whole"})

    with pytest.raises(ValueError, match="prompt token ids"):
        adapter.update_state(BatchUpdate(1, [], [(0, whole, None, [])], []))


def test_a_builder_gives_the_lowest_free_row_and_one_update() -> None:
    builder = BatchUpdateBuilder()
    for row in (3, 1, 5):
        builder.removed_append(row)

    assert (builder.has_removed(), builder.peek_removed(), builder.pop_removed()) == (True, 1, 1)
    with pytest.raises(RuntimeError):
        builder.removed_append(0)
    update = builder.get_and_reset(4)
    assert update == BatchUpdate(4, [5, 3], [], [])
    assert builder.get_and_reset(4) is None
    builder.removed_append(0)
    assert builder.pop_removed() == 0
    assert (builder.peek_removed(), builder.pop_removed()) == (None, None)
