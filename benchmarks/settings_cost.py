"""What each sampling setting costs: tokens a second beside greedy, on the embedded model.

Every cell decodes the same prompts (32 tokens each, 32 new ones, no end token). A round runs every
cell once, in an order that turns from round to round; a cell's ratio is greedy's time over its own
in the same round, and the median over the rounds is shown. Turning log-probabilities into Python
objects is a row of its own.

    python benchmarks/settings_cost.py [--batches 1,16,64] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from decodekit import LLM, SamplingParams

LENGTH = 32
TARGET = 0.95
RANDOM: dict[str, Any] = {"temperature": 0.8}
EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.2,
    "logit_bias": {198: -1.0},
    "bad_words": ["nonsense"],
    "min_tokens": 4,
    "stop": ["\n\n\n\n"],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": RANDOM,
    "top-k": {**RANDOM, "top_k": 50},
    "top-p": {**RANDOM, "top_p": 0.95},
    "min-p": {**RANDOM, "min_p": 0.05},
    "repetition penalty": {**RANDOM, "repetition_penalty": 1.1},
    "presence + frequency": {**RANDOM, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "logit bias": {**RANDOM, "logit_bias": {198: -1.0}},
    "bad words": {**RANDOM, "bad_words": ["nonsense"]},
    "stop string": {**RANDOM, "stop": ["\n\n\n\n"]},
    "everything": EVERYTHING,
    "everything + logprobs=5": {**EVERYTHING, "logprobs": 5},
    "greedy + logprobs=20": {"temperature": 0.0, "logprobs": 20},
    "greedy + logprobs=20, flat": {"temperature": 0.0, "logprobs": 20, "flat_logprobs": True},
}


def prompts(llm: LLM, batch: int) -> list[list[int]]:
    """Return `batch` different prompts of LENGTH ids."""
    text = "The harbour wakes before the town does, and the boats come in one behind another. " * 8
    ids = llm.get_tokenizer().encode(text)
    return [ids[place : place + LENGTH] for place in range(batch)]


def seconds(llm: LLM, batch: int, setting: dict[str, Any]) -> float:
    """Decode one cell and return its time."""
    params = [
        SamplingParams(seed=row, max_tokens=LENGTH, ignore_eos=True, **setting)
        for row in range(batch)
    ]
    asked = prompts(llm, batch)
    begun = time.perf_counter()
    outputs = llm.generate(asked, params, use_tqdm=False)
    passed = time.perf_counter() - begun
    assert all(len(part.outputs[0].token_ids) == LENGTH for part in outputs)
    return passed


def measure(llm: LLM, batch: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return tokens a second and the ratio to greedy for each setting."""
    times: dict[str, list[float]] = {name: [] for name in SETTINGS}
    names = list(SETTINGS)
    seconds(llm, batch, SETTINGS["everything"])
    for turn in track(range(rounds), f"batch {batch}", console=Console(stderr=True)):
        shift = turn * 5 % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(seconds(llm, batch, SETTINGS[name]))
    greedy = times["greedy"]
    return {
        name: {
            "tokens_per_second": batch * LENGTH / median(own),
            "ratio": median(base / mine for base, mine in zip(greedy, own, strict=True)),
        }
        for name, own in times.items()
    }


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(part) for part in args.batches.split(",")]
    llm = LLM(max_num_seqs=max(batches), max_model_len=256, enable_prefix_caching=False)
    found = {batch: measure(llm, batch, args.rounds) for batch in batches}
    table = Table(title=f"Tokens a second and share of greedy ({llm.model_config.dtype})")
    table.add_column("setting")
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right")
    for name in SETTINGS:
        cells = [found[batch][name] for batch in batches]
        table.add_row(
            name, *(f"{c['tokens_per_second']:.1f}  {100 * c['ratio']:.1f} %" for c in cells)
        )
    console = Console()
    console.print(table)
    for batch in batches:
        ratio = found[batch]["everything"]["ratio"]
        verdict = "reached" if ratio >= TARGET else "missed"
        console.print(f"batch {batch}: everything at {ratio:.1%} of greedy; {TARGET:.0%} {verdict}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
