"""An engine at a terminal: load it under a spinner, stream one answer, say in a line what ran."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from ...core.config import EngineArgs
from ...core.outputs import PlanReport, PlanStep
from ...core.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from ...core.engine import LLMEngine

_SERIAL = itertools.count()
MOST_LETTERS = 40  # of one value in a summary


def screen(*, stderr: bool = False) -> Console:
    """Return a console that colours and wraps on terminals only, and honours NO_COLOR."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    console.soft_wrap = not console.is_terminal
    return console


def open_engine(arguments: EngineArgs) -> LLMEngine:
    """Load the model; a spinner on standard error says so, if that is a terminal."""
    name = arguments.model or "the embedded model"
    with screen(stderr=True).status(f"Loading {name}"):
        from ...core.engine import LLMEngine  # costs the import of torch

        return LLMEngine.from_engine_args(arguments)


@dataclass(slots=True)
class Answer:
    """One streamed sequence so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    plan: PlanReport | None = None
    first: float = 0.0  # when the first token came, in seconds of a monotonic clock
    last: float = 0.0

    @property
    def speed(self) -> float | None:
        """Tokens a second after the first token; None before the second one."""
        passed = self.last - self.first
        return (len(self.token_ids) - 1) / passed if passed > 0 else None

    def summary(self) -> str:
        """The executed chain, how many tokens, how fast, and why it ended, in one line."""
        chain = " > ".join(steps_of(self.plan)) if self.plan is not None else "no chain"
        count = len(self.token_ids)
        parts = [chain, f"{count} token{'' if count == 1 else 's'}"]
        if self.speed is not None:
            parts.append(f"{self.speed:.1f} tokens/s")
        parts.append(self.finish_reason or "stopped")
        return " | ".join(parts)


def stream(engine: LLMEngine, prompt: Any, params: SamplingParams, answer: Answer) -> Iterator[str]:
    """Run one request, keep `answer` up to date and yield its text as it comes.

    Leaving the iteration early ends the request. Ctrl-C ends it after the running step, which is
    never cut in two; a second one interrupts at once.
    """
    own = params.clone()
    own.output_kind = RequestOutputKind.DELTA
    name = engine.add_request(f"console-{next(_SERIAL)}", prompt, own)
    try:
        with interrupts() as interrupted:
            while engine.has_unfinished_requests() and not interrupted:
                for output in engine.step():
                    if output.request_id != name:
                        continue
                    _take(answer, output)
                    yield output.outputs[0].text
    finally:
        engine.abort_request(name)
        engine.discard([name])
    if interrupted:
        answer.finish_reason = "stopped by Ctrl-C"


def _take(answer: Answer, output: Any) -> None:
    part = output.outputs[0]
    now = time.perf_counter()
    answer.first = answer.first or now
    answer.last = now
    answer.text += part.text
    answer.token_ids += part.token_ids
    answer.finish_reason, answer.error = part.finish_reason, part.error
    answer.plan = output.plan


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect the first Ctrl-C in a list instead of raising it; the second raises as usual."""
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


def steps_of(report: PlanReport) -> list[str]:
    """Each executed stage with the values that something set, such as "top_p 0.9"."""
    return [
        f"{step.id or step.stage}{_values(values)}"
        for step, values in zip(report.order, map(set_values, report.order), strict=True)
    ]


def set_values(step: PlanStep) -> dict[str, Any]:
    """The parameters of a step that are not at their default."""
    return {k: v for k, v in step.params.items() if step.provenance.get(k) != "default"}


def _values(params: Mapping[str, Any]) -> str:
    if len(params) == 1:
        return f" {_short(next(iter(params.values())))}"
    listed = ", ".join(f"{name}={_short(value)}" for name, value in params.items())
    return f"({listed})" if listed else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}..."


def chat_request(engine: LLMEngine, messages: Sequence[Mapping[str, Any]]) -> Any:
    """Render a conversation to a prompt, with the engine's own template."""
    from ...core.llm import chat_prompt

    return chat_prompt(engine, messages)
