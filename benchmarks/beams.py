"""What several sequences for one answer cost: beams and best-of beside one sampled sequence.

On the embedded model, one prompt, no end token. A round runs every cell once, in an order that
turns from round to round; a cost is the cell's time over one sampled sequence's in the same round,
and the median over the rounds is shown. transformers' `generate(num_beams=...)` on the same float32
weights runs in the same rounds.

    python benchmarks/beams.py [--widths 1,2,4,8] [--tokens 48] [--rounds 5] [--no-transformers]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from decodekit import LLM, SamplingParams
from decodekit.sampling_params import BeamSearchParams

TEXT = "The harbour wakes before the town does, and the boats come in one behind another, and"
PLAIN = "one sampled sequence"
TARGET = 2.0  # times transformers, at four beams


def decodekit_cells(llm: LLM, widths: list[int], tokens: int) -> dict[str, Callable[[], None]]:
    """Return the calls to be timed, by name."""
    prompt = llm.get_tokenizer().encode(TEXT)

    def sampled(best_of: int) -> None:
        params = SamplingParams(
            temperature=0.8, seed=1, max_tokens=tokens, ignore_eos=True, best_of=best_of
        )
        llm.generate([prompt], params, use_tqdm=False)

    def beams(width: int) -> None:
        params = BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True)
        [output] = llm.beam_search([prompt], params)
        assert len(output.sequences[0].tokens) == len(prompt) + tokens

    cells: dict[str, Callable[[], None]] = {PLAIN: lambda: sampled(1)}
    for width in widths:
        cells[f"beam width {width}"] = lambda width=width: beams(width)  # type: ignore[misc]
    for width in widths:
        if width > 1:
            cells[f"best of {width}"] = lambda width=width: sampled(width)  # type: ignore[misc]
    return cells


def transformers_cells(widths: list[int], tokens: int) -> dict[str, Callable[[], None]]:
    """Return the same searches by transformers."""
    import importlib.util

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    place = Path(__file__).with_name("cpu_vs_transformers.py")
    spec = importlib.util.spec_from_file_location("cpu_vs_transformers", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = Path(tempfile.mkdtemp())
    module.export(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(TEXT, return_tensors="pt").input_ids

    def beams(width: int) -> None:
        model.generate(
            ids,
            num_beams=width,
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
        )

    return {
        f"transformers, {width} beams": lambda width=width: beams(width)  # type: ignore[misc]
        for width in widths
        if width > 1
    }


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", default="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    widths = [int(part) for part in args.widths.split(",")]
    llm = LLM(max_model_len=512, enable_prefix_caching=False, plan_review=False)
    cells = decodekit_cells(llm, widths, args.tokens)
    if args.transformers:
        cells |= transformers_cells(widths, args.tokens)
    times: dict[str, list[float]] = {name: [] for name in cells}
    names = list(cells)
    for name in names:
        cells[name]()
    for turn in track(range(args.rounds), "rounds", console=Console(stderr=True)):
        shift = turn * 3 % len(names)
        for name in names[shift:] + names[:shift]:
            begun = time.perf_counter()
            cells[name]()
            times[name].append(time.perf_counter() - begun)
    table = Table(title=f"{args.tokens} tokens, median of {args.rounds} rounds")
    for title in ("", "steps a second", "time over one sequence's"):
        table.add_column(title, justify="left" if not title else "right")
    found = {}
    for name, own in times.items():
        cost = median(mine / base for mine, base in zip(own, times[PLAIN], strict=True))
        found[name] = {"steps_per_second": args.tokens / median(own), "cost": cost}
        table.add_row(name, f"{args.tokens / median(own):.1f}", f"{cost:.2f}")
    console = Console()
    console.print(table)
    theirs, mine = times.get("transformers, 4 beams"), times.get("beam width 4")
    if theirs and mine:
        ratio = median(a / b for a, b in zip(theirs, mine, strict=True))
        verdict = "reached" if ratio >= TARGET else "missed"
        console.print(f"four beams: {ratio:.2f} times transformers; {TARGET:.0f} {verdict}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
