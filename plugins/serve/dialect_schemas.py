"""The answers of the other dialects and of /v1/schema, as schemas for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Told(BaseModel):
    """Base: further fields may come."""

    model_config = ConfigDict(extra="allow")


class MessageUsage(Told):
    """Token counts of a message."""

    input_tokens: int
    output_tokens: int


class AnthropicMessage(Told):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class CountedTokens(Told):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int
    context_management: dict[str, int]


class AnthropicErrorDetail(Told):
    """What was wrong."""

    type: str
    message: str


class AnthropicError(Told):
    """Every refusal and failure of /v1/messages."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class RequestSchema(Told):
    """The answer of /v1/schema: a JSON schema."""

    type: Literal["object"]
    properties: dict[str, Any]


class ResponseObject(Told):
    """The answer of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
