"""What freedom costs: one chain for all, one more stage in it, and a chain for each row.

Every cell decodes the same prompts on the embedded model, without an end token:

* default: temperature, top-k, top-p and min-p for every row, in the default order;
* default + 1: the same with the stage of `examples/packages/decodekit-top-a-lite` behind it;
* different: a chain of its own for every row, drawn from built-in stages and that one; no two rows
  have the same stages in the same order, so no two run one program;
* greedy: for scale.

A round runs every cell once, in an order that turns from round to round; a cell's ratio is the
default chain's time a step over its own in the same round, the prefill left out, and the median
over the rounds is shown; "processor" is the same of the processor time, which a busy machine moves
less.

    python benchmarks/chain_cost.py [--batch 64] [--rounds 5] [--tokens 32] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import importlib.util
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from decodekit import LLM, SamplingParams

PROMPT_LEN = 32
TARGET = 0.95
PACKAGE = Path(__file__).parents[1] / "examples/packages/decodekit-top-a-lite/src"
DEFAULT: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02}
FIRST: list[dict[str, Any]] = [
    {"stage": "logit_bias", "bias": {198: -1.0}},
    {"stage": "repetition_penalty", "penalty": 1.1},
    {"stage": "frequency_penalty", "penalty": 0.2},
    {"stage": "presence_penalty", "penalty": 0.2},
]
THEN: list[dict[str, Any]] = [
    {"stage": "temperature", "t": 0.8},
    {"stage": "top_k", "k": 50},
    {"stage": "top_p", "p": 0.95},
    {"stage": "min_p", "p": 0.02},
    {"stage": "top_n_sigma", "n": 1.5},
    {"stage": "epsilon", "epsilon": 5e-4},
    {"stage": "top_a", "a": 0.1},
]


def third_party() -> type[Any]:
    """Load the example's stage from its sources; nothing has to be installed."""
    path = PACKAGE / "decodekit_top_a_lite/top_a.py"
    spec = importlib.util.spec_from_file_location("decodekit_top_a_lite_top_a", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stage: type[Any] = module.TopA
    return stage


def chains(count: int, stage: type[Any]) -> list[list[Any]]:
    """Return `count` chains, no two with the same stages in the same order."""
    rng = random.Random(0)
    found: dict[tuple[str, ...], list[Any]] = {}
    while len(found) < count:
        late: list[Any] = [*THEN, stage(a=0.1)]
        chain = [*rng.sample(FIRST, rng.randint(0, 2)), *rng.sample(late, rng.randint(2, 4))]
        names = tuple(each["stage"] if isinstance(each, dict) else each.name for each in chain)
        found.setdefault(names, chain)
    return list(found.values())


def cells(batch: int, tokens: int) -> dict[str, list[SamplingParams]]:
    """Return the parameters of every row, by cell."""
    stage = third_party()
    common: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    own = ["min_p", "temperature", "top_k", "top_p", stage(a=0.05)]
    different = chains(batch, stage)
    return {
        "default": [SamplingParams(seed=row, **DEFAULT, **common) for row in range(batch)],
        "default + 1": [
            SamplingParams(seed=row, chain=own, **DEFAULT, **common) for row in range(batch)
        ],
        "different": [
            SamplingParams(seed=row, chain=different[row], **common) for row in range(batch)
        ],
        "greedy": [SamplingParams(temperature=0.0, **common) for _ in range(batch)],
    }


def prompts(llm: LLM, batch: int) -> list[list[int]]:
    """Return `batch` different prompts of PROMPT_LEN ids."""
    text = "The harbour wakes before the town does, and the boats come in one behind another. " * 8
    ids = llm.get_tokenizer().encode(text)
    return [ids[place : place + PROMPT_LEN] for place in range(batch)]


def decode(llm: LLM, asked: list[list[int]], params: list[SamplingParams]) -> tuple[float, float]:
    """Return wall and processor seconds a step of one cell, from the step after the prefill on."""
    engine = llm.llm_engine
    ids = [str(next(llm.request_counter)) for _ in asked]
    for name, prompt, own in zip(ids, asked, params, strict=True):
        engine.add_request(name, prompt, own)
    sequences = [engine.requests[name].sequences[0] for name in ids]
    while not all(sequence.output_ids for sequence in sequences):
        engine.step()
    begun, spent, steps = time.perf_counter(), time.process_time(), 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    passed, spent = time.perf_counter() - begun, time.process_time() - spent
    errors = [sequence.error for sequence in sequences if sequence.error]
    if errors:
        raise RuntimeError(errors[0])
    return passed / steps, spent / steps


def measure(llm: LLM, batch: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return for each cell tokens a second, milliseconds a step, and ratios to the default."""
    params, asked = cells(batch, tokens), prompts(llm, batch)
    names = list(params)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for name in names:
        decode(llm, asked, params[name])
    for turn in track(range(rounds), "rounds", console=Console(stderr=True)):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(decode(llm, asked, params[name]))
    base = times["default"]
    found = {}
    for name, own in times.items():
        wall = [first[0] / mine[0] for first, mine in zip(base, own, strict=True)]
        spent = [first[1] / mine[1] for first, mine in zip(base, own, strict=True)]
        step = median(each[0] for each in own)
        found[name] = {
            "tokens_per_second": batch / step,
            "ms_per_step": 1e3 * step,
            "ratio": median(wall),
            "lowest_ratio": min(wall),
            "highest_ratio": max(wall),
            "processor_ratio": median(spent),
        }
    return found


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    llm = LLM(
        max_num_seqs=args.batch,
        max_model_len=256,
        enable_prefix_caching=False,
        plan_review=False,  # the settings mean nothing
    )
    found = measure(llm, args.batch, args.tokens, args.rounds)
    table = Table(title=f"Batch {args.batch}, {llm.model_config.dtype}, {args.rounds} rounds")
    columns = ("of default", "lowest", "highest", "processor")
    for title in ("chains", "tokens/s", "ms a step", *columns):
        table.add_column(title, justify="left" if title == "chains" else "right")
    for name, cell in found.items():
        table.add_row(
            name,
            f"{cell['tokens_per_second']:.1f}",
            f"{cell['ms_per_step']:.1f}",
            *(
                f"{100 * cell[key]:.1f} %"
                for key in ("ratio", "lowest_ratio", "highest_ratio", "processor_ratio")
            ),
        )
    console = Console()
    console.print(table)
    for name in ("default + 1", "different"):
        ratio = found[name]["ratio"]
        verdict = "reached" if ratio >= TARGET else "missed"
        console.print(f"{name}: {ratio:.1%} of the default chain; {TARGET:.0%} {verdict}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
