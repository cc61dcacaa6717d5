"""Bodies in and JSON out: strict in what is JSON, and never silent about a field without effect."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...core.param_rules import shown
from .errors import ApiError, bad

MOST_NESTED = 200  # levels of lists and objects in a body

_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str
).encode


def dumps(value: Any) -> str:
    """Write strict JSON on one line; a value that is no JSON becomes its text."""
    return _encode(value)


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode()


async def read_json(request: Request) -> dict[str, Any]:
    """Read the body: a JSON object in UTF-8, its numbers finite and its texts whole."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise bad(f"the body must be application/json, got Content-Type {shown(kind)}")
    raw = await request.body()
    try:
        body = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise bad(f"the body must be UTF-8; byte {error.start} is not") from None
    except RecursionError:
        raise bad(f"the body must not nest deeper than {MOST_NESTED} levels") from None
    except ValueError as error:
        raise bad(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad(f"the body must be a JSON object, got {shown(body)}")
    check_values(body)
    return body


def check_values(body: Mapping[str, Any]) -> None:
    """Refuse NaN, infinities and lone surrogates anywhere, naming the field; and deep nesting."""
    todo: list[tuple[str, Any, int]] = [(_name(key), value, 1) for key, value in body.items()]
    while todo:
        name, value, depth = todo.pop()
        if isinstance(value, str):
            _check_text(name, value)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise bad(f"{name} must be a finite number, got {value}", _top(name))
        elif isinstance(value, dict | list):
            if depth > MOST_NESTED:
                raise bad(f"{_top(name)} must not nest deeper than {MOST_NESTED} levels")
            if isinstance(value, dict):
                todo += [(f"{name}.{_name(key)}", item, depth + 1) for key, item in value.items()]
            else:
                todo += [
                    (f"{name}[{place}]", item, depth + 1)
                    for place, item in enumerate(value)
                    if type(item) is not int
                ]


def _name(key: str) -> str:
    _check_text("a field name", key)
    return key


def _top(name: str) -> str:
    return name.partition(".")[0].partition("[")[0]


def _check_text(name: str, value: str) -> None:
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise bad(
            f"{name} must be text; character {error.start} is a lone surrogate", _top(name)
        ) from None


class LimitedBody:
    """ASGI middleware: a body over `most` bytes is a 413, before it is read as a whole."""

    def __init__(self, app: Any, most: int) -> None:
        self.app = app
        self.most = most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        told = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if told.isdigit() and int(told) > self.most:
            await Json(self._error().body, 413)(scope, receive, send)
            return
        await self.app(scope, self._counted(receive), send)

    def _counted(self, receive: Callable[[], Any]) -> Callable[[], Any]:
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                raise self._error()
            return message

        return counted

    def _error(self) -> ApiError:
        return ApiError(413, f"the body must have at most {self.most} bytes (--max-body-bytes)")
