"""Fused chains: which programs the kernels can run, and how their rows are handed over.

A program is fused if each of its stages has a kernel (`Stage.kernel`), a short list of numbers to
add (`Stage.sparse`) or a mask (`Stage.bits`), and no one looks at the rows in between. Kernels are
compiled in the background, and until then, and where a row cannot prove its list, the stages run
one by one. $DECODEKIT_FUSED is "0" to leave the kernels alone and "wait" to wait for the compiler.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.dispatch import (
    Batch,
    Bits,
    FusedChain,
    History,
    ListClass,
    Result,
    Sparse,
    list_class,
)
from ..kernels.lang import HAS_TRITON
from ..kernels.price import lint
from ..kernels.program import HISTORY_NAMES, Outputs, Picker, Step, StepForm, argument_names, step
from ..kernels.program import Program as Kernels
from ..kernels.reference.noise import purpose_of
from .batch import Rows, RowView
from .program import Element, Program
from .slots import SlotTable
from .stage import CutStage, Form, Stage, Tap

if TYPE_CHECKING:
    from collections.abc import Mapping

PICKERS = {each.value: each for each in Picker}
WORK = ("transform", "keep", "pick", "threshold", "penalise", "weigh")
READY_FOR = (1, 16)  # rows; the first kernel is built for few and for many
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Group(NamedTuple):
    """The rows of one program in one step."""

    program: Program
    rows: Rows
    views: Mapping[int, RowView]


class Outcome(NamedTuple):
    """What the kernels made of a group; read once, for it waits for the device."""

    tokens: list[int]  # -1 where the kernels could not tell
    scores: list[float]  # log-probabilities before every stage


@dataclass(slots=True)
class _State:
    """A program on its way to its kernels."""

    chain: FusedChain | None
    reason: str = ""
    ready: threading.Event = field(default_factory=threading.Event)


class FusedChains:
    """The kernels of the programs of one engine."""

    def __init__(self, table: SlotTable, vocab_size: int, tokenizer_size: int) -> None:
        self.table = table
        self.vocab_size = vocab_size
        self.tokenizer_size = tokenizer_size
        self.waits = os.environ.get("DECODEKIT_FUSED") == "wait"
        self._states: dict[tuple[int, torch.dtype, ListClass], _State] = {}
        self._programs: list[Program] = []  # keeps their identities taken

    @classmethod
    def possible(cls, device: torch.device) -> bool:
        """Say whether there are kernels for this device."""
        wanted = os.environ.get("DECODEKIT_FUSED") != "0"
        return wanted and HAS_TRITON and device.type == "cuda"

    def chain_of(self, group: Group, logits: Tensor) -> FusedChain | None:
        """Return the kernels of a group if they are ready; a first call begins to build them."""
        longest = _longest(group)
        key = (id(group.program), logits.dtype, list_class(longest))
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = self._begin(group.program, logits, longest)
        if self.waits and state.chain is not None:
            state.ready.wait()
        return state.chain if state.ready.is_set() and not state.reason else None

    def wait(self) -> None:
        """Wait until every program that was met has its kernels."""
        for state in list(self._states.values()):
            if state.chain is not None:
                state.ready.wait()

    def launch(
        self,
        chain: FusedChain,
        group: Group,
        logits: Tensor,
        members: Sequence[int],
    ) -> Result:
        """Start the kernels on the rows `members` of `logits` [R, V]; does not wait for them."""
        rows = group.rows
        batch = self._batch(rows, members, len(logits))
        sparse: dict[int, Sparse] = {}
        bits: dict[int, Bits] = {}
        for place, (part, element) in enumerate(
            zip(chain.program.steps, _elements(group.program), strict=True)
        ):
            view = group.views[element.index]
            if part.form is StepForm.SPARSE:
                sparse[place] = _sparse(element.stage, view)
            elif part.form is StepForm.BITS:
                bits[place] = _bits(element.stage, view)
        columns = {name: self.table.column(*name) for name in chain.columns}
        history = _history(self.table) if group.program.needs_seen else None
        return chain.run(logits, batch, columns, history, sparse, bits, _longest(group))

    def read(self, result: Result) -> Outcome:
        """Wait for the kernels and return what they chose."""
        assert result.logprobs is not None
        packed = torch.stack((result.tokens.double(), result.logprobs.double())).tolist()
        return Outcome([int(token) for token in packed[0]], packed[1])

    def _batch(self, rows: Rows, members: Sequence[int], num_lines: int) -> Batch:
        cached = rows.cache.get("fused_batch")
        if cached is None or cached[0] != tuple(members):
            lines = torch.tensor(members, dtype=torch.int32, device=self.table.device)
            cached = (tuple(members), lines, rows.slots.int())
            rows.cache["fused_batch"] = cached
        positions = torch.from_numpy(rows.positions).to(self.table.device, non_blocking=True)
        same = len(members) == num_lines
        return Batch(cached[1], cached[2], rows.keys, positions, rows.branches, same)

    def _begin(self, program: Program, logits: Tensor, longest: int) -> _State:
        self._programs.append(program)
        made = kernels_of(program)
        if isinstance(made, str) or logits.dtype not in DTYPES or logits.stride(1) != 1:
            return _State(None, made if isinstance(made, str) else "the logits have another form")
        chain = FusedChain(made, self.tokenizer_size, self.tokenizer_size, self.table.device)
        state = _State(chain)
        shape = (READY_FOR[-1], logits.stride(0))
        like = torch.zeros(shape, dtype=logits.dtype, device=logits.device)
        job = threading.Thread(target=self._build, args=(state, made, like, longest), daemon=True)
        job.start()
        return state

    def _build(self, state: _State, made: Kernels, like: Tensor, longest: int) -> None:
        """Run the kernels of each shape once, on rows of zeros."""
        try:
            twin = FusedChain(made, self.tokenizer_size, self.tokenizer_size, self.table.device)
            if self.table.device.type == "cuda":
                side: Any = torch.cuda.Stream
                with torch.cuda.stream(side(self.table.device)):
                    for count in READY_FOR:
                        _run_once(twin, like, count, self.table, longest)
                    torch.cuda.current_stream(self.table.device).synchronize()
        except Exception as error:
            state.reason = f"{type(error).__name__}: {error}"
        finally:
            state.ready.set()


def kernels_of(program: Program) -> Kernels | str:
    """Return what the kernels are to do for a program, or why they cannot."""
    blocked = _blocked(program)
    if blocked:
        return blocked
    steps: list[Step] = []
    for element in _elements(program):
        made = _step(element)
        if isinstance(made, str):
            return made
        if made.form is not StepForm.CUT and any(each.form is StepForm.CUT for each in steps):
            if made.form is not StepForm.ELEMENT or HISTORY_NAMES & set(made.arguments):
                return f"the stage {made.name!r} reads tables after a truncation"
        steps.append(made)
    picker = program.picker
    return Kernels(
        steps=tuple(steps),
        picker=PICKERS[kernel_of(picker.stage)],
        outputs=Outputs(raw=True),
        pick_instance=picker.instance,
        pick_purpose=_signed(purpose_of(picker.instance)),
    )


def fusion_note(program: Program) -> str:
    """Return why the stages of a program run one by one on a GPU; empty if they are fused."""
    made = kernels_of(program)
    return f"not fused on the GPU: {made}" if isinstance(made, str) else ""


def _blocked(program: Program) -> str:
    if program.chooses or program.on_logprobs:
        return "a driver works on the log-probabilities"
    if program.joint:
        return f"{program.joint[0].name!r} works on all rows at once"
    taps = program.taps - {Tap.RAW}
    if taps or any(part.tap is not None for part in program.segments):
        return "an observer looks between the stages"
    if kernel_of(program.picker.stage) not in PICKERS:
        return f"the picker {program.picker.name!r} has no kernel"
    return ""


def kernel_of(stage: Stage) -> Any:
    """Return the kernel that a stage's class declares, None if a subclass changed the work."""
    for cls in type(stage).__mro__:
        if "kernel" in vars(cls):
            return vars(cls)["kernel"]
        if any(name in vars(cls) for name in WORK):
            return None
    return None


def _elements(program: Program) -> list[Element]:
    # The padding of the vocabulary needs no step: the kernels read the known ids alone.
    return [part for part in program.elements if part.name != "vocab_padding"]


def _step(element: Element) -> Step | str:
    stage = element.stage
    if getattr(stage, "sparse", None) is not None:
        return Step(stage.name, element.instance, StepForm.SPARSE)
    if getattr(stage, "bits", None) is not None:
        return Step(stage.name, element.instance, StepForm.BITS)
    kernel = kernel_of(stage)
    if isinstance(kernel, dict):
        kernel = kernel.get(element.mode)
    if kernel is None:
        return f"the stage {stage.name!r} has no kernel with these parameters"
    is_cut = isinstance(stage, CutStage)
    if element.guarded and not is_cut:
        found = lint(kernel)
        if found:
            return f"the kernel of the stage {stage.name!r} breaks its contract: {found[0]}"
    names = argument_names(kernel)
    pure = not {"seen", "in_prompt", "count", "ids"} & set(names)
    return step(
        stage.name,
        element.instance,
        kernel,
        cut=is_cut,
        monotone=pure and stage.caps.monotone and stage.form is Form.ELEMENTWISE,
        prefix=is_cut and stage.caps.keeps_top_segment,
        min_keep=is_cut and element.min_keep,
        purpose=_signed(purpose_of(element.instance)),
    )


def _signed(purpose: int) -> int:
    return purpose - (1 << 32) if purpose >= 1 << 31 else purpose


def _longest(group: Group) -> int:
    """Return the largest number of tokens that a truncation of these rows asks to keep."""
    found = group.rows.cache.get("fused_longest")
    if found is None:
        found = 0
        for element in group.program.elements:
            if isinstance(element.stage, CutStage):
                hint: Callable[[Any], int | None] = element.stage.list_hint
                views = group.views[element.index].params
                found = max([found, *(hint(params) or 0 for params in views)])
        group.rows.cache["fused_longest"] = found
    return int(found)


def _history(table: SlotTable) -> History:
    seen = table.seen
    return History(seen.bits, seen.counts, seen.in_prompt)


def _sparse(stage: Any, view: RowView) -> Sparse:
    """Lay a stage's pairs out by row; kept while the stage returns the same tensors."""
    places, adds = stage.sparse(view)
    cache = view.rows.cache
    key = (view.instance, "fused_sparse")
    found = cache.get(key)
    if found is None or found[0] is not places.ids:
        bounds = torch.arange(len(view) + 1, device=places.rows.device)
        starts = torch.searchsorted(places.rows, bounds).int()
        found = cache[key] = (places.ids, Sparse(starts, places.ids.int(), adds))
    made: Sparse = found[1]
    return made


def _bits(stage: Any, view: RowView) -> Bits:
    def build() -> Bits:
        words = stage.bits(view)
        return Bits(words, torch.arange(len(view), dtype=torch.int32, device=words.device))

    return view.cached("fused_bits", build)


def _run_once(twin: FusedChain, like: Tensor, count: int, table: SlotTable, longest: int) -> None:
    device = table.device
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    sparse = Sparse(
        torch.zeros(count + 1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.zeros(1, device=device),
    )
    width = -(-table.vocab_size // 32)
    bits = Bits(
        torch.zeros(1, width, dtype=torch.int32, device=device),
        torch.full((count,), -1, dtype=torch.int32, device=device),
    )
    places = range(len(twin.program.steps))
    columns = {name: table.column(*name) for name in twin.columns}
    for same in (True, False):
        # Without a slot a row is left alone.
        slots = zeros.int() if same else zeros.int() - 1
        twin.run(
            like[:count],
            Batch(zeros.int(), slots, zeros, zeros, zeros, same),
            columns,
            _history(table),
            dict.fromkeys(places, sparse),
            dict.fromkeys(places, bits),
            longest,
        )
