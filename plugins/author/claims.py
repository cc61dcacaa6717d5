"""What a stage declares of itself: its contract's data, tried against what it does."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from pydantic import ValidationError as PydanticError
from torch import Tensor

from ...core.batch import Ranking
from ...core.errors import DecodekitError
from ...core.stage import CutStage, Picker, Stage
from ...core.stage_rules import fault_of
from ...kernels.ops import rank_top
from .report import Breach, NotTried
from .trials import Bench, Row, Watch, replaced
from .variants import LARGEST, around, floats_of, wide_runs

INF = float("inf")
LIST = 48  # length of the short lists that a cut is tried on


def declares_no_contradiction(bench: Bench) -> None:
    """Name, API range, parameters and capabilities are such that the registry takes it."""
    stage = bench.stage
    is_ours = stage.__module__.partition(".")[0] == __name__.partition(".")[0]
    reason = fault_of(stage, is_built_in=is_ours, is_local=True)
    if reason is not None:
        raise Breach(f"the registry refuses it: {reason}")
    opens = stage.open is not Stage.open or stage.rebuild is not Stage.rebuild
    if opens and not stage.caps.stateful:
        raise Breach("it keeps a state (open), and its caps do not declare stateful=True")
    accepts = stage.accept is not Stage.accept
    if accepts and not opens:
        raise Breach("it implements accept and no open, so that there is no state to advance")


def checks_its_parameters(bench: Bench) -> None:
    """Unknown parameters are refused, and checked ones go through a request as plain data."""
    stage = bench.stage
    try:
        stage.validate({**bench.examples[0], "no_such_parameter": 1})
    except DecodekitError:
        pass
    else:
        raise Breach("it takes the unknown parameter 'no_such_parameter' without a word")
    for example in bench.examples:
        try:
            params = stage.validate(example)
        except DecodekitError as error:
            raise Breach(f"it refuses the example {example}: {error}") from None
        if _is_no_json(params.model_dump()):
            continue
        try:
            again = type(params).model_validate_json(params.model_dump_json())
        except (PydanticError, ValueError) as error:
            raise Breach(f"the parameters {example} do not go through JSON: {error}") from None
        if again != params:
            raise Breach(f"the parameters {params} come back from JSON as {again}")


def gives_numbers_as_columns(bench: Bench) -> None:
    """`table` returns a number for each column, under the same names for one structure."""
    stage = bench.stage
    names: dict[Hashable, tuple[set[str], dict[str, object]]] = {}
    for size, params in bench.runs():
        bound = bench.bind(Row(torch.zeros(size), params))
        table = stage.table(bound)
        for name, value in table.items():
            if not isinstance(name, str) or not isinstance(value, int | float):
                raise Breach(
                    f"table gives the column {name!r} the value {value!r}, which is no number",
                    str(params),
                )
        structure = stage.structure(bound)
        try:
            first, of = names.setdefault(structure, (set(table), params))
        except TypeError:
            raise Breach(
                f"structure returned a {type(structure).__name__}, which is not hashable",
                str(params),
            ) from None
        if first != set(table):
            raise Breach(
                f"rows of one structure have the columns {sorted(first)} with {of} and "
                f"{sorted(table)} with {params}"
            )


def keeps_numbers_out_of_structure(bench: Bench) -> None:
    """`structure` holds what changes the code, no number: each value would be a program of its own.

    Tried with three values of each float parameter.
    """
    tried = False
    for _, example in bench.runs():
        for name, values in floats_of(bench, example):
            tried = True
            found = set()
            for value in values:
                row = Row(torch.zeros(bench.sizes[-1]), {**example, name: value})
                found.add(bench.stage.structure(bench.bind(row)))
            if len(found) == len(values):
                raise Breach(
                    f"structure holds the number {name!r}, so that each value of it gets a "
                    "program and a group of its own; read it with rows.column"
                )
    if not tried:
        raise NotTried("no float parameter in the examples")


def skips_only_identities(bench: Bench) -> None:
    """Parameters that `is_identity` leaves out would change nothing.

    One value at which the formula itself is no identity may be off by convention, as z = 1 of a
    tail-free cut is; a range of such values may not.
    """
    if bench.is_picker:
        raise NotTried("a picker is never left out")
    tried = False
    for size in bench.sizes:
        acting: list[tuple[dict[str, object], dict[str, object], Row]] = []
        for params in [{}, *around(bench, size)]:
            rows = bench.rows(size, params)
            try:
                bound = [bench.bind(row) for row in rows]
                if not bench.stage.is_identity(bound[0]):
                    continue
                after = bench.run_group(rows, bound)
            except (DecodekitError, Breach):
                continue  # refused, or never run with these
            tried = True
            changed = (after != bench.stack(rows)).any(1).nonzero()[:, 0].tolist()
            if changed:
                whole = bench.stage.validate(params).model_dump()
                acting.append((params, whole, rows[changed[0]]))
        if len(acting) > 1 and not _share_a_value([whole for _, whole, _ in acting]):
            raise Breach(
                f"is_identity says that {acting[0][0]} and {acting[1][0]} change nothing, and with "
                "both a row changes",
                str(acting[0][2]),
            )
    if not tried:
        raise NotTried("no parameters of the trials are an identity that can be run")


def keeps_the_winner_where_it_says_so(bench: Bench) -> None:
    """With parameters that `argmax_invariant` vouches for, the best token stays the best."""
    if bench.is_picker:
        raise NotTried("it is about stages")
    tried = False
    for size, params in wide_runs(bench):
        bound = bench.bind(Row(torch.zeros(size), params))
        if not bench.stage.argmax_invariant(bound):
            continue
        tried = True
        for row, after in zip(*bench.tried(size, params), strict=True):
            best, now = int(row.values.argmax()), int(after.argmax())
            if best != now:
                raise Breach(
                    f"argmax_invariant says that the winner stays, and {best} became {now}",
                    str(row),
                )
    if not tried:
        raise NotTried("it claims it for no parameters of the trials")


def is_monotone_if_it_says_so(bench: Bench) -> None:
    """`Caps.monotone`: the result of a token needs neither the others nor its place in the row."""
    if not bench.stage.caps.monotone:
        raise NotTried("it does not declare monotone")
    for size, params in wide_runs(bench):
        rows = bench.rows(size, params)
        whole = bench.run(rows)
        ranked = rank_top(bench.stack(rows), max(size // 2, 1))
        part = [
            replaced(row, values=values) for row, values in zip(rows, ranked.values, strict=True)
        ]
        bound = [bench.bind(row) for row in rows]
        listed = bench.run_group(part, bound)
        wrong = (listed != whole.gather(1, ranked.ids)).any(1).nonzero()[:, 0].tolist()
        if wrong:
            raise Breach(
                "it declares monotone, and on a part of the row it gives other values than on the "
                "whole: it looks at more than a logit and its columns",
                str(rows[wrong[0]]),
            )
        order = whole.gather(1, bench.stack(rows).argsort(dim=1, stable=True))
        if bool((order[:, 1:] < order[:, :-1]).any()):
            raise Breach("it declares monotone, and it swaps two logits", str(rows[0]))


def keeps_a_top_segment_if_it_says_so(bench: Bench) -> None:
    """`Caps.keeps_top_segment`: the kept tokens are the first by (logit descending, id)."""
    if not bench.stage.caps.keeps_top_segment:
        raise NotTried("it does not declare keeps_top_segment")
    for size, params in wide_runs(bench):
        for row, after in zip(*bench.tried(size, params), strict=True):
            order = row.values.sort(descending=True, stable=True).indices
            kept = (after[order] > -INF).int()
            if bool((kept.diff() > 0).any()):
                place = int((kept.diff() > 0).nonzero()[0]) + 1
                raise Breach(
                    f"it kept token {int(order[place])} and dropped token "
                    f"{int(order[place - 1])}, which stands before it in rank",
                    str(row),
                )
            alive = after > -INF
            if not torch.equal(after[alive], row.values[alive]):
                raise Breach("it changed the logit of a token that it kept", str(row))


def needs_no_more_than_the_best(bench: Bench) -> None:
    """Without `Caps.needs_full_row`, `keep` decides alike on a short list of the best tokens."""
    stage = bench.stage
    if stage.caps.needs_full_row or not issubclass(stage, CutStage):
        raise NotTried("it is given whole rows")
    for size, params in bench.runs():
        if size <= LIST:
            continue
        rows = bench.rows(size, params)
        bound = [bench.bind(row) for row in rows]
        whole, listed = bench.run_group(rows, bound), _cut_list(bench, rows, bound)
        inside = (whole > -INF).sum(1) < LIST
        wrong = ((whole != listed).any(1) & inside).nonzero()[:, 0].tolist()
        if wrong:
            raise Breach(
                "on a list of the best tokens it keeps others than on the whole row; what needs "
                "more than the list and ranking.total must declare needs_full_row=True",
                str(rows[wrong[0]]),
            )


def picks_alike_from_a_list(bench: Bench) -> None:
    """A picker chooses the same token from the ranked list of what was kept as from the row."""
    if not issubclass(bench.stage, Picker):
        raise NotTried("it is about pickers")
    for size, params in bench.runs():
        rows = [row for row in bench.rows(size, params) if bool((row.values > -INF).any())]
        bound = [bench.bind(row) for row in rows]
        dense, listed = bench.run_group(rows, bound), bench.pick_ranked(rows, bound)
        wrong = (dense != listed).nonzero()[:, 0].tolist()
        if wrong:
            place = wrong[0]
            raise Breach(
                f"it picked {int(listed[place])} from the ranked list and {int(dense[place])} from "
                "the row that it stands for",
                str(rows[place]),
            )


def draws_by_its_address(bench: Bench) -> None:
    """`Caps.random`: the noise is that of the request, not one of the stage's own."""
    if not bench.stage.caps.random:
        raise NotTried("it does not declare random")
    blind: Row | None = None
    for size, params in bench.runs():
        if size < LARGEST:
            continue
        rows = bench.rows(size, params)
        watch = Watch()
        first = bench.run(rows, watch)
        others = bench.run([replaced(row, key=row.key + 77) for row in rows])
        if watch.draws or not torch.equal(first, others):
            return
        blind = rows[0]
    if blind is not None:
        raise Breach(
            "it declares random, and its noise is the same under every key of a request; take it "
            "from rows.uniform(ids)",
            str(blind),
        )


# --- small parts ----------------------------------------------------------------------------------


def _share_a_value(params: Sequence[dict[str, object]]) -> bool:
    """Say whether one parameter has the same value in all: the value that means off."""
    return any(len({repr(each[name]) for each in params}) == 1 for name in params[0])


def _cut_list(bench: Bench, rows: Sequence[Row], bound: Sequence[object]) -> Tensor:
    runner = bench.stage.prototype()
    assert isinstance(runner, CutStage)
    logits = bench.stack(rows)
    ranked = rank_top(logits, LIST)
    ranking = Ranking(
        ranked.values, ranked.ids, ranked.bound, total_of=lambda: Ranking.of_row(logits).total
    )
    mask = runner.cut(ranking, bench.view(rows, bound, runner, Watch()))
    result = torch.empty_like(logits)
    ranking.write(result, mask)
    return result


def _is_no_json(value: object) -> bool:
    """Say whether a value holds what JSON has no word for: callables and infinite numbers."""
    if isinstance(value, dict):
        return any(map(_is_no_json, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_no_json, value))
    return callable(value) or (isinstance(value, float) and not math.isfinite(value))
