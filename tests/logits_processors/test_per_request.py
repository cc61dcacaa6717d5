"""The adapter for a request's own callables."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit.core.errors import ChainError
from decodekit.logits_processors.per_request import PerRequest
from decodekit.plugins.author.rows import apply_stage, make_context, make_rows

INF = float("inf")


def add_length(output_ids: list[int], logits: Tensor) -> Tensor:
    return logits + len(output_ids)


def double(prompt_ids: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
    logits[prompt_ids[-1]] *= 2
    return logits


class Counter:
    """Counts its calls, as stateful processors of libraries do."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        self.calls += 1
        return logits + self.calls


def test_two_and_three_parameters_run_in_order_each_on_its_row() -> None:
    logits = torch.ones(2, 4)

    result = apply_stage(
        PerRequest,
        logits,
        [{"callables": [add_length, double]}, {"callables": [double, add_length]}],
        prompts=[[3], [0]],
        outputs=[[1, 1], [2]],
    )

    assert result.tolist() == [[3.0, 3.0, 3.0, 6.0], [3.0, 2.0, 2.0, 2.0]]


def test_history_and_logits_are_copies_that_a_callable_may_spoil() -> None:
    made = make_rows(
        PerRequest,
        [{"callables": [lambda prompt, output, logits: _spoil(prompt, output, logits)]}],
        vocab_size=4,
        prompts=[[1, 2]],
        outputs=[[3]],
    )
    logits = torch.zeros(1, 4)

    with pytest.raises(RuntimeError, match="after spoiling"):
        PerRequest.prototype().transform(logits, made.view)

    assert made.rows.sources[0].prompt_ids == (1, 2)
    assert made.rows.sources[0].output_ids == [3]
    assert logits.tolist() == [[0.0] * 4]


def _spoil(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    prompt.clear()
    output.append(99)
    logits.fill_(7.0)
    raise RuntimeError("after spoiling")


def test_masked_tokens_stay_masked_whatever_is_returned() -> None:
    result = apply_stage(
        PerRequest,
        torch.tensor([[-INF, 1.0, 2.0]]),
        [{"callables": [lambda output, logits: torch.full_like(logits, 5.0)]}],
    )

    assert result.tolist() == [[-INF, 5.0, 5.0]]


def test_half_precision_results_are_taken() -> None:
    result = apply_stage(
        PerRequest, torch.ones(1, 3), [{"callables": [lambda output, logits: logits.half() / 4]}]
    )

    assert result.dtype == torch.float32
    assert result.tolist() == [[0.25] * 3]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "it returned nothing"),
        ([1.0, 2.0], "it returned a list"),
        (torch.zeros(2), r"shape \[2\]"),
        (torch.zeros(1, 3), r"shape \[1, 3\]"),
        (torch.zeros(3, dtype=torch.int64), "int64"),
    ],
)
def test_a_wrong_result_is_a_clear_error(given: Any, said: str) -> None:
    def faulty(output_ids: list[int], logits: Tensor) -> Any:
        return given

    with pytest.raises(ValueError, match=rf"faulty must return .* shape \[3\], .*{said}"):
        apply_stage(PerRequest, torch.ones(1, 3), [{"callables": [faulty]}])


def test_running_a_step_again_calls_no_callable_twice() -> None:
    counters = [Counter(), Counter()]

    def raises(output_ids: list[int], logits: Tensor) -> Tensor:
        raise RuntimeError("always")

    made = make_rows(
        PerRequest,
        [{"callables": [each]} for each in (counters[0], raises, counters[1])],
        vocab_size=3,
    )
    stage = PerRequest.prototype()

    with pytest.raises(RuntimeError, match="always"):
        stage.transform(torch.zeros(3, 3), made.view)
    with pytest.raises(RuntimeError, match="always"):
        stage.transform(torch.zeros(3, 3), made.view)
    made.rows.sources[0].output_ids.append(1)  # a step further
    made.rows.advance()
    with pytest.raises(RuntimeError, match="always"):
        stage.transform(torch.zeros(3, 3), made.view)

    assert counters[0].calls == 2


def test_a_position_that_comes_back_is_computed_anew() -> None:
    counter = Counter()
    made = make_rows(PerRequest, [{"callables": [counter]}], vocab_size=3, outputs=[[1]])
    stage = PerRequest.prototype()
    stage.transform(torch.zeros(1, 3), made.view)

    stage.rollback(made.view.states[0], 1)
    stage.transform(torch.zeros(1, 3), made.view)

    assert counter.calls == 2
    assert stage.fork(made.view.states[0]) is not made.view.states[0]


@pytest.mark.parametrize(
    ("processor", "takes_prompt"),
    [
        (add_length, False),
        (double, True),
        (Counter(), False),
        (partial(double, [1]), False),
        (lambda *args: args[-1], True),
        (lambda output, logits, *, strength=1.0: logits, False),
    ],
)
def test_the_number_of_parameters_is_read_when_bound(processor: Any, takes_prompt: bool) -> None:
    bound = PerRequest.bind(PerRequest.validate({"callables": [processor]}), make_context(3))

    assert bound.takes_prompt == (takes_prompt,)


@pytest.mark.parametrize("processor", [lambda logits: logits, lambda a, b, c, d: d])
def test_other_numbers_of_parameters_are_refused(processor: Any) -> None:
    with pytest.raises(ChainError, match=r"\(output_ids, logits\)") as caught:
        PerRequest.bind(PerRequest.validate({"callables": [processor]}), make_context(3))

    assert caught.value.parameter == "logits_processors"


def test_what_cannot_be_called_is_refused_and_none_is_identity() -> None:
    with pytest.raises(ChainError, match="callable"):
        PerRequest(callables=["print"])
    assert PerRequest.is_identity(PerRequest.validate({}))
