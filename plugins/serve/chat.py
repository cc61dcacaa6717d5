"""POST /v1/chat/completions, its batch form and its render form."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...core.outputs import CompletionOutput, RequestOutput
from ...core.parsers import ReasoningParser, find_parser
from . import prompts
from .answers import StreamUsage, Usage, extras_of, headers_of, now, stop_reason_of
from .errors import bad
from .logprobs import ChatLogprobs, TokenNames, prompt_logprobs
from .message_reader import MessageReader, Shown
from .parsers.reasoning import Splitter
from .protocol import BatchChatRequest, ChatFields, ChatRequest
from .reading import read_whole
from .render import rendered
from .running import Job, Running, running
from .sampling import Length, make_params, own_fields
from .sse import DONE, EventStream, event, unless_gone
from .state import ServerState
from .tool_choice import Tooling, tooling
from .wire import Json

PREFIX = "chatcmpl-"


@dataclass(slots=True)
class ChatCall:
    """One chat request, checked and ready to run."""

    state: ServerState
    body: ChatFields
    id: str
    model: str
    jobs: list[Job]
    echo: str = ""  # put before each answer
    notes: list[str] = field(default_factory=list)
    tooling: Tooling = field(default_factory=Tooling)
    created: int = field(default_factory=now)

    @property
    def names(self) -> TokenNames:
        """How log-probs show tokens."""
        as_ids = self.body.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = self.state.settings.return_tokens_as_token_ids
        return TokenNames(self.state.tokenizer, as_ids)

    def logprobs(self) -> ChatLogprobs | None:
        """Return the writer of log-probs, None where none were asked for."""
        if not self.body.logprobs and not self.body.logprob_token_ids:
            return None
        listed = tuple(self.body.logprob_token_ids or ())
        return ChatLogprobs(self.names, self.body.top_logprobs or 0, listed)

    def reader(self, job: int = 0) -> MessageReader:
        """Return a fresh reader for one choice of a job."""
        parser = reasoning_parser(self.state)
        splitter = None
        if parser is not None:
            text = self.jobs[job].prompt.text
            splitter = Splitter(parser, None if text is None else parser.begins_inside(text))
        effort, told = self.body.reasoning_effort, self.body.include_reasoning
        shown = Shown(
            effort != "none" if told is None else told,
            self.state.settings.reasoning_content_field,
        )
        return MessageReader(splitter, self.tooling, shown, stream=bool(self.body.stream))


async def complete(
    state: ServerState, request: Request, body: ChatRequest, raw: Mapping[str, Any],
    ignored: Mapping[str, str],
) -> Response:  # fmt: skip
    """Answer one conversation."""
    call = await prepare(state, request, body, [raw["messages"]])
    headers = headers_of(state, call.id, ignored, call.notes)
    if not body.stream:
        return Json(await unless_gone(request, whole(call)), headers=headers)
    stack = AsyncExitStack()
    run = await stack.enter_async_context(running(state, call.id, call.jobs, stream=True))
    return EventStream(events(call, run), stack, headers)


async def batch(
    state: ServerState, request: Request, body: BatchChatRequest, raw: Mapping[str, Any],
    ignored: Mapping[str, str],
) -> Response:  # fmt: skip
    """Answer several conversations, one choice each."""
    if body.n not in (None, 1):
        raise bad(f"n must be 1 in a batch, got {body.n}", "n")
    for name in ("stream", "tools", "use_beam_search", "echo"):
        if getattr(body, name):
            raise bad(f"{name} is not served in a batch", name)
    for name in ("best_of", "early_stopping"):
        if getattr(body, name) not in (None, 1, False):
            raise bad(f"{name} has no effect in a batch; leave it out", name)
    call = await prepare(state, request, body, raw["messages"])
    headers = headers_of(state, call.id, ignored, call.notes)
    return Json(await unless_gone(request, whole(call)), headers=headers)


async def render(
    state: ServerState, request: Request, body: ChatRequest, raw: Mapping[str, Any],
    ignored: Mapping[str, str],
) -> Response:  # fmt: skip
    """Return the request to /inference/v1/generate that the chat request comes down to."""
    call = await prepare(state, request, body, [raw["messages"]])
    [job] = call.jobs
    headers = headers_of(state, call.id, ignored, call.notes)
    return Json(rendered(call.id, call.model, job, body), headers=headers)


# --- from the body to jobs ------------------------------------------------------------------------


async def prepare(
    state: ServerState,
    request: Request,
    body: ChatFields,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    *,
    prefix: str = PREFIX,
) -> ChatCall:
    """Check everything and render the prompts; nothing runs yet. `prefix` begins the id."""
    model = state.model_named(body.model)
    call_id = state.request_id(prefix, body.request_id, request.headers)
    tools = tooling(state, body)
    given = own_fields(body)
    if tools.constraint is not None:
        given["structured_outputs"] = tools.constraint
    _keep_markers(state, tools, given)
    _add_logprobs(state, body, given)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    variables = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    given.pop("truncate_prompt_tokens", None)
    call = ChatCall(state, body, call_id, model, [], notes=list(tools.notes), tooling=tools)
    for messages in conversations:
        prompt = await prompts.chat(
            state,
            body,
            messages,
            tools=tools.shown,
            truncate=body.truncate_prompt_tokens,
            variables=variables,
        )
        length = Length(asked, len(prompt.ids))
        params = make_params(state, model, given, length, call.notes)
        call.jobs.append(Job(prompt, params, body.priority or 0, body.cache_salt))
    if body.echo:
        call.echo = _echo(conversations[0])
    return call


def reasoning_parser(state: ServerState) -> ReasoningParser | None:
    """Return the parser of the server's --reasoning-parser."""
    name = state.engine.engine.config.reasoning_parser
    if not name:
        return None
    known = state.engine.engine.parts.registry.reasoning_parsers
    return find_parser("reasoning_parser", name, known)


def _keep_markers(state: ServerState, tools: Tooling, given: dict[str, Any]) -> None:
    """Leave special tokens in the text where a parser's markers are among them."""
    reasoning = reasoning_parser(state)
    marks = [] if reasoning is None else [reasoning.start, reasoning.end]
    marks += () if tools.parser is None else tools.parser.markers
    tokenizer = state.tokenizer
    if not marks or tokenizer is None:
        return
    special = {tokenizer.added_tokens.get(token) for token in tokenizer.special_ids}
    if special.intersection(mark.strip() for mark in marks):
        given["skip_special_tokens"] = False


def _add_logprobs(state: ServerState, body: ChatFields, given: dict[str, Any]) -> None:
    top = body.top_logprobs
    most = state.engine.engine.config.max_logprobs
    if top is not None and top < 0 and top != -1:
        raise bad(f"top_logprobs must be -1 or an integer >= 0, got {top}", "top_logprobs")
    if top and not body.logprobs:
        raise bad("top_logprobs needs logprobs=true", "top_logprobs")
    if top is not None and most != -1 and (top > most or top == -1):
        raise bad(
            f"top_logprobs must be at most {most} (--max-logprobs), got {top}", "top_logprobs"
        )
    if body.logprobs:
        given["logprobs"] = top or 0
        if body.echo:
            given["prompt_logprobs"] = top or 0


def _echo(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message, if the assistant wrote it."""
    last = messages[-1]
    if last["role"] != "assistant":
        return ""
    content = last.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.get("text", "") for part in content)


# --- whole answers --------------------------------------------------------------------------------


async def whole(call: ChatCall) -> dict[str, Any]:
    """Run a call and return its answer."""
    async with running(call.state, call.id, call.jobs, stream=False) as run:
        outputs = await run.results()
    usage = Usage()
    choices = []
    for number, output in enumerate(outputs):
        usage.prompt_tokens += len(call.jobs[number].prompt.ids)
        usage.add(number, output)
        choices += [_choice(call, number + part.index, output, part) for part in output.outputs]
    first = outputs[0]
    answer: dict[str, Any] = {
        "id": call.id,
        "object": "chat.completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage.told(call.state),
        "prompt_logprobs": prompt_logprobs(first.prompt_logprobs),
        "prompt_token_ids": None,
        "kv_transfer_params": None,
    }
    if call.body.return_token_ids:
        answer["prompt_token_ids"] = list(call.jobs[0].prompt.ids)
    return answer


def _choice(
    call: ChatCall, index: int, output: RequestOutput, part: CompletionOutput
) -> dict[str, Any]:
    ids = list(part.token_ids)
    job = index if len(call.jobs) > 1 else 0
    message, reason = read_whole(call.reader(job), part.text, ids, part.finish_reason or "stop")
    has_old_name = call.state.settings.reasoning_content_field
    content = message.content
    if call.echo:
        content = call.echo + (content or "")
    writer = call.logprobs()
    logprobs = None
    if writer is not None and part.logprobs is not None:
        logprobs = {"content": writer.content(ids, part.logprobs)}
    choice: dict[str, Any] = {
        "index": index,
        "message": {
            "role": call.state.settings.response_role,
            "content": content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": message.tool_calls,
            "reasoning": message.reasoning,
            **({"reasoning_content": message.reasoning} if has_old_name else {}),
        },
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": stop_reason_of(call.jobs[0].params, part),
        "token_ids": ids if call.body.return_token_ids else None,
        **extras_of(call.body, output, part, is_last=True),
    }
    if writer is not None and part.logprobs_at:
        choice["logprobs_at"] = {
            mode: {"content": writer.content(ids, values)}
            for mode, values in part.logprobs_at.items()
        }
    return choice


# --- streams --------------------------------------------------------------------------------------


async def events(call: ChatCall, run: Running) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer."""
    stream = ChatStream(call)
    for first in stream.opening():
        yield first
    async for part in run.parts():
        for data in stream.take(part.output):
            yield data
    if stream.usage_told.at_end:
        yield stream.last_usage()
    yield DONE


class ChatStream:
    """Turns the outputs of one request into events."""

    def __init__(self, call: ChatCall) -> None:
        self.call = call
        self.usage = Usage(prompt_tokens=len(call.jobs[0].prompt.ids))
        self.usage_told = StreamUsage.of(call.state, call.body.stream_options)
        count = call.jobs[0].params.n
        self.readers = [call.reader() for _ in range(count)]
        self.writer = call.logprobs()
        self.head = {
            "id": call.id,
            "object": "chat.completion.chunk",
            "created": call.created,
            "model": call.model,
        }

    def opening(self) -> list[bytes]:
        """Return the first event of each choice, and the echoed text behind it."""
        sent = []
        for index in range(len(self.readers)):
            delta = {"role": self.call.state.settings.response_role, "content": ""}
            more = {}
            if self.call.body.return_token_ids:
                more["prompt_token_ids"] = list(self.call.jobs[0].prompt.ids)
            sent.append(self._event(index, delta, top=more))
            if self.call.echo:
                sent.append(self._event(index, {"content": self.call.echo}))
        return sent

    def take(self, output: RequestOutput) -> list[bytes]:
        """Return the events for what one output brought."""
        self.usage.add(0, output)
        sent: list[bytes] = []
        for part in output.outputs:
            pieces, reason = self._pieces(output, part)
            sent += pieces
            if reason is not None:
                sent.append(self._end(output, part, reason))
        return sent

    def last_usage(self) -> bytes:
        """Return the event without choices."""
        return event({**self.head, "choices": [], "usage": self.usage.told(self.call.state)})

    def _pieces(
        self, output: RequestOutput, part: CompletionOutput
    ) -> tuple[list[bytes], str | None]:
        """Return the events that carry text, ids or log-probs, and the reason to report."""
        reader = self.readers[part.index]
        deltas = reader.push(part.text, part.token_ids)
        reason = part.finish_reason
        if reason is not None:
            held, reason = reader.end(reason)
            deltas = [*deltas, *held]
        more: dict[str, Any] = {}
        if part.token_ids:
            ids = list(part.token_ids)
            if self.writer is not None and part.logprobs is not None:
                more["logprobs"] = {"content": self.writer.content(ids, part.logprobs)}
            if self.call.body.return_token_ids:
                more["token_ids"] = ids
            more.update(extras_of(self.call.body, output, part, is_last=False))
        if more and not deltas:
            deltas = [{"content": ""}]
        sent = [
            self._event(part.index, delta, **(more if place == 0 else {}))
            for place, delta in enumerate(deltas)
        ]
        return sent, reason

    def _end(self, output: RequestOutput, part: CompletionOutput, reason: str) -> bytes:
        ours = extras_of(self.call.body, output, part, is_last=True)
        for name in ("kept_set", "kept_mass", "entropy"):
            ours.pop(name, None)  # sent with their tokens
        return self._event(
            part.index, {}, finish_reason=reason, stop_reason=part.stop_reason, **ours
        )

    def _event(
        self, index: int, delta: Mapping[str, Any], *, top: Mapping[str, Any] | None = None,
        **choice: Any,
    ) -> bytes:  # fmt: skip
        told = {
            **self.head,
            "choices": [
                {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
            ],
            **(top or {}),
        }
        if self.usage_told.always:
            told["usage"] = self.usage.told(self.call.state)
        return event(told)
