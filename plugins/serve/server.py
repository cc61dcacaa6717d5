"""The listener: uvicorn with our start-up line, our log, and an orderly end."""

from __future__ import annotations

import asyncio
import copy
import logging
import socket
import sys
from collections.abc import Mapping
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from ...core.async_llm import AsyncLLM
from ...core.config import AsyncEngineArgs
from ...core.errors import EngineDeadError, ValidationError
from .app import build_app
from .settings import ServeSettings
from .state import ServerState

log = logging.getLogger("decodekit.serve")

PORT = 8000
AFTER_DRAIN = 5.0  # seconds in which the last errors are written
ENGINE_DEAD = 1  # exit code
MOST_HEADER_BYTES = 4 * 2**20


def serve(arguments: AsyncEngineArgs, settings: ServeSettings, listener: Mapping[str, Any]) -> None:
    """Load the model and serve it until a signal; everything is checked before it listens."""
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)  # requests, where asked, and fields without effect
    sock = listen(listener)
    try:
        engine = AsyncLLM.from_engine_args(arguments)
        try:
            app = build_app(engine, settings)
            state = app.state.server
            server = Server(config_of(app, settings, listener), state, url_of(sock, listener))
            server.run(sockets=[sock])
        finally:
            engine.shutdown()
    finally:
        sock.close()
    if server.is_engine_dead:
        sys.exit(ENGINE_DEAD)


def listen(listener: Mapping[str, Any]) -> socket.socket:
    """Bind the socket before the model is loaded, so that a taken port is told at once.

    Connections wait in its queue only after `run` begins to listen.
    """
    path = listener.get("uds")
    host, port = listener.get("host") or "0.0.0.0", listener.get("port", PORT)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family if path is None else socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path is not None:
            sock.bind(path)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        where = path or f"{host}:{port}"
        raise ValidationError(f"cannot listen on {where}: {error}", parameter="port") from error
    return sock


def config_of(app: Any, settings: ServeSettings, listener: Mapping[str, Any]) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    level = listener.get("uvicorn_log_level", "info")
    has_access_log = not listener.get("disable_uvicorn_access_log", False)
    quiet = tuple(
        path.strip()
        for path in listener.get("disable_access_log_for_endpoints", "").split(",")
        if path.strip()
    )
    ssl = {name: value for name, value in listener.items() if name.startswith("ssl_")}
    return uvicorn.Config(
        app,
        log_level=level,
        log_config=_log_config(quiet),
        access_log=has_access_log,
        root_path=settings.root_path,
        timeout_graceful_shutdown=int(settings.drain_timeout + AFTER_DRAIN) + 1,
        h11_max_incomplete_event_size=listener.get(
            "h11_max_incomplete_event_size", MOST_HEADER_BYTES
        ),
        server_header=False,
        **ssl,
    )


def announce(state: ServerState, url: str) -> None:
    """Say in one line where what is served, and whether a key is needed."""
    from rich.console import Console

    key = "a key is needed" if state.settings.api_key else "no key is needed"
    line = f"{url} serves {', '.join(state.names)}; {key}"
    Console(stderr=True, highlight=False).print(line, soft_wrap=True, markup=False)


def url_of(sock: socket.socket, listener: Mapping[str, Any]) -> str:
    """Return the address as a client writes it."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    scheme = "https" if listener.get("ssl_certfile") else "http"
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server; at the end running requests have time to finish, then are told."""

    def __init__(self, config: uvicorn.Config, state: ServerState, url: str | None = None) -> None:
        super().__init__(config)
        self.state = state
        self.url = url  # told when the server listens; None: nothing is told
        self.is_engine_dead = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self.url is not None and self.started:
            announce(self.state, self.url)

    async def on_tick(self, counter: int) -> bool:
        """Stop when the engine is dead; it answers nothing any more."""
        if counter % 10 == 0 and not self.is_engine_dead:
            try:
                await self.state.engine.check_health()
            except EngineDeadError:
                self.is_engine_dead = True
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, wait for what runs, then end what still runs with an error."""
        limit = asyncio.create_task(self._cut_off())
        try:
            await super().shutdown(sockets)
        finally:
            limit.cancel()

    async def _cut_off(self) -> None:
        await asyncio.sleep(self.state.settings.drain_timeout)
        running = [name for ids in self.state.running.values() for name in ids]
        log.warning("%d requests are cut off by the end of the server", len(running))
        self.state.is_stopping = True
        try:
            await self.state.engine.abort(running)
        except EngineDeadError:
            pass  # their streams have been told already


def _log_config(quiet: tuple[str, ...]) -> dict[str, Any]:
    """Return uvicorn's logging, without access lines for the paths `quiet`."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    if quiet:
        config["filters"] = {"quiet": {"()": QuietPaths, "paths": quiet}}
        config["handlers"]["access"]["filters"] = ["quiet"]
    return config


class QuietPaths(logging.Filter):
    """Drops the access lines of some paths."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        super().__init__()
        self.paths = paths

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep what is no access line of these paths."""
        args = record.args if isinstance(record.args, tuple) else ()
        return not (len(args) > 2 and str(args[2]).partition("?")[0] in self.paths)
