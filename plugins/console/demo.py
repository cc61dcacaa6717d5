"""`decodekit demo`: the small model that pip installs answers a question and completes a text."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

from ...core.cli import say
from ...core.config import EngineArgs
from ...core.hookspecs import hookimpl
from ...core.stage import CommandSpec
from .options import Sampling
from .session import Answer, chat_request, open_engine, screen, stream
from .typewriter import Typewriter

if TYPE_CHECKING:
    from ...core.engine import LLMEngine

QUESTION = "Give three tips for a good night's sleep."
SECOND = "Completion, always the best token:"
OPENING = "The future of AI is"
DRAWN = Sampling(
    {
        "temperature": 0.5,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "seed": 1,
        "max_tokens": 140,
    }
)
BEST = Sampling({"temperature": 0.0, "max_tokens": 48})
NEXT = """\
Next: decodekit chat                                      talk with it
      decodekit explain --temperature 0.7 --top-p 0.9     what runs, and why
      decodekit plugin list                               the steps on offer"""


def demo() -> None:
    """Stream a chat answer and a completion of the embedded model, with the chain that ran."""
    engine = open_engine(EngineArgs())
    console = screen()
    spec = engine.parts.spec
    about = f"{spec.num_parameters / 1e6:.0f}M parameters, {str(spec.dtype)[6:]}, {spec.device}"
    console.print(f"{engine.model_name} ({about})", style="bold")
    failed = False
    for title, prompt, sampling in (
        (f"Chat: {QUESTION}", chat_request(engine, [{"role": "user", "content": QUESTION}]), DRAWN),
        (SECOND, OPENING, BEST),
    ):
        console.print(f"\n{title}", style="cyan", markup=False)
        start = prompt if isinstance(prompt, str) else ""
        failed |= _stream(engine, prompt, start, sampling)
    console.print(f"\n{NEXT}", markup=False)
    if failed:
        raise typer.Exit(1)


def _stream(engine: LLMEngine, prompt: Any, start: str, sampling: Sampling) -> bool:
    """Write one answer as it comes and its line; say whether it failed."""
    answer = Answer()
    page = Typewriter(sys.stdout)
    page.write(start)
    for piece in stream(engine, prompt, sampling.build(engine), answer):
        page.write(piece)
    page.end()
    if answer.error is not None:
        say("error", answer.error, "red")
    screen().print(answer.summary(), style="dim", markup=False)
    return answer.error is not None


@hookimpl
def decodekit_commands() -> Iterable[CommandSpec]:
    return [CommandSpec("demo", demo)]
