"""LLM: generate and chat with a model in this process, many prompts at once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from . import absent
from .beams import beams_of, request_params
from .chat import render_chat
from .chat_hint import ChatHint
from .choosing import ChoiceOutput, ChoiceTree, row_of, row_params
from .config import EngineArgs
from .engine import LLMEngine
from .errors import ParameterTypeError, ValidationError
from .inputs import TokensPrompt
from .intake import as_batch, as_params
from .outputs import BeamSearchOutput, PlanReport, RequestOutput
from .params import BeamSearchParams, RequestOutputKind, SamplingParams
from .progress import Progress

if TYPE_CHECKING:
    from .replay import Replay

TqdmOption = bool | Callable[..., Any]

CHOOSE_TOGETHER = 64  # prompts, and distributions, that `choose` holds at once


@absent.refuses_methods
class LLM:
    """A model with its engine.

    `LLM()` runs the embedded model; `model` is a local folder, a GGUF file or a hub name. Other
    arguments are those of `EngineArgs`. Raises ValidationError for a bad argument and
    ParameterTypeError (a TypeError) for an unknown one.
    """

    def __init__(self, model: str | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("disable_log_stats", True)
        self._open(EngineArgs(model=model, **kwargs))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Build from an EngineArgs object."""
        llm = cls.__new__(cls)
        llm._open(engine_args)
        return llm

    def _open(self, engine_args: EngineArgs) -> None:
        self.llm_engine = LLMEngine.from_engine_args(engine_args)
        self.request_counter = itertools.count()
        self._queued: dict[str, None] = {}
        self._results: dict[str, RequestOutput] = {}
        self._chat_hint: ChatHint | None = None  # made for the first text prompt

    # --- generation ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: TqdmOption = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; the results are in prompt order.

        A prompt is text, a list of token ids, or a dict (`TextPrompt`, `TokensPrompt`). No chat
        template is applied. `sampling_params`: one for all, or one a prompt; None takes the
        model's defaults. A request that fails while it runs does not raise: its output has
        `finish_reason="error"` and the sentence in `error`.
        """
        with Progress(use_tqdm) as progress:
            ids = self._add(
                as_batch(prompts), sampling_params, lora_request, priority, tokenization_kwargs,
                progress,
            )  # fmt: skip
            return self._run(ids, progress)

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: TqdmOption = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the `params.beam_width` best continuations of each prompt, best first.

        Every stage of `params.sampling_params` that masks, forces or biases acts on each beam.
        `concurrency_limit`: at most so many prompts at once. RuntimeError if a search fails while
        it runs.
        """
        request = request_params(params, self.llm_engine.config.max_num_seqs)
        listed = as_batch(prompts)
        step = len(listed) if concurrency_limit is None else concurrency_limit
        if step < 1:
            raise ValidationError(
                f"concurrency_limit must be at least 1 or None, got {concurrency_limit}",
                parameter="concurrency_limit",
                value=concurrency_limit,
            )
        outputs: list[RequestOutput] = []
        for start in range(0, len(listed), step):
            outputs += self.generate(
                listed[start : start + step],
                request,
                use_tqdm=use_tqdm if step == len(listed) else False,
                lora_request=lora_request,
            )
        tokenizer = self.llm_engine.parts.tokenizer
        return [
            beams_of(prompt, output, tokenizer)
            for prompt, output in zip(listed, outputs, strict=True)
        ]

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: TqdmOption = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or many, through the chat template."""
        absent.check_call(mm_processor_kwargs=mm_processor_kwargs)
        prompts = [
            self.chat_prompt(
                conversation,
                chat_template=chat_template,
                content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in _conversations(messages)
        ]
        options = dict(tokenization_kwargs or {})
        options.pop("add_special_tokens", None)  # the template wrote them
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            tokenization_kwargs=options,
        )

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokensPrompt:
        """Render one conversation to token ids, as `chat` does."""
        return chat_prompt(
            self.llm_engine,
            messages,
            chat_template=chat_template,
            content_format=content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )

    def choose(
        self, prompts: Any, choices: Sequence[str], *, use_tqdm: TqdmOption = False
    ) -> list[ChoiceOutput]:
        """Say for each prompt how likely the model is to answer with each of `choices`.

        Nothing is generated: the probabilities of every way to write an option in tokens are
        added up, with and without a leading space. Prompts are those of `generate`; render a
        conversation with `chat_prompt`. Raises ValidationError for fewer than two choices.
        """
        engine = self.llm_engine
        if engine.parts.tokenizer is None:
            raise ValidationError("choose needs the tokenizer, which is off (skip_tokenizer_init)")
        listed = [engine.intake.prompt(prompt).ids for prompt in as_batch(prompts)]
        results: list[ChoiceOutput] = []
        with Progress(use_tqdm) as progress:
            for start in progress.adding(range(0, len(listed), CHOOSE_TOGETHER)):
                results += self._choose(listed[start : start + CHOOSE_TOGETHER], choices)
        return results

    def _choose(
        self, prompts: Sequence[Sequence[int]], choices: Sequence[str]
    ) -> list[ChoiceOutput]:
        trees = [ChoiceTree(choices, self.llm_engine.parts.tokenizer) for _ in prompts]
        while any(tree.paths for tree in trees):
            asked = [
                TokensPrompt(prompt_token_ids=[*ids, *path])
                for ids, tree in zip(prompts, trees, strict=True)
                for path in tree.paths
            ]
            rows: list[Any] = []
            for start in range(0, len(asked), CHOOSE_TOGETHER):
                part = asked[start : start + CHOOSE_TOGETHER]
                outputs = self.generate(part, row_params(), use_tqdm=False)
                rows += [row_of(output.outputs[0]) for output in outputs]
            for tree in trees:
                count = len(tree.paths)
                tree.feed(rows[:count])
                del rows[:count]
        return [tree.result() for tree in trees]

    def enqueue(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: TqdmOption = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue requests and return their ids; `wait_for_completion` runs them."""
        with Progress(use_tqdm) as progress:
            ids = self._add(
                as_batch(prompts), sampling_params, lora_request, priority, tokenization_kwargs,
                progress,
            )  # fmt: skip
        self._queued.update(dict.fromkeys(ids))
        return ids

    def wait_for_completion(
        self,
        output_type: type | tuple[type, ...] | None = None,
        *,
        use_tqdm: TqdmOption = True,
    ) -> list[RequestOutput]:
        """Run until every queued request is done; return their results in the order of ids."""
        ids = list(self._queued)
        with Progress(use_tqdm) as progress:
            outputs = self._run(ids, progress)
        self._queued.clear()
        allowed = RequestOutput if output_type is None else output_type
        for output in outputs:
            assert isinstance(output, allowed), f"{type(output).__name__} is not {allowed}"
        return outputs

    # --- the engine's own -----------------------------------------------------------------------

    @property
    def model_config(self) -> Any:
        """Facts of the loaded model (`core.models.config.ModelSpec`)."""
        return self.llm_engine.parts.spec

    def get_tokenizer(self) -> Any:
        """Return the tokenizer as a live transformers object."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return fresh parameters with the model's own sampling defaults."""
        return self.llm_engine.get_default_sampling_params()

    def get_metrics(self) -> list[Any]:
        """Return counters and gauges of the engine."""
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes; False if requests hold blocks and are not to be reset."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause the engine and free memory by level; see `LLMEngine.sleep`."""
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back "weights", "kv_cache" and "scheduling", or all."""
        self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether the engine is paused or its memory is away."""
        return self.llm_engine.is_sleeping()

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin to record a torch profile; needs `profiler_config`."""
        self.llm_engine.start_profile(profile_prefix)

    def stop_profile(self) -> None:
        """Write the profile."""
        self.llm_engine.stop_profile()

    def register(self, plugin: Any) -> None:
        """Add a Stage class or a plugin module to this engine."""
        self.llm_engine.register(plugin)

    def unregister(self, name: str) -> None:
        """Take a plugin or stage out again."""
        self.llm_engine.unregister(name)

    def reload_plugins(self, name: str | None = None) -> list[str]:
        """Load the local files among the plugins again, all or one; return their names.

        New requests run the new code. Requests that run keep the classes that they were planned
        with. A file that fails leaves its former self in place and raises PluginError.
        """
        return self.llm_engine.reload_plugins(name)

    def explain(self, sampling_params: SamplingParams | None = None) -> PlanReport:
        """Return what `sampling_params` would run, in order, without running it."""
        return self.llm_engine.explain(sampling_params)

    def replay(self, bundle: Any, *, prompt: Any = None, **fields: Any) -> Replay:
        """Run a replay bundle (an object, its data or a file) again and compare.

        `prompt` and `fields` of SamplingParams give what the bundle could not hold, such as
        callables; ValidationError if one is missing.
        """
        from .replay import replay

        return replay(self, bundle, prompt=prompt, fields=fields)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function with the worker first, or a worker's method; one result a worker.

        TimeoutError after `timeout` seconds; the call itself cannot be stopped and runs on.
        """
        worker = self.llm_engine.parts.runner
        call = getattr(worker, method) if isinstance(method, str) else partial(method, worker)
        call = partial(call, *args, **(kwargs or {}))
        if timeout is None:
            return [call()]
        done: Future[Any] = Future()
        threading.Thread(target=_settle, args=(done, call), daemon=True).start()
        return [done.result(timeout)]

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call `func` with the model object; one result a worker."""
        return [func(self.llm_engine.parts.loaded.model)]

    # --- parts ----------------------------------------------------------------------------------

    def _add(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: Any,
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        progress: Progress,
    ) -> list[str]:
        """Add every prompt, or none: if one is refused, those before it are taken back."""
        params = self._params(sampling_params, len(prompts))
        priorities = _spread("priority", priority, len(prompts), 0)
        adapters = _spread("lora_request", lora_request, len(prompts), None)
        self._check_priority(priority)
        ids: list[str] = []
        try:
            for place, prompt in enumerate(progress.adding(prompts)):
                own = as_params(params[place]).clone()
                own.output_kind = RequestOutputKind.FINAL_ONLY
                ids.append(
                    self.llm_engine.add_request(
                        str(next(self.request_counter)),
                        prompt,
                        own,
                        lora_request=adapters[place],
                        tokenization_kwargs=tokenization_kwargs,
                        priority=priorities[place],
                    )
                )
                self._hint(ids[-1], prompt)
        except BaseException:
            self._abandon(ids)
            raise
        return ids

    def _hint(self, request_id: str, prompt: Any) -> None:
        """Note a raw text prompt that looks as if it was meant for `chat`."""
        if isinstance(prompt, Mapping):
            prompt = None if prompt.get("prompt_token_ids") is not None else prompt.get("prompt")
        if not isinstance(prompt, str):
            return
        engine = self.llm_engine
        if self._chat_hint is None:
            self._chat_hint = ChatHint(engine.parts.tokenizer, engine.config.chat_template)
        note = self._chat_hint.note(prompt)
        if note is not None:
            engine.requests[request_id].notes["chat"] = note
            engine.warn_once(note)

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
            raise ParameterTypeError(
                f"sampling_params must be SamplingParams or a list of them, got {given!r}",
                parameter="sampling_params",
                value=given,
            )
        if len(given) != count:
            raise ValidationError(
                f"sampling_params has {len(given)} entries, but there are {count} prompts",
                parameter="sampling_params",
                value=len(given),
            )
        return list(given)

    def _run(self, ids: Sequence[str], progress: Progress) -> list[RequestOutput]:
        """Step until the requests `ids` are done; keep results of others for their own caller."""
        waiting = {request_id for request_id in ids if request_id not in self._results}
        if waiting and self.llm_engine.is_sleeping():
            self._abandon(ids)
            raise RuntimeError("the engine is asleep; call wake_up first")
        try:
            progress.start(len(waiting))
            while waiting:
                outputs = self.llm_engine.step()
                for output in outputs:  # all are kept before the bar may raise
                    if output.request_id in waiting or output.request_id in self._queued:
                        self._results[output.request_id] = output
                for output in outputs:
                    if output.request_id in waiting:
                        waiting.remove(output.request_id)
                        progress.finished(output)
        except BaseException:
            self._abandon(ids)
            raise
        return [self._results.pop(request_id) for request_id in ids]

    def _abandon(self, ids: Sequence[str]) -> None:
        """Abort requests of a call that does not return, and forget what they made."""
        gone = set(ids)
        self.llm_engine.abort_request(ids)
        self.llm_engine.discard(gone)
        for request_id in ids:
            self._results.pop(request_id, None)
            self._queued.pop(request_id, None)

    def _check_priority(self, priority: int | Sequence[int] | None) -> None:
        if priority is not None and self.llm_engine.config.scheduling_policy != "priority":
            self.llm_engine.warn_once(
                "priority has no effect under scheduling_policy='fcfs'; build the engine with "
                "scheduling_policy='priority'"
            )


def _settle(done: Future[Any], call: Callable[[], Any]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:
        done.set_exception(error)


def chat_prompt(
    engine: LLMEngine, messages: Sequence[Mapping[str, Any]], **options: Any
) -> TokensPrompt:
    """Render one conversation to token ids; `options` are those of `core.chat.render_chat`."""
    tokenizer = engine.parts.tokenizer
    if tokenizer is None:
        raise ValidationError("chat needs the tokenizer, which is off (skip_tokenizer_init)")
    if options.get("chat_template") is None:
        options["chat_template"] = engine.config.chat_template
    text = render_chat(messages, tokenizer, **options)
    # No special tokens are added: the template writes BOS itself if it wants one.
    return TokensPrompt(
        prompt_token_ids=tokenizer.encode(text, add_special_tokens=False), prompt=text
    )


def _conversations(messages: Any) -> list[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise ParameterTypeError(
            f"messages must be a list of messages or of conversations, got {messages!r}",
            parameter="messages",
            value=messages,
        )
    if not messages:
        raise ValidationError("messages must not be empty", parameter="messages", value=messages)
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def _spread(name: str, value: Any, count: int, default: Any) -> list[Any]:
    """Return one value a prompt; a list must have one for each."""
    if value is None:
        return [default] * count
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise ValidationError(
                f"{name} has {len(value)} entries, but there are {count} prompts",
                parameter=name,
                value=len(value),
            )
        return list(value)
    return [value] * count
