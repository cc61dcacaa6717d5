"""AsyncLLM: the engine on a thread of its own, each request a stream of outputs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from . import absent
from .config import AsyncEngineArgs, EngineArgs
from .engine import LLMEngine
from .errors import EngineDeadError
from .intake import as_params
from .llm import chat_prompt
from .outputs import PlanReport, RequestOutput
from .params import RequestOutputKind, SamplingParams

log = logging.getLogger("decodekit")

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Stream:
    """Where the outputs of one request go: a queue of the caller's event loop."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput | BaseException]

    def put(self, item: RequestOutput | BaseException) -> None:
        """Hand `item` over from any thread; a closed loop wants nothing more."""
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:
            log.debug("an output came after its event loop was closed")


def _deliver(items: Iterable[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in items:
        stream.queue.put_nowait(output)


class RequestStream:
    """The outputs of one request that the engine has taken, as an async iterator.

    The last one has `finished`. Closing it earlier aborts the request.
    """

    def __init__(
        self, engine: AsyncLLM, request_id: str, stream: _Stream, kind: RequestOutputKind
    ) -> None:
        self.request_id = request_id
        self._engine = engine
        self._stream = stream
        self._kind = kind
        self._is_over = False
        self._pending: tuple[concurrent.futures.Future[Any], ...] = ()

    async def ready(self) -> None:
        """Wait for what its stages prepare, such as a grammar; raise what failed."""
        for future in self._pending:
            wrapped = asyncio.wrap_future(future)
            await asyncio.wait((wrapped,))  # leaving early cancels nothing that others wait for
            error = None if wrapped.cancelled() else wrapped.exception()
            if error is not None:
                raise error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        output = await self._engine._next(self._stream, self._kind)
        self._is_over = output.finished
        return output

    async def aclose(self) -> None:
        """Abort the request unless it has finished; a second call does nothing."""
        if self._is_over:
            return
        self._is_over = True
        with suppress(EngineDeadError):  # a stopped engine has nothing to abort
            self._engine._send(lambda: self._engine._drop(self.request_id, self._stream))


@absent.refuses_methods
class AsyncLLM:
    """A model served to many coroutines.

    `async for output in engine.generate(prompt, params, request_id)`. Constructor arguments are
    those of `LLM`. Closing or cancelling a generator aborts its request.
    """

    def __init__(self, model: str | None = None, **kwargs: Any) -> None:
        self._open(AsyncEngineArgs(model=model, **kwargs))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Build from an EngineArgs object."""
        engine = cls.__new__(cls)
        engine._open(engine_args)
        return engine

    def _open(self, engine_args: EngineArgs) -> None:
        self.engine = LLMEngine.from_engine_args(engine_args)
        self._streams: dict[str, _Stream] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._serve, name="decodekit-engine", daemon=True)
        self._thread.start()

    # --- requests -----------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_text: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs of one request as its `output_kind` says, the last with `finished`.

        Raises ValidationError at the first item for a bad request.
        """
        stream = await self.add_request(
            request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            trace_headers=trace_headers,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            prompt_text=prompt_text,
        )
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def add_request(
        self,
        request_id: str | None,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_text: str | None = None,
    ) -> RequestStream:
        """Check and queue one request; return its outputs to come, which `aclose` ends early.

        Raises ValidationError for a bad request, before anything runs.
        """
        if sampling_params is None:
            sampling_params = self.engine.get_default_sampling_params()
        params = as_params(sampling_params).clone()
        name = f"async-{next(self._ids)}" if request_id is None else request_id
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())

        def add() -> None:
            self.engine.add_request(
                name,
                prompt,
                params,
                lora_request=lora_request,
                tokenization_kwargs=tokenization_kwargs,
                trace_headers=trace_headers,
                priority=priority,
                prompt_text=prompt_text,
            )
            self._streams[name] = stream
            outputs._pending = tuple(self.engine.requests[name].plan.pending)

        outputs = RequestStream(self, name, stream, params.output_kind)
        try:
            await self._ask(add)
        except asyncio.CancelledError:  # it may be in the engine by now
            await outputs.aclose()
            raise
        return outputs

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`generate` on a conversation; `options` are the template options of `LLM.chat_prompt`."""
        prompt = chat_prompt(self.engine, messages, **options)
        stream = self.generate(prompt, sampling_params, request_id)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their generators yield what there is, with finish_reason "abort"."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._send(lambda: self.engine.abort_request(ids))

    # --- control --------------------------------------------------------------------------------

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes; see `LLMEngine.reset_prefix_cache`."""
        return await self._ask(
            lambda: self.engine.reset_prefix_cache(reset_running_requests, reset_connector)
        )

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause and free memory by level; "wait" lets running requests finish first."""
        while mode == "wait" and self.engine.requests:
            await asyncio.sleep(0.01)
        await self._ask(lambda: self.engine.sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back "weights", "kv_cache" and "scheduling", or all."""
        await self._ask(lambda: self.engine.wake_up(tags))

    async def is_sleeping(self) -> bool:
        """Whether the engine is paused or its memory is away."""
        return self.engine.is_sleeping()

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Let nothing run: "abort" ends what runs, "wait" lets it finish, "keep" freezes it."""
        while mode == "wait" and self.engine.requests:
            await asyncio.sleep(0.01)

        def pause() -> None:
            if mode == "abort":
                self.engine.abort_request(list(self.engine.requests))
            self.engine.sleep(0, mode)
            if clear_cache:
                self.engine.reset_prefix_cache(reset_running_requests=True)

        await self._ask(pause)

    async def resume_generation(self) -> None:
        """Undo `pause_generation`."""
        await self._ask(lambda: self.engine.wake_up(["scheduling"]))

    async def is_paused(self) -> bool:
        """Whether nothing runs."""
        return self.engine.is_sleeping()

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin to record a torch profile; needs `profiler_config`."""
        await self._ask(lambda: self.engine.start_profile(profile_prefix))

    async def stop_profile(self) -> None:
        """Write the profile."""
        await self._ask(self.engine.stop_profile)

    # --- the engine's own -----------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """Return the tokenizer as a live transformers object."""
        return self.engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return fresh parameters with the model's own sampling defaults."""
        return self.engine.get_default_sampling_params()

    def get_metrics(self) -> list[Any]:
        """Return counters and gauges of the engine."""
        return self.engine.get_metrics()

    def explain(self, sampling_params: SamplingParams | None = None) -> PlanReport:
        """Return what `sampling_params` would run, in order, without running it."""
        return self.engine.explain(sampling_params)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has stopped."""
        self.engine.check_health()
        if not self._thread.is_alive():
            raise EngineDeadError("the engine has been shut down")

    def shutdown(self) -> None:
        """Stop the engine's thread; requests that are running end with EngineDeadError."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    # --- the thread -----------------------------------------------------------------------------

    def _send(self, job: Callable[[], None]) -> None:
        with self._wake:
            if self._stopping:
                raise EngineDeadError("the engine has been shut down")
            self._inbox.append(job)
            self._wake.notify()

    async def _ask(self, job: Callable[[], T]) -> T:
        """Run `job` between two steps on the engine's thread and return what it returns."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return  # the caller left before its turn
            try:
                done.set_result(job())
            except Exception as error:
                done.set_exception(error)

        self._send(run)
        return await asyncio.wrap_future(done)

    def _drop(self, name: str, stream: _Stream) -> None:
        """Abort a request that nobody listens to, unless its id is another's by now."""
        if self._streams.get(name) is stream:
            del self._streams[name]
            self.engine.abort_request(name)

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not (self._stopping or self._inbox or self.engine.can_step):
                    self._wake.wait()
                if self._stopping:
                    break
                jobs = list(self._inbox)
                self._inbox.clear()
            try:
                for job in jobs:
                    job()
                self._hand_out(self.engine.step())
            except BaseException as error:  # whatever it is, nobody may be left waiting
                log.exception("the engine stopped")
                self.engine.die(str(error) or type(error).__name__)
                break
        reason = EngineDeadError("the engine has stopped")
        with self._wake:
            self._stopping = True
            jobs = list(self._inbox)
        for job in jobs:
            job()
        for stream in self._streams.values():
            stream.put(reason)
        self._streams.clear()

    def _hand_out(self, outputs: Iterable[RequestOutput]) -> None:
        """Put the outputs of a step into their queues; each event loop is woken once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            by_loop.setdefault(stream.loop, []).append((stream, output))
            if output.finished:
                del self._streams[output.request_id]
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:
                log.debug("outputs came after their event loop was closed")

    @staticmethod
    async def _next(stream: _Stream, kind: RequestOutputKind) -> RequestOutput:
        """Wait for an output; a slow consumer of deltas gets those that piled up as one."""
        output = await stream.queue.get()
        if isinstance(output, BaseException):
            raise output
        while kind is RequestOutputKind.DELTA and not stream.queue.empty() and not output.finished:
            more = stream.queue.get_nowait()
            if isinstance(more, BaseException):
                stream.queue.put_nowait(more)
                break
            output.add(more, aggregate=True)
        return output


AsyncLLMEngine = AsyncLLM  # the same class under vLLM's other name
