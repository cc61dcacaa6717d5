"""Decode with the embedded model on the CPU: decodekit beside transformers' `generate`.

Both sides hold the same bfloat16 weights: decodekit's reader expands the GGUF file, and the result
is written once as an ordinary folder, from which transformers loads. Prompts of 64 tokens, 64 new
tokens, no end token, two threads, idle OpenMP threads asleep. A round runs every cell of the table
once, the two sides in turn and the first one alternating, so that both meet the same neighbours;
ratios are taken within a round and their median is reported. Rates count new tokens over the whole
call, prefill and text included. Start-up and peak memory are those of a fresh process that imports,
loads, decodes one token and then the largest sampled batch.

    python benchmarks/cpu_vs_transformers.py [--quick] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import os

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["OMP_NUM_THREADS"] = "2"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

NUM_THREADS = int(os.environ["OMP_NUM_THREADS"])
PROMPT_LEN = 64
BATCHES = (1, 16)
MODES = ("greedy", "sampled")
SIDES = ("transformers", "decodekit")
TARGETS = {1: 1.4, 16: 1.5}  # decodekit / transformers, by batch
SAMPLED_TARGET = 0.95  # decodekit's sampled / greedy
DESCRIPTION = "{task.description}"
SHARED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
OURS = {"presence_penalty": 0.2, "frequency_penalty": 0.2, "logit_bias": {198: -1.0}, "logprobs": 5}
PASSAGE = """The old harbour wakes before the town does. Long before the first bus climbs the hill,
the boats come in one behind another, low in the water, and the gulls follow them as far as the
second pier. Men in yellow coats pass the boxes from hand to hand. A woman with a clipboard counts
them, writes a number, and shouts a price that nobody seems to hear. By seven the ice has melted,
the market is empty, and two cats share what is left. Then the cafe opens its shutters, the smell of
bread drifts over the quay, and the children run past on their way to school, late as always."""


class Decodekit:
    """Our engine, straight from the GGUF file."""

    def __init__(self) -> None:
        from decodekit import LLM

        self.llm = LLM(
            dtype="bfloat16",
            max_num_seqs=max(BATCHES),
            max_model_len=256,
            enable_prefix_caching=False,  # the rounds repeat their prompts
        )

    def generate(self, prompts: list[list[int]], mode: str, new_tokens: int) -> list[list[int]]:
        from decodekit import SamplingParams

        options: dict[str, Any] = {"temperature": 0} if mode == "greedy" else {**SHARED, **OURS}
        options |= {"max_tokens": new_tokens, "ignore_eos": True}
        params = [SamplingParams(seed=seed, **options) for seed in range(len(prompts))]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        failed = [output.outputs[0].error for output in outputs if output.outputs[0].error]
        if failed:
            raise RuntimeError(failed[0])
        return [list(output.outputs[0].token_ids) for output in outputs]


class Transformers:
    """transformers' `generate` from the folder that `export` wrote."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 2

    def generate(self, prompts: list[list[int]], mode: str, new_tokens: int) -> list[list[int]]:
        import torch

        ids = torch.tensor(prompts)
        options: dict[str, Any] = {} if mode == "greedy" else SHARED
        options = {**options, "do_sample": mode == "sampled", "max_new_tokens": new_tokens}
        with torch.inference_mode():
            full = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        new: list[list[int]] = full[:, ids.shape[1] :].tolist()
        self.tokenizer.batch_decode(new)
        return new


Side = Decodekit | Transformers


def make_side(name: str, folder: Path) -> Side:
    """Load one side with the benchmark's threads."""
    import torch

    torch.set_num_threads(NUM_THREADS)
    return Decodekit() if name == "decodekit" else Transformers(folder)


def export(folder: Path) -> None:
    """Write the embedded model as a bfloat16 folder of transformers, with its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    from decodekit.core.gguf_vocab import tokenizer_from_gguf
    from decodekit.core.models.family import config_from_gguf
    from decodekit.core.models.gguf import read_gguf
    from decodekit.core.models.locate import embedded_path
    from decodekit.core.models.rope import to_halves
    from decodekit.core.models.weights import GGUFWeights

    logging.disable_progress_bar()
    file = read_gguf(embedded_path())
    config = LlamaConfig(**config_from_gguf(file.metadata, has_output=False))
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    weights = GGUFWeights(file)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            weights.fill(name, tensor)
            count = heads.get(name.split(".")[-2])
            if count is not None:  # the file keeps rope's pairs together, transformers halves
                tensor.copy_(to_halves(tensor, count))
    model.save_pretrained(folder)
    tokenizer_from_gguf(file.metadata).hf.save_pretrained(folder)


def write_prompts(folder: Path) -> list[list[int]]:
    """Cut the passage into one prompt of 64 tokens a row, each starting at another token."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(PASSAGE)["input_ids"]
    step = (len(ids) - PROMPT_LEN) // max(BATCHES)
    if step < 1:
        raise ValueError(f"the passage has {len(ids)} tokens, too few for {max(BATCHES)} prompts")
    prompts = [ids[step * row : step * row + PROMPT_LEN] for row in range(max(BATCHES))]
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    return prompts


# --- what is measured -----------------------------------------------------------------------------


@dataclass
class Cell:
    """Rates of both sides at one batch and mode, new tokens a second, one value a round."""

    batch: int
    mode: str
    rates: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})

    @property
    def ratios(self) -> list[float]:
        """decodekit / transformers in each round."""
        pairs = zip(self.rates["decodekit"], self.rates["transformers"], strict=True)
        return [ours / theirs for ours, theirs in pairs]


@dataclass
class Start:
    """A fresh process of one side: seconds until ready, until its first token, and peak memory."""

    side: str
    ready_s: float
    first_token_s: float
    peak_mb: float


def run_rounds(
    sides: dict[str, Side],
    prompts: list[list[int]],
    new_tokens: int,
    rounds: int,
    advance: Callable[[str], None],
) -> tuple[list[Cell], int]:
    """Fill every cell, `rounds` times; also return how many greedy ids of one prompt agree."""
    cells = [Cell(batch, mode) for batch in BATCHES for mode in MODES]
    greedy: dict[str, list[int]] = {}
    for side in sides.values():  # warm up: caches, threads, lazy imports
        for mode in MODES:
            side.generate(prompts[:1], mode, 4)
    for number in range(rounds):
        for cell in cells:
            for name in SIDES if number % 2 == 0 else SIDES[::-1]:
                advance(f"round {number + 1} of {rounds}: {cell.mode}, batch {cell.batch}, {name}")
                start = time.perf_counter()
                new = sides[name].generate(prompts[: cell.batch], cell.mode, new_tokens)
                seconds = time.perf_counter() - start
                count = sum(map(len, new))
                if count != cell.batch * new_tokens:
                    raise RuntimeError(f"{name} made {count} tokens, not {cell.batch * new_tokens}")
                cell.rates[name].append(count / seconds)
                if cell.mode == "greedy" and cell.batch == 1:
                    greedy[name] = new[0]
    return cells, _common_prefix(*greedy.values())


def measure_start(name: str, folder: Path) -> Start:
    """Start one side in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--folder", str(folder)]
    command += ["--launched", repr(time.monotonic())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process of {name} failed:\n{done.stderr}")
    return Start(**json.loads(done.stdout.splitlines()[-1]))


def child(name: str, folder: Path, launched: float) -> None:
    """Load, decode one token, then the largest sampled batch; print a Start as JSON."""
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    side = make_side(name, folder)
    ready = time.monotonic() - launched
    side.generate(prompts[:1], "greedy", 1)
    first = time.monotonic() - launched
    side.generate(prompts, "sampled", 16)
    print(json.dumps(asdict(Start(name, ready, first, _peak_mb()))))


def _peak_mb() -> float:
    """Return this process's peak resident memory in MB.

    Not ru_maxrss, which a child inherits from the process that started it.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc/self/status has no VmHWM line")


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(first))


# --- what is reported -----------------------------------------------------------------------------


def result_of(
    cells: list[Cell], starts: list[Start], agreed: int, new_tokens: int
) -> dict[str, Any]:
    """Return everything as plain data: raw rounds, medians, ratios, targets."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {
        "machine": {
            "processor": _processor(),
            "threads": NUM_THREADS,
            "load_average": os.getloadavg()[0],
            "python": platform.python_version(),
            **versions,
        },
        "settings": {
            "dtype": "bfloat16",
            "prompt_tokens": PROMPT_LEN,
            "new_tokens": new_tokens,
            "rounds": len(cells[0].ratios),
            "sampled_both": SHARED,
            "sampled_decodekit_alone": {**OURS, "seed": "one a row"},
        },
        "cells": [
            {
                **asdict(cell),
                "median": {side: median(rates) for side, rates in cell.rates.items()},
                "ratios": cell.ratios,
                "ratio": median(cell.ratios),
                "target": TARGETS[cell.batch],
            }
            for cell in cells
        ],
        "sampled_over_greedy": [
            {"batch": batch, **{side: _sampled_ratio(cells, batch, side) for side in SIDES}}
            for batch in BATCHES
        ],
        "sampled_over_greedy_target": SAMPLED_TARGET,
        "starts": [asdict(start) for start in starts],
        "equal_greedy_tokens": agreed,
    }


def _sampled_ratio(cells: list[Cell], batch: int, side: str) -> float:
    """Return the median over rounds of sampled / greedy."""
    greedy, drawn = (
        next(cell.rates[side] for cell in cells if cell.batch == batch and cell.mode == mode)
        for mode in MODES
    )
    return median(b / a for a, b in zip(greedy, drawn, strict=True))


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def show(result: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    machine, settings = result["machine"], result["settings"]
    lines = (
        f"{machine['processor']}, {machine['threads']} threads, load {machine['load_average']:.1f}",
        f"Python {machine['python']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}",
        f"bfloat16, prompts of {settings['prompt_tokens']} tokens, {settings['new_tokens']} new; "
        f"medians of {settings['rounds']} rounds",
        f"sampled, both: {settings['sampled_both']}",
        f"sampled, decodekit also: {settings['sampled_decodekit_alone']}",
    )
    console.print("\n".join(lines), soft_wrap=True, highlight=False)
    for make in (_speed_table, _sampled_table, _start_table):
        console.print(make(result))
    console.print(
        f"greedy ids of the first prompt agree for {result['equal_greedy_tokens']} of "
        f"{settings['new_tokens']} tokens (sums differ in order, so near ties may part)"
    )


def _speed_table(result: dict[str, Any]) -> Table:
    table = Table(title="New tokens a second, prefill included")
    for name in ("batch", "mode", *SIDES, "ratio", "range", "target"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for cell in result["cells"]:
        rates = (f"{cell['median'][side]:.1f}" for side in SIDES)
        spread = f"{min(cell['ratios']):.2f}-{max(cell['ratios']):.2f}"
        verdict = _against(cell["ratio"], cell["target"])
        table.add_row(
            str(cell["batch"]), cell["mode"], *rates, f"{cell['ratio']:.2f}", spread, verdict
        )
    return table


def _sampled_table(result: dict[str, Any]) -> Table:
    table = Table(title="Sampled over greedy")
    for name in ("batch", *SIDES, "target"):
        table.add_column(name, justify="right")
    for line in result["sampled_over_greedy"]:
        verdict = _against(line["decodekit"], result["sampled_over_greedy_target"])
        table.add_row(str(line["batch"]), *(f"{line[side]:.2f}" for side in SIDES), verdict)
    return table


def _start_table(result: dict[str, Any]) -> Table:
    table = Table(title="A fresh process")
    for name in ("", "ready (s)", "first token (s)", "peak memory (MB)"):
        table.add_column(name, justify="right" if name else "left")
    for side in SIDES:
        mine = [start for start in result["starts"] if start["side"] == side]
        ready, first = (
            f"{median(start[key] for start in mine):.2f}" for key in ("ready_s", "first_token_s")
        )
        table.add_row(side, ready, first, f"{median(start['peak_mb'] for start in mine):.0f}")
    return table


def _against(value: float, target: float) -> str:
    verdict = "[green]met[/]" if value >= target else "[red]missed[/]"
    return f"{target:.2f} {verdict}"


# --- the command ----------------------------------------------------------------------------------


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of 16 tokens, one start")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--launched", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parsed()
    if options.child:
        child(options.child, options.folder, options.launched)
        return
    rounds, starts, new_tokens = (1, 1, 16) if options.quick else (options.rounds, 3, 64)
    num_steps = 1 + len(SIDES) * (1 + starts + rounds * len(BATCHES) * len(MODES))
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn(DESCRIPTION))
    with (
        tempfile.TemporaryDirectory(prefix="decodekit-bench-") as name,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        folder = Path(name)
        task = progress.add_task("", total=num_steps)

        def advance(text: str) -> None:
            progress.update(task, advance=1, description=text)

        advance("writing the weights as a transformers folder")
        export(folder)
        prompts = write_prompts(folder)
        started: list[Start] = []
        for number in range(starts):
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                advance(f"start {number + 1} of {starts}: {side}")
                started.append(measure_start(side, folder))
        sides: dict[str, Side] = {}
        for side in SIDES:
            advance(f"loading {side}")
            sides[side] = make_side(side, folder)
        cells, agreed = run_rounds(sides, prompts, new_tokens, rounds, advance)
    result = result_of(cells, started, agreed, new_tokens)
    show(result, Console())
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
