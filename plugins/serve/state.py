"""What all endpoints of one server share: the engine, the settings, who is running."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.async_llm import AsyncLLM
from .errors import ApiError, bad, not_found, shutting_down
from .meters import Meters
from .policy import Policy
from .settings import ServeSettings

MOST_ID_LETTERS = 256
PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")  # of the ids of answers


@dataclass
class ServerState:
    """One engine behind one set of settings."""

    engine: AsyncLLM
    settings: ServeSettings
    policy: Policy
    meters: Meters
    running: dict[str, list[str]] = field(default_factory=dict)  # id told -> ids in the engine
    responses: OrderedDict[str, Any] = field(default_factory=OrderedDict)  # id -> Stored
    is_stopping: bool = False  # after SIGTERM, when the time to drain has passed

    # --- names --------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The names under which the model is served, the first in answers."""
        return list(self.settings.served_model_name) or [self.engine.engine.model_name]

    def model_named(self, asked: str | None) -> str:
        """Return the served name for a request's `model`; 404 for an unknown one."""
        if not asked:
            return self.names[0]
        if asked in self.names:
            return asked
        raise not_found(
            f"the model {asked!r} does not exist; served here: {', '.join(self.names)}", "model"
        )

    # --- the engine's parts ---------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, None without one."""
        return self.engine.engine.parts.tokenizer

    def needs_tokenizer(self) -> Any:
        """Return the tokenizer; 400 without one."""
        if self.tokenizer is None:
            raise bad("this server has no tokenizer (skip_tokenizer_init); send token ids")
        return self.tokenizer

    @property
    def max_model_len(self) -> int:
        """The longest prompt and answer together, in tokens."""
        return self.engine.engine.max_model_len

    def check_awake(self) -> None:
        """503 while the engine's memory is away, or while the server ends."""
        if self.is_stopping:
            raise shutting_down()
        if self.engine.engine.power.is_memory_away:
            raise ApiError(503, "the engine is asleep; POST /wake_up first")

    # --- ids ------------------------------------------------------------------------------------

    def request_id(self, prefix: str, asked: str | None, headers: Mapping[str, str]) -> str:
        """Return an answer's id: the prefix, and the client's own id if it gave one."""
        core = headers.get("x-request-id") or asked
        if core is not None and (len(core) > MOST_ID_LETTERS or not core.isprintable()):
            raise bad(
                f"request_id must be printable and have at most {MOST_ID_LETTERS} characters",
                "request_id",
            )
        name = f"{prefix}{core or uuid.uuid4().hex}"
        if name in self.running:
            raise bad(f"request_id {core!r} is already running; choose another", "request_id")
        return name

    def engine_ids(self, name: str) -> list[str]:
        """Return the engine's ids of a running answer, by its whole id or without the prefix."""
        for own in (name, *(f"{prefix}{name}" for prefix in PREFIXES)):
            if own in self.running:
                return self.running[own]
        return []
