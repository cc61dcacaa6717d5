"""A loop ends where the detector says, and nothing else does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.core.outputs import CompletionOutput
from decodekit.plugins.author.table_model import blank_table, flat_table
from decodekit.sampling_params import RepetitionDetectionParams

Maker = Callable[..., LLM]
A, B, C = 10, 11, 12


def looping_table() -> Tensor:
    """After c or b comes a, after a comes b."""
    table = blank_table(97)
    table[C, A] = table[B, A] = table[A, B] = 0.0
    return table


@pytest.fixture(scope="module")
def loop(make_llm: Maker) -> LLM:
    return make_llm(looping_table())


def run(llm: LLM, prompts: list[list[int]], *params: SamplingParams) -> list[CompletionOutput]:
    outputs = llm.generate(prompts, list(params), use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def greedy(**given: object) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, **{"max_tokens": 100, **given})  # type: ignore[arg-type]


def spelling(path: list[int]) -> Callable[[list[int], Tensor], Tensor]:
    """Leave at step t only token t of `path`."""

    def keep(output_ids: list[int], logits: Tensor) -> Tensor:
        kept = torch.full_like(logits, -torch.inf)
        kept[path[len(output_ids)]] = 0.0
        return kept

    return keep


@pytest.mark.parametrize("prompt", [[C], [A, B, A, B, C], [C, A, B, A, B]])
def test_dec_110_the_third_copy_in_the_output_ends_it(loop: LLM, prompt: list[int]) -> None:
    detect = RepetitionDetectionParams(max_pattern_size=4, min_count=3)

    (found,) = run(loop, [prompt], greedy(repetition_detection=detect))

    assert list(found.token_ids) == [A, B] * 3
    assert (found.finish_reason, found.stop_reason) == ("repetition", "repetition_detected")


def test_dec_110_off_runs_to_the_limit_and_one_copy_is_refused(loop: LLM) -> None:
    (plain, off) = run(
        loop,
        [[C], [C]],
        greedy(),
        greedy(repetition_detection={"max_pattern_size": 0}),
    )

    assert len(plain.token_ids) == len(off.token_ids) == 100
    assert plain.finish_reason == off.finish_reason == "length"
    with pytest.raises(ValueError, match="min_count must be an integer >= 2"):
        RepetitionDetectionParams(max_pattern_size=4, min_count=1)


def test_dec_111_lists_and_short_runs_are_not_cut(make_llm: Maker, loop: LLM) -> None:
    llm = make_llm(flat_table(97))
    detect = RepetitionDetectionParams(max_pattern_size=4, min_count=6)
    items = [token for other in range(20, 50) for token in (A, other)]
    run_of_five = [1, 2, 3, 7, 7, 7, 7, 7, 4, 5, 6, 8, 9]

    listed, short, neighbour = run(
        llm,
        [[C]] * 3,
        greedy(max_tokens=60, repetition_detection=detect, logits_processors=[spelling(items)]),
        greedy(
            max_tokens=13, repetition_detection=detect, logits_processors=[spelling(run_of_five)]
        ),
        greedy(max_tokens=60, logits_processors=[spelling([A, B] * 30)]),
    )

    assert list(listed.token_ids) == items
    assert list(short.token_ids) == run_of_five
    assert list(neighbour.token_ids) == [A, B] * 30
    assert {listed.finish_reason, short.finish_reason, neighbour.finish_reason} == {"length"}


def test_min_tokens_postpones_it(loop: LLM) -> None:
    detect = RepetitionDetectionParams(max_pattern_size=4, min_count=3)

    (found,) = run(loop, [[C]], greedy(repetition_detection=detect, min_tokens=21))

    assert len(found.token_ids) == 21
    assert found.finish_reason == "repetition"


def test_the_limit_is_asked_first(loop: LLM) -> None:
    detect = RepetitionDetectionParams(max_pattern_size=4, min_count=3)

    (found,) = run(loop, [[C]], greedy(repetition_detection=detect, max_tokens=6))

    assert (found.finish_reason, found.stop_reason) == ("length", None)
