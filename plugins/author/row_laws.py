"""The laws that hold for rows: what a stage may do to one, and that it looks at no other.

A law takes a bench, raises Breach with one sentence where it is broken, and NotTried where it says
nothing about such a stage. Source: the laws of a stage in the design, numbers 1 to 9.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.batch import PickView
from ...core.stage import Kind, Picker
from .report import Breach, NotTried
from .trials import Bench, Row, Watch, replaced
from .variants import LARGEST, around, wide_runs

INF = float("inf")
GENTLE = (Kind.SHAPE, Kind.CUT, Kind.MARK)  # kinds that may never empty a row
MOST_SHOWN = 8
MOST_TOGETHER = 12  # sets of parameters in one batch


# --- how it behaves ------------------------------------------------------------------------------


def runs_on_every_shape(bench: Bench) -> None:
    """It raises at no vocabulary size, on no row and with no history."""
    tried = False
    for size, params in bench.runs():
        tried = True
        rows = bench.rows(size, params)
        bench.run(rows)
        bench.run(rows[:1])
    if not tried:
        raise Breach(
            f"none of the examples can be tried: each is refused or changes nothing at every "
            f"vocabulary of {bench.sizes}"
        )


def works_in_place(bench: Bench) -> None:
    """`transform` changes the float32 rows that it is given, and returns None."""
    _needs_stage(bench)
    for size, params in bench.runs():
        watch = Watch()
        rows = bench.rows(size, params)
        bench.run(rows, watch)
        if watch.returned is not None:
            raise Breach(
                f"transform returned a {type(watch.returned).__name__}; it must change the given "
                "logits in place and return None",
                str(rows[0]),
            )


def returns_ids(bench: Bench) -> None:
    """`pick` returns int64 [rows], each the id of an alive token, and changes no logit."""
    _needs_picker(bench)
    for size, params in bench.runs():
        rows = [row for row in bench.rows(size, params) if _alive(row)]
        before = bench.stack(rows)
        tokens = bench.run(rows)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if not 0 <= token < size:
                raise Breach(f"it chose {token}, which is no id in [0, {size})", str(row))
            if row.values[token] == -INF:
                raise Breach(f"it chose the dead token {token}", str(row))
        if not torch.equal(before, bench.stack(rows)):
            raise Breach("pick wrote into the row that it was shown", str(rows[0]))


def writes_no_row(bench: Bench) -> None:
    """`pick` leaves the final row as it is: observers look at it afterwards."""
    _needs_picker(bench)
    for size, params in bench.runs():
        rows = bench.rows(size, params)
        runner = bench.stage.prototype()
        assert isinstance(runner, Picker)
        bound = [bench.bind(row) for row in rows]
        logits = bench.stack(rows)
        shown = PickView(ranking=None, dense=logits, has_cut=True, vocab_size=size)
        runner.pick(shown, bench.view(rows, bound, runner, Watch()))
        if not torch.equal(logits, bench.stack(rows)):
            place = int((logits != bench.stack(rows)).any(1).nonzero()[0])
            raise Breach("pick wrote into the row that it was shown", str(rows[place]))


def does_something(bench: Bench) -> None:
    """Some row of the trials is changed: a stage that rebinds its copy of a tensor changes none."""
    _needs_stage(bench)
    for size, params in bench.runs():
        rows = bench.rows(size, params)
        if not torch.equal(bench.run(rows), bench.stack(rows)):
            return
    raise Breach(
        "it changed no row at all; work in place (`logits.mul_(x)`, not `logits = logits * x`), "
        "or give examples and histories at which it acts"
    )


def gives_equal_results(bench: Bench) -> None:
    """The same rows give the same result each time."""
    for size, params in bench.runs():
        rows = bench.rows(size, params)
        first = bench.run(rows)
        torch.manual_seed(size)
        second = bench.run(rows)
        place = _first_difference(first, second)
        if place is not None:
            raise Breach(
                f"the same row gave {_show(first[place])} and then {_show(second[place])}: it "
                "draws from a generator of its own, or keeps something from call to call",
                str(rows[place]),
            )


def leaves_generators_alone(bench: Bench) -> None:
    """Noise comes from `rows.uniform`; no global generator moves."""
    for size, params in bench.runs():
        watch = Watch()
        rows = bench.rows(size, params)
        bench.run(rows, watch)
        if watch.generators:
            raise Breach(
                f"it draws from the global generator of {min(watch.generators)}, so its noise "
                "depends on everything else that draws; take it from rows.uniform(ids)",
                str(rows[0]),
            )


def keeps_nothing(bench: Bench) -> None:
    """The object that runs the stage serves every request; it keeps nothing of a call."""
    for size, params in bench.runs():
        watch = Watch()
        rows = bench.rows(size, params)
        bench.run(rows, watch)
        if watch.changed:
            raise Breach(
                f"{_deed(bench)} set {min(watch.changed)!r} on the stage object or its class, "
                "which serve every request; keep it in the state of the sequence",
                str(rows[0]),
            )


def declares_what_it_reads(bench: Bench) -> None:
    """It reads of the history what `Caps.needs` says, draws only if `Caps.random` says so."""
    caps = bench.stage.caps
    for size, params in bench.runs():
        watch = Watch()
        rows = bench.rows(size, params)
        bench.run(rows, watch)
        hidden = sorted(need.name for need in watch.reads - caps.needs)
        if hidden:
            how = {"PROMPT": "rows.prompt", "OUTPUT": "rows.output", "COUNTS": "rows.seen"}
            raise Breach(
                f"it reads {how[hidden[0]]}, and its caps do not declare Need.{hidden[0]}",
                str(rows[0]),
            )
        if watch.draws and not caps.random:
            raise Breach("it draws noise, and its caps do not declare random=True", str(rows[0]))


def depends_on_no_key(bench: Bench) -> None:
    """Without `Caps.random`, key and branch of the request change nothing."""
    if bench.stage.caps.random:
        raise NotTried("it declares random")
    for size, params in bench.runs():
        rows, first = bench.tried(size, params)
        others = [replaced(row, key=row.key + 99, branch=3) for row in rows]
        place = _first_difference(first, bench.run(others))
        if place is not None:
            raise Breach(
                "its result depends on the request's key, and its caps do not declare random=True",
                str(rows[place]),
            )


# --- one row --------------------------------------------------------------------------------------


def revives_no_token(bench: Bench) -> None:
    """What is -inf stays -inf (all kinds but FORCE)."""
    _needs_stage(bench)
    if bench.stage.kind is Kind.FORCE:
        raise NotTried("a FORCE stage may bring the token back that it names")
    for row, after in _each(bench):
        risen = ((row.values == -INF) & (after != -INF)).nonzero()[:, 0].tolist()
        if risen:
            raise Breach(
                f"token {risen[0]} was dead (-inf) and became {float(after[risen[0]]):g}", str(row)
            )


def stays_finite(bench: Bench) -> None:
    """No NaN and no +inf comes out of a sound row."""
    _needs_stage(bench)
    for row, after in _each(bench):
        bad = (after.isnan() | after.isposinf()).nonzero()[:, 0].tolist()
        if bad:
            raise Breach(f"token {bad[0]} became {float(after[bad[0]]):g}", str(row))


def kills_no_row(bench: Bench) -> None:
    """Only a MASK may leave a row without a token; a CUT keeps `min_keep` of those there are."""
    _needs_stage(bench)
    kind = bench.stage.kind
    if kind is Kind.MASK:
        raise NotTried("a MASK may empty a row; on_dead_row decides then")
    for row, after in _each(bench):
        alive = _alive(row)
        if not alive or (kind not in GENTLE and alive < row.values.shape[0]):
            continue  # a bias may ban the one token that a mask has left
        kept = int((after > -INF).sum())
        floor = 1
        if kind is Kind.CUT:
            floor = min(getattr(bench.bind(row), "min_keep", 1), alive)
        if kind is Kind.FORCE and torch.equal(after, row.values):
            continue
        if kept < floor:
            raise Breach(
                f"it left {kept} of {alive} alive tokens; it must keep at least {floor}", str(row)
            )


def leaves_dead_rows_dead(bench: Bench) -> None:
    """A row without any token passes: it raises nothing and stays as it is."""
    for size, params in bench.runs():
        row = bench.rows(size, params, 1)[0]
        row = replaced(row, values=torch.full((size,), -INF))
        after = bench.run([row])[0]
        forces = bench.stage.kind is Kind.FORCE
        if not bench.is_picker and not forces and bool((after != -INF).any()):
            raise Breach(f"a row with no token alive became {_show(after)}", str(row))


def counts_alive_tokens_only(bench: Bench) -> None:
    """Statistics are over alive tokens: more dead ones change nothing."""
    if bench.stage.kind in (Kind.FORCE, Kind.MARK):
        raise NotTried("such a stage may depend on the size of the vocabulary")
    for size, params in bench.runs():
        rows = [row for row in bench.rows(size, params) if _alive(row)]
        wide = 3 * size + 5
        longer = [
            replaced(row, values=torch.cat([row.values, torch.full((wide - size,), -INF)]))
            for row in rows
        ]
        if not bench.acts(params, wide):
            continue
        fixed = {"tokenizer_size": size, "stop_ids": (0, size - 1), **bench.changes}
        before, after = bench.run(rows), _with_context(bench, fixed, longer)
        after = after if bench.is_picker else after[:, :size]
        wrong = [place for place in range(len(rows)) if not _alike(before[place], after[place])]
        if len(wrong) > 1:  # one alone may be a sum that rounds to the other side of a threshold
            place = wrong[0]
            raise Breach(
                f"with {wide - size} dead tokens more, {_show(before[place])} became "
                f"{_show(after[place])}: some statistic counts dead tokens",
                str(rows[place]),
            )


def keeps_the_order(bench: Bench) -> None:
    """A SHAPE maps equal logits to equal ones and never swaps two."""
    if bench.stage.kind is not Kind.SHAPE:
        raise NotTried("only a SHAPE promises it")
    for row, after in _each(bench):
        values, places = row.values.sort()
        mapped = after[places]
        alive = values > -INF
        values, mapped, places = values[alive], mapped[alive], places[alive]
        swapped = (mapped[1:] < mapped[:-1]).nonzero()[:, 0].tolist()
        if swapped:
            low, high = places[swapped[0]], places[swapped[0] + 1]
            raise Breach(
                f"token {int(high)} was above token {int(low)} and came out below it", str(row)
            )
        split = ((values[1:] == values[:-1]) & (mapped[1:] != mapped[:-1])).nonzero()
        if len(split):
            raise Breach("two equal logits came out different", str(row))


def decides_ties_by_id(bench: Bench) -> None:
    """A CUT keeps of equal logits all, none, or a run at one end of their ids."""
    if bench.stage.kind is not Kind.CUT:
        raise NotTried("only a CUT has to decide")
    for row, after in _each(bench):
        values, counts = np.unique(row.values.numpy(), return_counts=True)
        for value in values[(counts > 2) & (values > -INF)].tolist():
            tied = (row.values == value).nonzero()[:, 0]
            kept = (after[tied] > -INF).int()
            if int(kept.diff().abs().sum()) > 1:
                raise Breach(
                    f"of the equal tokens {tied.tolist()} it kept "
                    f"{tied[kept.bool()].tolist()}, which no rule about ids explains",
                    str(row),
                )


# --- rows together --------------------------------------------------------------------------------


def looks_at_no_other_row(bench: Bench) -> None:
    """A row alone gives the bits that it gives in a batch."""
    for size, params in bench.runs():
        rows, together = bench.tried(size, params)
        for place, row in enumerate(rows):
            alone = bench.run([row])[0]
            if not torch.equal(alone, together[place]):
                raise Breach(
                    f"the row alone became {_show(alone)}, in a batch of {len(rows)} "
                    f"{_show(together[place])}",
                    str(row),
                )


def minds_no_order(bench: Bench) -> None:
    """Rows in another order give the same results in that order."""
    for size, params in bench.runs():
        rows, straight = bench.tried(size, params)
        generator = torch.Generator().manual_seed(size)
        order: list[int] = torch.randperm(len(rows), generator=generator).tolist()
        mixed = bench.run([rows[place] for place in order])
        place = _first_difference(straight[order], mixed)
        if place is not None:
            raise Breach(
                f"row {order[place]} of {len(rows)} became {_show(straight[order][place])}, and "
                f"{_show(mixed[place])} when it stood at place {place}",
                str(rows[order[place]]),
            )


def minds_no_batch_size(bench: Bench) -> None:
    """Any number of copies of a row come out alike."""
    for size, params in bench.runs():
        for row in bench.rows(size, params)[:4]:
            alone = bench.run([row])[0]
            for count in (2, 16):
                copies = bench.run([row] * count)
                place = _first_difference(copies, alone.expand(count, *alone.shape))
                if place is not None:
                    raise Breach(
                        f"copy {place} of {count} equal rows became {_show(copies[place])}, a "
                        f"single one {_show(alone)}",
                        str(row),
                    )


def shares_a_program_rightly(bench: Bench) -> None:
    """Rows whose `structure` is equal may run together, whatever their other parameters."""
    tried = False
    for size in bench.sizes:
        variants = [each for each in around(bench, size) if bench.acts(each, size)]
        if len(variants) < 2 or size > LARGEST:
            continue
        tried = True
        variants = variants[:: len(variants) // MOST_TOGETHER + 1]
        rows = [row for params in variants for row in bench.rows(size, params, 3)]
        together = bench.run(rows)
        for place, row in enumerate(rows):
            alone = bench.run([row])[0]
            if not torch.equal(alone, together[place]):
                raise Breach(
                    f"beside rows with other parameters and the same structure it became "
                    f"{_show(together[place])}, alone {_show(alone)}: take numbers of a request "
                    "from rows.column or rows.params[i], or name the parameter in structure",
                    str(row),
                )
    if not tried:
        raise NotTried("it has no two sets of parameters; give more examples")


# --- small parts ----------------------------------------------------------------------------------


def _each(bench: Bench) -> Iterator[tuple[Row, Tensor]]:
    for size, params in wide_runs(bench):
        rows, after = bench.tried(size, params)
        yield from zip(rows, after, strict=True)


def _with_context(bench: Bench, changes: dict[str, Any], rows: Sequence[Row]) -> Tensor:
    own, bench.changes = bench.changes, changes
    try:
        return bench.run(rows)
    finally:
        bench.changes = own


def _alike(first: Tensor, second: Tensor) -> bool:
    if not first.dim():
        return bool(first == second)
    if not torch.equal(first == -INF, second == -INF):
        return False
    return torch.allclose(first, second, rtol=1e-5, atol=1e-5, equal_nan=True)


def _first_difference(first: Tensor, second: Tensor) -> int | None:
    same = (first == second) | (first.isnan() & second.isnan())
    same = same.reshape(len(same), -1).all(1)
    return None if bool(same.all()) else int((~same).nonzero()[0])


def _alive(row: Row) -> int:
    return int((row.values > -INF).sum())


def _show(row: Tensor) -> str:
    if not row.dim():
        return f"token {int(row)}"
    known = ", ".join(f"{value:.6g}" for value in row[:MOST_SHOWN].tolist())
    return f"[{known}{', ...' if len(row) > MOST_SHOWN else ''}]"


def _deed(bench: Bench) -> str:
    return "pick" if bench.is_picker else "transform"


def _needs_stage(bench: Bench) -> None:
    if bench.is_picker:
        raise NotTried("it is about stages")


def _needs_picker(bench: Bench) -> None:
    if not bench.is_picker:
        raise NotTried("it is about pickers")
