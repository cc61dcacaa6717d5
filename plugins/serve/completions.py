"""POST /v1/completions and its render form."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...core.outputs import CompletionOutput, RequestOutput
from . import prompts
from .answers import StreamUsage, Usage, extras_of, headers_of, now, stop_reason_of
from .errors import bad
from .logprobs import CompletionLogprobs, TokenNames, prompt_logprobs
from .protocol import CompletionRequest
from .render import rendered
from .running import Job, Running, running
from .sampling import Length, make_params, own_fields
from .sse import DONE, EventStream, event, unless_gone
from .state import ServerState
from .wire import Json

PREFIX = "cmpl-"
DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class CompletionCall:
    """One completion request, checked and ready to run."""

    state: ServerState
    body: CompletionRequest
    id: str
    model: str
    jobs: list[Job]
    echoes: list[str]  # put before the answers of each prompt
    is_scoring: bool  # max_tokens 0 with echo: the one generated token is not shown
    notes: list[str] = field(default_factory=list)
    created: int = field(default_factory=now)

    def writer(self) -> CompletionLogprobs | None:
        """Return a writer of log-probs for one choice, None where none were asked for."""
        if self.body.logprobs is None and not self.body.logprob_token_ids:
            return None
        as_ids = self.body.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = self.state.settings.return_tokens_as_token_ids
        return CompletionLogprobs(TokenNames(self.state.tokenizer, as_ids))

    @property
    def hidden(self) -> frozenset[int]:
        """Ids whose text an answer leaves out."""
        if self.state.tokenizer is None or self.body.skip_special_tokens is False:
            return frozenset()
        ids: frozenset[int] = self.state.tokenizer.special_ids
        return ids


async def complete(
    state: ServerState, request: Request, body: CompletionRequest, raw: Mapping[str, Any],
    ignored: Mapping[str, str],
) -> Response:  # fmt: skip
    """Complete one prompt or several."""
    call = await prepare(state, request, body, raw)
    headers = headers_of(state, call.id, ignored, call.notes)
    if not body.stream:
        return Json(await unless_gone(request, whole(call)), headers=headers)
    stack = AsyncExitStack()
    run = await stack.enter_async_context(running(state, call.id, call.jobs, stream=True))
    return EventStream(events(call, run), stack, headers)


async def render(
    state: ServerState, request: Request, body: CompletionRequest, raw: Mapping[str, Any],
    ignored: Mapping[str, str],
) -> Response:  # fmt: skip
    """Return the requests to /inference/v1/generate, one for each prompt."""
    call = await prepare(state, request, body, raw)
    several = len(call.jobs) > 1
    bodies = [
        rendered(f"{call.id}-{number}" if several else call.id, call.model, job, body)
        for number, job in enumerate(call.jobs)
    ]
    return Json(bodies, headers=headers_of(state, call.id, ignored, call.notes))


# --- from the body to jobs ------------------------------------------------------------------------


async def prepare(
    state: ServerState, request: Request, body: CompletionRequest, raw: Mapping[str, Any]
) -> CompletionCall:
    """Check everything and tokenise the prompts; nothing runs yet."""
    model = state.model_named(body.model)
    call_id = state.request_id(PREFIX, body.request_id, request.headers)
    if body.suffix is not None:
        raise bad("suffix must be null: text is only put behind a prompt", "suffix")
    given = own_fields(body)
    given.pop("truncate_prompt_tokens", None)
    is_scoring = body.max_tokens == 0
    if is_scoring and not body.echo:
        raise bad("max_tokens must be at least 1 without echo, got 0", "max_tokens")
    _add_logprobs(state, body, given)
    read = await prompts.completion(state, body)
    call = CompletionCall(state, body, call_id, model, [], [], is_scoring)
    is_given = "max_tokens" in raw
    asked = body.max_tokens if is_given and not is_scoring else None
    for prompt in read:
        length = Length(
            1 if is_scoring else asked,
            0 if is_scoring else len(prompt.ids),
            DEFAULT_MAX_TOKENS,
            is_open=is_given and body.max_tokens is None,
        )
        params = make_params(state, model, given, length, call.notes)
        call.jobs.append(Job(prompt, params, body.priority or 0, body.cache_salt))
        call.echoes.append(prompts.text_of(state, prompt) if body.echo else "")
    return call


def _add_logprobs(state: ServerState, body: CompletionRequest, given: dict[str, Any]) -> None:
    if body.logprobs is None:
        return
    most = state.engine.engine.config.max_logprobs
    if body.logprobs < 0:
        raise bad(f"logprobs must be an integer >= 0, got {body.logprobs}", "logprobs")
    if most != -1 and body.logprobs > most:
        raise bad(f"logprobs must be at most {most} (--max-logprobs), got {body.logprobs}",
                  "logprobs")  # fmt: skip
    given["logprobs"] = body.logprobs
    if body.echo:
        given.setdefault("prompt_logprobs", body.logprobs)


# --- whole answers --------------------------------------------------------------------------------


async def whole(call: CompletionCall) -> dict[str, Any]:
    """Run a call and return its answer."""
    async with running(call.state, call.id, call.jobs, stream=False) as run:
        outputs = await run.results()
    usage = Usage()
    choices = []
    for number, output in enumerate(outputs):
        usage.prompt_tokens += len(call.jobs[number].prompt.ids)
        if not call.is_scoring:
            usage.add(number, output)
        choices += [_choice(call, number, output, part) for part in output.outputs]
    return {
        "id": call.id,
        "object": "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage.told(call.state),
        "kv_transfer_params": None,
    }


def _choice(
    call: CompletionCall, number: int, output: RequestOutput, part: CompletionOutput
) -> dict[str, Any]:
    body, job = call.body, call.jobs[number]
    ids = [] if call.is_scoring else list(part.token_ids)
    text = call.echoes[number] + ("" if call.is_scoring else part.text)
    writer = call.writer()
    logprobs = None
    if writer is not None:
        logprobs = _empty()
        if body.echo:
            _extend(logprobs, _of_prompt(call, number, output.prompt_logprobs, writer))
        if ids and part.logprobs is not None:
            _extend(logprobs, writer.piece(ids, part.logprobs, call.hidden))
    choice: dict[str, Any] = {
        "index": number * job.params.n + part.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": part.finish_reason,
        "stop_reason": None if call.is_scoring else stop_reason_of(job.params, part),
        "token_ids": ids if body.return_token_ids else None,
        "prompt_token_ids": list(job.prompt.ids) if body.return_token_ids else None,
        "prompt_logprobs": None,
        **extras_of(body, output, part, is_last=True),
    }
    if body.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    if part.logprobs_at and not call.is_scoring:
        choice["logprobs_at"] = {
            mode: CompletionLogprobs(writer.names, len(call.echoes[number])).piece(
                ids, values, call.hidden
            )
            for mode, values in part.logprobs_at.items()
            if writer is not None
        }
    return choice


def _of_prompt(
    call: CompletionCall, number: int, values: Any, writer: CompletionLogprobs
) -> dict[str, list[Any]]:
    """Return the log-prob lists of the echoed prompt."""
    ids = call.jobs[number].prompt.ids
    positions: list[Any] = list(values or [None] * len(ids))
    positions[0] = None
    piece = writer.piece(ids, positions, text=call.echoes[number])
    writer.offset = len(call.echoes[number])
    return piece


def _empty() -> dict[str, list[Any]]:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def _extend(lists: dict[str, list[Any]], more: Mapping[str, list[Any]]) -> None:
    for name, values in more.items():
        lists[name] += values


# --- streams --------------------------------------------------------------------------------------


async def events(call: CompletionCall, run: Running) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer."""
    stream = CompletionStream(call)
    async for part in run.parts():
        for data in stream.take(part.job, part.output):
            yield data
    if stream.usage_told.at_end:
        yield stream.last_usage()
    yield DONE


class CompletionStream:
    """Turns the outputs of one call's requests into events."""

    def __init__(self, call: CompletionCall) -> None:
        self.call = call
        self.usage = Usage(prompt_tokens=sum(len(job.prompt.ids) for job in call.jobs))
        self.usage_told = StreamUsage.of(call.state, call.body.stream_options)
        self.writers: dict[int, CompletionLogprobs | None] = {}  # by the choice's index
        self.of_prompts: dict[int, Any] = {}  # job -> prompt log-probs, which come once
        self.head = {
            "id": call.id,
            "object": "text_completion",
            "created": call.created,
            "model": call.model,
        }

    def take(self, number: int, output: RequestOutput) -> list[bytes]:
        """Return the events for what one output brought."""
        call = self.call
        if not call.is_scoring:
            self.usage.add(number, output)
        if output.prompt_logprobs is not None:
            self.of_prompts[number] = output.prompt_logprobs
        sent: list[bytes] = []
        for part in output.outputs:
            index = number * call.jobs[number].params.n + part.index
            is_first = index not in self.writers
            if is_first:
                self.writers[index] = call.writer()
            sent += self._piece(number, index, output, part, is_first)
            if part.finish_reason is not None:
                sent.append(self._end(index, output, part))
        return sent

    def last_usage(self) -> bytes:
        """Return the event without choices."""
        return event({**self.head, "choices": [], "usage": self.usage.told(self.call.state)})

    def _piece(
        self, number: int, index: int, output: RequestOutput, part: CompletionOutput, is_first: bool
    ) -> list[bytes]:
        call = self.call
        body, writer = call.body, self.writers[index]
        ids = [] if call.is_scoring else list(part.token_ids)
        text = "" if call.is_scoring else part.text
        lists = _empty()
        more: dict[str, Any] = {}
        if is_first and body.echo:
            text = call.echoes[number] + text
            if writer is not None:
                _extend(lists, _of_prompt(call, number, self.of_prompts.get(number), writer))
        if writer is not None:
            if ids and part.logprobs is not None:
                _extend(lists, writer.piece(ids, part.logprobs, call.hidden))
            if lists["tokens"]:
                more["logprobs"] = lists
        if body.return_token_ids:
            if ids:
                more["token_ids"] = ids
            if is_first:
                more["prompt_token_ids"] = list(call.jobs[number].prompt.ids)
        if ids:
            more.update(extras_of(body, output, part, is_last=False))
        return [self._event(index, text, **more)] if text or more else []

    def _end(self, index: int, output: RequestOutput, part: CompletionOutput) -> bytes:
        ours = extras_of(self.call.body, output, part, is_last=True)
        for name in ("kept_set", "kept_mass", "entropy"):
            ours.pop(name, None)  # sent with their tokens
        stop_reason = None if self.call.is_scoring else part.stop_reason
        return self._event(
            index, "", finish_reason=part.finish_reason, stop_reason=stop_reason, **ours
        )

    def _event(self, index: int, text: str, **choice: Any) -> bytes:
        told = {
            **self.head,
            "choices": [
                {
                    "index": index,
                    "text": text,
                    "logprobs": None,
                    "finish_reason": None,
                    "stop_reason": None,
                    "prompt_token_ids": None,
                    "token_ids": None,
                    **choice,
                }
            ],
        }
        if self.usage_told.always:
            told["usage"] = self.usage.told(self.call.state)
        return event(told)
