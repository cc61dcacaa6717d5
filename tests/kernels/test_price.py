"""The machine code of fused chains stays small, and a stage that breaks its contract is told so."""

import json
import os
import subprocess
import sys

import pytest

from decodekit.kernels.lang import tl, triton
from decodekit.kernels.ops import divide
from decodekit.kernels.price import lint

# The kernels are compiled in a process of their own: this one may interpret them.
SCRIPT = """
import json
from dataclasses import asdict
from decodekit.kernels.ops import divide
from decodekit.kernels.price import price_of
from decodekit.kernels.program import Picker, Program, step
from decodekit.logits_processors.bias.penalties import lower_by_count, lower_output, repeat_both
from decodekit.logits_processors.cut.top_k import keep_top_k
from decodekit.logits_processors.cut.top_p import keep_nucleus

temperature = step("temperature", "t", divide, monotone=True)
cuts = (step("top_k", "k", keep_top_k, cut=True), step("top_p", "p", keep_nucleus, cut=True))
penalties = (
    step("repetition_penalty", "r", repeat_both),
    step("frequency_penalty", "f", lower_by_count),
    step("presence_penalty", "p2", lower_output),
)
usual = Program((temperature, *cuts), Picker.RACE)
prices = {
    "usual": price_of(usual),
    "bfloat16": price_of(usual, logits="*bf16"),
    "weighed": price_of(Program((temperature, cuts[1]), Picker.RACE)),
    "penalties": price_of(Program((*penalties, temperature, *cuts), Picker.RACE)),
}
print(json.dumps({name: [asdict(p) for p in both] for name, both in prices.items()}))
"""
# Instructions a token of the scan, with a tenth to spare over what Triton 3.6 and 3.7 give.
MOST_PER_TOKEN = {"usual": 7, "bfloat16": 4, "weighed": 27, "penalties": 34}
MOST_IN_SELECT = {"usual": 2500, "bfloat16": 2450, "weighed": 2750, "penalties": 2950}


@pytest.mark.slow
def test_compiled_kernels_spill_nothing_and_stay_within_their_budget() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    prices = json.loads(done.stdout)
    for name, (scan, select) in prices.items():
        assert scan["spilled"] == select["spilled"] == 0, name
        assert scan["per_token"] <= MOST_PER_TOKEN[name], (name, scan)
        assert select["instructions"] <= MOST_IN_SELECT[name], (name, select)


@triton.jit
def sums_the_block(y):  # type: ignore[no-untyped-def]
    return y - tl.sum(y, 0)


@triton.jit
def takes_logits_last(ids, y):  # type: ignore[no-untyped-def]
    return y + ids


def test_a_function_that_is_not_elementwise_is_told_why() -> None:
    assert lint(sums_the_block) == ["line 3: tl.sum is not elementwise"]
    assert lint(takes_logits_last) == ["its first argument must be y, not ids"]
    assert [word for word in lint(divide) if "first" in word] == []
