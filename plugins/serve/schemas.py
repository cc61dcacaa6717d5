"""The answers, as schemas for the OpenAPI document; the endpoints write plain dicts."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from ...core.request_fields import FIELDS as REQUEST_FIELDS
from ...core.request_fields import nullable
from . import protocol
from .dialect_schemas import (
    AnthropicError,
    AnthropicMessage,
    CountedTokens,
    RequestSchema,
    ResponseObject,
)
from .messages_body import CountRequest, MessagesRequest
from .responses_body import ResponsesRequest


class Answered(BaseModel):
    """Base: further fields may come, those of ours among them."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(Answered):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(Answered):
    """Every refusal and failure."""

    error: ErrorDetail


class Unauthorized(Answered):
    """The answer without a key."""

    error: str


class PromptTokensDetails(Answered):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class UsageInfo(Answered):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class TokenLogprob(Answered):
    """One token of an alternative list."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    """One token of the answer."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answered):
    """Log-probabilities of a chat answer."""

    content: list[ContentLogprob] | None


class ChatMessage(Answered):
    """The assistant's message."""

    role: str
    content: str | None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = []
    refusal: str | None = None


class ChatChoice(Answered):
    """One chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Answered):
    """The answer of /v1/chat/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Answered):
    """Log-probabilities of a completion, four parallel lists."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Answered):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None


class Completion(Answered):
    """The answer of /v1/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo


class GenerateChoice(Answered):
    """One continuation in token ids."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class Generated(Answered):
    """The answer of /inference/v1/generate."""

    request_id: str
    choices: list[GenerateChoice]
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None
    usage: UsageInfo


class Tokenized(Answered):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answered):
    """The answer of /detokenize."""

    prompt: str


class ModelCard(Answered):
    """One served name."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str | None
    parent: str | None
    max_model_len: int


class ModelList(Answered):
    """The answer of /v1/models."""

    object: str
    data: list[ModelCard]


class Version(Answered):
    """The answer of /version."""

    version: str


class IsSleeping(Answered):
    """The answer of /is_sleeping."""

    is_sleeping: bool


class IsPaused(Answered):
    """The answer of /is_paused."""

    is_paused: bool


class Status(Answered):
    """The answer of /pause and /resume."""

    status: str


Answer = type[BaseModel] | tuple[type[BaseModel]] | str  # a model, a list of it, a media type

ANSWERS: dict[str, Answer] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/chat/completions/batch": ChatCompletion,
    "/v1/chat/completions/render": protocol.GenerateRequest,
    "/v1/completions": Completion,
    "/v1/completions/render": (protocol.GenerateRequest,),
    "/inference/v1/generate": Generated,
    "/v1/messages": AnthropicMessage,
    "/v1/messages/count_tokens": CountedTokens,
    "/v1/responses": ResponseObject,
    "/v1/responses/{response_id}": ResponseObject,
    "/v1/responses/{response_id}/cancel": ResponseObject,
    "/v1/schema": RequestSchema,
    "/": "text/html",
    "/page.js": "text/javascript",
    "/tokenize": Tokenized,
    "/detokenize": Detokenized,
    "/v1/models": ModelList,
    "/v1/models/{model:path}": ModelCard,
    "/version": Version,
    "/metrics": "text/plain",
    "/is_sleeping": IsSleeping,
    "/is_paused": IsPaused,
    "/pause": Status,
    "/resume": Status,
}
STREAMED: frozenset[type[BaseModel]] = frozenset(
    {ChatCompletion, Completion, Generated, AnthropicMessage, ResponseObject}
)


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


_SWITCH = {"type": "boolean", "default": False}
_RESPONSE = {
    "name": "response_id", "in": "path", "required": True, "schema": {"type": "string"},
}  # fmt: skip
PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "/v1/models/{model:path}": [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ],
    "/v1/responses/{response_id}": [_RESPONSE, _query("stream", _SWITCH)],
    "/v1/responses/{response_id}/cancel": [_RESPONSE],
    "/sleep": [
        _query("level", {"type": "integer", "enum": [0, 1, 2], "default": 1}),
        _query("mode", {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"}),
    ],
    "/wake_up": [
        _query(
            "tags",
            {
                "type": "array",
                "items": {"type": "string", "enum": ["weights", "kv_cache", "scheduling"]},
            },
        )
    ],
    "/reset_prefix_cache": [
        _query("reset_running_requests", _SWITCH),
        _query("reset_external", _SWITCH),
    ],
    "/pause": [
        _query("mode", {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"}),
        _query("clear_cache", {"type": "boolean", "default": True}),
    ],
}

BODIES: list[type[BaseModel]] = [
    protocol.ChatRequest,
    protocol.BatchChatRequest,
    protocol.CompletionRequest,
    protocol.GenerateRequest,
    MessagesRequest,
    CountRequest,
    ResponsesRequest,
    protocol.TokenizeRequest,
    protocol.DetokenizeRequest,
    protocol.AbortRequest,
]


def definitions(ref: str) -> dict[str, Any]:
    """Return the JSON Schema of every body and answer by name."""
    answers = [told[0] if isinstance(told, tuple) else told for told in ANSWERS.values()]
    models = {*BODIES, *(told for told in answers if isinstance(told, type))}
    models |= {ErrorBody, Unauthorized, AnthropicError}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schema = models_json_schema([(model, "validation") for model in ordered], ref_template=ref)
    found = dict(schema["$defs"])
    for model in BODIES:
        if issubclass(model, protocol.Sampling):
            _describe(found[model.__name__]["properties"])
    return found


def _describe(properties: dict[str, Any]) -> None:
    """Give the sampling fields their ranges and what they do, as the Python API has them."""
    for name, row in REQUEST_FIELDS.items():
        if name in properties and name not in OWN_MEANING:
            properties[name] = {**nullable(row.schema), "description": row.text}


# Fields that mean something else over HTTP than in SamplingParams.
OWN_MEANING = frozenset({"logprobs", "max_tokens", "logit_bias", "extra_args"})
