"""`decodekit doctor`: this machine, these plugins, this model, a verdict and a remedy a line."""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Annotated, Any

import typer

from ...core.config import EngineArgs
from ...core.errors import DecodekitError, PluginError, ValidationError
from ...core.hookspecs import hookimpl
from ...core.registry import Registry
from ...core.stage import CommandSpec
from ...kernels.lang import HAS_TRITON
from .model_checks import Check, check_answers, check_setup
from .options import ENGINE, SAMPLING, Sampling
from .session import open_engine, screen
from .shared import takes

VERDICTS = {"ok": "ok", "info": "info", "warn": "warn", "error": "FAIL"}
STYLES = {"ok": "green", "info": "dim", "warn": "yellow", "error": "bold red"}
LEAST_TORCH = (2, 11)


@takes(engine_args=ENGINE, sampling=SAMPLING)
def doctor(
    engine_args: EngineArgs,
    sampling: Sampling,
    no_model: Annotated[
        bool, typer.Option("--no-model", help="Look at the environment and the plugins only.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Check the environment, the plugins and a model; exit code 1 if something fails.

    The sampling options are those of the check for repetition.
    """
    found: list[Check] = []
    for check in _checks(engine_args, sampling, no_model):
        found.append(check)
        if not as_json:
            show(check)
    failed = any(check.level == "error" for check in found)
    if as_json:
        listed = [
            {
                "check": check.name,
                "verdict": VERDICTS[check.level],
                "seen": check.seen,
                "remedy": check.remedy,
                "data": dict(check.data),
            }
            for check in found
        ]
        print(json.dumps({"ok": not failed, "checks": listed}, indent=2, default=repr))
    if failed:
        raise typer.Exit(1)


def show(check: Check) -> None:
    """Print a check: verdict, name, what was seen; the remedy under it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1))
    line.add_column(width=4)
    line.add_column(width=17, overflow="fold")
    line.add_column(overflow="fold")
    style = STYLES[check.level]
    line.add_row(Text(VERDICTS[check.level], style=style), Text(check.name), Text(check.seen))
    if check.remedy:
        line.add_row("", "", Text(f"-> {check.remedy}", style=style))
    Console(highlight=False).print(line)


def _checks(engine_args: EngineArgs, sampling: Sampling, no_model: bool) -> Iterator[Check]:
    yield from environment()
    yield from plugins(engine_args)
    if no_model:
        return
    try:
        with warnings.catch_warnings():
            # The lines about plugins have said it.
            warnings.filterwarnings("ignore", message="plugin trouble", category=RuntimeWarning)
            engine = open_engine(engine_args)
    except (DecodekitError, OSError, RuntimeError) as error:
        if engine_args.debug:
            raise
        yield Check("model", "error", f"it cannot be loaded: {error}", _advice(error))
        return
    yield from check_setup(engine)
    with screen(stderr=True).status("Trying the model"):
        found = list(check_answers(engine, sampling))
    yield from found


def _advice(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "" if error.parameter is None else f"see the option for {error.parameter}"
    return "run again with --debug to see where it comes from"


# --- this machine ---------------------------------------------------------------------------------


def environment() -> Iterator[Check]:
    """Yield what the process runs on."""
    import torch

    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", "ok", f"{version}, {platform.system()} {platform.machine()}")
    yield _torch(torch)
    if HAS_TRITON:
        yield Check("triton", "ok", _version("triton"))
    else:
        level = "warn" if torch.cuda.is_available() else "info"
        yield Check("triton", level, "not installed", "pip install triton" * (level == "warn"))
    yield from _device(torch)
    yield _threads(torch)
    yield _embedded()


def _torch(torch: Any) -> Check:
    found = str(torch.__version__)
    parts = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if parts < LEAST_TORCH:
        wanted = ".".join(map(str, LEAST_TORCH))
        return Check("torch", "warn", found, f"install torch>={wanted}, the oldest that is tested")
    return Check("torch", "ok", f"{found}, transformers {_version('transformers')}")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _device(torch: Any) -> Iterator[Check]:
    from ...core.build import default_device
    from ...core.models.layers import cpu_has_fast_bfloat16

    try:
        device = default_device()
    except RuntimeError as error:
        yield Check("device", "error", f"DECODEKIT_DEVICE: {error}", "set it to cpu or cuda")
        return
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        yield Check("device", "ok", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB")
        has_bfloat16 = torch.cuda.is_bf16_supported()
    else:
        yield Check("device", "ok", f"{device} ({platform.processor() or platform.machine()})")
        has_bfloat16 = cpu_has_fast_bfloat16()
    fast = ["float32"] + ["bfloat16"] * has_bfloat16 + ["float16"] * (device.type == "cuda")
    note = "" if has_bfloat16 else "; bfloat16 works, but not faster"
    yield Check("dtypes", "ok", f"computes in {', '.join(fast)}{note}")


def _threads(torch: Any) -> Check:
    used = torch.get_num_threads()
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    seen = f"{used} of torch, {there} cores for this process"
    if there is not None and used > there:
        return Check("threads", "warn", seen, f"set OMP_NUM_THREADS={there}")
    return Check("threads", "ok", seen)


def _embedded() -> Check:
    from ...core.models.locate import EMBEDDED_INSTALL, EMBEDDED_NAME, embedded_path

    try:
        embedded_path()
    except ValidationError:
        return Check("embedded model", "info", "not installed", EMBEDDED_INSTALL)
    return Check("embedded model", "ok", EMBEDDED_NAME)


# --- plugins --------------------------------------------------------------------------------------


def plugins(engine_args: EngineArgs) -> Iterator[Check]:
    """Yield the state of the plugins that these options select, and their own self-checks."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="plugin trouble", category=RuntimeWarning)
            registry = Registry.load(
                plugins=engine_args.plugins or (), autoload=engine_args.plugin_autoload
            )
    except PluginError as error:
        yield Check("plugins", "error", str(error), "see `decodekit plugin list`")
        return
    infos = registry.plugins()
    active = [info for info in infos if info.state == "active"]
    others = [info.name for info in active if not info.built_in]
    named = f" ({', '.join(others)})" if others else ""
    yield Check(
        "plugins",
        "ok",
        f"{len(active) - len(others)} built-in, {len(others)} other{named} active; "
        f"{len(registry.stages)} stages, fingerprint {registry.fingerprint}",
    )
    backends = ", ".join(backend.name for backend in registry.attention_backends)
    yield Check("attention plugins", "ok" if backends else "error", backends or "none")
    for finding in registry.doctor():
        yield Check("plugin", finding.level, finding.message, finding.remedy, finding.data)


@hookimpl
def decodekit_commands() -> Iterable[CommandSpec]:
    return [CommandSpec("doctor", doctor)]
