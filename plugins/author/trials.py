"""The rows that a plugin is tried on, and the bench that runs it on them as the engine would.

A row is everything that its outcome may depend on. Small vocabularies come first, so that the first
breach found is a small one.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.batch import PickView, Ranking, Rows, RowView, Seen
from ...core.errors import DecodekitError
from ...core.params import SamplingParams
from ...core.slots import SlotTable
from ...core.stage import BindContext, CutStage, Need, Picker, Stage
from .report import Breach
from .rows import CPU, ToySequence, make_context
from .toys import ByteTokens

SIZES = (1, 2, 5, 8, 65, 257)
TIMED = 1009  # the vocabulary at which a stage is timed
INF = float("inf")
MOST_SHOWN = 8
History = tuple[Sequence[int], Sequence[int]]  # prompt, output
HISTORIES: tuple[History, ...] = (
    ((0,), ()),
    ((1, 2), (2,)),
    ((2, 1, 2), (1, 2)),
    ((3, 4, 3, 4), (3, 4, 3)),
    ((0, 1, 2, 3, 1), (1, 2, 3, 1, 1, 4)),
    ((4,), (4, 4, 4, 4, 4, 4)),
    ((5, 3, 1), (0, 2, 4, 1, 3, 5, 2, 4, 1)),
)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One row and all it depends on."""

    values: Tensor  # float32 [vocab]
    params: Mapping[str, object]
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    key: int = 0
    branch: int = 0

    def __str__(self) -> str:
        known = self.values.tolist()
        shown = ", ".join(f"{value:g}" for value in known[:MOST_SHOWN])
        more = f", ... {len(known)} in all" if len(known) > MOST_SHOWN else ""
        text = f"logits [{shown}{more}] with {dict(self.params)}"
        if self.output or self.prompt != (0,):
            text += f", prompt {list(self.prompt)}, output {list(self.output)}"
        return text


@dataclass(slots=True)
class Watch:
    """What a stage did besides its work, while it was watched."""

    reads: set[Need] = field(default_factory=set)
    columns: set[str] = field(default_factory=set)
    draws: bool = False
    returned: object = None
    changed: set[str] = field(default_factory=set)  # names on the object or its class
    generators: set[str] = field(default_factory=set)  # global ones that moved


class WatchedView(RowView):
    """A view that notes what is read through it."""

    __slots__ = ("watch",)
    watch: Watch

    @property
    def seen(self) -> Seen:
        self.watch.reads.add(Need.COUNTS)
        return super().seen

    def column(self, name: str) -> Tensor:
        self.watch.columns.add(name)
        try:
            return super().column(name)
        except KeyError:
            held = sorted(type(self.params[0]).model_fields) if self.params else []
            raise Breach(
                f"it asks for the column {name!r}, which its table does not have; a column is a "
                f"numeric parameter (parameters: {', '.join(held) or 'none'}) or what table returns"
            ) from None

    def prompt(self, row: int) -> Sequence[int]:
        self.watch.reads.add(Need.PROMPT)
        return super().prompt(row)

    def output(self, row: int) -> Sequence[int]:
        self.watch.reads.add(Need.OUTPUT)
        return super().output(row)

    def uniform(self, ids: Tensor, purpose: int | None = None) -> Tensor:
        self.watch.draws = True
        return super().uniform(ids, purpose)

    def exponential(self, ids: Tensor, purpose: int | None = None) -> Tensor:
        self.watch.draws = True
        return super().exponential(ids, purpose)


class Bench:
    """Runs one stage or picker on rows; counts them."""

    def __init__(
        self,
        stage: type[Stage],
        examples: Sequence[Mapping[str, object]],
        *,
        histories: Sequence[History] = (),
        sizes: Sequence[int] = SIZES,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        self.stage = stage
        self.examples = [dict(example) for example in examples] or [{}]
        self.histories = (*HISTORIES, *histories)
        self.sizes = tuple(sorted(sizes))
        self.changes = dict(context or {})
        self.num_rows = 0
        self.is_picker = issubclass(stage, Picker)
        self._tried: dict[str, tuple[list[Row], Tensor]] = {}

    # --- rows -------------------------------------------------------------------------------------

    def rows(self, size: int, params: Mapping[str, object], count: int | None = None) -> list[Row]:
        """Return rows of many shapes and histories; the same for the same arguments."""
        found: list[Row] = []
        shapes = _shapes_of(size)
        total = max(len(shapes), len(self.histories)) if count is None else count
        for number in range(total):
            prompt, output = self.histories[number % len(self.histories)]
            found.append(
                Row(
                    shapes[number % len(shapes)],
                    params,
                    tuple(token % size for token in prompt),
                    tuple(token % size for token in output),
                    key=7000 + number,
                )
            )
        return found

    def runs(self) -> Iterator[tuple[int, dict[str, object]]]:
        """Yield sizes and examples that can be bound and that do something, small sizes first."""
        for size in self.sizes:
            for example in self.examples:
                if self.acts(example, size):
                    yield size, example

    def acts(self, params: Mapping[str, object], size: int) -> bool:
        """Say whether `params` can be bound at a vocabulary of `size` and are no identity there."""
        try:
            bound = self.bind(Row(torch.zeros(size), params))
        except DecodekitError:
            return False
        return not self.stage.is_identity(bound)

    def context(self, row: Row) -> BindContext:
        """Return what `bind` is shown for a row."""
        size = row.values.shape[0]
        base = {
            "tokenizer_size": size,
            "tokenizer": ByteTokens(size),
            "request": _REQUEST,
            "stop_ids": (0, size - 1),
            "prompt_ids": row.prompt,
            "prompt_len": len(row.prompt),
        }
        return make_context(size, **{**base, **self.changes})

    def bind(self, row: Row) -> Any:
        """Return what the stage makes of a row's parameters; DecodekitError where it refuses."""
        stage = self.stage
        return stage.bind(stage.validate(row.params), self.context(row))

    # --- runs -------------------------------------------------------------------------------------

    def run(self, rows: Sequence[Row], watch: Watch | None = None) -> Tensor:
        """Return the rows after the stage [rows, vocab], or the chosen ids [rows].

        Grouped by structure as the engine does; identities are left out. What the stage raises
        becomes a Breach with the rows.
        """
        bound = [self._ask(self.bind, row) for row in rows]
        size = rows[0].values.shape[0]
        shape = (len(rows),) if self.is_picker else (len(rows), size)
        result = torch.full(shape, -1, dtype=torch.int64) if self.is_picker else self.stack(rows)
        groups: dict[Hashable, list[int]] = {}
        for place, params in enumerate(bound):
            if self.is_picker or not self.stage.is_identity(params):
                groups.setdefault(self.stage.structure(params), []).append(place)
        for members in groups.values():
            part = [rows[place] for place in members]
            result[members] = self.run_group(part, [bound[place] for place in members], watch)
        return result

    def tried(self, size: int, params: Mapping[str, object]) -> tuple[list[Row], Tensor]:
        """Return the rows of these parameters and what became of them; run once for all laws."""
        key = f"{size} {sorted(params.items())!r}"
        if key not in self._tried:
            rows = self.rows(size, params)
            self._tried[key] = (rows, self.run(rows))
        return self._tried[key]

    def run_group(
        self,
        rows: Sequence[Row],
        bound: Sequence[Any],
        watch: Watch | None = None,
        states: Sequence[Any] | None = None,
    ) -> Tensor:
        """Run the stage once on rows of one structure; `states` replaces those of their tokens."""
        self.num_rows += len(rows)
        logits = self.stack(rows)
        runner = self.stage.prototype()
        before = (dict(vars(runner)), dict(vars(self.stage)))
        generators = {} if watch is None else _generators()
        try:
            view = self.view(rows, bound, runner, watch or Watch(), states)
            returned, result = self._deed(runner, logits, view)
        except Breach as breach:
            raise Breach(breach.sentence, str(rows[0])) from None
        except Exception as error:
            raise Breach(f"it raised {_told(error)}", _which(self, rows, bound, error)) from error
        if watch is None:
            return result
        watch.returned = returned
        watch.generators |= {
            name for name, state in _generators().items() if state != generators[name]
        }
        for then, now in zip(before, (vars(runner), vars(self.stage)), strict=True):
            watch.changed |= {
                name for name in {*then, *now} if then.get(name, INF) is not now.get(name, INF)
            }
        return result

    def _deed(self, runner: Stage, logits: Tensor, view: RowView) -> tuple[object, Tensor]:
        if isinstance(runner, Picker):
            pick = PickView(ranking=None, dense=logits, has_cut=True, vocab_size=logits.shape[1])
            tokens = runner.pick(pick, view)
            return tokens, tokens
        returned: Any = runner.transform(logits, view)  # type: ignore[func-returns-value]
        return returned, logits

    def view(
        self,
        rows: Sequence[Row],
        bound: Sequence[Any],
        runner: Stage,
        watch: Watch,
        states: Sequence[Any] | None = None,
    ) -> WatchedView:
        """Return the stage's view of rows of one structure."""
        stage, count, size = self.stage, len(rows), rows[0].values.shape[0]
        table = SlotTable(2 * count + 1, size, CPU)
        sources = [
            ToySequence(2 * (count - 1 - place), row.key, row.branch, row.prompt, list(row.output))
            for place, row in enumerate(rows)
        ]
        built: list[Any] = []
        for source, params in zip(sources, bound, strict=True):
            table.write(source.slot, stage.name, stage.table(params))
            if Need.COUNTS in stage.caps.needs:
                table.seen.open(source.slot, source.prompt_ids, source.output_ids)
            if states is None:
                built.append(runner.rebuild(params, source.prompt_ids, source.output_ids))
        group = Rows(sources, table, size, self.context(rows[0]).tokenizer_size)
        group.advance()
        view = WatchedView(
            group,
            stage=stage.name,
            instance=stage.name,
            params=bound,
            states=built if states is None else states,
            mode=(stage.mode if issubclass(stage, CutStage) else stage.structure)(bound[0]),
            min_keep=getattr(bound[0], "min_keep", 1) > 1,
        )
        view.watch = watch
        return view

    @staticmethod
    def stack(rows: Sequence[Row]) -> Tensor:
        """Return the rows' logits, float32 [rows, vocab]."""
        return torch.stack([row.values for row in rows])

    def pick_ranked(self, rows: Sequence[Row], bound: Sequence[Any]) -> Tensor:
        """Let a picker choose from ranked lists of every alive token, as after a fused cut."""
        runner = self.stage.prototype()
        assert isinstance(runner, Picker)
        ranked = Ranking.of_row(self.stack(rows))
        width = max(int(ranked.alive.sum(1).max()), 1)
        short = Ranking(ranked.values[:, :width], ranked.ids[:, :width])
        size = rows[0].values.shape[0]
        view = PickView(ranking=short, dense=None, has_cut=True, vocab_size=size)
        return runner.pick(view, self.view(rows, bound, runner, Watch()))

    def _ask(self, question: Any, row: Row) -> Any:
        try:
            return question(row)
        except Exception as error:
            raise Breach(f"bind raised {_told(error)}", str(row)) from error


_REQUEST = SamplingParams(max_tokens=24).snapshot()


@lru_cache(maxsize=32)
def _shapes_of(size: int) -> tuple[Tensor, ...]:
    return tuple(_shapes(size, torch.Generator().manual_seed(1000 + size)))


def _shapes(size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield rows of `size`: plain, masked, spiky, flat, one alive, large, two equal, near."""

    def normal(scale: float) -> Tensor:
        return torch.randn(size, generator=generator) * scale

    def masked(values: Tensor) -> Tensor:
        dead = torch.rand(size, generator=generator) < 0.33
        dead[int(torch.randint(size, (1,), generator=generator))] = False
        return values.masked_fill(dead, -INF)

    alone = torch.full((size,), -INF)
    alone[size - 1] = -12.5
    pair = normal(1.0) - 4.0
    pair[0] = pair[size - 1] = 3.0
    for _ in range(2):
        yield (normal(2.0) * 4).round() / 4  # on a grid, so that ties are common
        yield masked((normal(2.0) * 4).round() / 4)
        yield masked(normal(3.0))
    yield normal(8.0)
    yield torch.full((size,), 1.25)
    yield alone
    yield normal(1.0) * 3e4
    yield pair
    yield 5.0 + normal(1e-3)
    yield masked(normal(0.3) - 50.0)
    yield normal(1.0)


def replaced(row: Row, **changes: Any) -> Row:
    """Return a row with some of its parts changed."""
    return replace(row, **changes)


def _generators() -> dict[str, Hashable]:
    """Return the state of every global generator."""
    kind, keys, at, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": random.getstate(),
        "numpy": (kind, np.asarray(keys).tobytes(), at, *rest),
    }


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _which(bench: Bench, rows: Sequence[Row], bound: Sequence[Any], error: Exception) -> str:
    """Name the row that makes it raise, if one does alone."""
    if len(rows) > 1:
        for row, params in zip(rows, bound, strict=True):
            try:
                bench.run_group([row], [params])
            except Breach:
                return str(row)
    return str(rows[0])
