"""What a fused chain costs, told without a GPU: registers, spills and instructions a token.

A program is compiled ahead of time for one architecture, and the machine code is counted. `lint`
says what in a stage's function breaks the contract of `program.py`. Neither runs anything.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .codegen import Generator, module_of, num_summaries
from .dispatch import LIST_CLASSES
from .lang import triton
from .program import Program, argument_names

__all__ = ["Price", "lint", "price_of"]

THREADS = 128  # of a program of the scan
SMALL, LARGE = 8, 16  # segments a program; what they differ by is the price of the tokens alone
NUM_SEGMENTS = 1024  # padded, of the largest vocabularies

_INT32 = {"rows", "slots", "scratch", "flag_out", "top_ids", "kept_out", "seen_bits", "counts"}
_INT64 = {"keys", "positions", "branches", "token_out", "rank_out", "lists"}
_COUNTED = {"V", "K", "S"}
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/", re.MULTILINE)

FORBIDDEN = frozenset(
    {
        *("load", "store", "make_block_ptr", "advance", "program_id", "num_programs"),
        *("sum", "max", "min", "reduce", "argmax", "argmin", "cumsum", "cumprod", "xor_sum"),
        *("associative_scan", "sort", "topk", "gather", "histogram", "dot", "dot_scaled"),
        *("reshape", "view", "trans", "permute", "expand_dims", "broadcast_to", "split", "join"),
        *("interleave", "cat", "ravel", "flip", "inline_asm_elementwise", "debug_barrier"),
        *("rand", "randn", "randint", "philox", "device_print", "device_assert"),
    }
)


@dataclass(frozen=True)
class Price:
    """One kernel's machine code."""

    kernel: str  # "scan" or "select"
    registers: int  # a thread
    spilled: int  # bytes a thread
    instructions: int
    per_token: float | None  # instructions for a token, of the scan


def lint(function: Any) -> list[str]:
    """Return what in an elementwise stage function breaks its contract, a sentence each."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
    found = list(_offences(tree))
    names = argument_names(function)
    if not names or names[0] != "y":
        found.append(f"its first argument must be y, not {names[0] if names else 'nothing'}")
    return found


def _offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _called(node.func)
            if name.split(".")[-1] in FORBIDDEN or name.startswith("tl.atomic"):
                yield f"line {node.lineno}: {name} is not elementwise"
            elif "libdevice" in name:
                yield f"line {node.lineno}: {name} is a library call of one device"
        elif isinstance(node, ast.While | ast.For):
            yield f"line {node.lineno}: a loop"


def _called(func: ast.expr) -> str:
    if isinstance(func, ast.Attribute):
        return f"{_called(func.value)}.{func.attr}"
    return func.id if isinstance(func, ast.Name) else ""


def price_of(
    program: Program,
    *,
    columns: Mapping[str, str] | None = None,
    logits: str = "*fp32",
    capability: int = 90,
) -> list[Price]:
    """Compile the kernels of a program and count their code.

    `columns` gives the pointer type of a column by name, "*fp32" otherwise. Raises what the
    compiler raises.
    """
    types = {"k": "*i64", "min_keep": "*i64", **(columns or {})}
    compiler = _Compiler(program, types, logits, capability)
    small, large = (compiler.build("scan", {"T": size}, 4) for size in (SMALL, LARGE))
    sizes = LIST_CLASSES[0]
    select = {"P": NUM_SEGMENTS, "G": sizes.groups, "N": sizes.entries, "CAP": sizes.cap}
    tokens_a_thread = (LARGE - SMALL) * 256 / THREADS
    per_token = (large.instructions - small.instructions) / tokens_a_thread
    return [
        Price("scan", large.registers, large.spilled, large.instructions, per_token),
        compiler.build("select", select, 8),
    ]


class _Compiler:
    def __init__(
        self, program: Program, columns: Mapping[str, str], logits: str, capability: int
    ) -> None:
        self.program = program
        self.columns = columns
        self.logits = logits
        self.capability = capability
        self.module = module_of(program)
        self.generator = Generator(program)

    def build(self, kernel: str, constants: Mapping[str, int], warps: int) -> Price:
        """Compile one kernel."""
        function = getattr(self.module, kernel)
        values: dict[str, int | bool] = {
            **constants,
            "SAME": True,
            "STATS": num_summaries(self.program),
        }
        names = list(function.arg_names)
        types = {name: self._type(name) for name in names}
        constexprs = {(n,): values[name] for n, name in enumerate(names) if name in values}
        aligned = {
            (n,): [["tt.divisibility", 16]]
            for n, name in enumerate(names)
            if types[name].startswith("*") or name.endswith("stride") or name in ("V", "K")
        }
        source = triton.compiler.ASTSource(
            fn=function, signature=types, constexprs=constexprs, attrs=aligned
        )
        target = triton.backends.compiler.GPUTarget("cuda", self.capability, 32)
        options = {"num_warps": warps, "enable_fp_fusion": False}
        made = triton.compile(source, target=target, options=options)
        return _counted(kernel, made.asm["cubin"])

    def _type(self, name: str) -> str:
        owners = {f"{short}_ptr": column for column, short in self.generator.names.items()}
        if name in ("T", "P", "G", "N", "CAP", "SAME", "STATS"):
            return "constexpr"
        if name in _COUNTED or name.endswith("stride"):
            return "i32"
        if name in owners:
            return self.columns.get(owners[name][1], "*fp32")
        if name == "logits":
            return self.logits
        if name == "prompts":
            return "*u1"
        if name in _INT64 or "mass_" in name or name.startswith("stat_"):
            return "*i64"
        if name in _INT32 or name.startswith(("starts", "listed", "words", "mask")):
            return "*i32"
        return "*fp32"


def _counted(kernel: str, binary: bytes) -> Price:
    """Read registers, stack and instructions off machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        code = _output(tool, "-sass", path)
        use = _output(tool, "-res-usage", path)
    registers = re.search(r"REG:(\d+)", use)
    spilled = sum(int(found) for found in re.findall(r"(?:STACK|LOCAL):(\d+)", use))
    return Price(
        kernel=kernel,
        registers=int(registers[1]) if registers else 0,
        spilled=spilled,
        instructions=len(_INSTRUCTION.findall(code)),
        per_token=None,
    )


def _output(tool: Path, option: str, path: Path) -> str:
    done = subprocess.run([tool, option, path], capture_output=True, text=True, check=True)
    return done.stdout
