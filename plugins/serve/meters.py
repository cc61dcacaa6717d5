"""Prometheus metrics: what the engine counts, and the times and sizes of the server's requests."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ...core import metrics as engine_metrics
from ...core.outputs import RequestOutput
from ...core.params import SamplingParams

PREFIX = "decodekit:"
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
FEW = (1, 2, 5, 10, 20)
STAGE = re.compile(r"stage=(\S+) instance=\S+ position=\d+: ")

LABELS = ("model_name", "engine")


class Meters:
    """Counters and histograms of one server; `engine` is asked when somebody looks."""

    def __init__(self, engine: Any, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._own = {"model_name": model_name, "engine": "0"}
        self._last_token: dict[str, float] = {}  # request -> when its last token came
        self.registry.register(_OfEngine(engine, self._own))
        self._times = {
            name: self._histogram(name, help, SECONDS)
            for name, help in (
                ("time_to_first_token_seconds", "From arrival to the first token."),
                ("inter_token_latency_seconds", "Between two tokens of a stream."),
                ("request_time_per_output_token_seconds", "Mean time of a token after the first."),
                ("e2e_request_latency_seconds", "From arrival to the last token."),
                ("request_queue_time_seconds", "From arrival to the first step."),
                ("request_inference_time_seconds", "From the first step to the last token."),
                ("request_prefill_time_seconds", "From the first step to the first token."),
                ("request_decode_time_seconds", "From the first token to the last."),
            )
        }
        self._sizes = {
            name: self._histogram(name, help, buckets)
            for name, help, buckets in (
                ("request_prompt_tokens", "Prompt tokens of a request.", COUNTS),
                ("request_generation_tokens", "Generated tokens of a request.", COUNTS),
                ("request_max_num_generation_tokens", "Longest answer of a request.", COUNTS),
                ("request_params_n", "n of a request.", FEW),
                ("request_params_max_tokens", "max_tokens of a request.", COUNTS),
            )
        }
        self._success = self._counter(
            "request_success", "Answers by how they ended.", "finished_reason"
        )
        self._plugin_errors = self._counter(
            "plugin_errors", "Requests that failed in a stage or plugin.", "plugin"
        )
        self._http = self._counter("http_requests", "HTTP requests.", "method", "handler", "status")
        self._http_seconds = Histogram(
            f"{PREFIX}http_request_duration_seconds",
            "Time to the end of the response.",
            ("method", "handler"),
            registry=self.registry,
            buckets=SECONDS,
        )
        self._ignored = self._counter("ignored_fields", "Body fields without effect.", "field")

    # --- what happened --------------------------------------------------------------------------

    def delta(self, name: str, output: RequestOutput) -> None:
        """Note the tokens of a stream's output."""
        count = sum(len(choice.token_ids) for choice in output.outputs)
        if not count:
            return
        now = time.monotonic()
        before = self._last_token.get(name)
        self._last_token[name] = now
        if before is not None:
            each = (now - before) / count
            for _ in range(count):
                self._times["inter_token_latency_seconds"].observe(each)

    def forget(self, name: str) -> None:
        """Forget a stream that has ended."""
        self._last_token.pop(name, None)

    def finished(self, output: RequestOutput, params: SamplingParams) -> None:
        """Note a request that has ended, from its last output."""
        for choice in output.outputs:
            if choice.finish_reason is not None:
                self._success.labels(**self._own, finished_reason=choice.finish_reason).inc()
        sizes = self._sizes
        sizes["request_prompt_tokens"].observe(len(output.prompt_token_ids or ()))
        sizes["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            sizes["request_params_max_tokens"].observe(params.max_tokens)
        stats = output.metrics
        if stats is None:
            return
        sizes["request_generation_tokens"].observe(stats.num_generation_tokens)
        longest = stats.num_generation_tokens / max(params.n, 1)
        sizes["request_max_num_generation_tokens"].observe(longest)
        if not (stats.scheduled_ts and stats.first_token_ts):
            return
        decode = stats.last_token_ts - stats.first_token_ts
        spans = {
            "time_to_first_token_seconds": stats.first_token_ts - stats.queued_ts,
            "e2e_request_latency_seconds": stats.last_token_ts - stats.queued_ts,
            "request_queue_time_seconds": stats.scheduled_ts - stats.queued_ts,
            "request_inference_time_seconds": stats.last_token_ts - stats.scheduled_ts,
            "request_prefill_time_seconds": stats.first_token_ts - stats.scheduled_ts,
            "request_decode_time_seconds": decode,
        }
        if longest > 1:
            spans["request_time_per_output_token_seconds"] = decode / (longest - 1)
        for name, seconds in spans.items():
            self._times[name].observe(max(seconds, 0.0))

    def failed(self, error: str | None) -> None:
        """Note a request that failed while it ran; the sentence names the stage."""
        self._success.labels(**self._own, finished_reason="error").inc()
        found = STAGE.search(error or "")
        if found:
            self._plugin_errors.labels(**self._own, plugin=found[1]).inc()

    def ignored(self, field: str, known: Iterable[str]) -> None:
        """Note a field without effect; names that nobody knows share a label."""
        name = field if field in known else "other"
        self._ignored.labels(**self._own, field=name).inc()

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Note an HTTP response."""
        self._http.labels(**self._own, method=method, handler=handler, status=str(status)).inc()
        self._http_seconds.labels(method=method, handler=handler).observe(seconds)

    # --- telling it -----------------------------------------------------------------------------

    def page(self) -> tuple[bytes, str]:
        """Return the text of /metrics and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _histogram(self, name: str, help: str, buckets: Iterable[float]) -> Any:
        family = Histogram(
            f"{PREFIX}{name}", help, LABELS, registry=self.registry, buckets=tuple(buckets)
        )
        return family.labels(**self._own)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{name}", help, (*LABELS, *labels), registry=self.registry)


class _OfEngine:
    """Reads the engine's own metrics whenever they are scraped."""

    def __init__(self, engine: Any, labels: dict[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for metric in self._engine.get_metrics():
            if metric.name == f"{PREFIX}request_success":
                continue  # told by how requests ended instead
            family = self._family(metric)
            if family is not None:
                yield family
        core = self._engine.engine
        state = GaugeMetricFamily(
            f"{PREFIX}engine_sleep_state", "1 for the state that holds.",
            labels=(*LABELS, "sleep_state"),
        )  # fmt: skip
        for level, name in enumerate(SLEEP_STATES):
            state.add_metric([*self._labels.values(), name], float(core.power.level == level))
        yield state
        yield self._cache_info(core)

    def _family(self, metric: engine_metrics.Metric) -> Metric | None:
        labels = {**metric.labels, **self._labels}
        names, values = list(labels), list(labels.values())
        help = metric.name.removeprefix(PREFIX).replace("_", " ")
        if isinstance(metric, engine_metrics.Counter):
            counter = CounterMetricFamily(metric.name, help, labels=names)
            counter.add_metric(values, metric.value)
            return counter
        if isinstance(metric, engine_metrics.Gauge):
            gauge = GaugeMetricFamily(metric.name, help, labels=names)
            gauge.add_metric(values, metric.value)
            return gauge
        if isinstance(metric, engine_metrics.Histogram):
            histogram = HistogramMetricFamily(metric.name, help, labels=names)
            histogram.add_metric(values, list(metric.buckets.items()), metric.sum)
            return histogram
        if isinstance(metric, engine_metrics.Vector):
            vector = CounterMetricFamily(metric.name, help, labels=[*names, "position"])
            for place, value in enumerate(metric.values):
                vector.add_metric([*values, str(place)], value)
            return vector
        return None

    def _cache_info(self, core: Any) -> Metric:
        config, pool = core.config, core.parts.pool
        told = {
            "block_size": pool.block_size,
            "num_blocks": pool.num_blocks,
            "enable_prefix_caching": config.enable_prefix_caching,
            "max_model_len": core.max_model_len,
        }
        info = GaugeMetricFamily(
            f"{PREFIX}cache_config_info", "How the cache is made.", labels=[*self._labels, *told]
        )
        info.add_metric([*self._labels.values(), *map(str, told.values())], 1.0)
        return info


class Measured:
    """ASGI middleware: counts every response, by the route and not by the path."""

    def __init__(self, app: Any, meters: Meters) -> None:
        self.app = app
        self.meters = meters

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 499  # stays so if the client leaves first

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self.meters.answered(scope["method"], route, status, time.monotonic() - began)
