"""`decodekit chat`: a conversation at the terminal, or one answer for a script."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.cli import say
from ...core.config import EngineArgs
from ...core.errors import DecodekitError, ValidationError
from ...core.hookspecs import hookimpl
from ...core.stage import CommandSpec
from .options import ENGINE, SAMPLING, Sampling
from .session import Answer, chat_request, open_engine, screen, stream
from .shared import takes
from .typewriter import Typewriter

if TYPE_CHECKING:
    from ...core.engine import LLMEngine

HELP = """\
/system TEXT   set the system message, and start over
/reset         forget the conversation
/params        show the request; /params top_p=0.9 top_k=null sets and unsets
/chain         show what runs; /chain temperature=0.7,top_p=0.9 sets it
/chain off     take the model's own chain again
/exit          end, as Ctrl-D does
\"\"\"            begins and ends a message of several lines
Ctrl-C stops an answer."""


class Conversation:
    """The messages so far, and how the next answer is decoded."""

    def __init__(self, engine: LLMEngine, sampling: Sampling, system: str | None) -> None:
        self.engine = engine
        self.sampling = sampling
        self.system = system
        self.messages: list[dict[str, str]] = []

    def say(self, text: str) -> Answer:
        """Answer `text`, writing the answer as it comes.

        What failed is taken out of the conversation; an answer that was stopped stays in it.
        """
        params = self.sampling.build(self.engine)
        if params.n != 1:
            raise ValidationError(
                f"n must be 1 in a chat, got {params.n}", parameter="n", value=params.n
            )
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = Answer()
        page = Typewriter(sys.stdout)
        try:
            request = chat_request(self.engine, [*system, *asked])
            for piece in stream(self.engine, request, params, answer):
                page.write(piece)
        finally:
            if answer.token_ids:
                page.end()
        if answer.error is None and answer.text:
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        return answer

    def command(self, line: str) -> str:
        """Carry out a line that begins with a slash; return what there is to say about it."""
        name, _, rest = line[1:].strip().partition(" ")
        rest = rest.strip()
        if name == "help":
            return HELP
        if name == "reset":
            self.messages = []
            return "The conversation is empty."
        if name == "system":
            self.system, self.messages = rest or None, []
            return f"System message: {self.system or 'none'}. The conversation is empty."
        if name == "params":
            return self._params(rest)
        if name == "chain":
            return self._chain(rest)
        raise ValidationError(
            f"there is no command /{name}; /help lists them", parameter="command", value=name
        )

    def _params(self, text: str) -> str:
        if text:
            self._try(self.sampling.with_fields(parse_fields(text)))
        return str(self.sampling.build(self.engine))

    def _chain(self, text: str) -> str:
        if text:
            fields = {name: v for name, v in self.sampling.fields.items() if name != "chain"}
            self._try(Sampling(fields, None if text == "off" else text))
        return str(self.engine.explain(self.sampling.build(self.engine)))

    def _try(self, sampling: Sampling) -> None:
        """Take `sampling`, unless it could not run."""
        self.engine.explain(sampling.build(self.engine))
        self.sampling = sampling


def parse_fields(text: str) -> dict[str, Any]:
    """Read "top_p=0.9 temperature=null": values are JSON, or else plain words."""
    import json
    import shlex

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValidationError(f"cannot read {text!r}: {error}", parameter="params") from None
    fields: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValidationError(
                f"expected name=value, got {word!r}", parameter="params", value=word
            )
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields


@takes(engine_args=ENGINE, sampling=SAMPLING)
def chat(
    engine_args: EngineArgs,
    sampling: Sampling,
    message: Annotated[
        str | None,
        typer.Option("--message", "-m", help="Answer this and end.", show_default=False),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="The system message.", show_default=False)
    ] = None,
) -> None:
    """Talk with a model, or get one answer with -m; the executed chain stands under each answer."""
    conversation = Conversation(open_engine(engine_args), sampling, system)
    sampling.build(conversation.engine)  # a bad option is refused before the first message
    if message is not None:
        answer = conversation.say(message)
        _report(answer)
        if answer.error is not None:
            raise typer.Exit(1)
        return
    _converse(conversation)


def _converse(conversation: Conversation) -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  (line editing and history for input)

        name = conversation.engine.model_name
        screen().print(f"{name}. /help shows the commands, Ctrl-D ends.", style="dim")
    for text in _messages(is_terminal):
        if text in ("/exit", "/quit", "/bye"):
            return
        try:
            if text.startswith("/"):
                screen().print(conversation.command(text), markup=False, style="dim")
            else:
                _report(conversation.say(text))
        except DecodekitError as error:
            hint = " (/reset starts over)" if getattr(error, "parameter", "") == "prompt" else ""
            say("error", f"{error}{hint}", "red")


def _messages(is_terminal: bool) -> Iterable[str]:
    """Yield what the user writes, until the end of the input; blank lines are left out."""
    while True:
        try:
            text = _read(is_terminal).strip()
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print()
            continue
        if text:
            yield text


def _read(is_terminal: bool) -> str:
    """Read one line, or several between triple quotes."""
    text = input(">>> " if is_terminal else "")
    if not text.lstrip().startswith('"""'):
        return text
    text = text.lstrip()[3:]
    while not text.rstrip().endswith('"""'):
        text += "\n" + input("... " if is_terminal else "")
    return text.rstrip()[:-3]


def _report(answer: Answer) -> None:
    """Write the line under an answer: to the terminal, or beside the answer where that is piped."""
    if answer.error is not None:
        say("error", answer.error, "red")
    to_stderr = not sys.stdout.isatty()
    screen(stderr=to_stderr).print(answer.summary(), markup=False, style="dim")


@hookimpl
def decodekit_commands() -> Iterable[CommandSpec]:
    return [CommandSpec("chat", chat)]
