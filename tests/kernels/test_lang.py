"""Triton through one file: real where installed, refusing where not."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import decodekit.kernels.lang

KERNEL_WITH_RUNTIME_LOOP = """
import torch
from decodekit.kernels.lang import HAS_TRITON, tl, triton

@triton.jit
def sum_row(x, y, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        idx = start + tl.arange(0, BLOCK)
        total += tl.load(x + idx, mask=idx < n, other=0.0)
    tl.store(y, tl.sum(total, 0))

x, y = torch.arange(1000, dtype=torch.float32), torch.zeros(1)
sum_row[(1,)](x, y, 1000, BLOCK=256)
print(int(y.item()))
"""


@pytest.fixture
def lang_without_triton(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A second copy of the module, loaded while Triton can't be found."""
    monkeypatch.setitem(sys.modules, "triton", None)
    source = decodekit.kernels.lang.__file__
    spec = importlib.util.spec_from_file_location("lang_without_triton", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_load_without_triton_and_refuse_to_launch(lang_without_triton: ModuleType) -> None:
    triton, tl = lang_without_triton.triton, lang_without_triton.tl

    @triton.jit
    def bare(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        return x

    @triton.jit(do_not_specialize=["x"])
    def configured(x):  # type: ignore[no-untyped-def]
        return x

    assert not lang_without_triton.HAS_TRITON
    with pytest.raises(lang_without_triton.TritonMissingError, match="'bare' needs Triton"):
        bare[(1,)](0, BLOCK=16)
    with pytest.raises(lang_without_triton.TritonMissingError, match="'configured' needs Triton"):
        configured(0)


def test_placeholder_arithmetic_is_tritons(lang_without_triton: ModuleType) -> None:
    ours = lang_without_triton.triton

    assert [ours.next_power_of_2(n) for n in (1, 2, 3, 255, 256, 257)] == [1, 2, 4, 256, 256, 512]
    assert [ours.cdiv(n, 256) for n in (1, 255, 256, 257, 49152)] == [1, 1, 1, 2, 192]


def test_placeholder_language_names_what_is_missing(lang_without_triton: ModuleType) -> None:
    with pytest.raises(lang_without_triton.TritonMissingError, match=r"triton\.language\.arange"):
        lang_without_triton.tl.arange(0, 16)


@pytest.mark.skipif(not decodekit.kernels.lang.HAS_TRITON, reason="Triton is not installed")
def test_interpreter_runs_a_loop_with_a_runtime_bound(tmp_path: Path) -> None:
    """The pinned numpy and Triton fit each other: older pairs fail on this loop."""
    script = tmp_path / "kernel.py"  # a jitted function's source has to lie in a file
    script.write_text(KERNEL_WITH_RUNTIME_LOOP)

    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == sum(range(1000))
