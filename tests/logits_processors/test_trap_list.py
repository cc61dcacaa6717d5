"""Every trap of the method catalogue has a test that is there: `traps.tsv` says which.

Where: a law of stages, a rule of order, or the entry of a method whose edge it is. A test of
`test_traps.py` is named by the broken plugin that it tries.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import NamedTuple

import torch

from decodekit.logits_processors.mask.bad_words import BadWords
from decodekit.plugins.author.rows import apply_stage, make_context

TESTS = Path(__file__).resolve().parents[1]


class Trap(NamedTuple):
    """A line of the list."""

    where: str
    trap: str
    test: str


def listed() -> list[Trap]:
    with (Path(__file__).parent / "traps.tsv").open(encoding="utf-8", newline="") as file:
        return [Trap(**line) for line in csv.DictReader(file, delimiter="\t")]


def test_every_listed_test_is_there() -> None:
    missing = []
    for trap in listed():
        name, _, test = trap.test.partition("::")
        source = (TESTS / name).read_text(encoding="utf-8")
        pattern = rf"^def {test}\(" if test.startswith("test_") else rf"^    Trap\({test}, "
        if not re.search(pattern, source, re.M):
            missing.append(trap.test)

    assert missing == []


def test_every_law_has_a_trap_and_no_trap_stands_twice() -> None:
    traps = listed()

    assert {f"law {number}" for number in range(1, 13)} <= {trap.where for trap in traps}
    assert len({(trap.where, trap.trap) for trap in traps}) == len(traps)


def test_a_banned_end_token_is_banned() -> None:
    context = make_context(6, eos_ids=(5,), stop_ids=(5,))

    after = apply_stage(BadWords, torch.zeros(1, 6), [{"words": [[5]]}], context=context)

    assert (after == -torch.inf).nonzero().tolist() == [[0, 5]]
