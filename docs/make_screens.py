"""Captures the command screens of the pages: `python docs/make_screens.py` rewrites them in place.

A screen is a block ```console whose first line is `$ decodekit ...`. The suite runs each one again
and compares, but for those under a comment `<!-- varies -->`: speed, machine, draws.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

FOLDER = Path(__file__).parent
WIDTH = 96
SCREEN = re.compile(
    r"^(<!-- varies -->\n)?```console\n\$ (decodekit[^\n]*)\n(.*?)^```$", re.M | re.S
)


class Screen(NamedTuple):
    """One captured command: what was typed, what came, and whether it comes again like that."""

    command: str
    shown: str
    varies: bool


def screens(page: str) -> Iterator[Screen]:
    """Yield the screens of a page's text."""
    for match in SCREEN.finditer(page):
        yield Screen(match[2], match[3], match[1] is not None)


def run(command: str) -> str:
    """Run a `decodekit ...` line in this process; return what it writes to both streams."""
    from typer.testing import CliRunner

    from decodekit.core.cli import app

    environ = {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
    arguments = shlex.split(command)[1:]
    result = CliRunner(env=environ).invoke(app, arguments, prog_name="decodekit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    lines = [line.rstrip() for line in result.output.splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def refreshed(page: str) -> str:
    """Return the text of a page with every screen captured again."""

    def again(match: re.Match[str]) -> str:
        print(f"$ {match[2]}", file=sys.stderr)
        return f"{match[1] or ''}```console\n$ {match[2]}\n{run(match[2])}```"

    return SCREEN.sub(again, page)


if __name__ == "__main__":
    chosen = sys.argv[1:]
    for path in sorted(FOLDER.glob("*.md")):
        if not chosen or path.name in chosen:
            path.write_text(refreshed(path.read_text()))
