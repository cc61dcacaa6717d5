"""Rows without an engine, so that a stage can be tried alone.

    logits = apply_stage(TopA, torch.randn(2, 100), [{"a": 0.2}, {"a": 0.5}])

`apply_stage` does with one stage what the engine does: validate, bind, leave identities out, group
rows of one structure, write columns, open states, transform. `make_rows` stops before the last step
and returns the view that `transform`, `cut` or `pick` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.batch import Rows, RowView
from ...core.slots import SlotTable
from ...core.stage import BindContext, CutStage, Need, Stage

CPU = torch.device("cpu")
Tokens = Sequence[Sequence[int]]
ParamsOfRows = Sequence[Mapping[str, object]]


@dataclass(eq=False, slots=True)
class ToySequence:
    """As much of a sequence as a row needs."""

    slot: int
    key: int
    branch: int
    prompt_ids: tuple[int, ...]
    output_ids: list[int]


class MadeRows(NamedTuple):
    """A group of rows and one stage's view of it."""

    rows: Rows
    view: RowView


def make_context(vocab_size: int, **changes: Any) -> BindContext:
    """Return a context to bind in: no tokenizer, id 0 ends, 4,096 tokens of context.

    `changes` are fields of BindContext.
    """
    base = BindContext(
        vocab_size=vocab_size,
        tokenizer_size=vocab_size,
        max_model_len=4096,
        eos_ids=(0,),
        stop_ids=(0,),
        device=CPU,
    )
    return replace(base, **{"prompt_len": -1, **changes})


def make_rows(
    stage: type[Stage],
    params: ParamsOfRows,
    *,
    vocab_size: int,
    prompts: Tokens | None = None,
    outputs: Tokens | None = None,
    seed: int = 0,
    keys: Sequence[int] | None = None,
    branches: Sequence[int] | None = None,
    context: BindContext | None = None,
    instance: str | None = None,
) -> MadeRows:
    """Make a row for each of `params`, which must share one structure.

    Row i has `prompts[i]` (by default the token 0) and has generated `outputs[i]` (nothing). Its
    noise key is `keys[i]`, by default seed + i; the branch is 0. Slots are neither ordered nor
    dense, so a stage that takes a row's number for its slot shows.

    Raises ChainError where a request would be refused, and ValueError if structures differ.
    """
    context = context or make_context(vocab_size)
    bound = [stage.bind(stage.validate(given), context) for given in params]
    structures = {stage.structure(each) for each in bound}
    if len(structures) != 1:
        raise ValueError(
            f"rows of {stage.name!r} must share one structure, got {sorted(map(str, structures))}"
        )
    count = len(bound)
    table = SlotTable(2 * count + 1, vocab_size, context.device)
    sources = [
        ToySequence(
            slot=2 * count - 2 * row,
            key=seed + row if keys is None else keys[row],
            branch=0 if branches is None else branches[row],
            prompt_ids=tuple(prompts[row]) if prompts is not None else (0,),
            output_ids=list(outputs[row]) if outputs is not None else [],
        )
        for row in range(count)
    ]
    name = instance or stage.name
    runner = stage.prototype()
    states = []
    for source, each in zip(sources, bound, strict=True):
        table.write(source.slot, name, stage.table(each))
        if Need.COUNTS in stage.caps.needs:
            table.seen.open(source.slot, source.prompt_ids, source.output_ids)
        states.append(runner.rebuild(each, source.prompt_ids, source.output_ids))
    rows = Rows(sources, table, vocab_size, context.tokenizer_size)
    rows.advance()
    view = RowView(
        rows,
        stage=stage.name,
        instance=name,
        params=bound,
        states=states,
        mode=_mode(stage, bound[0]),
        min_keep=getattr(bound[0], "min_keep", 1) > 1,
    )
    return MadeRows(rows, view)


def apply_stage(
    stage: type[Stage],
    logits: Tensor,
    params: ParamsOfRows,
    *,
    prompts: Tokens | None = None,
    outputs: Tokens | None = None,
    seed: int = 0,
    keys: Sequence[int] | None = None,
    branches: Sequence[int] | None = None,
    context: BindContext | None = None,
    instance: str | None = None,
) -> Tensor:
    """Return `logits` float32 [rows, vocab] after `stage`, row i with `params[i]`."""
    context = context or make_context(logits.shape[1])
    keys = range(seed, seed + len(params)) if keys is None else keys
    result = logits.clone()
    for members in _groups(stage, params, context):
        pick = _picker_of(members)
        made = make_rows(
            stage,
            pick(params),
            vocab_size=logits.shape[1],
            prompts=pick(prompts),
            outputs=pick(outputs),
            keys=pick(keys),
            branches=pick(branches),
            context=context,
            instance=instance,
        )
        part = result[members]
        stage.prototype().transform(part, made.view)
        result[members] = part
    return result


def _picker_of(members: Sequence[int]) -> Callable[[Any], Any]:
    return lambda column: None if column is None else [column[row] for row in members]


def _groups(stage: type[Stage], params: ParamsOfRows, context: BindContext) -> list[list[int]]:
    """Return the rows that run, by structure."""
    groups: dict[Hashable, list[int]] = {}
    for row, given in enumerate(params):
        bound = stage.bind(stage.validate(given), context)
        if not stage.is_identity(bound):
            groups.setdefault(stage.structure(bound), []).append(row)
    return list(groups.values())


def _mode(stage: type[Stage], params: Any) -> Hashable:
    return stage.mode(params) if issubclass(stage, CutStage) else stage.structure(params)
