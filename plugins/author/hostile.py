"""An engine that does everything to a request that a real one may, on a toy model.

It is the real planner and the real chain with a table for a model and with no scheduler: a script
says when a sequence comes, waits, loses its place and is built anew, drafts tokens and takes them
back, rewinds, or forks, and in what company and order rows run. The tokens of each sequence must be
those that it gets alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core.chain import ChainRunner
from ...core.params import SamplingParams
from ...core.plan import Planner
from ...core.registry import Registry
from ...core.request import Request
from ...core.request import Sequence as TokenSequence
from ...core.stage import Stage
from .rows import CPU
from .toys import ByteTokens

VOCAB = 40
MOST_TOKENS = 14
Chain = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its chain, prompt, key, and how many tokens it wants."""

    chain: tuple[Any, ...]
    prompt: tuple[int, ...]
    key: int
    num_tokens: int = MOST_TOKENS


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens to request `number` before step `step`.

    deed: "wait" (leaves for `count` steps and keeps its slot), "preempt" (leaves for `count` steps
    and is built anew from its tokens in another slot), "rewind" (its last `count` tokens are taken
    back), "draft" (`count` other tokens are accepted, run, and taken back), "fork" (when the
    request has `step` tokens, a branch with its own noise goes on from there; `count` names it).
    """

    step: int
    deed: str
    number: int
    count: int = 1

    def __str__(self) -> str:
        return f"step {self.step}: {self.deed} request {self.number} ({self.count})"


@dataclass(slots=True)
class Answer:
    """What a sequence got: tokens, and the sentence of what ended it, if anything did."""

    tokens: list[int] = field(default_factory=list)
    error: str | None = None


class HostileEngine:
    """Runs `asks` under a script of events. `fusion=False` keeps to dense rows."""

    def __init__(
        self,
        asks: Sequence[Ask],
        *,
        vocab_size: int = VOCAB,
        fusion: bool = True,
        seed: int = 0,
        context: Mapping[str, Any] | None = None,
        calm: HostileEngine | None = None,
    ) -> None:
        self.calm = calm  # whose solo runs count; None: its own
        self.asks = list(asks)
        self.vocab_size = vocab_size
        self.fusion = fusion
        self.seed = seed
        self.context = dict(context or {})
        self.planner = _planner(vocab_size, dict(self.context))
        self.table = _model(vocab_size)
        self._alone: dict[tuple[int, tuple[Event, ...]], dict[str, Answer]] = {}

    def run(self, events: Sequence[Event] = ()) -> dict[str, Answer]:
        """Return the answers by name: "0", "1", ... and "0+2" for branch 2 of request 0."""
        return _Run(self, list(enumerate(self.asks)), events).to_the_end()

    def alone(self, number: int, forks: Sequence[Event] = ()) -> dict[str, Answer]:
        """Return the answers of one request with nothing around it, and of its forks."""
        if self.calm is not None:
            return self.calm.alone(number, forks)
        key = (number, tuple(forks))
        if key not in self._alone:
            asks = [(number, self.asks[number])]
            self._alone[key] = _Run(self, asks, forks, is_calm=True).to_the_end()
        return self._alone[key]

    def differences(self, events: Sequence[Event]) -> list[str]:
        """Run a script and say in one sentence each which answers are not those given alone."""
        found = self.run(events)
        told: list[str] = []
        for number in range(len(self.asks)):
            forks = [event for event in events if event.deed == "fork" and event.number == number]
            for name, answer in self.alone(number, forks).items():
                told += _difference(name, answer, found.get(name))
        return told

    def shrunk(self, events: Sequence[Event]) -> list[Event]:
        """Return as few of the events as still make a difference."""
        kept = list(events)
        for event in list(kept):
            fewer = [other for other in kept if other is not event]
            if self.differences(fewer):
                kept = fewer
        return kept


def script(seed: int, num_requests: int, num_events: int) -> list[Event]:
    """Return a random script over the life of some requests."""
    rng = random.Random(seed)
    deeds = ("wait", "preempt", "preempt", "rewind", "rewind", "draft", "draft", "fork")
    events = [
        Event(
            step=rng.randrange(1, MOST_TOKENS - 2),
            deed=rng.choice(deeds),
            number=rng.randrange(num_requests),
            count=rng.randint(1, 4),
        )
        for _ in range(num_events)
    ]
    return sorted(events, key=lambda event: event.step)


class _Run:
    """One run of a script."""

    def __init__(
        self,
        engine: HostileEngine,
        asks: Sequence[tuple[int, Ask]],
        events: Sequence[Event],
        is_calm: bool = False,
    ) -> None:
        self.engine = engine
        self.events = list(events)
        self.is_calm = is_calm
        self.rng = random.Random(engine.seed)
        size = engine.vocab_size
        self.runner = ChainRunner(
            max_slots=64,
            vocab_size=size,
            tokenizer_size=size,
            device=CPU,
            fusion=engine.fusion,
        )
        self.free = list(range(64))
        self.rng.shuffle(self.free)
        self.answers: dict[str, Answer] = {}
        self.sequences: dict[str, TokenSequence] = {}
        self.targets: dict[str, int] = {}
        self.away: dict[str, int] = {}  # steps until it comes back
        self.lost: set[str] = set()  # of those, the ones without a slot
        for number, ask in asks:
            name = str(number)
            self.sequences[name] = self._sequence(ask, 0)
            self.answers[name] = Answer()
            self.targets[name] = ask.num_tokens
            self.away[name] = 0 if is_calm else self.rng.choice((0, 0, 1, 3))
            self.lost.add(name)

    def to_the_end(self) -> dict[str, Answer]:
        """Step until every sequence has its tokens."""
        for step in range(40 * MOST_TOKENS):
            self._happen(step)
            if not self._step():
                break
        return self.answers

    # --- a step -------------------------------------------------------------------------------

    def _step(self) -> bool:
        waiting = [name for name in self.sequences if self.away.get(name, 0) > 0]
        for name in waiting:
            self.away[name] -= 1
        here = [name for name in self.sequences if self._goes_on(name) and name not in waiting]
        if not self.is_calm:
            self.rng.shuffle(here)
        ready = [name for name in here if name not in self.lost or self._open(name)]
        if ready:
            self._run([self.sequences[name] for name in ready], ready)
        return bool(here or waiting)

    def _goes_on(self, name: str) -> bool:
        answer = self.answers[name]
        return answer.error is None and len(answer.tokens) < self.targets[name]

    def _run(self, sequences: list[TokenSequence], names: list[str]) -> None:
        result = self.runner.run(sequences, self._logits(sequences))
        good = [place for place in range(len(names)) if place not in result.errors]
        for place, error in result.errors.items():
            self._fail(names[place], str(error))
        late = self.runner.accept(
            [sequences[place] for place in good], [result.tokens[place] for place in good]
        )
        for local, error in late.items():
            self._fail(names[good[local]], str(error))
        for local, place in enumerate(good):
            if local not in late:
                sequences[place].output_ids.append(result.tokens[place])
                self.answers[names[place]].tokens = list(sequences[place].output_ids)

    def _logits(self, sequences: Sequence[TokenSequence]) -> Tensor:
        rows = []
        for sequence in sequences:
            last = [*sequence.prompt_ids, *sequence.output_ids][-1]
            turn = 7 * len(sequence.output_ids) % self.engine.vocab_size
            rows.append(self.engine.table[last].roll(turn))
        return torch.stack(rows)

    def _fail(self, name: str, error: str) -> None:
        self.answers[name].error = error

    # --- events ---------------------------------------------------------------------------------

    def _happen(self, step: int) -> None:
        for event in self.events:
            name = str(event.number)
            if name not in self.sequences or name in self.lost or not self._goes_on(name):
                continue
            if event.deed == "fork":
                here = len(self.sequences[name].output_ids)
                if here == event.step and f"{name}+{event.count}" not in self.sequences:
                    self._fork(name, event.count)
                continue
            if event.step != step:
                continue
            if event.deed == "wait":
                self.away[name] = event.count
            elif event.deed == "preempt":
                self._preempt(name, event.count)
            elif event.deed == "rewind":
                self._rewind(name, min(event.count, len(self.sequences[name].output_ids)))
            elif event.deed == "draft":
                self._draft(name, event.count)

    def _preempt(self, name: str, steps: int) -> None:
        sequence = self.sequences[name]
        self.free.insert(0, sequence.slot)
        sequence.slot = -1
        self.away[name] = steps
        self.lost.add(name)

    def _open(self, name: str) -> bool:
        sequence = self.sequences[name]
        sequence.slot = self.free.pop()
        self.lost.discard(name)
        try:
            self.runner.program(sequence.plan)
            self.runner.open(sequence)
        except Exception as error:
            self._fail(name, str(error))
            return False
        return True

    def _rewind(self, name: str, count: int) -> None:
        sequence = self.sequences[name]
        if not count:
            return
        gone = sequence.output_ids[len(sequence.output_ids) - count :]
        try:
            self._each_state(sequence, lambda stage, state: stage.rollback(state, count))
        except Exception as error:
            self._fail(name, f"rollback raised {type(error).__name__}: {error}")
            return
        if self.runner.program(sequence.plan).needs_seen:
            self.runner.table.seen.rollback(sequence.slot, gone)
        del sequence.output_ids[len(sequence.output_ids) - count :]
        self.answers[name].tokens = list(sequence.output_ids)

    def _draft(self, name: str, count: int) -> None:
        """Accept tokens that another model might have drafted, run each place, take them back."""
        sequence = self.sequences[name]
        done = 0
        for _ in range(count):
            self.runner.run([sequence], self._logits([sequence]))
            token = self.rng.randrange(self.engine.vocab_size)
            late = self.runner.accept([sequence], [token])
            if late:
                self._fail(name, str(late[0]))
                return
            sequence.output_ids.append(token)
            done += 1
        self._rewind(name, done)

    def _fork(self, name: str, branch: int) -> None:
        """Let a branch go on from here, with its own noise."""
        parent = self.sequences[name]
        twin_name = f"{name}+{branch}"
        twin = self._sequence(self.engine.asks[int(name)], branch)
        twin.request = parent.request
        twin.output_ids = list(parent.output_ids)
        twin.slot = self.free.pop()
        self.sequences[twin_name] = twin
        self.answers[twin_name] = Answer(list(twin.output_ids))
        self.targets[twin_name] = self.targets[name]
        try:
            self.runner.program(parent.plan)
            self.runner.open(twin)
            twin.states = [
                self._forked(entry.stage, state, own)
                for entry, state, own in zip(
                    parent.plan.entries, parent.states, twin.states, strict=True
                )
            ]
        except Exception as error:
            self._fail(twin_name, f"fork raised {type(error).__name__}: {error}")

    def _forked(self, stage: type[Stage], state: Any, rebuilt: Any) -> Any:
        """Return a fork; in a calm run the state of its tokens, which a fork must equal."""
        if not _keeps(stage) or (self.is_calm and not stage.caps.carried):
            return rebuilt
        return stage.prototype().fork(state)

    @staticmethod
    def _each_state(sequence: TokenSequence, deed: Any) -> None:
        for entry, state in zip(sequence.plan.entries, sequence.states, strict=True):
            if _keeps(entry.stage):
                deed(entry.stage.prototype(), state)

    def _sequence(self, ask: Ask, branch: int) -> TokenSequence:
        params = SamplingParams(chain=list(ask.chain), max_tokens=MOST_TOKENS, ignore_eos=True)
        frozen = params.snapshot()
        plan = self.engine.planner.admit(frozen, prompt_ids=ask.prompt)
        request = Request("toy", None, ask.prompt, frozen, plan, ask.key, 0, 0.0, 0)
        sequence = TokenSequence(
            uid=len(self.sequences),
            request=request,
            branch=branch,
            prompt_ids=ask.prompt,
            prompt_len=len(ask.prompt),
        )
        request.sequences = [sequence]
        return sequence


def _keeps(stage: type[Stage]) -> bool:
    return stage.open is not Stage.open or stage.rebuild is not Stage.rebuild


@lru_cache(maxsize=1)
def built_ins() -> Registry:
    """Return a registry of the built-in plugins alone."""
    return Registry.load(autoload=False)


def _planner(vocab_size: int, context: dict[str, Any]) -> Planner:
    return Planner(
        built_ins(),
        vocab_size=vocab_size,
        tokenizer_size=context.get("tokenizer_size", vocab_size),
        max_model_len=context.get("max_model_len", 4096),
        device=CPU,
        eos_ids=context.get("eos_ids", (0,)),
        tokenizer=context.get("tokenizer", ByteTokens(vocab_size)),
        reasoning=context.get("reasoning"),
    )


@lru_cache(maxsize=8)
def _model(vocab_size: int) -> Tensor:
    """Return logits [from, to] on a grid; a row turns with the position."""
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randint(-24, 25, (vocab_size, vocab_size), generator=generator) / 8


def _difference(name: str, alone: Answer, found: Answer | None) -> list[str]:
    if found is None or (found.tokens == alone.tokens and found.error == alone.error):
        return []
    if found.error != alone.error:
        return [f"request {name} ended with {found.error!r}, alone with {alone.error!r}"]
    place = next(
        (i for i, (a, b) in enumerate(zip(alone.tokens, found.tokens, strict=False)) if a != b),
        min(len(alone.tokens), len(found.tokens)),
    )
    return [
        f"request {name} got {found.tokens[place : place + 1]} at position {place}, alone "
        f"{alone.tokens[place : place + 1]}"
    ]
