"""`decodekit generate`: many prompts in, one line of JSON out for each, written as it is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ...core.config import EngineArgs
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.outputs import RequestOutput
from ...core.params import RequestOutputKind
from ...core.stage import CommandSpec
from .options import ENGINE, SAMPLING, Sampling
from .prompt_file import Record, of_file, of_lines, of_texts
from .results import dump, failure_of, has_failed, record_of, resume
from .session import chat_request, open_engine
from .shared import takes

if TYPE_CHECKING:
    from ...core.engine import LLMEngine

Write = Callable[[dict[str, Any]], None]


class Format(StrEnum):
    """What an input file holds."""

    AUTO = "auto"
    TEXT = "text"
    JSONL = "jsonl"


class Batch:
    """Runs records on an engine, many at once; what is wrong with one stays with it."""

    def __init__(self, engine: LLMEngine, sampling: Sampling, *, with_ids: bool) -> None:
        self.engine = engine
        self.sampling = sampling
        self.with_ids = with_ids
        self._running: dict[str, Record] = {}

    def run(self, records: Iterable[Record]) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each result with its number of generated tokens, as they finish.

        Twice as many requests as can run are kept in the engine, so that it never waits.
        """
        most = 2 * self.engine.config.max_num_seqs
        left = iter(records)
        exhausted = False
        while self._running or not exhausted:
            while not exhausted and len(self._running) < most:
                record = next(left, None)
                if record is None:
                    exhausted = True
                    break
                error = self._add(record)
                if error is not None:
                    yield failure_of(record, error), 0
            for output in self.engine.step() if self._running else ():
                record = self._running.pop(output.request_id)
                yield record_of(record, output, with_ids=self.with_ids), _num_tokens(output)

    def _add(self, record: Record) -> str | None:
        """Queue a record; return what is wrong with it, or None."""
        if record.error is not None:
            return record.error
        try:
            params = self._sampling(record).build(self.engine)
            params.output_kind = RequestOutputKind.FINAL_ONLY
            prompt: Any = record.prompt
            if "messages" in prompt:
                prompt = chat_request(self.engine, prompt["messages"])
            name = self.engine.add_request(f"record-{record.index}", prompt, params)
        except ValidationError as error:
            return str(error) if record.line is None else f"line {record.line}: {error}"
        self._running[name] = record
        return None

    def _sampling(self, record: Record) -> Sampling:
        return self.sampling.with_fields(record.params) if record.params else self.sampling


@takes(engine_args=ENGINE, sampling=SAMPLING)
def generate(
    engine_args: EngineArgs,
    sampling: Sampling,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="A prompt. Repeatable.", show_default=False),
    ] = None,
    input: Annotated[
        str | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            show_default=False,
            help="Prompts: .txt with one a line, .jsonl with objects that have prompt, messages or "
            "prompt_token_ids, and may have params and id. By default, or with -, standard input.",
        ),
    ] = None,
    format: Annotated[
        Format,
        typer.Option("--format", help="What the input is; auto goes by the file's name."),
    ] = Format.AUTO,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Results; by default standard output.",
            show_default=False,
        ),
    ] = None,
    resume_: Annotated[
        bool,
        typer.Option("--resume", help="Keep the results in FILE, run what is missing or failed."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE.")] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take each prompt as a user's message.")
    ] = False,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Write token ids too.")] = False,
    progress: Annotated[
        bool | None,
        typer.Option(
            "--progress/--no-progress",
            help="A bar on standard error; by default if that is a terminal.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Complete prompts and write one JSON object a line, as each is done.

    Exit code 1 if any failed.
    """  # fmt: skip
    records = _records(prompt, input, format)
    if chat:
        records = [_as_chat(record) for record in records]
    done = _prepare(output, records, resume_, overwrite)
    missing = [record for record in records if record.error is not None or record.id not in done]
    if not missing:
        print("nothing to do: every prompt has its result", file=sys.stderr)
        return
    engine = open_engine(engine_args)
    sampling.build(engine)  # what is wrong for every record is refused as a whole
    batch = Batch(engine, sampling, with_ids=token_ids)
    with _bar(len(records), len(missing), output, progress) as bar:
        failed = _run(batch, missing, output, bar)
    if failed:
        print(f"{failed} of {len(missing)} failed", file=sys.stderr)
        raise typer.Exit(1)


def _run(batch: Batch, records: Sequence[Record], output: Path | None, bar: Any) -> int:
    """Write every result as it is done; return how many failed."""
    failed = generated = 0
    try:
        with _writer(output) as write:
            for result, count in batch.run(records):
                write(result)
                failed += has_failed(result)
                generated += count
                bar.set_postfix(tokens=generated, failed=failed, refresh=False)
                bar.update(1)
    except KeyboardInterrupt:
        if output is not None:
            print(f"\ninterrupted; --resume goes on with {output}", file=sys.stderr)
        raise
    return failed


def _records(prompts: Sequence[str] | None, source: str | None, kind: str) -> list[Record]:
    if prompts and source is not None:
        raise ValidationError(
            "prompts come from --prompt or from --input, not from both", parameter="input"
        )
    if prompts:
        return of_texts(prompts)
    if source not in (None, "-"):
        assert source is not None
        return of_file(Path(source), kind)
    if source is None and sys.stdin.isatty():
        raise ValidationError(
            "there is no prompt: give --prompt TEXT or --input FILE, or pipe prompts in",
            parameter="prompt",
        )
    return of_lines(sys.stdin, Format.JSONL if kind == Format.JSONL else Format.TEXT)


def _as_chat(record: Record) -> Record:
    """Turn a text prompt into a conversation; other forms are refused on their line."""
    text = record.prompt.get("prompt")
    if record.error is None and "messages" not in record.prompt:
        if not isinstance(text, str):
            where = "" if record.line is None else f"line {record.line}: "
            return replace(record, error=f"{where}--chat needs a text prompt or messages")
        return replace(record, prompt={"messages": [{"role": "user", "content": text}]})
    return record


def _prepare(
    output: Path | None, records: Sequence[Record], is_resumed: bool, overwrite: bool
) -> set[str | int]:
    """Look at the output file before anything is loaded; return the ids that are done."""
    if output is None:
        if is_resumed or overwrite:
            name = "--resume" if is_resumed else "--overwrite"
            raise ValidationError(f"{name} needs an output file (-o)", parameter=name)
        return set()
    if is_resumed and overwrite:
        raise ValidationError("--resume and --overwrite exclude each other", parameter="--resume")
    try:
        if is_resumed:
            return resume(output, records)
        if output.exists() and output.stat().st_size and not overwrite:
            raise ValidationError(
                f"output file {str(output)!r} has results already; "
                "--resume goes on with it, --overwrite replaces it",
                parameter="output",
                value=str(output),
            )
        output.write_text("")
    except OSError as error:
        raise ValidationError(
            f"output file {str(output)!r} cannot be written: {error.strerror}",
            parameter="output",
            value=str(output),
        ) from error
    return set()


@contextmanager
def _writer(output: Path | None) -> Iterator[Write]:
    """Append results to the file or to standard output, each flushed as one line."""
    file: TextIO = sys.stdout if output is None else output.open("a", encoding="utf-8")

    def write(result: dict[str, Any]) -> None:
        file.write(f"{dump(result)}\n")
        file.flush()

    try:
        yield write
    finally:
        if output is not None:
            file.close()


def _bar(total: int, missing: int, output: Path | None, wanted: bool | None) -> Any:
    """Make a progress bar on standard error; never one between results on the same terminal."""
    from tqdm import tqdm

    if wanted is None:
        wanted = sys.stderr.isatty() and not (output is None and sys.stdout.isatty())
    return tqdm(
        total=total,
        initial=total - missing,
        disable=not wanted,
        unit="prompt",
        dynamic_ncols=True,
    )


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(part.token_ids) for part in output.outputs)


@hookimpl
def decodekit_commands() -> Iterable[CommandSpec]:
    return [CommandSpec("generate", generate)]
