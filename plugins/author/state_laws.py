"""The laws of state: open, accept, rollback, fork and rebuild agree, and `transform` only reads.

States are compared by what they make the stage do, since only the stage knows what is in them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.stage import Stage
from .report import Breach, NotTried
from .trials import HISTORIES, Bench, Row

LENGTHS = (1, 2, 6)  # tokens of a life, the short ones first
LETTERS = 5  # few different tokens, so that histories repeat themselves


class Life:
    """One sequence of a stage with its state."""

    def __init__(
        self, bench: Bench, params: Mapping[str, object], size: int, prompt: Sequence[int]
    ) -> None:
        self.bench, self.given, self.size = bench, params, size
        self.prompt = tuple(prompt)
        self.output: list[int] = []
        self.runner = bench.stage.prototype()
        self.params = bench.bind(self.row())
        self.state = self.call("open", self.params, self.prompt)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the stage; what it raises becomes a Breach."""
        try:
            return getattr(self.runner, method)(*arguments)
        except Exception as error:
            text = " ".join(str(error).split())
            raise Breach(f"{method} raised {type(error).__name__}: {text}", self.told()) from error

    def accept(self, tokens: Sequence[int]) -> None:
        self.call("accept", self.state, list(tokens))
        self.output += tokens

    def rollback(self, count: int) -> None:
        self.call("rollback", self.state, count)
        del self.output[len(self.output) - count :]

    def fork(self) -> Life:
        twin = copy.copy(self)
        twin.output = list(self.output)
        twin.state = self.call("fork", self.state)
        return twin

    def rebuilt(self) -> Life:
        twin = copy.copy(self)
        twin.output = list(self.output)
        twin.state = self.call("rebuild", self.params, self.prompt, list(self.output))
        return twin

    def row(self) -> Row:
        """Return the row at this position, as a model that knows nothing of the text gives it."""
        generator = torch.Generator().manual_seed(31 + len(self.output))
        values = (torch.randn(self.size, generator=generator) * 8).round() / 8
        return Row(values, self.given, self.prompt, tuple(self.output), key=5)

    def effect(self) -> Tensor:
        """Return what the stage makes of that row, or which token it picks."""
        return self.bench.run_group([self.row()], [self.params], states=[self.state])[0]

    def told(self) -> str:
        return f"{dict(self.given)}, prompt {list(self.prompt)}, output {self.output}"


def reads_only_in_transform(bench: Bench) -> None:
    """`transform` reads the state: any number of runs at a position leaves it as one would."""
    for make, tokens in _lives(bench):
        counts = (1, 3) if bench.stage.caps.carried else (1, 3, 0)
        lives = [make() for _ in counts]
        for place in range(len(tokens) + 1):
            effects = []
            for life, count in zip(lives, counts, strict=True):
                for _ in range(count):
                    life.effect()
                effects.append(_peek(life))
            if not _same(effects):
                raise Breach(
                    f"after {place} tokens it does something else if transform ran three times at "
                    "each position instead of once: transform changes the state, which only accept "
                    "may",
                    lives[0].told(),
                )
            if place < len(tokens):
                for life in lives:
                    life.accept(tokens[place : place + 1])


def accepts_in_any_pieces(bench: Bench) -> None:
    """Tokens accepted together are those accepted one by one."""
    _not_carried(bench)
    for make, tokens in _lives(bench):
        once, pieces = make(), make()
        once.accept(tokens)
        for token in tokens:
            pieces.accept([token])
        if not _same([once.effect(), pieces.effect()]):
            raise Breach(
                f"accept of {len(tokens)} tokens at once gives another state than one by one",
                once.told(),
            )


def takes_tokens_back(bench: Bench) -> None:
    """After `rollback(n)` the state is as before the last n tokens."""
    for make, tokens in _lives(bench):
        for count in sorted({1, (len(tokens) + 1) // 2, len(tokens)}):
            life = make()
            effects = [_peek(life)]
            for token in tokens:
                life.effect()
                life.accept([token])
                effects.append(_peek(life))
            life.rollback(count)
            if not _same([effects[len(tokens) - count], _peek(life)]):
                raise Breach(
                    f"after accepting {tokens[len(tokens) - count :]} and taking it back it does "
                    "something else than before: rollback does not undo accept",
                    life.told(),
                )
            for token in tokens[len(tokens) - count :]:
                life.effect()
                life.accept([token])
            if not _same([effects[-1], _peek(life)]):
                raise Breach(
                    f"with {count} tokens taken back and accepted again it does something else",
                    life.told(),
                )


def forks_apart(bench: Bench) -> None:
    """A fork begins as its origin, and neither sees what the other accepts."""
    for make, tokens in _lives(bench):
        life, control = make(), make()
        for each in (life, control):
            for token in tokens:
                each.effect()
                each.accept([token])
        twin = life.fork()
        if not _same([_peek(control), _peek(twin)]):
            raise Breach("a fork does something else than the state it was made of", life.told())
        for token in (tokens[0], *reversed(tokens)):
            twin.accept([(token + 1) % life.size])
        if not _same([_peek(control), _peek(life)]):
            raise Breach(
                "a state changed when its fork accepted tokens: fork must copy what accept changes",
                life.told(),
            )
        second = life.fork()
        life.accept(list(tokens))
        if not _same([_peek(control), _peek(second)]):
            raise Breach(
                "a fork changed when its origin accepted tokens: fork must copy what accept "
                "changes",
                life.told(),
            )


def rebuilds_from_tokens(bench: Bench) -> None:
    """`rebuild(params, prompt, output)` is the state that those tokens lead to."""
    _not_carried(bench)
    for make, tokens in _lives(bench):
        life = make()
        for token in tokens:
            life.effect()
            life.accept([token])
        if not _same([life.effect(), life.rebuilt().effect()]):
            raise Breach(
                "rebuilt from its tokens, as after a preemption, it does something else than the "
                "state that accepted them",
                life.told(),
            )


def shares_nothing(bench: Bench) -> None:
    """Two sequences that advance in turn are as two that advance alone."""
    for make, tokens in _lives(bench):
        alone = make()
        for token in tokens:
            alone.effect()
            alone.accept([token])
        expected = _peek(alone)
        one, other = make(), make()
        for token in tokens:
            one.effect()
            one.accept([token])
            other.accept([(token + 1) % other.size])
        if not _same([expected, _peek(one)]):
            raise Breach(
                "a sequence does something else when another one advances beside it: their states "
                "share something",
                one.told(),
            )


# --- small parts ----------------------------------------------------------------------------------


def _lives(bench: Bench) -> Iterator[tuple[Callable[[], Life], list[int]]]:
    """Yield makers of equal lives with the tokens to give them, short ones first."""
    stage = bench.stage
    if stage.open is Stage.open and stage.rebuild is Stage.rebuild:
        raise NotTried("it keeps no state")
    size_of: dict[str, tuple[int, dict[str, object]]] = {}
    for size, params in bench.runs():
        if size >= LETTERS:
            size_of.setdefault(repr(params), (size, params))
    rng = random.Random(11)
    for length in LENGTHS:
        for size, params in size_of.values():
            for number, (prompt, output) in enumerate(bench.histories[len(HISTORIES) - 3 :]):
                drawn = [rng.randrange(LETTERS) for _ in range(length)]
                given = [token % size for token in output[:length]]
                start = [token % size for token in prompt]
                tokens = given if number % 2 == 0 and given else drawn
                yield _maker(bench, params, size, start), tokens


def _maker(
    bench: Bench, params: Mapping[str, object], size: int, prompt: Sequence[int]
) -> Callable[[], Life]:
    return lambda: Life(bench, params, size, prompt)


def _peek(life: Life) -> Tensor:
    """Return the effect of a copy of the state, so that looking leaves no trace."""
    try:
        state = copy.deepcopy(life.state)
    except Exception:
        return life.effect()  # it cannot be copied so
    twin = copy.copy(life)
    twin.state = state
    return twin.effect()


def _same(effects: Sequence[Tensor]) -> bool:
    return all(torch.equal(effects[0], other) for other in effects[1:])


def _not_carried(bench: Bench) -> None:
    if bench.stage.caps.carried:
        raise NotTried("its state is carried: it holds what tokens do not tell")
