"""The engine: add requests, step, collect outputs, abort. LLM and AsyncLLM are built on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from . import absent, collect
from .blame import blaming, checked_verdict
from .build import Parts, build, device_memory, generation_defaults
from .chain import StepResult
from .choice_shares import ChoiceShares
from .config import EngineArgs, EngineConfig
from .drive import Drives
from .errors import EngineDeadError, StageError, ValidationError
from .generation_config import announce, default_params
from .holding import Holding
from .intake import Intake
from .lanes import Lanes
from .metrics import Counter, Gauge, Metric, Vector
from .outputs import PlanReport, RequestOutput
from .params import RequestParams, SamplingParams
from .power import Power
from .presets import resolve
from .profiling import Profiling
from .request import Request, Status
from .request import Sequence as TokenSequence
from .runner import StepOutcome
from .scheduler import Schedule
from .stage import Verdict
from .vllm_load import is_processor

log = logging.getLogger("decodekit")


@absent.refuses_methods
class LLMEngine:
    """Runs many requests together, one token of each running sequence a step.

    Not safe to call from several threads at once; `AsyncLLM` is.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.parts: Parts = build(config)
        self.config = config = self.parts.config  # with what its plugins settled
        self.intake = Intake(self.parts)
        self.holding = Holding(self.parts.scheduler)
        self.choices = ChoiceShares(self)
        self.drives = Drives(
            Lanes(self.parts.scheduler, self.parts.chain, self.parts.runner),
            accept=self.parts.chain.accept_lanes,
            write=self._write,
            end=self._end,
            fail=self._break,
            new=self.intake.lane,
            queue=self.parts.scheduler.add,
            max_model_len=self.parts.max_model_len,
        )
        self.power = Power(self.parts)
        self.profiling = Profiling(config.profiler_config)
        self.requests: dict[str, Request] = {}
        self.sampling_defaults = generation_defaults(self.parts.loaded, config)
        self._ready: list[RequestOutput] = []
        self._num_prompt_tokens = 0
        self._num_generated = 0
        self._num_finished = 0
        self._num_failed = 0
        self._dead: str | None = None
        self._warned: set[str] = set()
        self._advised: set[str] = set()  # rules whose advice was logged
        announce(self.sampling_defaults)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Build an engine from its public arguments."""
        return cls(engine_args.resolve(device_memory_bytes=device_memory()))

    @classmethod
    def from_vllm_config(cls, vllm_config: EngineConfig) -> Self:
        """Build an engine from a resolved configuration (vLLM's name)."""
        return cls(vllm_config)

    # --- requests -----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
        *,
        key: int | None = None,
    ) -> str:
        """Check and queue one request; return its id. A bad one raises ValidationError.

        `key` in [0, 2**64) is that of its noise, as a bundle names it, in place of a seed.
        """
        self.check_health()
        absent.check_call(lora_request=lora_request, trace_headers=trace_headers)
        if not isinstance(request_id, str):
            raise ValidationError(
                f"request_id must be a string, got {request_id!r}",
                parameter="request_id",
                value=request_id,
            )
        if request_id in self.requests or request_id in self.choices:
            raise ValidationError(
                f"request_id {request_id!r} is already running; live requests need different ids",
                parameter="request_id",
                value=request_id,
            )
        frozen = self.intake.params(params)
        read = self.intake.prompt(
            prompt,
            truncate=frozen.truncate_prompt_tokens,
            tokenization_kwargs=tokenization_kwargs,
        )
        self._check_room(read.length)
        request = self.intake.admit(
            request_id,
            read,
            frozen,
            priority=priority,
            arrival_time=arrival_time,
            provenance=self._provenance(frozen),
            key=key,
        )
        self._note_advice(request)
        self.choices.check(request)
        if prompt_text is not None:
            request.prompt = prompt_text
        if self.parts.processors.hosts:
            request.given = self.intake.own(params)
        self.requests[request_id] = request
        self.parts.speculation.enter(request)
        self._num_prompt_tokens += read.length
        self.holding.queue(request)
        self.choices.begin(request)
        return request_id

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests at once; the next step returns what they had. Unknown ids are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request = self.requests.get(request_id)
            if request is None:
                continue
            for sequence in request.sequences:
                self._end(sequence, Verdict("abort"))
            unheard = self.choices.drop(request_id)
            self._emit(request.sequences, self._ready)
            if unheard:
                self.abort_request(unheard)

    def discard(self, request_ids: Iterable[str]) -> None:
        """Drop outputs of these requests that no step has returned yet."""
        gone = set(request_ids)
        self._ready = [output for output in self._ready if output.request_id not in gone]

    def has_unfinished_requests(self) -> bool:
        """Whether another step would do anything."""
        return bool(self.requests or self._ready)

    @property
    def can_step(self) -> bool:
        """Whether a step now would do or return anything; False while asleep."""
        return bool(self._ready) or (self.has_unfinished_requests() and not self.power.is_sleeping)

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests are waiting or running."""
        return len(self.requests)

    # --- a step -------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Schedule, run, advance, collect; return what there is to say about requests."""
        self.check_health()
        outputs, self._ready = self._ready, []
        if self.power.is_sleeping:
            return outputs
        if self.holding:
            self._release(outputs)
        if not self.parts.scheduler.has_work:
            return outputs
        try:
            self._emit(self._turn(), outputs)
        except BaseException:
            self._recover(outputs)
            raise
        return outputs

    def _release(self, outputs: list[RequestOutput]) -> None:
        """Let those run that waited for their stages; end those whose preparation failed."""
        may_wait = not self.parts.scheduler.has_work and not outputs
        for request, error in self.holding.release(may_wait=may_wait):
            for sequence in request.sequences:
                self._break(sequence, error)
            self._emit(request.sequences, outputs)

    def _turn(self) -> list[TokenSequence]:
        """Run one step up to the new tokens; return the sequences that changed."""
        schedule = self.parts.scheduler.schedule()
        touched = self._begin(schedule)
        if schedule.work:
            outcome = self._run(schedule)
            if outcome is not None:
                for sequence, _ in schedule.work:
                    self.parts.scheduler.publish(sequence)
                touched += self._advance(outcome)
                touched += self._match(outcome)
                if self.parts.speculation.num_users:
                    self.parts.speculation.propose(outcome.sampled)
            else:
                touched += self._fail(schedule)
        return touched + self.drives.note_ended(touched)

    def _match(self, outcome: StepOutcome) -> list[TokenSequence]:
        """Let sequences whose token was the guessed one go on; return those that changed more."""
        drafted = outcome.drafted
        if not drafted:
            return []
        speculation, touched, depth = self.parts.speculation, list[TokenSequence](), 1
        going = speculation.matching(drafted, drafted, depth)
        while going:
            for sequence in going:
                sequence.num_computed += 1
                self.parts.scheduler.publish(sequence)
            try:
                result = self.parts.runner.go_on(outcome, going, depth)
            except Exception:
                log.exception("a chain failed as a whole; the requests that it ran for end")
                for sequence in going:
                    self._break(sequence, RuntimeError("the chain failed; see the log"))
                touched += going
                break
            touched += self._advance(StepOutcome(going, result, []))
            depth += 1
            going = speculation.matching(going, drafted, depth)
        speculation.learn(drafted)
        return [sequence for sequence in touched if sequence not in drafted]

    def _recover(self, outputs: list[RequestOutput]) -> None:
        """After an interrupt inside a step: lose nothing that was said, compute the rest again.

        Tokens that were chosen and not taken are chosen again, as the noise has an address.
        """
        self.parts.scheduler.preempt_all()
        ended = [
            sequence
            for request in list(self.requests.values())
            for sequence in request.sequences
            if sequence.is_finished
        ]
        self._emit(ended, outputs)
        self._ready = outputs

    def _begin(self, schedule: Schedule) -> list[TokenSequence]:
        """Open the states of newcomers; end those that can never get another block."""
        touched = list(schedule.starved)
        for sequence in schedule.starved:
            log.warning(
                "request %s ended early: the cache holds no more than %d tokens",
                sequence.request.request_id,
                self.parts.pool.num_blocks * self.parts.pool.block_size,
            )
            self._end(sequence, Verdict("length"))
        now = time.monotonic()
        for sequence in schedule.admitted:
            metrics = sequence.request.metrics
            if metrics is not None and not metrics.scheduled_ts:
                metrics.scheduled_ts = now
            try:
                self.parts.chain.open(sequence)
            except Exception as error:
                self._break(sequence, error)
                schedule.work = [item for item in schedule.work if item[0] is not sequence]
                touched.append(sequence)
        return touched

    def _run(self, schedule: Schedule) -> StepOutcome | None:
        """Run the device step; None if it failed as a whole."""
        try:
            return self.parts.runner.run(schedule)
        except Exception:
            log.exception("the forward pass failed; the requests of this step end with an error")
            return None

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes. False, and nothing done, if blocks are in use.

        `reset_running_requests` takes running requests off the device first; they are computed
        again and lose nothing.
        """
        absent.check_call(reset_connector=reset_connector)
        if reset_running_requests:
            self.parts.scheduler.preempt_all()
        if self.parts.pool.num_used:
            return False
        self.parts.pool.forget()
        return True

    def _fail(self, schedule: Schedule) -> list[TokenSequence]:
        touched = [sequence for sequence, _ in schedule.work]
        for sequence in touched:
            self._break(sequence, RuntimeError("the forward pass failed; see the log"))
        return touched

    def _advance(self, outcome: StepOutcome) -> list[TokenSequence]:
        """Give each sequence its token: states, record, text, stops; return those that changed."""
        sampled, result = outcome.sampled, outcome.result
        for sequence, failure in outcome.broken:
            self._break(sequence, failure)
        driven = self._collect(sampled, result)
        for sequence in sampled:
            is_parent = sequence.branch == 0 and len(sequence.request.sequences) > 1
            if is_parent and not sequence.is_finished:
                self.parts.runner.copy_blocks(self.parts.scheduler.fork_children(sequence))
        good = [
            row
            for row, sequence in enumerate(sampled)
            if row not in result.errors and row not in driven and not sequence.is_finished
        ]
        late = self.parts.chain.accept(
            [sampled[row] for row in good], [result.tokens[row] for row in good]
        )
        result.errors.update((good[local], failure) for local, failure in late.items())
        now = time.monotonic()
        for row, sequence in enumerate(sampled):
            error = result.errors.get(row)
            if row in driven:
                continue
            if error is not None:
                if not sequence.is_finished:
                    collect.note_failure(sequence, result.measured.get(row, ()))
                self._break(sequence, error)
            elif not sequence.is_finished:
                self._take(sequence, result, row, now)
        ended = self.drives.turn(driven.values())
        taken = [sequence for row, sequence in enumerate(sampled) if row not in driven]
        broken = [sequence for sequence, _ in outcome.broken if sequence not in taken]
        return taken + broken + ended

    def _collect(self, sampled: Sequence[TokenSequence], result: StepResult) -> dict[int, Request]:
        """Hand the rows whose tokens a driver chooses to it; return their requests by row."""
        driven: dict[int, Request] = {}
        for row, sequence in enumerate(sampled):
            driver = sequence.plan.driver
            if driver is None or not driver.kind.chooses:
                continue
            driven[row] = sequence.request
            found = result.scored.get(row) or result.errors.get(row)
            if not sequence.is_finished and found is not None:
                self.drives.collect(sequence, found)
            self._note(sequence, result.notes.get(row, {}))
        return driven

    def _take(self, sequence: TokenSequence, result: StepResult, row: int, now: float) -> None:
        """Write the token of a row down."""
        measured = result.measured.get(row, ())
        self._note(sequence, result.notes.get(row, {}))
        self._write(sequence, result.tokens[row], measured, result.scores[row], now)

    def _write(
        self,
        sequence: TokenSequence,
        token: int,
        measured: Sequence[tuple[int, Mapping[str, Any]]],
        score: float,
        now: float | None = None,
    ) -> None:
        """Write a token down; what an observer, a stop or the text raises ends this sequence."""
        position = len(sequence.output_ids)
        sequence.output_ids.append(token)
        undo, before = sequence.undo, sequence.score
        sequence.score += score
        if undo is not None:
            undo.push(measured, before)
            measured = ()
        try:
            verdict = self._written(sequence, token, measured)
        except BaseException as error:
            del sequence.output_ids[position:]
            sequence.score = before
            if undo is not None:
                undo.steps.pop()
            self._break(sequence, error)
            if not isinstance(error, Exception):
                raise
            return
        self._num_generated += 1
        metrics = sequence.request.metrics
        if metrics is not None:
            collect.note_token(metrics, time.monotonic() if now is None else now)
        drive = sequence.request.drive
        if drive is not None and drive.looks:
            verdict = self.drives.look(sequence, verdict)
        if verdict is not None:
            self._end(sequence, verdict)

    def _note(self, sequence: TokenSequence, notes: Mapping[str, str]) -> None:
        for stage, note in notes.items():
            sequence.request.notes.setdefault(stage, note)

    def _written(
        self,
        sequence: TokenSequence,
        token: int,
        measured: Sequence[tuple[int, Mapping[str, Any]]],
    ) -> Verdict | None:
        """Tell observers, stops and the text of the last token; return why it ends, or None."""
        position = len(sequence.output_ids) - 1
        plan = sequence.plan
        for place, values in measured:
            observer = plan.observers[place][0]
            with blaming(observer.name, "observer", position):
                observer.record(sequence.records[place], token, values)
        below = position + 1 < (sequence.request.params.min_tokens or 0)
        verdict: Verdict | None = None
        for stop in plan.stops:
            if verdict is None and not (below and stop.respects_min_tokens):
                with blaming(stop.name, "stop", position):
                    verdict = checked_verdict(stop.check(sequence))
        if verdict is None or verdict.reason == "length":
            verdict = self._ended_by_stage(sequence, position) or verdict
        ends = (
            verdict is not None
            and verdict.reason == "stop"
            and (verdict is not OVER or token in sequence.request.params.all_stop_token_ids)
        )
        with blaming("detokenizer", "text", position):
            hit = sequence.text.push((token,), last_ends=ends)
        return verdict if hit is None else Verdict("stop", hit.stop)

    def _ended_by_stage(self, sequence: TokenSequence, position: int) -> Verdict | None:
        """Ask the stages that may end a sequence by themselves, as a grammar does."""
        for place in sequence.plan.enders:
            entry = sequence.plan.entries[place]
            with blaming(entry.stage.name, entry.instance, position):
                if entry.stage.ended(sequence.states[place]):
                    return OVER
        return None

    # --- endings ------------------------------------------------------------------------------

    def _end(self, sequence: TokenSequence, verdict: Verdict) -> None:
        if sequence.finish_reason is not None:
            return
        if sequence.status is not Status.FINISHED:
            self.parts.scheduler.finish(sequence)
        sequence.finish_reason = verdict.reason
        sequence.stop_reason = verdict.detail
        if sequence.guesser is not None:
            self.parts.speculation.close(sequence)
        try:
            with blaming("detokenizer", "text", len(sequence.output_ids)):
                if sequence.undo is not None:
                    sequence.text.read_as(sequence.undo.shown)
                sequence.text.finish()
            if sequence.undo is not None:
                sequence.undo.end(sequence)
            collect.end_records(sequence)
        except StageError as error:
            self._break(sequence, error)

    def _break(self, sequence: TokenSequence, error: BaseException) -> None:
        """End a sequence with an error, even one that has just ended otherwise."""
        if sequence.finish_reason == "error":
            return
        self._num_failed += 1
        sequence.error = str(error) or type(error).__name__
        log.warning("request %s failed: %s", sequence.request.request_id, sequence.error)
        self._end(sequence, Verdict("error"))
        sequence.finish_reason, sequence.stop_reason = "error", None

    def _emit(self, touched: Iterable[TokenSequence], outputs: list[RequestOutput]) -> None:
        """Append the outputs that these sequences' requests ask for; forget finished requests."""
        for sequence in touched:
            request = sequence.request
            output = self._output(sequence)
            if output is not None and self.choices:
                outputs += self.choices.pass_on(output)
            elif output is not None:
                outputs.append(output)
            if request.is_finished and self.requests.get(request.request_id) is request:
                del self.requests[request.request_id]
                self.parts.speculation.leave(request)
                self._num_finished += 1
        if not self.requests:
            self.parts.chain.rest()

    def _output(self, sequence: TokenSequence) -> RequestOutput | None:
        """Make one output; an observer whose result fails ends its own sequence with an error."""
        while True:
            try:
                return collect.output_of(sequence, self.config.stream_interval)
            except collect.LostRecord as lost:
                self._break(lost.sequence, lost.error)

    # --- sleep and profiles ---------------------------------------------------------------------

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause (level 0), and free the cache and the device's weights (1), or all weights (2).

        `mode`: what happens to running requests at levels 1 and 2: "abort" ends them, "keep"
        computes them again after waking, "wait" is refused while any runs. Levels 1 and 2 need
        `enable_sleep_mode=True` (RuntimeError). Asleep already: a warning.
        """
        self.power.sleep(
            level,
            mode,
            abort_all=lambda: self.abort_request(list(self.requests)),
            has_work=bool(self.requests),
        )

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Bring back "weights", "kv_cache" and "scheduling", or all; awake already: a no-op."""
        self.power.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether the engine is paused or its memory is away."""
        return self.power.is_sleeping

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin to record a torch profile; needs `profiler_config`."""
        self.profiling.start(profile_prefix)

    def stop_profile(self) -> None:
        """Write the profile."""
        self.profiling.stop()

    # --- looking at it --------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and output together, in tokens."""
        return self.parts.max_model_len

    def get_tokenizer(self) -> Any:
        """Return the tokenizer as a live transformers object."""
        if self.parts.tokenizer is None:
            raise ValidationError("there is no tokenizer (skip_tokenizer_init is set)")
        return self.parts.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """Return fresh parameters: the model's own sampling defaults, then the engine's preset."""
        params = default_params(self.sampling_defaults)
        resolve(params, self.parts.presets, self.parts.preset)
        return params

    def explain(self, params: SamplingParams | None = None) -> PlanReport:
        """Return the plan that `params` would run, without a run."""
        source = self.get_default_sampling_params() if params is None else params
        frozen = self.intake.params(source)
        return self.parts.planner.explain(frozen, provenance=self._provenance(frozen))

    def register(self, plugin: Any) -> None:
        """Add a Stage class, a plugin module or a processor class of vLLM's, for new requests."""
        if is_processor(plugin):
            self.parts.processors.attach(plugin)
        else:
            self.parts.registry.register(plugin)

    def unregister(self, name: str) -> None:
        """Take a plugin or stage out again; running requests keep theirs."""
        self.parts.registry.unregister(name)

    def reload_plugins(self, name: str | None = None) -> list[str]:
        """Load local plugin files again for new requests; running ones keep theirs."""
        return self.parts.registry.reload(name)

    def get_metrics(self) -> list[Metric]:
        """Return counters and gauges of this engine."""
        scheduler, pool = self.parts.scheduler, self.parts.pool
        speculation = self.parts.speculation
        labels = {"model_name": self.model_name}
        counters = {
            "prompt_tokens": self._num_prompt_tokens,
            "generation_tokens": self._num_generated,
            "request_success": self._num_finished,
            "request_errors": self._num_failed,
            "num_preemptions": scheduler.num_preemptions,
            "dense_rows": self.parts.chain.dense_rows,
            "prefix_cache_queries": pool.num_queried,
            "prefix_cache_hits": pool.num_hit,
            "spec_decode_num_drafts": speculation.num_drafts,
            "spec_decode_num_draft_tokens": speculation.num_draft_tokens,
            "spec_decode_num_accepted_tokens": speculation.num_accepted_tokens,
        }
        for observer in self.parts.registry.observers:
            counters.update(observer.metrics())
        gauges = {
            "num_requests_running": float(len(scheduler.running)),
            "num_requests_waiting": float(len(scheduler.waiting) + len(scheduler.held)),
            "kv_cache_usage_perc": pool.num_used / pool.num_blocks,
        }
        return [
            *(
                Counter(f"decodekit:{name}", dict(labels), value)
                for name, value in counters.items()
            ),
            *(Gauge(f"decodekit:{name}", dict(labels), value) for name, value in gauges.items()),
            Vector(
                "decodekit:spec_decode_num_accepted_tokens_per_pos",
                dict(labels),
                list(speculation.accepted_at),
            ),
        ]

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        names = self.config.served_model_name
        return names[0] if names else self.parts.loaded.source.name

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine has stopped for good."""
        if self._dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self._dead}")

    def die(self, reason: str) -> None:
        """Mark the engine as stopped; every later call raises EngineDeadError."""
        self._dead = reason

    def warn_once(self, message: str) -> None:
        """Log a warning the first time that it is given."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message)

    def _check_room(self, prompt_len: int) -> None:
        room = self.parts.pool.num_blocks * self.parts.pool.block_size
        if prompt_len >= room:
            raise ValidationError(
                f"the prompt has {prompt_len} tokens, but the cache holds {room}, the answer "
                "included; shorten it or raise kv_cache_memory_bytes",
                parameter="prompt",
                value=prompt_len,
            )

    def _provenance(self, params: RequestParams) -> dict[str, str]:
        """Say where each set field came from: a preset, the generation config, the request."""
        own = self.sampling_defaults
        told = {
            name: "generation_config"
            if own.get(name, _UNSET) == getattr(params, name)
            else "request"
            for name in params.fields_set
        }
        return {**told, **params.sources}

    def _note_advice(self, request: Request) -> None:
        """Log what the plan's review says, each rule once."""
        for advice in request.plan.advice:
            if advice.rule not in self._advised:
                self._advised.add(advice.rule)
                log.warning("request %s: %s", request.request_id, advice)


_UNSET = object()
OVER = Verdict("stop")  # a stage says that nothing can follow
