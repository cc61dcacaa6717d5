"""One Python module for each chain signature: the skeleton with the stages' functions in it.

The text is a real file, since Triton reads the source of what it compiles; stage functions are put
in the module's namespace and called by name, and Triton inlines them. Two kernels come out:

* `scan`, (splits, rows): the head of the chain on every token; writes the maximum of each 64
  tokens and the mass of each 256.
* `select`, one program a row: finds a cut that at least as many tokens as wanted reach, lists
  those, sorts the list, runs the rest of the chain on it and picks.

A row whose list cannot prove that it holds every survivor is flagged, and gets no token here.
"""

from __future__ import annotations

import linecache
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from .fused.blocks import divide
from .program import STATISTICS, Picker, Program, Step, StepForm, histories
from .tail import element_call, tail_lines

__all__ = ["UNSURE", "BROKEN", "cache_dir", "columns_of", "module_of", "source_of_program"]

UNSURE = 1  # flag: the list cannot prove itself
BROKEN = 2  # flag: the row is dead, or holds NaN or infinity

_HEADER = '''"""Generated for the chain: {chain}."""

from decodekit.kernels.fused.blocks import *
from decodekit.kernels.fused.rows import *
from decodekit.kernels.lang import tl, triton

'''


# Rows mostly are what they are in the logits, and then no load stands before those of the logits.
_ROW = "row = b.to(tl.int64) if SAME else tl.load(rows + b).to(tl.int64)"
_SLOT = "slot = tl.load(slots + b).to(tl.int64)"


def columns_of(program: Program) -> list[tuple[str, str]]:
    """Return the slot-table columns (instance, name) in the order of the kernels' arguments."""
    found = [(part.instance, name) for part in program.steps for name in part.columns]
    if program.picker is Picker.ICDF:
        found.append((program.pick_instance, "skew"))
    return list(dict.fromkeys(found))


def statistics_of(program: Program) -> list[str]:
    """Return the statistics that the first truncation reads of whole rows."""
    tail = program.tail
    return [name for name in STATISTICS if tail and name in tail[0].arguments]


class Writer:
    """Collects lines at a depth of indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1

    def add(self, *lines: str) -> None:
        """Add lines at the present depth."""
        self.lines += ["    " * self.depth + line if line else "" for line in lines]

    def text(self) -> str:
        """Return what was written."""
        return "\n".join(self.lines) + "\n"


class Generator:
    """Writes the kernels of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.columns = columns_of(program)
        self.names = {column: f"c{place}" for place, column in enumerate(self.columns)}
        self.statistics = statistics_of(program)
        self.history = histories(program.head)
        self.raw = program.outputs.raw or program.outputs.num_top > 0
        self.sparse = [n for n, p in enumerate(program.head) if p.form is StepForm.SPARSE]
        self.bits = [n for n, p in enumerate(program.head) if p.form is StepForm.BITS]

        tail = program.tail
        if self._uses_list:
            first = tail[0].arguments if tail else ("total",)
            self.weighs = bool({"total", *self.statistics} & set(first))
        else:
            self.weighs = program.picker is Picker.RACE
        last = program.head[-1].function if program.head else None
        self.scaled = last is divide and not self.statistics

    # --- arguments ------------------------------------------------------------------------------

    @property
    def aux_args(self) -> list[str]:
        """Pointers beside the columns, in the order of the kernels' arguments."""
        args: list[str] = []
        if self.history:
            args += ["seen_bits", "seen_stride"]
        if "count" in self.history:
            args += ["counts", "counts_stride"]
        if "in_prompt" in self.history:
            args += ["prompts", "prompts_stride"]
        for place in self.sparse:
            args += [f"starts{place}", f"listed{place}", f"adds{place}"]
        for place in self.bits:
            args += [f"words{place}", f"words{place}_stride", f"mask{place}"]
        return args

    @property
    def column_args(self) -> list[str]:
        """Pointers of the columns."""
        return [f"{name}_ptr" for name in self.names.values()]

    def head_args(self) -> str:
        """What `head` is called with after y, ids and live."""
        scalars = [self.names[(p.instance, n)] for p in self.program.head for n in p.columns]
        return ", ".join(["b", "slot", "low", "high", *dict.fromkeys(scalars), *self.aux_args])

    def _past(self, first: str, rows: str, width: int, inside: str, mark: str = "") -> list[str]:
        """Load what the head asks of the history of tokens [rows, 32 * width].

        `first` is the place of a row's first word of bits. Neighbours share a word, and so a load;
        counts are read of seen tokens alone. Both halves of a tile do this before either goes on,
        so that the loads wait for memory together.
        """
        names = ("seen", "count", "in_prompt")
        lines = [f"{name}{mark} = 0" for name in names if name not in self.history]
        if not self.history:
            return lines
        shape = f"[{rows}, {width}, 32]"
        flat = f"[{32 * width}]" if rows == "1" else f"[{rows}, {32 * width}]"
        at, some, ids = f"at{mark}", f"some{mark}", f"ids{mark}"
        lines += [
            f"{at} = ({first})[:, None] + tl.arange(0, {width})[None, :]",
            f"{some} = ({inside})[:, None] & ({at} < (V + 31) // 32)",
            f"word{mark} = tl.load(seen_bits + slot * seen_stride + {at}, mask={some}, other=0)",
            f"word{mark} = tl.reshape(tl.broadcast_to(word{mark}[:, :, None], {shape}), {flat})",
            f"seen{mark} = (((word{mark} >> ({ids} & 31)) & 1) != 0) & live{mark}",
        ]
        for name, table in (("count", "counts"), ("in_prompt", "prompts")):
            if name in self.history:
                lines.append(
                    f"{name}{mark} = tl.load({table} + slot * {table}_stride + {ids}, "
                    f"mask=seen{mark}, other=0)"
                )
        if "in_prompt" in self.history:
            lines.append(f"in_prompt{mark} = in_prompt{mark} != 0")
        return lines

    def load_columns(self, out: Writer, steps: tuple[Step, ...]) -> None:
        """Load the scalars of the row."""
        wanted = dict.fromkeys((p.instance, n) for p in steps for n in p.columns)
        for column in wanted:
            name = self.names[column]
            out.add(f"{name} = tl.load({name}_ptr + slot)")

    # --- the head -------------------------------------------------------------------------------

    def head(self, name: str = "head", end: int | None = None) -> str:
        """Return the function that takes every token through the steps before the first cut."""
        out = Writer()
        for place, part in enumerate(self.program.head[:end]):
            if part.form is StepForm.SPARSE:
                out.add(
                    f"y = add_sparse(y, ids, b, low, high, starts{place}, listed{place}, "
                    f"adds{place})"
                )
            elif part.form is StepForm.BITS:
                out.add(
                    f"y = mask_bits(y, ids, live, b, words{place}, words{place}_stride, "
                    f"mask{place})"
                )
            else:
                out.add(element_call(place, part, self.names, "y", "ids"))
        out.add("return y")
        args = f"y, ids, live, seen, count, in_prompt, {self.head_args()}"
        return f"@triton.jit\ndef {name}({args}):\n{out.text()}"

    # --- scan -----------------------------------------------------------------------------------

    def scan(self) -> str:
        """Return the kernel that reads every logit once."""
        out = Writer()
        out.add("b = tl.program_id(1)", _SLOT, _ROW)
        self.load_columns(out, self.program.head)
        out.add("part = tl.program_id(0)")
        scale, name = "1.0", "head"
        if self.scaled:
            last = self.program.head[-1]
            divisor = self.names[(last.instance, last.columns[0])]
            scale, name = f"1.0 / {divisor}", "scan_head"
        out.add(
            "low = part * (T * 256)",
            "high = low + T * 256",
            # In halves, so that one warp holds a whole segment and sums it without the others.
            "segs = part * T + tl.arange(0, T)",
            "ids0 = segs[:, None] * 256 + tl.arange(0, 128)[None, :]",
            "ids1 = ids0 + 128",
            "live0 = ids0 < V",
            "live1 = ids1 < V",
            "line = logits + row * stride",
            "x0 = tl.load(line + ids0, mask=live0, other=DEAD).to(tl.float32)",
            "x1 = tl.load(line + ids1, mask=live1, other=DEAD).to(tl.float32)",
            *self._past("segs * 8", "T", 4, "segs < S", "0"),
            *self._past("segs * 8 + 4", "T", 4, "segs < S", "1"),
            f"y0 = {name}(x0, ids0, live0, seen0, count0, in_prompt0, {self.head_args()})",
            f"y1 = {name}(x1, ids1, live1, seen1, count1, in_prompt1, {self.head_args()})",
            "sub0 = quarter_maxima(y0)",
            "sub1 = quarter_maxima(y1)",
            "inside = segs < S",
            "base = b.to(tl.int64) * S",
            "subs = base * 4 + segs[:, None] * 4 + tl.arange(0, 2)[None, :]",
        )
        if self.weighs or self.statistics:
            out.add("smax = nan_max(larger(y0, y1), 1)")
        if self.weighs:
            out.add(
                f"masses = segment_masses(y0, y1, smax, {scale})",
                "tl.store(mass_out + base + segs, masses, mask=inside)",
            )
        if self.scaled:
            # A division keeps order, so the greatest quotient is that of the greatest.
            out.add(f"sub0 = divide(sub0, {divisor})", f"sub1 = divide(sub1, {divisor})")
        out.add(
            "tl.store(sub_out + subs, sub0, mask=inside[:, None])",
            "tl.store(sub_out + subs + 2, sub1, mask=inside[:, None])",
        )
        if self.raw:
            out.add(
                "x0 = tl.where(ids0 < K, x0, DEAD)",
                "x1 = tl.where(ids1 < K, x1, DEAD)",
                "sub0 = quarter_maxima(x0)",
                "sub1 = quarter_maxima(x1)",
                "rmax = nan_max(larger(x0, x1), 1)",
                "tl.store(rmass_out + base + segs, segment_masses(x0, x1, rmax, 1.0), mask=inside)",
                "tl.store(rsub_out + subs, sub0, mask=inside[:, None])",
                "tl.store(rsub_out + subs + 2, sub1, mask=inside[:, None])",
            )
        if self.statistics:
            out.add("sums = stat_out + base * STATS + segs * STATS")
        for place, line in enumerate(_summaries(self.statistics)):
            out.add(f"tl.store(sums + {place}, {line}, mask=inside)")
        args = [
            *("logits", "stride", "rows", "slots", "V", "K", "S"),
            *("sub_out", "mass_out"),
            *(("rsub_out", "rmass_out") if self.raw else ()),
            *(("stat_out",) if self.statistics else ()),
            *(*self.column_args, *self.aux_args, *_constants("T", "SAME")),
            *(("STATS: tl.constexpr",) if self.statistics else ()),
        ]
        out.add("finish_early()")
        return _kernel("scan", args, out.text())

    # --- select ---------------------------------------------------------------------------------

    def select(self) -> str:
        """Return the kernel that chooses a token for each row."""
        out = Writer()
        out.add("b = tl.program_id(0)", _SLOT, _ROW, "low = 0", "high = V")
        self.load_columns(out, self.program.steps)
        out.add("base = b.to(tl.int64) * S", "line = logits + row * stride")
        out.add("own = scratch + b.to(tl.int64) * (4 * P)", "flag = 0", "token = -1")
        out.add("listed = lists + b.to(tl.int64) * N")
        if self.program.picker is Picker.ICDF:
            skew = self.names[(self.program.pick_instance, "skew")]
            out.add(f"{skew} = tl.load({skew}_ptr + slot)")
        draws = any("fires" in part.arguments for part in self.program.steps)
        if draws or self.program.picker is not Picker.GREEDY:
            out.add("key = tl.load(keys + b)", "position = tl.load(positions + b)")
            out.add("branch = tl.load(branches + b)")
        out.add("wait_for_last()")
        if self._uses_list:
            self._list(out, "sub_in", "y", self._wanted)
            out.add("best = nan_max(gmax, 0)", "worst = best")
            self._totals(out)
            out.add(*tail_lines(self))
        else:
            self._without_list(out)
        out.add("if (worst == DEAD) | (worst != worst) | (worst == float('inf')):")
        out.add(f"    flag = {BROKEN}", "    token = -1")
        out.add("tl.store(token_out + b, token.to(tl.int64))", "tl.store(flag_out + b, flag)")
        args = [
            *("logits", "stride", "rows", "slots"),
            *("keys", "positions", "branches"),
            *("V", "K", "S", "sub_in", "mass_in"),
            *(("rsub_in", "rmass_in", "logprob_out") if self.raw else ()),
            *(("rank_out", "top_ids", "top_values") if self.program.outputs.num_top else ()),
            *(("kept_out",) if self.keeps else ()),
            *(("stat_in",) if self.statistics else ()),
            *("scratch", "lists", "token_out", "flag_out"),
            *(*self.column_args, *self.aux_args),
            *(
                "P: tl.constexpr",
                "G: tl.constexpr",
                "N: tl.constexpr",
                "CAP: tl.constexpr",
                "SAME: tl.constexpr",
            ),
            *(("STATS: tl.constexpr",) if self.statistics else ()),
        ]
        if not self.raw:
            return _kernel("select", args, out.text())
        names = ", ".join(arg.split(":")[0] for arg in args)
        out.add(f"report_row(b, token, {names})")
        report = Writer()
        report.add(_ROW, "base = b.to(tl.int64) * S", "line = logits + row * stride")
        report.add("own = scratch + b.to(tl.int64) * (4 * P)")
        report.add("listed = lists + b.to(tl.int64) * N")
        self._raw(report)
        text = f"@triton.jit\ndef report_row(b, token, {', '.join(args)}):\n{report.text()}"
        return text + "\n\n" + _kernel("select", args, out.text())

    @property
    def keeps(self) -> bool:
        """Whether the list that was chosen from is written."""
        return self.program.outputs.kept and self._uses_list

    @property
    def _uses_list(self) -> bool:
        return bool(self.program.tail) or self.program.picker is Picker.ICDF

    @property
    def _wanted(self) -> str:
        """How many tokens the list should hold at least."""
        for part in self.program.tail:
            if part.name == "top_k":
                return f"tl.minimum({self.names[(part.instance, 'k')]}, CAP).to(tl.int32)"
        return "CAP * 3 // 4"

    def _list(self, out: Writer, source: str, kind: str, wanted: str) -> None:
        """List the tokens that reach a cut, in rank order, with the bound at the end."""
        value = (
            f"head(x, ids, live, seen, count, in_prompt, {self.head_args()})"
            if kind == "y"
            else "x"
        )
        past = self._past("sub * 2", "64", 2, "places < num_subs") if kind == "y" else []
        limit = "V" if kind == "y" else "K"
        out.add(
            "quarters = tl.arange(0, G)[:, None] * (4 * P // G)"
            " + tl.arange(0, 4 * P // G)[None, :]",
            f"maxima = tl.load({source} + base * 4 + quarters, mask=quarters < 4 * S, other=DEAD)",
            "gmax = nan_max(maxima, 1)",
            f"cut = find_cut(gmax, {wanted})",
            "num_subs = list_subs(maxima, quarters, cut, own)",
            "num_subs = tl.where(num_subs < N, num_subs, 0)",
            "n = tl.where(num_subs > 0, 0, N)",
            "for first in range(0, num_subs, 64):",
            "    places = first + tl.arange(0, 64)",
            "    sub = tl.load(own + places, mask=places < num_subs, other=0)",
            "    ids = sub[:, None] * 64 + tl.arange(0, 64)[None, :]",
            f"    live = (places < num_subs)[:, None] & (ids < {limit})",
            "    x = tl.load(line + ids, mask=live, other=DEAD).to(tl.float32)",
            *("    " + line for line in past),
            f"    y = {value}",
            "    take = live & (y >= cut) & (y > DEAD) & (n < N)",
            "    n = append_list(y, ids, take, n, listed, N)",
            "full = n >= N",
            "n = tl.where(full, 0, n)",
            f"values, ids = sort_list(listed, n, {'just_below(cut)' if kind == 'y' else 'cut'}"
            f", {'True' if kind == 'y' else 'False'}, N)",
        )

    def _totals(self, out: Writer) -> None:
        """Load what the first truncation asks of the whole row."""
        names = self.program.tail[0].arguments if self.program.tail else ("total",)
        if not self.statistics and "total" not in names:
            return
        out.add(
            "segs = tl.arange(0, P)",
            "inside = segs < S",
            "quarters = segs[:, None] * 4 + tl.arange(0, 4)[None, :]",
            "smax = tl.max(tl.load(sub_in + base * 4 + quarters, mask=inside[:, None], "
            "other=DEAD), 1)",
            "smass = tl.load(mass_in + base + segs, mask=inside, other=0)",
            "total = tl.sum(weights_of(smax, smass, best), 0)",
        )
        if self.statistics:
            out.add("sums = stat_in + base * STATS + segs * STATS")
        place = 0
        for name in self.statistics:
            width = 3 if name == "deviation" else 1
            loads = [
                f"tl.load(sums + {place + extra}, mask=inside, other=0)" for extra in range(width)
            ]
            place += width
            out.add(f"{name} = {name}_of(smax, smass, {', '.join(loads)}, best, total)")

    def _without_list(self, out: Writer) -> None:
        """Pick without a truncation: a segment by its weight, then a token in it."""
        head = f"head(x, ids, live, seen, count, in_prompt, {self.head_args()})"
        out.add(
            "segs = tl.arange(0, P)",
            "inside = segs < S",
            "quarters = segs[:, None] * 4 + tl.arange(0, 4)[None, :]",
            "smax = nan_max(tl.load(sub_in + base * 4 + quarters, mask=inside[:, None], "
            "other=DEAD), 1)",
            "best = nan_max(smax, 0)",
            "worst = best",
        )
        if self.program.picker is Picker.RACE:
            out.add(
                "smass = tl.load(mass_in + base + segs, mask=inside, other=0)",
                "weights = weights_of(smax, smass, best).to(tl.float64)",
                "times = log_time_for(key, position, branch, 0, segs).to(tl.float64)",
                "chosen = first_best(tl.log(weights) - times, segs)",
            )
        else:
            out.add("chosen = first_best(tl.where(inside, smax, DEAD), segs)")
        out.add(
            "chosen = tl.minimum(chosen, S - 1)",
            "ids = chosen * 256 + tl.arange(0, 256)",
            "live = ids < V",
            "x = tl.load(line + ids, mask=live, other=DEAD).to(tl.float32)",
            *self._past("chosen * 8 + tl.arange(0, 1)", "1", 8, "tl.arange(0, 1) < 1"),
            f"y = {head}",
        )
        if self.program.picker is Picker.RACE:
            out.add(
                "weights = mass_of(y, tl.max(y, 0)).to(tl.float64)",
                "times = log_time_for(key, position, branch, 1, ids).to(tl.float64)",
                "token = first_best(tl.log(weights) - times, ids)",
            )
        else:
            out.add("token = first_best(y, ids)")

    def _raw(self, out: Writer) -> None:
        """Report the token's log-probability before every stage, its rank and the best tokens."""
        out.add(
            "segs = tl.arange(0, P)",
            "inside = segs < S",
            "quarters = segs[:, None] * 4 + tl.arange(0, 4)[None, :]",
            "smax = tl.max(tl.load(rsub_in + base * 4 + quarters, mask=inside[:, None], "
            "other=DEAD), 1)",
            "smass = tl.load(rmass_in + base + segs, mask=inside, other=0)",
            "best = tl.max(smax, 0)",
            "total = tl.sum(weights_of(smax, smass, best), 0).to(tl.float64)",
            "log_total = best.to(tl.float64) + tl.log(total / ONE)",
            "known = (token >= 0) & (token < K)",
            "own_logit = tl.load(line + tl.maximum(token, 0), mask=known, other=DEAD)"
            ".to(tl.float32)",
            "logprob = own_logit.to(tl.float64) - log_total",
            "tl.store(logprob_out + b, logprob.to(tl.float32))",
        )
        if not self.program.outputs.num_top:
            return
        num_top = self.program.outputs.num_top
        self._list(out, "rsub_in", "raw", str(num_top))
        out.add(
            "top = tl.arange(0, N)",
            f"shown_at = b.to(tl.int64) * {num_top} + top",
            f"shown = (top < {num_top}) & (top < n)",
            f"tl.store(top_ids + shown_at, tl.where(shown, ids, -1), mask=top < {num_top})",
            f"tl.store(top_values + shown_at, tl.where(shown, values - log_total, DEAD)"
            f".to(tl.float32), mask=top < {num_top})",
            "rank = 1 + tl.sum((values > own_logit).to(tl.int32), 0)",
            "if (own_logit < cut) | (n == 0):",
            "    num_subs = list_subs(maxima, quarters, own_logit, own)",
            "    rank = 1",
            "    for first_sub in range(0, num_subs, 64):",
            "        others = first_sub + tl.arange(0, 64)",
            "        other = tl.load(own + others, mask=others < num_subs, other=0)",
            "        ids2 = other[:, None] * 64 + tl.arange(0, 64)[None, :]",
            "        live2 = (others < num_subs)[:, None] & (ids2 < K)",
            "        x2 = tl.load(line + ids2, mask=live2, other=DEAD).to(tl.float32)",
            "        rank += tl.sum(tl.sum((x2 > own_logit).to(tl.int32), 1), 0)",
            "tl.store(rank_out + b, tl.where(full & (own_logit >= cut), -1, rank).to(tl.int64))",
        )

    def source(self) -> str:
        """Return the text of the module."""
        names = [part.name for part in self.program.steps] + [self.program.picker.value]
        header = _HEADER.format(chain=" -> ".join(names))
        parts = [header + self.head()]
        if self.scaled:
            parts.append(self.head("scan_head", -1))
        return "\n\n".join([*parts, self.scan(), self.select()])


_BODY = """@triton.jit
def {name}_row({args}):
{text}

@triton.jit
def {name}({args}):
    b = tl.program_id({axis})
    if SAME:
        {name}_row({call})
    elif tl.load(slots + b) >= 0:
        {name}_row({call})
"""


def _kernel(name: str, args: list[str], text: str) -> str:
    """Return a kernel whose body runs for rows that have a slot; all have where rows are SAME."""
    names = [arg.split(":")[0] for arg in args]
    return _BODY.format(
        name=name,
        args=", ".join(args),
        call=", ".join(names),
        text=text,
        axis=1 if name == "scan" else 0,
    )


def _constants(*names: str) -> list[str]:
    return [f"{name}: tl.constexpr" for name in names]


def _summaries(statistics: list[str]) -> Iterator[str]:
    for name in statistics:
        if name == "deviation":
            yield "count_alive(y0, y1)"
            yield "sum_drops(y0, y1, smax)"
            yield "sum_square_drops(y0, y1, smax)"
        else:
            yield f"sum_{name}(y0, y1, smax)"


def num_summaries(program: Program) -> int:
    """Return how many int64 a segment has beside its mass."""
    return len(list(_summaries(statistics_of(program))))


def source_of_program(program: Program) -> str:
    """Return the text of the program's module."""
    return Generator(program).source()


def cache_dir() -> Path:
    """Return where generated modules are kept: $DECODEKIT_CACHE, or the user's cache."""
    root = os.environ.get("DECODEKIT_CACHE")
    if root:
        return Path(root) / "kernels"
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "decodekit" / "kernels"


_MODULES: dict[str, ModuleType] = {}


def module_of(program: Program) -> ModuleType:
    """Return the module of a program, written and loaded once for each signature."""
    key = program.key()
    module = _MODULES.get(key)
    if module is None:
        module = _MODULES[key] = _load(key, program)
    return module


def _load(key: str, program: Program) -> ModuleType:
    text = source_of_program(program)
    path = _write(f"chain_{key}.py", text)
    module = ModuleType(f"decodekit.kernels.generated.chain_{key}")
    module.__file__ = str(path)
    for place, part in enumerate(program.steps):
        if part.function is not None:
            setattr(module, f"stage{place}", part.function)
    sys.modules[module.__name__] = module
    linecache.checkcache(str(path))
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def _write(name: str, text: str) -> Path:
    """Write the module's text, so that Triton can read it; a temporary place if the cache fails."""
    for folder in (cache_dir(), Path(tempfile.gettempdir()) / "decodekit-kernels"):
        path = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != text:
                partial = path.with_suffix(f".{os.getpid()}")
                partial.write_text(text)
                partial.replace(path)
            return path
        except OSError:
            continue
    raise OSError(f"generated kernels cannot be written to {cache_dir()}; set DECODEKIT_CACHE")
