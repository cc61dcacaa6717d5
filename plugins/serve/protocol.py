"""The bodies that the endpoints take, as pydantic models; None is always "not given".

They check types only: what a value may be is for `SamplingParams` to say, whose sentences name the
field and the range.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...core.params import FIELD_NAMES

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
Entry = str | dict[str, Any]  # of a chain, of stops, of observers
ResponseFormat = dict[str, Any]


class Body(BaseModel):
    """A request body; unknown keys are sorted out before it is made."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(Body):
    """What a stream says of usage."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Message(Body):
    """One turn of a conversation; further keys reach the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[str | dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Sampling(Body):
    """How the tokens are chosen: OpenAI's fields, vLLM's further ones, and ours."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool | None = None
    logprobs_mode: str | list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None
    repetition_detection: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = Field(None, description="for plugins: extra_args")
    extra_args: dict[str, Any] | None = None
    chain: list[Entry] | None = Field(None, description="the whole chain of stages, in order")
    picker: str | dict[str, Any] | None = None
    profile: str | None = Field(None, description="the named default chain")
    preset: str | None = Field(None, description="a named set of parameters")
    on_dead_row: str | None = None
    kept_set: bool | None = None
    entropy: bool | None = None
    trace: str | None = None
    stops: list[Entry] | None = None
    observers: list[Entry] | None = None
    driver: str | dict[str, Any] | None = None
    speculation: str | dict[str, Any] | bool | None = None
    plan_review: bool | None = None


class Common(Sampling):
    """What both text endpoints take beside the sampling fields."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_plan: bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ChatTemplating(Body):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class ChatFields(Common, ChatTemplating):
    """Everything of a chat request but its messages."""

    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool | None = None


class ChatRequest(ChatFields):
    """POST /v1/chat/completions."""

    messages: list[Message]


class BatchChatRequest(ChatFields):
    """POST /v1/chat/completions/batch: one answer to each conversation."""

    messages: Annotated[list[list[Message]], Field(min_length=1)]


class CompletionRequest(Common):
    """POST /v1/completions. A missing `max_tokens` is 16, null as much as the context holds."""

    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    prompt_embeds: str | list[str] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    suffix: str | None = None


class GenerateRequest(Body):
    """POST /inference/v1/generate: token ids in, token ids out."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: Int64 | None = None
    kv_transfer_params: dict[str, Any] | None = None
    features: dict[str, Any] | None = None


class TokenizeRequest(ChatTemplating):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class AbortRequest(Body):
    """POST /abort_requests: ids as the answers carry them."""

    request_ids: list[str]


# The fields of a body that are fields of SamplingParams too, in the order of the latter.
SAMPLING_FIELDS = tuple(name for name in FIELD_NAMES if name in Sampling.model_fields)
