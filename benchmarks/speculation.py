"""What prompt lookup saves where answers copy from the prompt, and costs where they do not.

Cells, on the embedded model, each decoded with and without speculation:

* copy: prompts that ask for a text again; greedy;
* free: the openings of stories, drawn at temperature 1, which copy nothing;

at batch 1 (one prompt after the other) and in one batch of 8. A round runs both sides of every
cell one after the other and swaps them in the next; the ratio is that of the two times in one
round, and the median over the rounds is shown, by the clock and by processor time, with the share
of guesses that were right and the tokens of a step. Prompts are in the prefix cache, so that
decoding is what is measured. Both sides must give the same tokens: where they differ, the two best
must be within a rounding error, as the shape of a batch may decide between equals.

    python benchmarks/speculation.py [--tokens 96] [--rounds 5] [--k 8] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from decodekit import LLM, SamplingParams
from decodekit.core.outputs import RequestOutput

COPY_TARGET, FREE_TARGET = 1.5, 0.95
TEXTS = [
    "The committee met on Tuesday to discuss the new library. Mrs. Alder, the librarian, said "
    "that the reading room should stay open until nine in the evening. Nothing is decided yet.",
    "def area(width, height):\n    if width < 0 or height < 0:\n        raise ValueError('negative "
    "size')\n    return width * height\n\ndef volume(width, height, depth):\n    return "
    "area(width, height) * depth\n",
    '{"name": "Ada Lovelace", "born": 1815, "died": 1852, "fields": ["mathematics", "computing"], '
    '"known_for": "the first published algorithm for a machine", "country": "England"}',
    "Mix two cups of flour with a pinch of salt. Rub in the butter until it all looks like "
    "breadcrumbs. Add four spoons of cold water, knead it briefly, and let it rest for an hour.",
    "Invoice 2041: 12 boxes of paper at 18.50, 3 printers at 249.00, 40 pens at 0.85, 2 chairs at "
    "129.99 and 1 desk lamp at 34.20. Payment is due within thirty days of delivery.",
    "SELECT customers.name, orders.date, orders.total FROM customers JOIN orders ON customers.id "
    "= orders.customer WHERE orders.total > 100 AND orders.date >= '2024-01-01' ORDER BY date;",
    "From the station, walk along Mill Street to the old bridge. Cross the river, turn left at the "
    "bakery, and follow the path through the park until you see the house with the green door.",
    "The glacier moves about thirty metres a year. Its surface is broken by deep cracks where it "
    "bends over the rock, and in summer the meltwater runs in blue channels to the lake.",
]
OPENINGS = [
    "Once upon a time, in a village by the sea, there lived",
    "The strangest thing about the machine was",
    "My grandmother always told me that",
    "When the lights went out across the city,",
    "The recipe was simple, but the secret was",
    "Nobody expected the letter to arrive, and",
    "In the year 2150, the first colony on Mars",
    "It was raining when the detective opened",
]


class Side(NamedTuple):
    """One run of a cell."""

    seconds: float
    work: float  # seconds of the processor, which other programs do not lengthen
    outputs: list[RequestOutput]
    guessed: int
    right: int
    drafts: int


def copying(text: str) -> str:
    """A prompt after which the model writes the text again."""
    return f"A text:\n{text}\n\nThe same text again, word for word:\n{text}\n\nAnd again:\n"


def sides(llm: LLM, prompts: list[str], params: SamplingParams, batch: int) -> Side:
    """Run a cell once."""
    before = _counts(llm)
    outputs: list[RequestOutput] = []
    start, worked = time.perf_counter(), time.process_time()
    for place in range(0, len(prompts), batch):
        outputs += llm.generate(prompts[place : place + batch], params, use_tqdm=False)
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    drafts, guessed, right = (a - b for a, b in zip(_counts(llm), before, strict=True))
    return Side(seconds, worked, outputs, guessed, right, drafts)


def _counts(llm: LLM) -> list[int]:
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return [values[f"decodekit:spec_decode_num_{name}"] for name in names]


def differ(one: RequestOutput, other: RequestOutput) -> bool:
    """Whether two answers part where the two best tokens are no tie."""
    mine, theirs = one.outputs[0], other.outputs[0]
    pairs = zip(mine.token_ids, theirs.token_ids, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return len(mine.token_ids) != len(theirs.token_ids)
    assert mine.logprobs is not None
    entries = mine.logprobs[place]
    gap = abs(entries[mine.token_ids[place]].logprob - max(e.logprob for e in entries.values()))
    best = sorted((entry.logprob for entry in entries.values()), reverse=True)
    return max(gap, best[0] - best[1]) > 0.05


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    llm = LLM()
    guess = {"method": "ngram", "num_speculative_tokens": options.k}
    base: dict[str, Any] = {"max_tokens": options.tokens, "ignore_eos": True}
    copy = {**base, "temperature": 0.0}
    free = {**base, "temperature": 1.0, "seed": 1}
    work = {"copy": ([copying(text) for text in TEXTS], copy), "free": (OPENINGS, free)}
    cells = [(kind, batch) for kind in work for batch in options.batches]
    runs: dict[tuple[str, int], list[tuple[Side, Side]]] = {cell: [] for cell in cells}
    for number in track(range(options.rounds + 1), description="rounds", console=console):
        for cell in cells:
            prompts, fields = work[cell[0]]
            with_it = SamplingParams(speculation=guess, **fields)
            without = SamplingParams(speculation=False, **fields)
            swapped = number % 2 == 1
            pair = [sides(llm, prompts, params, cell[1]) for params in
                    ((with_it, without) if swapped else (without, with_it))]  # fmt: skip
            off, on = reversed(pair) if swapped else pair
            if number:  # the first round fills the prefix cache
                runs[cell].append((off, on))
    differing = _check(llm, work, guess)
    rows = [_row(cell, runs[cell], options.tokens) for cell in cells]
    _show(console, rows, options)
    console.print(f"answers that differ beyond a tie: {differing}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "differing": differing}, indent=1))


def _check(llm: LLM, work: dict[str, Any], guess: dict[str, Any]) -> int:
    found = 0
    for prompts, fields in work.values():
        both = [
            llm.generate(
                prompts, SamplingParams(speculation=asked, logprobs=5, **fields), use_tqdm=False
            )
            for asked in (guess, False)
        ]
        found += sum(differ(one, other) for one, other in zip(*both, strict=True))
    return found


def _row(cell: tuple[str, int], runs: list[tuple[Side, Side]], tokens: int) -> dict[str, Any]:
    kind, batch = cell
    on = [side for _, side in runs]
    written = sum(len(o.outputs[0].token_ids) for o in on[0].outputs)
    guessed = sum(side.guessed for side in on)
    right = sum(side.right for side in on)
    return {
        "kind": kind,
        "batch": batch,
        "off": written / median(off.seconds for off, _ in runs),
        "on": written / median(side.seconds for side in on),
        "ratio": median(off.seconds / side.seconds for off, side in runs),
        "work": median(off.work / side.work for off, side in runs),
        "target": COPY_TARGET if kind == "copy" and batch == 1 else FREE_TARGET,
        "right": right / guessed if guessed else 0.0,
        "tokens_a_step": written / max(written - on[0].right, 1),
    }


def _show(console: Console, rows: list[dict[str, Any]], options: Any) -> None:
    table = Table(title=f"prompt lookup, at most {options.k} tokens; {options.rounds} rounds")
    heads = ("answers", "batch", "off tok/s", "on tok/s", "ratio", "CPU", "aim")
    for name in (*heads, "right", "tokens a step"):
        table.add_column(name, justify="left" if name == "answers" else "right")
    for row in rows:
        figures = [row[name] for name in ("off", "on", "ratio", "work", "target")]
        told = [f"{value:.1f}" for value in figures[:2]] + [f"{value:.2f}" for value in figures[2:]]
        table.add_row(
            row["kind"],
            str(row["batch"]),
            *told,
            f"{row['right']:.0%}",
            f"{row['tokens_a_step']:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
