"""Prompts: a conversation through the chat template, or the prompts of a completion, to token ids.

Rendering and tokenising run in a thread of their own, so that neither the event loop nor the engine
waits for a long text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core import absent
from ...core.llm import chat_prompt
from .errors import bad
from .protocol import ChatTemplating, CompletionRequest
from .state import ServerState

MOST_PROMPTS = 2048  # of one completion request


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the engine takes it; `text` is None where nobody can read it."""

    ids: tuple[int, ...]
    text: str | None

    def for_engine(self, salt: str | None) -> dict[str, Any]:
        """The prompt as a dict of the Python API."""
        prompt: dict[str, Any] = {"prompt_token_ids": self.ids, "prompt": self.text}
        return prompt if salt is None else {**prompt, "cache_salt": salt}


async def chat(
    state: ServerState,
    body: ChatTemplating,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    truncate: int | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Prompt:
    """Render a conversation; `variables` are template variables under those of the request."""
    _check_templating(state, body)
    settings = state.settings
    tokenizer = state.needs_tokenizer()

    def render() -> Prompt:
        rendered = chat_prompt(
            state.engine.engine,
            messages,
            chat_template=body.chat_template,
            allow_template_file=body.chat_template is None,
            content_format=settings.chat_template_content_format,
            add_generation_prompt=_or(body.add_generation_prompt, True),
            continue_final_message=_or(body.continue_final_message, False),
            tools=tools,
            documents=body.documents,
            default_chat_template_kwargs={
                **settings.default_chat_template_kwargs,
                **(variables or {}),
            },
            chat_template_kwargs=body.chat_template_kwargs,
        )
        ids, text = rendered["prompt_token_ids"], rendered["prompt"]
        if body.add_special_tokens:
            ids = tokenizer.encode(text, add_special_tokens=True)
        return _read(state, {"prompt_token_ids": ids, "prompt": text}, truncate)

    return await asyncio.to_thread(render)


async def completion(state: ServerState, body: CompletionRequest) -> list[Prompt]:
    """Read the prompts of a completion request, in order."""
    if body.prompt_embeds is not None:
        raise bad("prompt_embeds is taken in Python only; send prompt", "prompt_embeds")
    if body.prompt is None:
        raise bad("prompt is required: text, token ids, or a list of either", "prompt")
    given: list[str | list[int]]
    if isinstance(body.prompt, str):
        given = [body.prompt]
    elif not body.prompt:
        raise bad("prompt must not be an empty list", "prompt")
    elif isinstance(body.prompt[0], int):
        given = [body.prompt]
    else:
        given = list(body.prompt)
    if len(given) > MOST_PROMPTS:
        raise bad(f"prompt must list at most {MOST_PROMPTS} prompts, got {len(given)}", "prompt")
    if any(isinstance(one, str) for one in given):
        state.needs_tokenizer()
    options = {"add_special_tokens": _or(body.add_special_tokens, True)}

    def read() -> list[Prompt]:
        return [_read(state, one, body.truncate_prompt_tokens, options) for one in given]

    return await asyncio.to_thread(read)


def of_ids(state: ServerState, ids: list[int]) -> Prompt:
    """Check token ids that a client made itself."""
    return _read(state, {"prompt_token_ids": ids}, None)


def text_of(state: ServerState, prompt: Prompt) -> str:
    """Return what `echo` puts before an answer: the prompt as given, else its tokens' text."""
    if prompt.text is not None:
        return prompt.text
    if state.tokenizer is None:
        return ""
    text: str = state.tokenizer.decode(prompt.ids, skip_special_tokens=False)
    return text


def _read(
    state: ServerState,
    prompt: Any,
    truncate: int | None,
    options: Mapping[str, Any] | None = None,
) -> Prompt:
    read = state.engine.engine.intake.prompt(prompt, truncate=truncate, tokenization_kwargs=options)
    return Prompt(read.ids, read.text)


def _check_templating(state: ServerState, body: ChatTemplating) -> None:
    absent.check_call(mm_processor_kwargs=body.mm_processor_kwargs)
    if body.media_io_kwargs:
        raise bad("media_io_kwargs must be empty: messages hold text parts only", "media_io_kwargs")
    trusted = state.settings.trust_request_chat_template
    if not trusted and (
        body.chat_template is not None or "chat_template" in (body.chat_template_kwargs or {})
    ):
        raise bad(
            "chat_template must be absent: this server takes no template from requests "
            "(--trust-request-chat-template)",
            "chat_template",
        )
    if _or(body.add_generation_prompt, True) and body.continue_final_message:
        raise bad(
            "continue_final_message must be false while add_generation_prompt is true",
            "continue_final_message",
        )


def _or(value: bool | None, default: bool) -> bool:
    return default if value is None else value
