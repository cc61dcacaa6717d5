"""Who may call: keys compared in constant time, on every path but those that tell of health."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from .wire import Json

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/", "/page.js"})
KEY_HEADER_PATHS = ("/v1/messages",)  # whose clients send x-api-key


class Authorized:
    """ASGI middleware: 401 without one of the keys.

    `v1_only` leaves every path outside /v1 open, as vLLM does.
    """

    def __init__(self, app: Any, keys: Sequence[str], *, v1_only: bool, root_path: str) -> None:
        self.app = app
        self.hashes = [_hash(key) for key in keys]
        self.v1_only = v1_only
        self.root_path = root_path.rstrip("/")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_free = scope["type"] != "http" or scope["method"] == "OPTIONS"
        if is_free or self._is_open(scope["path"]) or self._is_known(scope):
            await self.app(scope, receive, send)
            return
        body: dict[str, Any] = {"error": "Unauthorized"}
        if self._path(scope["path"]).startswith(KEY_HEADER_PATHS):
            told = {"type": "authentication_error", "message": "Unauthorized"}
            body = {"type": "error", "error": told}
        await Json(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _path(self, path: str) -> str:
        return path.removeprefix(self.root_path) if self.root_path else path

    def _is_open(self, path: str) -> bool:
        own = self._path(path)
        return own in OPEN_PATHS or (self.v1_only and not own.startswith("/v1"))

    def _is_known(self, scope: Any) -> bool:
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else b""
        if not given and self._path(scope["path"]).startswith(KEY_HEADER_PATHS):
            given = headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(given).digest()
        # Every key is looked at, so that the time tells nothing of which one is near.
        hits = sum(hmac.compare_digest(digest, own) for own in self.hashes)
        return hits > 0 and bool(given)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
