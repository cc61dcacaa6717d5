"""The thinking budget against its definition, computed from the tokens alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decodekit.core.errors import ChainError, ParameterTypeError, ValidationError
from decodekit.core.reasoning import ReasoningConfig, ReasoningMarkers, markers_of, reasoning_config
from decodekit.logits_processors.force.thinking_budget import Pattern, ThinkingBudget
from decodekit.plugins.author.rows import apply_stage, make_context, make_rows

INF = float("inf")
VOCAB = 12
ONE = ReasoningMarkers(start=(1,), end=(2,), closing=(2,))
MANY = ReasoningMarkers(start=(1, 3), end=(4, 2, 5), closing=(2,))


def allowed(
    prompt: Sequence[int], output: Sequence[int], markers: ReasoningMarkers, **params: Any
) -> list[int]:
    """Return the ids that are alive after the stage."""
    result = apply_stage(
        ThinkingBudget,
        torch.zeros(1, VOCAB),
        [params],
        prompts=[prompt],
        outputs=[output],
        context=make_context(VOCAB, reasoning=markers),
    )
    return (result[0] > -INF).nonzero()[:, 0].tolist()


def generate(
    wanted: Sequence[int], prompt: Sequence[int], markers: ReasoningMarkers, **params: Any
) -> list[int]:
    """Write `wanted` token by token wherever the stage leaves a choice."""
    output: list[int] = []
    rest = list(wanted)
    while rest and len(output) < 60:
        alive = allowed(prompt, output, markers, **params)
        output.append(alive[0] if len(alive) == 1 else rest.pop(0))
    return output


def after_last(history: Sequence[int], marker: Sequence[int]) -> int:
    """Return the place after the last `marker` in `history`, or -1."""
    size = len(marker)
    found = [
        i + size
        for i in range(len(history) - size + 1)
        if list(history[i : i + size]) == list(marker)
    ]
    return found[-1] if found else -1


@pytest.mark.parametrize("budget", [0, 1, 3])
@pytest.mark.parametrize("prompt", [[7, 1], [7]])
def test_the_end_follows_the_last_thought_of_the_budget(budget: int, prompt: list[int]) -> None:
    wanted = [8, 9, 8, 9, 8, 9] if 1 in prompt else [1, 8, 9, 8, 9, 8, 9]

    found = generate(wanted, prompt, ONE, budget=budget)

    thoughts = wanted[: wanted.index(8) + budget]
    assert found == [*thoughts, 2, *wanted[len(thoughts) :]]


@given(
    prompt=st.lists(st.integers(1, 4), max_size=6),
    output=st.lists(st.integers(1, 4), max_size=12),
    budget=st.integers(0, 4),
)
def test_single_markers_force_exactly_when_open_and_spent(
    prompt: list[int], output: list[int], budget: int
) -> None:
    history = [*prompt, *output]
    opened = after_last(history, [1])
    is_open = opened > after_last(history, [2])
    spent = is_open and len(history) - opened >= budget

    assert allowed(prompt, output, ONE, budget=budget) == ([2] if spent else list(range(VOCAB)))


@given(
    prompt=st.lists(st.integers(1, 5), max_size=8),
    output=st.lists(st.integers(1, 5), max_size=16),
    cut=st.integers(0, 16),
    budget=st.integers(0, 3),
)
def test_taking_back_forking_and_rebuilding_give_the_state_of_the_tokens(
    prompt: list[int], output: list[int], cut: int, budget: int
) -> None:
    stage = ThinkingBudget.prototype()
    context = make_context(VOCAB, reasoning=MANY)
    bound = ThinkingBudget.bind(ThinkingBudget.validate({"budget": budget}), context)
    cut = min(cut, len(output))
    state = stage.rebuild(bound, prompt, output)
    fork = stage.fork(state)

    stage.rollback(state, len(output) - cut)
    shorter = stage.rebuild(bound, prompt, output[:cut])
    assert (state.marks, state.forced) == (shorter.marks, shorter.forced)
    stage.accept(state, output[cut:])

    assert (state.marks, state.forced) == (fork.marks, fork.forced)


@given(prompt=st.lists(st.integers(1, 5), max_size=14))
def test_a_long_prompt_is_read_as_if_from_its_beginning(prompt: list[int]) -> None:
    context = make_context(VOCAB, reasoning=MANY)
    bound = ThinkingBudget.bind(ThinkingBudget.validate({"budget": 2}), context)
    state = ThinkingBudget.prototype().open(bound, prompt)
    opened = after_last(prompt, MANY.start)

    is_open = opened > after_last(prompt, MANY.closing)
    assert (state.forced is not None) == (is_open and len(prompt) - opened >= 2)


def test_an_end_of_several_tokens_is_written_whole_after_a_message() -> None:
    found = generate([8, 9, 8, 9], [1, 3], MANY, budget=2, message=[10, 11])

    assert found == [8, 9, 10, 11, 4, 2, 5, 8, 9]


def test_what_is_already_written_of_the_end_is_not_written_again() -> None:
    assert generate([8, 4, 9, 9], [1, 3], MANY, budget=2) == [8, 4, 2, 5, 9, 9]


def test_a_reasoning_that_ends_by_itself_is_left_alone() -> None:
    # The model's own marker alone, without the rest of the configured end.
    assert generate([8, 2, 9, 9, 9, 9], [1, 3], MANY, budget=4) == [8, 2, 9, 9, 9, 9]


def test_a_later_start_opens_a_fresh_count() -> None:
    assert generate([8, 9, 1, 8, 9, 9], [1], ONE, budget=1) == [8, 2, 9, 1, 8, 2, 9, 9]


def test_the_forced_id_lives_even_if_it_was_masked() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 2] = -INF

    result = apply_stage(
        ThinkingBudget,
        logits,
        [{"budget": 0}, {"budget": 9}],
        prompts=[[1], [1]],
        context=make_context(VOCAB, reasoning=ONE),
    )

    assert (result[0] > -INF).nonzero().tolist() == [[2]]
    assert torch.equal(result[1], logits[1])


def test_no_limit_is_identity_and_needs_no_markers() -> None:
    for params in ({}, {"budget": None}, {"budget": -1}):
        validated = ThinkingBudget.validate(params)
        assert ThinkingBudget.is_identity(ThinkingBudget.bind(validated, make_context(VOCAB)))
    assert not ThinkingBudget.argmax_invariant(None)


@pytest.mark.parametrize("budget", [-2, True, 1.5, "4"])
def test_other_budgets_are_refused(budget: object) -> None:
    with pytest.raises(ChainError, match="thinking_budget.budget"):
        ThinkingBudget.validate({"budget": budget})


def test_a_budget_without_markers_is_refused() -> None:
    with pytest.raises(ChainError, match="reasoning_config"):
        make_rows(ThinkingBudget, [{"budget": 3}], vocab_size=VOCAB)


def test_a_message_is_checked() -> None:
    context = make_context(VOCAB, reasoning=ONE)

    with pytest.raises(ChainError, match="message"):
        ThinkingBudget.bind(ThinkingBudget.validate({"budget": 1, "message": [99]}), context)
    with pytest.raises(ChainError, match="tokenizer is not loaded"):
        ThinkingBudget.bind(ThinkingBudget.validate({"budget": 1, "message": "so"}), context)


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=5), st.lists(st.integers(0, 1), max_size=20)
)
def test_a_pattern_follows_the_longest_match_below_the_whole(
    ids: list[int], text: list[int]
) -> None:
    pattern = Pattern(ids)
    length = 0
    for end in range(1, len(text) + 1):
        length = pattern.after(length, text[end - 1])
        longest = max(
            size for size in range(min(end, len(ids)) + 1) if text[end - size : end] == ids[:size]
        )
        assert length == longest
        if length == len(ids):
            return


class Words:
    """A tokenizer of whole words."""

    ids = {"<think>": 1, "</think>": 2, "wait": 3, "enough": 4}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [self.ids[word] for word in text.split()]


def test_the_setting_has_two_names_and_defaults() -> None:
    assert reasoning_config(None) is None
    assert reasoning_config({}) == ReasoningConfig("<think>", "</think>")
    older = reasoning_config({"think_start_str": "a", "think_end_str": "b"})
    assert older == ReasoningConfig("a", "b")
    assert older is not None and older.think_start_str == "a" and older.think_end_str == "b"

    class Theirs:
        think_start_str, think_end_str = "a", "b"

    assert reasoning_config(Theirs()) == older


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"think_start": "a"}, ParameterTypeError),
        ({"think_start_str": "", "think_end_str": "b"}, ValidationError),
        ({"think_start_str": "a", "reasoning_start_str": "b"}, ValidationError),
        ("<think>", ParameterTypeError),
        (5, ParameterTypeError),
    ],
)
def test_bad_settings_are_refused(value: object, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        reasoning_config(value)


def test_the_models_own_marker_closes_where_the_end_holds_a_sentence() -> None:
    config = ReasoningConfig("<think>", "wait enough </think>")

    assert markers_of(config, Words()) == ReasoningMarkers((1,), (3, 4, 2), (3, 4, 2))
    assert markers_of(config, Words(), [1, 2]) == ReasoningMarkers((1,), (3, 4, 2), (2,))
    with pytest.raises(ValidationError, match="end must be text that the tokenizer can write"):
        markers_of(ReasoningConfig("<think>", " "), Words())
