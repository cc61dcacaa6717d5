"""How the server behaves: everything that is not the engine's, checked when it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import ValidationError
from ...core.param_rules import Rule, as_list, count, flag, mapping, one_of, real, text
from ...core.structured_params import KnownKeywords, apply_rules

KEY_VARIABLES = ("DECODEKIT_API_KEY", "VLLM_API_KEY")


@dataclass
class ServeSettings(KnownKeywords):
    """Settings of one server.

    `max_tokens_limit` is hard: a request for more is refused. `default_max_tokens` holds where
    neither the request nor the model's generation config says how long an answer may be.
    """

    api_key: list[str] = field(default_factory=list)
    auth_v1_only: bool = False  # as vLLM: paths outside /v1 are open
    served_model_name: list[str] = field(default_factory=list)
    response_role: str = "assistant"
    chat_template_content_format: str = "auto"
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    return_tokens_as_token_ids: bool = False
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = False
    disable_playground: bool = False
    reasoning_content_field: bool = False  # reasoning under its older name too
    responses_store: int = 0  # most answers of /v1/responses that are kept
    strict_fields: bool = False
    default_max_tokens: int | None = None
    max_tokens_limit: int | None = None
    preset_file: str | None = None
    served_preset: list[str] = field(default_factory=list)  # NAME=PRESET
    allowed_stages: list[str] | None = None  # None: every one
    max_body_bytes: int = 32 * 2**20
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    enable_request_id_headers: bool = False
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
    max_log_len: int | None = None
    disable_log_stats: bool = False
    tokens_only: bool = False
    control_endpoints: bool = True  # sleep, pause, caches, abort
    drain_timeout: float = 30.0  # seconds for running requests after SIGTERM
    root_path: str = ""
    middleware: list[str] = field(default_factory=list)
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    allow_credentials: bool = False
    disable_fastapi_docs: bool = False

    def __post_init__(self) -> None:
        apply_rules(self, _RULES)
        if self.enable_log_outputs and not self.enable_log_requests:
            raise ValidationError(
                "enable_log_outputs must be False without enable_log_requests",
                parameter="enable_log_outputs",
                value=True,
            )
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValidationError(
                "enable_auto_tool_choice needs tool_call_parser",
                parameter="enable_auto_tool_choice",
                value=True,
            )
        limit, default = self.max_tokens_limit, self.default_max_tokens
        if limit is not None and default is not None and default > limit:
            raise ValidationError(
                f"default_max_tokens must be at most max_tokens_limit ({limit}), got {default}",
                parameter="default_max_tokens",
                value=default,
            )

    @property
    def preset_of(self) -> dict[str, str]:
        """Served name -> preset."""
        return dict(item.partition("=")[::2] for item in self.served_preset)


def keys_of_environment(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the API key of DECODEKIT_API_KEY, or of VLLM_API_KEY."""
    return next(([environ[name]] for name in KEY_VARIABLES if environ.get(name)), [])


def _texts(name: str, *, optional: bool = False) -> Rule:
    one = text(name)

    def check(value: Any) -> list[str] | None:
        if value is None and optional:
            return None
        given = [value] if isinstance(value, str) else as_list(name, value, "a list of strings")
        return [one(item) for item in given]

    return check


def _pairs(value: Any) -> list[str]:
    pairs: list[str] = _texts("served_preset")(value) or []
    for item in pairs:
        name, _, preset = item.partition("=")
        if not name or not preset:
            raise ValidationError(
                f"served_preset must be NAME=PRESET, got {item!r}",
                parameter="served_preset",
                value=item,
            )
    return pairs


_FLAGS = (
    "auth_v1_only",
    "trust_request_chat_template",
    "return_tokens_as_token_ids",
    "enable_auto_tool_choice",
    "exclude_tools_when_tool_choice_none",
    "reasoning_content_field",
    "disable_playground",
    "strict_fields",
    "enable_prompt_tokens_details",
    "enable_force_include_usage",
    "enable_request_id_headers",
    "enable_log_requests",
    "enable_log_outputs",
    "disable_log_stats",
    "tokens_only",
    "control_endpoints",
    "allow_credentials",
    "disable_fastapi_docs",
)
_RULES: dict[str, Rule] = {
    **{name: flag(name) for name in _FLAGS},
    **{
        name: _texts(name)
        for name in (
            "api_key",
            "served_model_name",
            "middleware",
            "allowed_origins",
            "allowed_methods",
            "allowed_headers",
        )
    },
    "allowed_stages": _texts("allowed_stages", optional=True),
    "served_preset": _pairs,
    "tool_call_parser": text("tool_call_parser", optional=True),
    "responses_store": count("responses_store", 0),
    "response_role": text("response_role"),
    "chat_template_content_format": one_of(
        "chat_template_content_format", ("auto", "string", "openai")
    ),
    "default_chat_template_kwargs": mapping("default_chat_template_kwargs", optional=False),
    "default_max_tokens": count("default_max_tokens", 1, optional=True),
    "max_tokens_limit": count("max_tokens_limit", 1, optional=True),
    "preset_file": text("preset_file", optional=True),
    "max_body_bytes": count("max_body_bytes", 1),
    "max_log_len": count("max_log_len", 0, optional=True),
    "drain_timeout": real("drain_timeout", 0.0, 86400.0),
    "root_path": text("root_path", empty=True),
}
