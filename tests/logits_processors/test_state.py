"""The state contract of every built-in that keeps one: accept, rollback, fork and rebuild."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodekit.core.batch import PickView
from decodekit.core.stage import Picker, Stage
from decodekit.logits_processors.bias.dry import Dry
from decodekit.logits_processors.mark.synthid import SynthId
from decodekit.logits_processors.mask.no_repeat_ngram import NoRepeatNGram
from decodekit.plugins.author.rows import make_rows
from decodekit.plugins.pick.adaptive_p import AdaptiveP
from decodekit.plugins.pick.keyed_gumbel import KeyedGumbel
from decodekit.plugins.pick.mirostat import Mirostat

VOCAB = 9
Case = tuple[type[Stage], dict[str, Any]]
BY_TOKENS: list[Case] = [
    (NoRepeatNGram, {"n": 2}),
    (NoRepeatNGram, {"n": 3, "window": 6, "scope": "both"}),
    (Dry, {"multiplier": 1.0, "allowed_length": 1, "breakers": [[8], [7, 1]]}),
    (Dry, {"multiplier": 1.0, "allowed_length": 2, "range": 5, "breakers": []}),
    (SynthId, {"keys": [5, 77], "ngram": 3}),
    (KeyedGumbel, {"key": 11, "context": 2}),
]
CARRIED: list[Case] = [
    (Mirostat, {"tau": 1.5, "eta": 0.9}),
    (Mirostat, {"mode": 1, "tau": 1.5, "eta": 0.9}),
    (AdaptiveP, {"target": 0.4, "decay": 0.5}),
]
Tokens = st.lists(st.integers(0, VOCAB - 1), max_size=14)


def named(cases: list[Case]) -> Any:
    return pytest.mark.parametrize(
        ("stage", "params"), cases, ids=[f"{stage.name}-{params}" for stage, params in cases]
    )


class Life:
    """One sequence with its state."""

    def __init__(self, stage: type[Stage], params: dict[str, Any], prompt: list[int]) -> None:
        self.stage, self.given, self.prompt = stage, params, prompt
        self.output: list[int] = []
        self.runner = stage.prototype()
        self.params = make_rows(stage, [params], vocab_size=VOCAB).view.params[0]
        self.state = self.runner.open(self.params, prompt)

    def accept(self, tokens: list[int]) -> None:
        self.runner.accept(self.state, tokens)
        self.output += tokens

    def rollback(self, count: int) -> None:
        self.runner.rollback(self.state, count)
        del self.output[len(self.output) - count :]

    def effect(self, state: Any = None) -> Tensor:
        """What the stage does to a fixed row, or which token it picks there."""
        logits = torch.linspace(1.0, -1.0, VOCAB)[None].clone()
        view = make_rows(
            self.stage,
            [self.given],
            vocab_size=VOCAB,
            prompts=[self.prompt],
            outputs=[self.output],
        ).view
        view.states = [self.state if state is None else state]
        if isinstance(self.runner, Picker):
            shown = PickView(ranking=None, dense=logits, has_cut=False, vocab_size=VOCAB)
            return self.runner.pick(shown, view)
        self.runner.transform(logits, view)
        return logits[0]


@named(BY_TOKENS)
@settings(max_examples=40)
@given(prompt=Tokens, first=Tokens, second=Tokens)
def test_the_state_is_a_function_of_the_tokens(
    stage: type[Stage],
    params: dict[str, Any],
    prompt: list[int],
    first: list[int],
    second: list[int],
) -> None:
    life = Life(stage, params, prompt)
    life.accept(first)
    before = life.effect()

    twin = life.runner.fork(life.state)
    life.accept(second)
    after = life.effect()
    forked = life.effect(life.runner.rebuild(life.params, prompt, first + second))
    life.rollback(len(second))

    assert torch.equal(after, forked)
    assert torch.equal(life.effect(), before)
    assert torch.equal(life.effect(twin), before)
    assert torch.equal(life.effect(life.runner.rebuild(life.params, prompt, first)), before)


@named(BY_TOKENS)
def test_some_state_changes_something(stage: type[Stage], params: dict[str, Any]) -> None:
    life = Life(stage, params, [3, 4, 5])
    seen = {tuple(life.effect().tolist())}

    for token in [3, 4, 6, 3, 4, 6, 3, 4]:
        life.accept([token])
        seen.add(tuple(life.effect().tolist()))

    assert len(seen) > 2


def values(life: Life) -> list[Any]:
    return list(life.state.values)


@named(CARRIED)
def test_a_chosen_token_moves_the_value_and_another_does_not(
    stage: type[Stage], params: dict[str, Any]
) -> None:
    life = Life(stage, params, [1])
    chosen = int(life.effect())

    life.accept([chosen])
    moved = values(life)
    life.accept([chosen])  # nothing was picked at this position
    life.effect()
    life.accept([(int(life.effect()) + 1) % VOCAB])  # another token than the one picked

    assert moved[0] != moved[1]
    assert values(life) == [*moved, moved[1], moved[1]]


@named(CARRIED)
def test_a_carried_value_goes_back_with_its_tokens(
    stage: type[Stage], params: dict[str, Any]
) -> None:
    life = Life(stage, params, [1])
    for _ in range(5):
        life.accept([int(life.effect())])
    before = values(life)
    twin = life.runner.fork(life.state)

    life.rollback(2)
    again: list[int] = []
    for _ in range(2):
        again.append(int(life.effect()))
        life.accept(again[-1:])

    assert len(set(before)) > 3
    assert values(life) == before
    assert twin.values == before
    life.rollback(5)
    assert values(life) == before[:1]
    assert twin.values == before


@named(CARRIED)
def test_the_state_is_marked_as_carried(stage: type[Stage], params: dict[str, Any]) -> None:
    assert stage.caps.carried
    assert stage.caps.stateful
