"""What a step of the chain costs in Python, tensor work left out.

A step is `ChainRunner.run` and `ChainRunner.accept` on running sequences: finding each row's
program, grouping, calling stages, picker and log-probs, advancing the token counts. Validation and
planning happen when a request is admitted and are timed by themselves in the last table.

Tensor work cannot be switched off, and a profiler costs as much as what it measures. So:

1. The step runs on a vocabulary of 128, where kernels take next to no time, with nothing attached.
2. One such step of a twin, in the same state, runs under a torch function mode that notes every
   call into torch with its arguments. A call of a function of `kernels/`, the room of tensor
   arithmetic, is noted as one call: on the CPU these are numpy and torch, on a card one kernel.
3. The noted calls are made again in a plain loop, on the same values: argument parsing, dispatch,
   allocation and kernels of the very same calls. The cost of the loop itself is that of the same
   loop over a built-in that does nothing.
4. Python = step - (calls - loop), each the fastest of some hundred over many twins, in processor
   time of the thread: what else runs on the machine can only add. Where it is busy, caches and
   cores are shared and all of it is slower; the time of one tiny addition, about 1 on a quiet
   machine, tells by how much.

Attribute reads such as `tensor.shape`, and all that torch does not let a mode see, count as Python.
The column "+ kernels/" is Python when calls into torch alone are left out, so that it holds numpy's
arithmetic and the Python inside `kernels/` too: an upper bound. The whole step at the vocabulary of
the embedded model stands beside it for scale. One thread throughout.

    python benchmarks/step_overhead.py [--quick] [--profile] [--json FILE]
"""

from __future__ import annotations

import os

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from statistics import median
from types import FunctionType
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from decodekit import SamplingParams
from decodekit.core.chain import ChainRunner
from decodekit.core.plan import Planner
from decodekit.core.registry import Registry
from decodekit.core.request import Request
from decodekit.core.request import Sequence as TokenSequence

TARGET_US = 150.0  # the default chain at 64 rows
ROWS = (1, 16, 64)
SMALL, FULL = 128, 49_152  # vocabularies
PADDING = 8  # ids past the tokenizer's
PROMPT_LEN = 16
WARM_STEPS = 5
STEPS_A_TWIN = 25  # token counts grow, so twins are made anew before they drift apart

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05}
EVERY = {
    **SAMPLED,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.2,
    "logit_bias": {7: 1.5},
    "allowed_token_ids": list(range(100)),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: what every row asks for."""

    name: str
    params: Mapping[str, Any]
    is_default_chain: bool = False


CASES = (
    Case("greedy", {"temperature": 0}),
    Case("temperature and cuts", SAMPLED),
    Case("default, every setting", EVERY, is_default_chain=True),
    Case("the same, log-probs", {**EVERY, "logprobs": 0}),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds of one step."""

    case: str
    rows: int
    num_calls: int  # calls into torch and kernels/
    step: float  # on the small vocabulary
    python: float
    python_and_kernels: float  # with what is numpy or Python inside kernels/
    full_step: float  # on the full vocabulary
    is_default_chain: bool


class Recorder(TorchFunctionMode):
    """Notes calls into torch while it is active, and calls of `kernels/` under `whole_kernels`.

    Each tensor's values are kept as they were when a noted call first got it, so that calls that
    change tensors in place find the same values each time they are made again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._is_inside = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not self._is_inside and getattr(func, "__name__", "") != "__get__":
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append((func, args, kwargs))
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and id(value) not in self._values:
                self._values[id(value)] = (value, value.clone())

    def restore(self) -> None:
        """Give every tensor its values back; of those that share memory the first seen wins."""
        for tensor, values in reversed(self._values.values()):
            tensor.copy_(values)

    def noting(self, kernel: FunctionType) -> Callable[..., Any]:
        """Return `kernel` as a function that is noted as one call."""

        @wraps(kernel)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return kernel(*args, **kwargs)
            self._is_inside = True
            try:
                self._note(kernel, args, kwargs)
                return kernel(*args, **kwargs)
            finally:
                self._is_inside = False

        return call

    @contextmanager
    def whole_kernels(self) -> Iterator[None]:
        """Put `noting` around every function of `kernels/` that another room has imported."""
        places = [
            (module, name, value)
            for module in list(sys.modules.values())
            if module.__name__.startswith("decodekit.")
            and not module.__name__.startswith("decodekit.kernels.")
            for name, value in vars(module).items()
            if isinstance(value, FunctionType) and value.__module__.startswith("decodekit.kernels.")
        ]
        for module, name, value in places:
            setattr(module, name, self.noting(value))
        try:
            yield
        finally:
            for module, name, value in places:
                setattr(module, name, value)


class Batch:
    """Sequences of one case in a chain runner, with fixed random logits in place of a model."""

    def __init__(self, registry: Registry, case: Case, rows: int, vocab_size: int) -> None:
        size = vocab_size - PADDING
        device = torch.device("cpu")
        planner = Planner(
            registry,
            vocab_size=vocab_size,
            tokenizer_size=size,
            max_model_len=8192,
            device=device,
            eos_ids=(2,),
        )
        self.runner = ChainRunner(
            max_slots=rows, vocab_size=vocab_size, tokenizer_size=size, device=device
        )
        generator = torch.Generator().manual_seed(0)
        self.logits = 3 * torch.randn(rows, vocab_size, generator=generator)
        prompts = torch.randint(size, (rows, PROMPT_LEN), generator=generator).tolist()
        self.sequences = []
        for row, prompt in enumerate(prompts):
            params = SamplingParams(seed=row, **case.params).snapshot()
            plan = planner.admit(params, prompt_ids=prompt)
            self.runner.program(plan)
            sequence = _sequence(row, params, plan, tuple(prompt))
            self.runner.open(sequence)
            self.sequences.append(sequence)
        for _ in range(WARM_STEPS):
            self.step()

    def step(self) -> float:
        """Choose a token a row and take it in; return the seconds."""
        start = time.thread_time()
        result = self.runner.run(self.sequences, self.logits)
        errors = self.runner.accept(self.sequences, result.tokens)
        seconds = time.thread_time() - start
        if errors or result.errors or self.runner.dense_rows:
            raise RuntimeError(f"not the step that was meant: {errors or result.errors}")
        for sequence, token in zip(self.sequences, result.tokens, strict=True):
            sequence.output_ids.append(token)
        return seconds

    def record(self, *, kernels_whole: bool) -> Recorder:
        """Return the recorder of one step."""
        with Recorder() as recorder:
            with recorder.whole_kernels() if kernels_whole else nullcontext():
                self.step()
        return recorder


def _sequence(row: int, params: Any, plan: Any, prompt: tuple[int, ...]) -> TokenSequence:
    request = Request(str(row), None, prompt, params, plan, row, 0, 0.0, row)
    sequence = TokenSequence(
        uid=row, request=request, branch=0, prompt_ids=prompt, prompt_len=len(prompt)
    )
    sequence.slot = row
    request.sequences = [sequence]
    return sequence


# --- the measurement ------------------------------------------------------------------------------


def replayed(recorder: Recorder) -> tuple[float, float]:
    """Make the calls again; return their seconds, and those of the loop around them."""
    recorder.restore()
    calls = recorder.calls
    start = time.thread_time()
    for func, args, kwargs in calls:
        func(*args, **kwargs)
    middle = time.thread_time()
    nothing = "".format  # takes any arguments and returns at once
    for _, args, kwargs in calls:
        nothing(*args, **kwargs)
    return middle - start, time.thread_time() - middle


@torch.inference_mode()
def measure(registry: Registry, case: Case, rows: int, twins: int, full_steps: int) -> Measured:
    """Measure one line of the table."""
    times: list[tuple[float, ...]] = []
    for _ in range(twins):
        batch = Batch(registry, case, rows, SMALL)
        whole = Batch(registry, case, rows, SMALL).record(kernels_whole=True)
        split = Batch(registry, case, rows, SMALL).record(kernels_whole=False)
        times += [(batch.step(), *replayed(whole), *replayed(split)) for _ in range(STEPS_A_TWIN)]
    step, whole_s, whole_loop, split_s, split_loop = (
        1e6 * min(column) for column in zip(*times, strict=True)
    )
    large = Batch(registry, case, rows, FULL)
    return Measured(
        case=case.name,
        rows=rows,
        num_calls=len(whole.calls),
        step=step,
        python=step - whole_s + whole_loop,
        python_and_kernels=step - split_s + split_loop,
        full_step=1e6 * min(large.step() for _ in range(full_steps)),
        is_default_chain=case.is_default_chain,
    )


def torch_call() -> float:
    """Return the microseconds of one small addition, as a measure of this machine at this time."""
    four = torch.ones(4)

    def added() -> float:
        start = time.thread_time()
        for _ in range(1000):
            four + four
        return time.thread_time() - start

    return 1e3 * min(added() for _ in range(20))


def measure_admission(registry: Registry, repeats: int) -> dict[str, float]:
    """Return microseconds to make parameters and to plan them, first of its kind and repeated."""
    case = next(case for case in CASES if case.is_default_chain)
    planner = Planner(
        registry,
        vocab_size=FULL,
        tokenizer_size=FULL,
        max_model_len=8192,
        device=torch.device("cpu"),
        eos_ids=(2,),
    )
    made: list[float] = []
    first: list[float] = []
    again: list[float] = []
    for number in range(repeats):
        start = time.thread_time()
        params = SamplingParams(**{**case.params, "temperature": 0.8 + number / 1e4}).snapshot()
        middle = time.thread_time()
        planner.admit(params)
        end = time.thread_time()
        planner.admit(params)
        made.append(middle - start)
        first.append(end - middle)
        again.append(time.thread_time() - end)
    return {
        "make the parameters": 1e6 * median(made),
        "plan values seen for the first time": 1e6 * median(first),
        "plan values seen before": 1e6 * median(again),
    }


@torch.inference_mode()
def profile(registry: Registry, steps: int) -> None:
    """Print where the Python time of the default chain at 64 rows goes, by cProfile."""
    case = next(case for case in CASES if case.is_default_chain)
    batch = Batch(registry, case, ROWS[-1], SMALL)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        batch.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


# --- the command ----------------------------------------------------------------------------------


def show(
    results: Sequence[Measured], admission: Mapping[str, float], call_us: float, console: Console
) -> None:
    """Print the tables and the verdict."""
    table = Table(
        title=f"A step of the chain, microseconds (one thread; a tiny addition: {call_us:.1f})"
    )
    table.add_column("chain")
    for name in ("rows", "calls", f"V={SMALL}", "Python", "+ kernels/", f"V={FULL}"):
        table.add_column(name, justify="right")
    for line in results:
        table.add_row(
            line.case if line.rows == ROWS[0] else "",
            str(line.rows),
            str(line.num_calls),
            f"{line.step:.0f}",
            f"[bold]{line.python:.0f}[/]",
            f"{line.python_and_kernels:.0f}",
            f"{line.full_step:.0f}",
            end_section=line.rows == ROWS[-1],
        )
    console.print(table)
    found = next(line for line in results if line.is_default_chain and line.rows == ROWS[-1])
    verdict = "[green]met[/]" if found.python < TARGET_US else "[red]missed[/]"
    console.print(
        f"Python at {found.rows} rows, default chain with every setting: {found.python:.0f} "
        f"microseconds; target under {TARGET_US:.0f}: {verdict}"
    )
    once = Table(title="Once a request, microseconds")
    once.add_column("admission")
    once.add_column("median", justify="right")
    for name, value in admission.items():
        once.add_row(name, f"{value:.0f}")
    console.print(once)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--profile", action="store_true", help="print a cProfile listing instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    registry = Registry.load(autoload=False)
    if options.profile:
        profile(registry, 500)
        return
    twins, full_steps = (2, 3) if options.quick else (16, 15)
    lines = [(case, rows) for case in CASES for rows in ROWS]
    results = [
        measure(registry, case, rows, twins, full_steps)
        for case, rows in track(lines, console=Console(stderr=True), transient=True)
    ]
    admission = measure_admission(registry, 20 if options.quick else 300)
    call_us = torch_call()
    show(results, admission, call_us, Console())
    if options.json:
        found = {
            "steps": [asdict(line) for line in results],
            "admission_us": admission,
            "small_addition_us": call_us,
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
