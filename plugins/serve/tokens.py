"""POST /inference/v1/generate, /tokenize, /detokenize and /abort_requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...core.outputs import CompletionOutput, RequestOutput
from . import prompts
from .answers import StreamUsage, Usage, headers_of
from .errors import bad
from .logprobs import ChatLogprobs, TokenNames, prompt_logprobs
from .protocol import AbortRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest
from .running import Job, Running, running
from .sampling import params_of_json
from .sse import DONE, EventStream, event, unless_gone
from .state import ServerState
from .wire import Json


@dataclass(slots=True)
class GenerateCall:
    """One request of token ids, checked and ready to run."""

    state: ServerState
    body: GenerateRequest
    id: str
    job: Job
    notes: list[str] = field(default_factory=list)

    def logprobs(self) -> ChatLogprobs | None:
        """Return the writer of log-probs, None where none were asked for."""
        params = self.job.params
        if params.logprobs is None and not params.logprob_token_ids:
            return None
        names = TokenNames(self.state.tokenizer, self.state.settings.return_tokens_as_token_ids)
        return ChatLogprobs(names, params.logprobs or 0, tuple(params.logprob_token_ids or ()))


async def generate(
    state: ServerState, request: Request, body: GenerateRequest, raw: Mapping[str, Any],
    ignored: Mapping[str, str],
) -> Response:  # fmt: skip
    """Continue token ids by token ids."""
    model = state.model_named(body.model)
    call_id = state.request_id("", body.request_id, request.headers)
    for name in ("features", "kv_transfer_params"):
        if getattr(body, name):
            raise bad(f"{name} must be empty in this version", name)
    if body.stream_options is not None and not body.stream:
        raise bad("stream_options needs stream", "stream_options")
    prompt = await asyncio.to_thread(prompts.of_ids, state, body.token_ids)
    notes: list[str] = []
    given = dict(body.sampling_params)
    if state.settings.tokens_only:
        given["detokenize"] = False
    params = params_of_json(state, model, given, len(prompt.ids), notes)
    if body.stream and params.prompt_logprobs:
        raise bad("sampling_params.prompt_logprobs is not served with stream", "prompt_logprobs")
    job = Job(prompt, params, body.priority or 0, body.cache_salt)
    call = GenerateCall(state, body, call_id, job, notes)
    headers = headers_of(state, call_id, ignored, notes)
    if not body.stream:
        return Json(await unless_gone(request, _whole(call)), headers=headers)
    stack = AsyncExitStack()
    run = await stack.enter_async_context(running(state, call_id, [job], stream=True))
    return EventStream(_events(call, run), stack, headers)


async def _whole(call: GenerateCall) -> dict[str, Any]:
    async with running(call.state, call.id, [call.job], stream=False) as run:
        [output] = await run.results()
    usage = Usage(prompt_tokens=len(call.job.prompt.ids))
    usage.add(0, output)
    return {
        "request_id": call.id,
        "choices": [_choice(call, part) for part in output.outputs],
        "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
        "kv_transfer_params": None,
        "usage": usage.told(call.state),
    }


async def _events(call: GenerateCall, run: Running) -> AsyncGenerator[bytes, None]:
    usage = Usage(prompt_tokens=len(call.job.prompt.ids))
    told = StreamUsage.of(call.state, call.body.stream_options)
    async for part in run.parts():
        usage.add(0, part.output)
        answer = _event_of(call, part.output)
        if told.always:
            answer["usage"] = usage.told(call.state)
        yield event(answer)
    if told.at_end:
        yield event({"request_id": call.id, "choices": [], "usage": usage.told(call.state)})
    yield DONE


def _event_of(call: GenerateCall, output: RequestOutput) -> dict[str, Any]:
    return {"request_id": call.id, "choices": [_choice(call, part) for part in output.outputs]}


def _choice(call: GenerateCall, part: CompletionOutput) -> dict[str, Any]:
    ids = list(part.token_ids)
    writer = call.logprobs()
    logprobs = None
    if writer is not None and part.logprobs is not None:
        logprobs = {"content": writer.content(ids, part.logprobs)}
    return {
        "index": part.index,
        "token_ids": ids,
        "logprobs": logprobs,
        "finish_reason": part.finish_reason,
        "stop_reason": part.stop_reason,
    }


# --- the tokenizer --------------------------------------------------------------------------------


async def tokenize(
    state: ServerState, request: Request, body: TokenizeRequest, raw: Mapping[str, Any],
    ignored: Mapping[str, str],
) -> Response:  # fmt: skip
    """Return the ids of a text, or of a conversation through the chat template."""
    state.model_named(body.model)
    tokenizer = state.needs_tokenizer()
    if (body.prompt is None) == (body.messages is None):
        raise bad("give prompt or messages, one of them", "prompt")
    if body.messages is not None:
        prompt = await prompts.chat(state, body, raw["messages"], tools=body.tools)
        ids = list(prompt.ids)
    else:
        special = body.add_special_tokens is not False
        ids = await asyncio.to_thread(tokenizer.encode, body.prompt, special)
    answer = {
        "count": len(ids),
        "max_model_len": state.max_model_len,
        "tokens": ids,
        "token_strs": [_token_str(tokenizer, i) for i in ids] if body.return_token_strs else None,
    }
    return Json(answer, headers=ignored)


async def detokenize(
    state: ServerState, request: Request, body: DetokenizeRequest, raw: Mapping[str, Any],
    ignored: Mapping[str, str],
) -> Response:  # fmt: skip
    """Return the text of token ids."""
    state.model_named(body.model)
    tokenizer = state.needs_tokenizer()
    size = state.engine.engine.parts.spec.vocab_size
    for place, token in enumerate(body.tokens):
        if token >= size:
            raise bad(f"tokens[{place}] must be in [0, {size}), got {token}", "tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, False)
    return Json({"prompt": text}, headers=ignored)


async def abort(
    state: ServerState, request: Request, body: AbortRequest, raw: Mapping[str, Any],
    ignored: Mapping[str, str],
) -> Response:  # fmt: skip
    """End running requests by the ids of their answers; unknown ids are ignored."""
    ids = [own for name in body.request_ids for own in state.engine_ids(name)]
    await state.engine.abort(ids)
    return Response(status_code=200, headers=dict(ignored))


def _token_str(tokenizer: Any, token: int) -> str:
    return str(tokenizer.hf.convert_ids_to_tokens(token) or "")
