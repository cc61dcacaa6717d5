"""The forms a prompt may take, as typed dicts with vLLM's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NotRequired, TypeAlias, TypedDict

if TYPE_CHECKING:
    from torch import Tensor


class _Common(TypedDict):
    """Keys that every prompt dict may hold."""

    multi_modal_data: NotRequired[dict[str, Any] | None]
    mm_processor_kwargs: NotRequired[dict[str, Any] | None]
    multi_modal_uuids: NotRequired[dict[str, Any] | None]
    cache_salt: NotRequired[str]


class TextPrompt(_Common):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_Common):
    """A prompt as token ids; `prompt` is for display only."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    token_type_ids: NotRequired[list[int]]


class EmbedsPrompt(_Common):
    """A prompt as embeddings [tokens, hidden]."""

    prompt_embeds: Tensor
    prompt: NotRequired[str]


PromptType: TypeAlias = "str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt"
SingletonPrompt: TypeAlias = PromptType
