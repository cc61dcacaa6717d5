"""What the planner hands down to the device: the steps of a chain, their numbers left out.

A step names a jitted function and what it is to be called with. Names of arguments are the whole
of the contract: a name that the skeleton knows is a value it has at hand, any other is a column of
the slot table.

Elementwise (E), `f(y, ids, ...) -> y`: y float32 of any shape, ids int32 of that shape;
`seen`, `in_prompt` (bool) and `count` (int32) of each token's history, in the same shape.
No loads, reductions or changes of shape; -inf in, -inf out.

Truncation (T), `f(values, ..., ) -> keep`: values float32 [N] of the tokens in rank order, -inf
where dead; `ranks` int32 [N]; `mass` and `before` int64 [N], a token's mass and the mass of those
before it; `above`, the mass of those with larger values; `best` the greatest value; `total` int64,
the mass of every alive token; `mean_drop`, `squares`, `deviation` float64, as in
reference/statistics.py. The last entry may stand for what the list does not hold: a function must
keep a prefix, and what it says about that entry decides whether the list was long enough.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["Outputs", "Picker", "Program", "Step", "StepForm", "step"]

ELEMENT_NAMES = frozenset({"y", "ids", "seen", "in_prompt", "count"})
HISTORY_NAMES = frozenset({"seen", "in_prompt", "count"})
LIST_NAMES = frozenset(
    {
        *("values", "ids", "ranks", "mass", "before", "above", "best", "total"),
        *("mean_drop", "squares", "deviation", "fires"),
    }
)
STATISTICS = ("mean_drop", "squares", "deviation")  # in the order of their summaries


class StepForm(Enum):
    """How a step runs; the letters of the design."""

    ELEMENT = "E"
    CUT = "T"
    SPARSE = "sparse"  # adds a number to a short list of ids a row; -inf bans
    BITS = "bits"  # -inf where a bit of the row's mask is 0


class Picker(Enum):
    """The pickers that the kernels know."""

    GREEDY = "greedy"
    RACE = "race"
    ICDF = "icdf"


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of a fused chain."""

    name: str
    instance: str
    form: StepForm
    function: Any = field(default=None, compare=False)  # a triton.jit function
    arguments: tuple[str, ...] = ()
    monotone: bool = False  # E: keeps order, and reads nothing but y and columns
    prefix: bool = True  # T: keeps a prefix of the order
    min_keep: bool = False  # T: has a column min_keep above 1
    purpose: int = 0  # T: where its noise is addressed, if it has an argument `fires`

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the slot table that it reads, in the order of its arguments."""
        known = ELEMENT_NAMES if self.form is StepForm.ELEMENT else LIST_NAMES
        own = tuple(name for name in self.arguments if name not in known)
        if self.min_keep:
            own += ("min_keep",)
        return own + (("probability",) if "fires" in self.arguments else ())


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a run reports beside the tokens."""

    raw: bool = False  # log-probability of the token, before every stage
    num_top: int = 0  # the best tokens before every stage, and the rank of the chosen one
    kept: bool = False  # the list that the picker chose from


@dataclass(frozen=True, slots=True)
class Program:
    """A chain that the kernels can run."""

    steps: tuple[Step, ...]
    picker: Picker
    outputs: Outputs = Outputs()
    pick_instance: str = ""  # owner of the picker's columns
    pick_purpose: int = 0  # where the noise of icdf is addressed

    @property
    def head(self) -> tuple[Step, ...]:
        """The steps before the first truncation: every token goes through them."""
        return self.steps[: self._first_cut]

    @property
    def tail(self) -> tuple[Step, ...]:
        """The steps from the first truncation on: they work on the list."""
        if self.picker is Picker.GREEDY and all(part.prefix for part in self.steps):
            if all(part.monotone for part in self.steps[self._first_cut :] if not _is_cut(part)):
                return ()  # none of them can change the winner
        return self.steps[self._first_cut :]

    @property
    def _first_cut(self) -> int:
        cuts = [place for place, part in enumerate(self.steps) if _is_cut(part)]
        return cuts[0] if cuts else len(self.steps)

    def key(self) -> str:
        """Return the signature: equal for chains that run the same kernels."""
        parts = [
            (
                *(part.name, part.form.value, part.arguments, part.monotone, part.prefix),
                *(part.min_keep, part.purpose, source_of(part.function)),
            )
            for part in self.steps
        ]
        text = repr((parts, self.picker.value, self.outputs, self.pick_purpose))
        return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


def step(
    name: str,
    instance: str,
    function: Any,
    *,
    cut: bool = False,
    monotone: bool = False,
    prefix: bool = True,
    min_keep: bool = False,
    purpose: int = 0,
) -> Step:
    """Return the step of a jitted function, its arguments read off its signature."""
    arguments = argument_names(function)
    return Step(
        name=name,
        instance=instance,
        form=StepForm.CUT if cut else StepForm.ELEMENT,
        function=function,
        arguments=arguments,
        monotone=monotone,
        prefix=prefix,
        min_keep=min_keep,
        purpose=purpose,
    )


def argument_names(function: Any) -> tuple[str, ...]:
    """Return the names of a jitted function's arguments."""
    return tuple(inspect.signature(function.fn).parameters)


def source_of(function: Any) -> str:
    """Return the text of a jitted function, empty for none."""
    return "" if function is None else inspect.getsource(function.fn)


def histories(steps: Sequence[Step]) -> frozenset[str]:
    """Return which parts of a token's history the steps read."""
    return HISTORY_NAMES & {name for part in steps for name in part.arguments}


def _is_cut(part: Step) -> bool:
    return part.form is StepForm.CUT
