"""Microseconds of one sampling call on a GPU: fused, stage by stage, torch's sorts, and peers.

Every sampler gets the same logits in one run. Inputs rotate over more than 250 MB, so that the L2
cache does not serve them. "graph" is the time of a call in a replayed CUDA graph, the median of
several replays; "eager" is launched from Python call by call. "x floor" is the multiple of the time
that it takes to read the logits once at the copy bandwidth measured in the same run.

Settings: `greedy`; `draw` temperature alone; `usual` temperature 0.8, top-k 50, top-p 0.95; `top_p`
temperature and top-p; `penalties` `usual` behind three penalties on 1,000 seen tokens; `logprobs`
`penalties` with five log-probabilities and a seed a row; `mixed` `usual` with other numbers in
every row. Rows: `llm` (normal with deviation 2.2 and twenty raised tokens), `flat` (deviation 1),
`peaked` (deviation 5). FlashInfer and vLLM are timed where they can be imported.

    python benchmarks/sampler.py [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from decodekit.core.slots import SeenTokens
from decodekit.kernels.dispatch import Batch, FusedChain, History
from decodekit.kernels.ops import divide, race_list, rank_all, token_mass
from decodekit.kernels.program import Outputs, Picker, Program, Step, step
from decodekit.logits_processors.bias.penalties import (
    lower_by_count,
    lower_output,
    repeat_both,
)
from decodekit.logits_processors.cut.top_k import keep_top_k
from decodekit.logits_processors.cut.top_p import keep_nucleus

BATCHES = (1, 8, 32, 64, 128, 256, 512)
VOCABULARIES = (32_000, 128_256, 151_936)
KINDS = ("llm", "flat", "peaked")
COLD_BYTES = 250e6
MOST_INPUTS = 300
REPLAYS = 20
NUM_SEEN = 1000

TEMPERATURE = step("temperature", "temperature", divide, monotone=True)
TOP_K = step("top_k", "top_k", keep_top_k, cut=True)
TOP_P = step("top_p", "top_p", keep_nucleus, cut=True)
PENALTIES: tuple[Step, ...] = (
    step("repetition_penalty", "repetition", repeat_both),
    step("frequency_penalty", "frequency", lower_by_count),
    step("presence_penalty", "presence", lower_output),
)
USUAL = (TEMPERATURE, TOP_K, TOP_P)
PROGRAMS = {
    "greedy": Program((), Picker.GREEDY),
    "draw": Program((TEMPERATURE,), Picker.RACE),
    "usual": Program(USUAL, Picker.RACE),
    "mixed": Program(USUAL, Picker.RACE),
    "top_p": Program((TEMPERATURE, TOP_P), Picker.RACE),
    "penalties": Program(PENALTIES + USUAL, Picker.RACE),
    "logprobs": Program(PENALTIES + USUAL, Picker.RACE, Outputs(raw=True, num_top=5)),
}

Sampler = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Timing:
    """One line of the result."""

    sampler: str
    setting: str
    kind: str
    dtype: str
    vocab: int
    batch: int
    graph_us: float | None
    eager_us: float
    floor_us: float
    flagged: int  # rows that the kernels leave to the stages; their time is not in the line


class Inputs:
    """Logits that rotate, and the numbers of the rows."""

    def __init__(self, kind: str, dtype: torch.dtype, vocab: int, batch: int) -> None:
        self.device = torch.device("cuda")
        size = batch * vocab * dtype.itemsize
        count = min(max(2, math.ceil(COLD_BYTES / size)), MOST_INPUTS)
        self.sets = [_rows(kind, vocab, batch, seed).to(dtype) for seed in range(count)]
        self.vocab, self.num_rows = vocab, batch
        rows = torch.arange(batch, dtype=torch.int32, device=self.device)
        self.batch = Batch(
            rows,
            rows.clone(),
            torch.arange(batch, device=self.device) * 7919 + 1,  # a seed a row
            torch.arange(batch, device=self.device),
            torch.zeros(batch, dtype=torch.int64, device=self.device),
            same=True,
        )
        self._seen: History | None = None

    def columns(self, mixed: bool) -> dict[tuple[str, str], Tensor]:
        """Return the parameters of each row."""
        spread = torch.linspace(0, 1, self.num_rows, device=self.device) if mixed else None

        def column(usual: float, low: float, high: float) -> Tensor:
            if spread is None:
                return torch.full((self.num_rows,), usual, device=self.device)
            return low + (high - low) * spread

        return {
            ("temperature", "t"): column(0.8, 0.3, 1.5),
            ("top_k", "k"): column(50, 5, 60).long(),
            ("top_p", "p"): column(0.95, 0.5, 0.99),
            ("repetition", "penalty"): column(1.1, 1.0, 1.3),
            ("frequency", "penalty"): column(0.1, 0.0, 0.5),
            ("presence", "penalty"): column(0.1, 0.0, 0.5),
        }

    @property
    def history(self) -> History:
        """What each row has seen."""
        if self._seen is None:
            seen = SeenTokens(self.num_rows, self.vocab, self.device)
            for row in range(self.num_rows):
                generator = torch.Generator().manual_seed(row)
                ids = torch.randint(0, self.vocab, (NUM_SEEN,), generator=generator).tolist()
                seen.open(row, ids[NUM_SEEN // 4 :], ids[: NUM_SEEN // 4])
            self._seen = History(seen.bits, seen.counts, seen.in_prompt)
        return self._seen


def _rows(kind: str, vocab: int, batch: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    made = torch.randn(batch, vocab, device="cuda", generator=generator)
    if kind == "peaked":
        return made * 5
    if kind == "llm":
        places = torch.randint(0, vocab, (batch, 20), device="cuda", generator=generator)
        raised = torch.rand(batch, 20, device="cuda", generator=generator) * 8 + 4
        return (made * 2.2).scatter_add_(1, places, raised)
    return made


def fused(inputs: Inputs, setting: str) -> tuple[Sampler, FusedChain]:
    """Return our kernels for a setting."""
    chain = FusedChain(PROGRAMS[setting], inputs.vocab, inputs.vocab, inputs.device)
    columns = inputs.columns(setting == "mixed")
    history = inputs.history if setting in ("penalties", "logprobs") else None
    return lambda logits: chain.run(logits, inputs.batch, columns, history, longest=60), chain


def unfused(inputs: Inputs, setting: str) -> Sampler | None:
    """Return our reference for `usual`: the meaning, stage by stage, on ranked rows."""
    if setting not in ("usual", "mixed"):
        return None
    columns = inputs.columns(setting == "mixed")
    heat, k, p = columns["temperature", "t"], columns["top_k", "k"], columns["top_p", "p"]
    batch = inputs.batch

    def run(logits: Tensor) -> Tensor:
        ranked = rank_all(logits.float() / heat[:, None])
        values = ranked.values
        values = values.masked_fill(values < values.gather(1, k[:, None] - 1), -torch.inf)
        mass = token_mass(values, values[:, 0])
        before = mass.cumsum(1) - mass
        bound = (mass.sum(1) * p.double()).ceil().long()
        values = values.masked_fill(before >= bound[:, None], -torch.inf)
        kept = values[:, :128]
        return race_list(kept, ranked.ids[:, :128], batch.keys, batch.positions, batch.branches)

    return run


def torch_sorts(inputs: Inputs, setting: str) -> Sampler | None:
    """Return the chain that every tutorial shows: a sort, a softmax, a multinomial draw."""
    if setting not in ("usual", "mixed"):
        return None
    columns = inputs.columns(setting == "mixed")
    heat, k, p = columns["temperature", "t"], columns["top_k", "k"], columns["top_p", "p"]

    def run(logits: Tensor) -> Tensor:
        values, ids = (logits.float() / heat[:, None]).sort(dim=1, descending=True)
        values = values.masked_fill(values < values.gather(1, k[:, None] - 1), -torch.inf)
        shares = values.softmax(1)
        shares = shares.masked_fill(shares.cumsum(1) - shares >= p[:, None], 0.0)
        return ids.gather(1, torch.multinomial(shares, 1))

    return run


def flashinfer(inputs: Inputs, setting: str) -> Sampler | None:
    """Return FlashInfer's sampler, where it is installed."""
    if setting not in ("usual", "mixed") or find_spec("flashinfer") is None:
        return None
    from flashinfer.sampling import top_k_top_p_sampling_from_logits as sample

    columns = inputs.columns(setting == "mixed")
    heat, k, p = columns["temperature", "t"], columns["top_k", "k"].int(), columns["top_p", "p"]
    return lambda logits: sample(logits.float() / heat[:, None], k, p)


def vllm(inputs: Inputs, setting: str) -> Sampler | None:
    """Return vLLM's top-k and top-p with its draw, where it is installed."""
    if setting not in ("usual", "mixed") or find_spec("vllm") is None:
        return None
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    sampler = TopKTopPSampler()
    columns = inputs.columns(setting == "mixed")
    heat, k, p = columns["temperature", "t"], columns["top_k", "k"], columns["top_p", "p"]
    return lambda logits: sampler(logits.float() / heat[:, None], {}, k, p)


PEERS = {"unfused": unfused, "torch sorts": torch_sorts, "FlashInfer": flashinfer, "vLLM": vllm}


def graph_us(call: Sampler, sets: Sequence[Tensor]) -> float | None:
    """Return the median time of a call in a graph over all inputs; None if that cannot be."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for logits in sets:
                call(logits)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return median(_time(graph.replay) for _ in range(REPLAYS)) / len(sets)


def eager_us(call: Sampler, sets: Sequence[Tensor]) -> float:
    """Return the median time of a call launched from Python."""

    def run() -> None:
        for logits in sets[:16]:
            call(logits)

    return median(_time(run) for _ in range(5)) / len(sets[:16])


def _time(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def copy_bandwidth() -> float:
    """Return bytes a microsecond of a large copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / median(_time(lambda: target.copy_(source)) for _ in range(10))


def measure(cases: Sequence[tuple[str, str, torch.dtype, int, int]]) -> Iterator[Timing]:
    """Time each case (setting, kind, dtype, vocabulary, batch) with every sampler."""
    bandwidth = copy_bandwidth()
    for setting, kind, dtype, vocab, batch in cases:
        inputs = Inputs(kind, dtype, vocab, batch)
        ours, _ = fused(inputs, setting)
        samplers: dict[str, Sampler | None] = {"fused": ours}
        samplers |= {name: make(inputs, setting) for name, make in PEERS.items()}
        for name, call in samplers.items():
            if call is None:
                continue
            for logits in inputs.sets[:2]:
                first = call(logits)
            flagged = int((first.flags != 0).sum()) if name == "fused" else 0
            yield Timing(
                sampler=name,
                setting=setting,
                kind=kind,
                dtype=str(dtype).removeprefix("torch."),
                vocab=vocab,
                batch=batch,
                graph_us=graph_us(call, inputs.sets),
                eager_us=eager_us(call, inputs.sets),
                floor_us=batch * vocab * dtype.itemsize / bandwidth,
                flagged=flagged,
            )


def cases_of(quick: bool) -> list[tuple[str, str, torch.dtype, int, int]]:
    """Return what is measured."""
    large = VOCABULARIES[-1]
    if quick:
        return [("usual", "llm", torch.float32, large, batch) for batch in (1, 32, 256)]
    found = [
        ("usual", kind, dtype, vocab, batch)
        for vocab in VOCABULARIES
        for kind in KINDS
        for dtype in (torch.float32, torch.bfloat16)
        for batch in BATCHES
        if vocab == large or kind == "llm"
    ]
    others = [name for name in PROGRAMS if name != "usual"]
    found += [
        (name, "llm", torch.float32, large, batch) for name in others for batch in (1, 32, 256)
    ]
    return found


def shown(lines: Sequence[Timing]) -> Table:
    """Return the result as a table."""
    table = Table()
    names = ("setting", "rows", "dtype", "V", "B", "sampler", "graph us", "x floor", "eager us")
    for name in (*names, "flagged"):
        table.add_column(name, justify="right")
    for line in lines:
        graph = line.graph_us
        table.add_row(
            *(line.setting, line.kind, line.dtype, str(line.vocab), str(line.batch), line.sampler),
            "-" if graph is None else f"{graph:.1f}",
            "-" if graph is None else f"{graph / line.floor_us:.1f}",
            f"{line.eager_us:.1f}",
            str(line.flagged),
        )
    return table


def plot(lines: Sequence[Timing], path: Path) -> None:
    """Draw time against batch for the usual settings at the largest vocabulary."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = [
        line
        for line in lines
        if (line.setting, line.kind, line.dtype) == ("usual", "llm", "float32")
        and line.vocab == VOCABULARIES[-1]
    ]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in dict.fromkeys(line.sampler for line in chosen):
        own = [line for line in chosen if line.sampler == name]
        times = [line.graph_us or line.eager_us for line in own]
        axes.plot([line.batch for line in own], times, marker="o", label=name)
    floor = [line for line in chosen if line.sampler == "fused"]
    axes.plot(
        [line.batch for line in floor],
        [line.floor_us for line in floor],
        linestyle="--",
        color="grey",
        label="logits read once",
    )
    axes.set(xscale="log", yscale="log", xlabel="rows", ylabel="microseconds a call")
    axes.set_title("temperature, top-k 50, top-p 0.95; vocabulary 151,936, float32")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three batches of one setting")
    parser.add_argument("--json", type=Path, help="write the lines here")
    parser.add_argument("--plot", type=Path, help="draw time against batch here")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 1
    lines = []
    for line in measure(cases_of(options.quick)):
        lines.append(line)
        print(asdict(line), file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(each) for each in lines], indent=1))
    Console(width=140).print(shown(lines))
    if options.plot:
        plot(lines, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
