"""A server on a thread of this process, for notebooks and tests."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Self

import uvicorn

from ...core.async_llm import AsyncLLM
from .app import build_app
from .server import Server, listen, url_of
from .settings import ServeSettings
from .state import ServerState

LONGEST_START = 60.0  # seconds


class LiveServer:
    """Serves a model on a free port of this machine while the `with` block runs.

    `model` and further keywords are those of `LLM`; or give an `engine`, which stays open.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        settings: ServeSettings | None = None,
        engine: AsyncLLM | None = None,
        **kwargs: Any,
    ) -> None:
        self._owned = engine is None
        self.settings = settings or ServeSettings()
        if engine is None:
            names = self.settings.served_model_name or None
            engine = AsyncLLM(model, served_model_name=names, **kwargs)
        self.engine = engine
        self.app = build_app(engine, self.settings)
        self._socket = listen({"host": "127.0.0.1", "port": 0})
        self.url = url_of(self._socket, {})
        config = uvicorn.Config(
            self.app, log_level="error", lifespan="off", root_path=self.settings.root_path
        )
        self.server = Server(config, self.state)
        self._thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )

    @property
    def state(self) -> ServerState:
        """What the endpoints share."""
        state: ServerState = self.app.state.server
        return state

    def start(self) -> Self:
        """Begin to listen; return when requests are answered."""
        self._thread.start()
        end = time.monotonic() + LONGEST_START
        while not self.server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise RuntimeError("the server did not start; see the log")
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        """End as after SIGTERM: running requests have `drain_timeout` seconds."""
        self.server.should_exit = True
        self._thread.join()
        self._socket.close()
        if self._owned:
            self.engine.shutdown()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
