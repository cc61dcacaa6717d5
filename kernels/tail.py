"""Text of the steps that run on the sorted list, and of the picks from it.

The last alive entry of the list is its bound: the best value that a token outside can have. A step
that drops it has dropped everything outside; a row whose bound is still alive at the end, or of
which a step needed more than the list before that, is flagged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .program import LIST_NAMES, STATISTICS, Picker, Step, StepForm

if TYPE_CHECKING:
    from .codegen import Generator

__all__ = ["element_call", "tail_lines"]

Names = Mapping[tuple[str, str], str]

_MEASURE = ("mass = mass_of(values, best)", "before = tl.cumsum(mass, 0) - mass")
_NEEDS_PROOF = "unproven = unproven | (tl.max(tl.where(is_bound & alive, 1, 0), 0) > 0)"


def element_call(place: int, part: Step, names: Names, y: str, ids: str) -> str:
    """Return the line that calls an elementwise step."""
    known = {"y": y, "ids": ids}
    args = [known.get(name) or names.get((part.instance, name), name) for name in part.arguments]
    return f"{y} = stage{place}({', '.join(args)})"


class Tail:
    """Writes the steps in order and keeps track of what holds for the list."""

    def __init__(self, owner: Generator) -> None:
        self.owner = owner
        self.lines: list[str] = []
        self.cut_before = False  # a truncation ran: the total is that of the list
        self.shaped = False  # rounding may have made the bound equal to a listed token
        self.fresh = False  # ranks and masses are those of the alive tokens
        self.proven = False  # whether the bound is alive was looked at; it never revives

    def write(self) -> list[str]:
        """Return the lines from the sorted list to the token."""
        program = self.owner.program
        first = len(program.steps) - len(program.tail)
        self.lines += [
            "alive = values > DEAD",
            "is_bound = ids == BOUND_ID",
            "ranks = tl.arange(0, N)",
            "unproven = full",
        ]
        for place, part in enumerate(program.tail, first):
            if part.form is StepForm.CUT:
                self._cut(place, part)
            else:
                last = not any(p.form is StepForm.CUT for p in program.steps[place + 1 :])
                self._shape(place, part, last)
        self._pick()
        self.lines += ["if unproven | (n == 0):", "    flag = 1", "    token = -1"]
        return self.lines

    def _cut(self, place: int, part: Step) -> None:
        wanted = set(part.arguments)
        names = self.owner.names
        if not part.prefix:
            self._prove()
        if not self.fresh and wanted & {"mass", "before", "above", *STATISTICS, "total"}:
            self._refresh()
        if self.cut_before and wanted & {"total", *STATISTICS}:
            self._prove()
            self.lines.append("total = tl.sum(tl.where(alive, mass, 0), 0)")
            self.lines += [
                f"{name} = list_{name}(values, alive, mass, best, total)"
                for name in STATISTICS
                if name in wanted
            ]
        if "above" in wanted:
            self.lines.append("above = mass_above(values, before, N)")
        if "fires" in wanted:
            chance = names[(part.instance, "probability")]
            self.lines.append(f"fires = fires_now(key, position, branch, {part.purpose}, {chance})")
        if self.shaped:
            self.lines.append("edge = tl.max(tl.where(is_bound, values, DEAD), 0)")
        args = [n if n in LIST_NAMES else names[(part.instance, n)] for n in part.arguments]
        self.lines.append(f"kept = stage{place}({', '.join(args)})")
        if part.min_keep:
            self.lines.append(f"kept = kept | (ranks < {names[(part.instance, 'min_keep')]})")
        self.lines += ["alive = alive & kept", "values = tl.where(alive, values, DEAD)"]
        if self.shaped:
            self.lines += [
                "least = tl.min(tl.where(alive & (ids != BOUND_ID), values, float('inf')), 0)",
                "unproven = unproven | ((edge > DEAD) & (least <= edge))",
            ]
        if not part.prefix:
            self.lines.append("ranks = tl.cumsum(alive.to(tl.int32), 0) - 1")
            self.lines.append("best = tl.max(values, 0)")
            self.fresh = False
        self.cut_before = True

    def _prove(self) -> None:
        """Flag the row if the list is not all that is left of it."""
        if not self.proven:
            self.lines.append(_NEEDS_PROOF)
            self.proven = True

    def _refresh(self) -> None:
        self.lines += _MEASURE
        self.fresh = True

    def _shape(self, place: int, part: Step, last: bool) -> None:
        if not part.monotone:
            self._prove()
        self.lines += [
            element_call(place, part, self.owner.names, "values", "ids"),
            "values = tl.where(alive, values, DEAD)",
        ]
        if not last or self.owner.program.picker is Picker.ICDF:
            self.lines += [
                "values, ids = sort_again(values, ids, N)",
                "alive = values > DEAD",
                "is_bound = ids == BOUND_ID",
                "ranks = tl.arange(0, N)",
            ]
        self.lines.append("best = tl.max(values, 0)")
        self.shaped = True
        self.fresh = False

    def _pick(self) -> None:
        program = self.owner.program
        if program.tail:
            self._prove()
        if program.outputs.kept:
            self.lines.append(
                "tl.store(kept_out + b.to(tl.int64) * N + tl.arange(0, N), "
                "tl.where(alive & (ids != BOUND_ID), ids, -1))"
            )
        if program.picker is Picker.GREEDY:
            self.lines.append("token = first_best(values, ids)")
        elif program.picker is Picker.RACE:
            self.lines += [
                "times = log_time_for(key, position, branch, 2, ids).to(tl.float64)",
                "token = first_best(values.to(tl.float64) - times, ids)",
            ]
        else:
            self._invert()

    def _invert(self) -> None:
        program = self.owner.program
        skew = self.owner.names[(program.pick_instance, "skew")]
        if not self.fresh:
            self._refresh()
        self.lines.append("sums = tl.cumsum(tl.where(alive & (ids != BOUND_ID), mass, 0), 0)")
        if program.tail:
            self.lines.append("total = tl.max(sums, 0)")
        self.lines += [
            f"chance = skewed(unit53(key, position, branch, {program.pick_purpose}), {skew})",
            "target = tl.minimum((chance * total.to(tl.float64)).to(tl.int64), total - 1)",
            "place = tl.sum((sums <= target).to(tl.int32), 0)",
            "token = tl.sum(tl.where(tl.arange(0, N) == place, ids, 0), 0)",
        ]
        if not program.tail:
            self.lines.append("unproven = unproven | (place >= n)")


def tail_lines(owner: Generator) -> list[str]:
    """Return the lines from the sorted list to the token."""
    return Tail(owner).write()
