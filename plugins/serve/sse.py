"""Server-sent events, and the end of a call when its client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from .errors import as_api_error
from .wire import dumps

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """Write one event with a line of JSON."""
    return f"data: {dumps(value)}\n\n".encode()


class ClientGone(Exception):
    """The client closed the connection; nobody reads the answer."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it as soon as the client closes the connection."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError):
                    await each


async def _disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come; what fails on the way becomes an event with the error body.

    `owned` is closed at the end, however it comes: it aborts requests that still run.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        owned: AsyncExitStack,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", **(headers or {})})
        del self.headers["content-length"]
        self.events = events
        self.owned = owned

    def failure(self, error: Exception) -> bytes:
        """Return the last events of a stream that fails."""
        return event(as_api_error(error).body) + DONE

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with self.owned:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            sender = asyncio.ensure_future(self._send_all(send))
            watch = asyncio.ensure_future(_disconnect(receive))
            try:
                await asyncio.wait((sender, watch), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sender, watch):
                    task.cancel()
                with suppress(asyncio.CancelledError):
                    await sender

    async def _send_all(self, send: Any) -> None:
        async with aclosing(self.events):
            try:
                async for data in self.events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except OSError:  # the connection broke
                return
            except Exception as error:
                failure = self.failure(error)
                await send({"type": "http.response.body", "body": failure, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
