"""Turn what a caller gives (a prompt in any form, parameters) into a request that can run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ..kernels.reference.noise import request_key, seed_key
from . import absent
from .build import Parts
from .bundle import EngineFacts
from .detokenizer import Detokenizer, TextStream, TokenTexts
from .drive import Drive
from .errors import ParameterTypeError, ValidationError
from .outputs import RequestStateStats
from .param_rules import shown
from .params import RequestOutputKind, RequestParams, SamplingParams
from .plan import Plan
from .presets import resolve
from .prompt_logprobs import PromptCollector
from .request import Request
from .request import Sequence as TokenSequence
from .request_checks import check_prompt, check_request
from .stage import Stage
from .undo import Undo


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as ids, with its text where the caller gave one."""

    ids: tuple[int, ...]
    text: str | None = None
    embeds: Any = None  # Tensor [tokens, hidden]; then `ids` is empty
    salt: str | None = None  # keeps the cached prefixes of this prompt apart from others

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.ids) if self.embeds is None else int(self.embeds.shape[0])

    @property
    def cache_root(self) -> bytes:
        """What the prefix cache mixes into the names of this prompt's blocks."""
        root = (self.salt or "").encode()
        if self.embeds is not None:
            root += blake2b(self.embeds.float().cpu().numpy().tobytes()).digest()
        return root


class Intake:
    """Checks and admits requests of one engine; holds no request itself."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._numbers = itertools.count()
        self._uids = itertools.count()
        self._facts: tuple[int, EngineFacts] | None = None  # with the registry's generation

    # --- prompts --------------------------------------------------------------------------------

    def prompt(
        self,
        prompt: Any,
        *,
        truncate: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Read one prompt: text, ids, or a dict with `prompt` or `prompt_token_ids`."""
        if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
            return self._embeds_prompt(prompt)
        text, ids = _split(prompt)
        options = dict(tokenization_kwargs or {})
        options.setdefault("truncate_prompt_tokens", truncate)
        limit = self.parts.max_model_len
        if ids is None:
            assert text is not None
            if self.parts.tokenizer is None:
                raise ValidationError(
                    "prompt is text, but the tokenizer is off (skip_tokenizer_init); give "
                    "prompt_token_ids",
                    parameter="prompt",
                    value=text,
                )
            ids = self.parts.tokenizer.encode_prompt(text, max_model_len=limit, **options)
        elif options.get("truncate_prompt_tokens") is not None:
            ids = self._cut(list(ids), options)
        known = self.parts.spec.vocab_size
        check_prompt(ids, vocab_size=known, max_model_len=limit)
        return Prompt(tuple(ids), text, salt=_salt(prompt))

    def _embeds_prompt(self, prompt: Mapping[str, Any]) -> Prompt:
        """Read a prompt given as embeddings [tokens, hidden]; a leading 1 is squeezed."""
        parts = self.parts
        if not parts.config.enable_prompt_embeds:
            raise ValidationError(
                "prompt_embeds needs an engine that was made with enable_prompt_embeds=True",
                parameter="prompt_embeds",
            )
        absent.check_prompt({**prompt, "prompt_embeds": None})
        given = prompt["prompt_embeds"]
        hidden = parts.spec.hidden_size
        shape = tuple(getattr(given, "shape", ()))
        if len(shape) == 3 and shape[0] == 1:
            given, shape = given[0], shape[1:]
        if len(shape) != 2 or shape[1] != hidden or not getattr(given, "is_floating_point", bool)():
            raise ValidationError(
                f"prompt_embeds must be a floating-point tensor [tokens, {hidden}], got "
                f"{list(shape) or shown(given)}",
                parameter="prompt_embeds",
                value=shape,
            )
        if not 0 < shape[0] < parts.max_model_len:
            raise ValidationError(
                f"prompt_embeds must have from 1 to {parts.max_model_len - 1} tokens, "
                f"got {shape[0]}",
                parameter="prompt_embeds",
                value=shape[0],
            )
        values = given.detach().to(device=parts.spec.device, dtype=parts.spec.dtype)
        return Prompt((), prompt.get("prompt"), embeds=values, salt=_salt(prompt))

    def _cut(self, ids: list[int], options: Mapping[str, Any]) -> list[int]:
        from .tokenizer import cut_ids, prompt_limit, truncation_side_of

        limit = prompt_limit(options["truncate_prompt_tokens"], self.parts.max_model_len)
        side = truncation_side_of(options.get("truncation_side"))
        return ids if limit is None else cut_ids(ids, limit, side)

    # --- parameters -----------------------------------------------------------------------------

    def own(self, params: Any) -> SamplingParams:
        """Return a copy of a caller's parameters that knows the model's end ids."""
        own = as_params(params).clone()
        resolve(own, self.parts.presets, self.parts.preset)
        eos = self.parts.eos_ids[0] if self.parts.eos_ids else None
        own.update_from_generation_config({"eos_token_id": list(self.parts.eos_ids)}, eos)
        return own

    def params(self, params: Any) -> RequestParams:
        """Freeze and check one SamplingParams against this engine; the object is untouched."""
        parts = self.parts
        own = self.own(params)
        if parts.tokenizer is not None:
            own.update_from_tokenizer(parts.tokenizer)
        elif own.stop or own.bad_words:
            name = "stop" if own.stop else "bad_words"
            raise ValidationError(
                f"{name} needs the tokenizer, which is off (skip_tokenizer_init)",
                parameter=name,
                value=getattr(own, name),
            )
        absent.check_params(own)
        frozen = own.snapshot()
        check_request(
            frozen,
            vocab_size=parts.spec.vocab_size,
            max_logprobs=parts.config.max_logprobs,
            max_logprob_token_ids=parts.config.max_logprob_token_ids,
            tokenizer=parts.tokenizer,
            tokenizer_size=parts.tokenizer_size,
        )
        parts.processors.validate(own)
        return frozen

    # --- the request ----------------------------------------------------------------------------

    def admit(
        self,
        request_id: str,
        prompt: Prompt,
        params: RequestParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        provenance: Mapping[str, str] | None = None,
        key: int | None = None,
    ) -> Request:
        """Plan the chain and make the request with its sequences; nothing runs yet.

        `key` is that of the noise; None takes the seed, or makes one.
        """
        parts = self.parts
        if prompt.embeds is not None and params.prompt_logprobs is not None:
            raise ValidationError(
                "prompt_logprobs needs token ids, but the prompt is embeddings",
                parameter="prompt_logprobs",
                value=params.prompt_logprobs,
            )
        is_best_of = params.best_of > params.n and not params.use_beam_search
        if is_best_of and params.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise ValidationError(
                f"best_of={params.best_of} with n={params.n} cannot be streamed, since the best "
                "are known at the end; use output_kind=RequestOutputKind.FINAL_ONLY",
                parameter="best_of",
                value=params.best_of,
            )
        number = next(self._numbers)
        plan = parts.planner.admit(
            params,
            prompt_ids=prompt.ids,
            prompt_len=prompt.length,
            stop_ids=tuple(sorted(params.all_stop_token_ids)),
            provenance=provenance,
        )
        self._check_driver(plan, params)
        trim = 0 if plan.driver is None else plan.driver.trim
        seed = params.seed
        if key is None:
            key = request_key(parts.config.seed, number) if seed is None else seed_key(seed)
        now = time.time() if arrival_time is None else arrival_time
        request = Request(
            request_id=request_id,
            prompt=prompt.text,
            prompt_ids=prompt.ids[: len(prompt.ids) - trim],
            asked_ids=prompt.ids if trim else None,
            params=params,
            plan=plan,
            key=key,
            priority=priority,
            arrival_time=now,
            arrival_index=number,
            output_kind=params.output_kind,
            cache_root=prompt.cache_root,
            facts=self._engine_facts(),
            prompt_embeds=prompt.embeds,
        )
        if not parts.config.disable_log_stats:
            request.metrics = RequestStateStats(arrival_time=now, queued_ts=time.monotonic())
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = PromptCollector(
                params.prompt_logprobs,
                prompt.ids,
                tokenizer=parts.tokenizer if params.detokenize else None,
                tokenizer_size=parts.tokenizer_size,
                flat=params.flat_logprobs,
            )
        driver = plan.driver
        if driver is not None:
            request.drive = Drive(driver.kind(driver.bound, driver.context), driver.width)
            request.num_slots = driver.width if driver.kind.chooses else 1
        parts.speculation.admit(request, joint=bool(parts.chain.program(plan).joint))
        count = params.best_of if driver is None else driver.start
        request.sequences = [
            self._sequence(request, branch, prompt.length - trim) for branch in range(count)
        ]
        for child in request.sequences[1:]:
            child.fork_from = request.sequences[0]
        return request

    def _engine_facts(self) -> EngineFacts:
        """Return what bundles say of this engine, taken again when its set of plugins changed."""
        generation = self.parts.registry.generation
        if self._facts is None or self._facts[0] != generation:
            self._facts = generation, EngineFacts.of(self.parts)
        return self._facts[1]

    def _check_driver(self, plan: Plan, params: RequestParams) -> None:
        """Refuse a driver that this request or engine cannot have."""
        program = self.parts.chain.program(plan)
        driver = plan.driver
        if driver is None:
            return
        name = driver.kind.name
        if not driver.kind.streams and params.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise ValidationError(
                f"driver {name!r} cannot be streamed, since its outputs are known at the end; use "
                "output_kind=RequestOutputKind.FINAL_ONLY",
                parameter="driver",
                value=name,
            )
        most = self.parts.config.max_num_seqs
        if driver.kind.chooses and driver.width > most:
            raise ValidationError(
                f"driver {name!r} wants {driver.width} sequences at once, and the engine runs at "
                f"most max_num_seqs={most}",
                parameter="driver",
                value=driver.width,
            )
        if driver.kind.rewinds:
            for entry in plan.entries:
                if entry.stage.caps.carried and entry.stage.rollback is Stage.rollback:
                    raise ValidationError(
                        f"driver {name!r} cannot run with stage {entry.stage.name!r}, whose state "
                        "holds what no token tells and cannot go back",
                        parameter="driver",
                        value=name,
                    )
        moves_lanes = driver.kind.chooses or driver.kind.forks or driver.kind.rewinds
        if moves_lanes and program.joint:
            raise ValidationError(
                f"driver {name!r} cannot run with processors of vLLM's interface, whose state "
                "cannot follow a sequence that forks or goes back",
                parameter="driver",
                value=name,
            )

    def lane(self, request: Request, branch: int) -> TokenSequence:
        """Make one more sequence of a request, at the prompt's end."""
        return self._sequence(request, branch, request.sequences[0].prompt_len)

    def _num_hidden(self, request: Request) -> int:
        """Return the characters of the prompt's end that the lanes of a driver write again."""
        if request.asked_ids is None or self.parts.tokenizer is None:
            return 0
        gone = request.asked_ids[len(request.prompt_ids) :]
        return len(Detokenizer(self.parts.tokenizer, request.prompt_ids).push(gone))

    def _sequence(self, request: Request, branch: int, prompt_len: int) -> TokenSequence:
        params = request.params
        tokenizer = self.parts.tokenizer if params.detokenize else None
        sequence = TokenSequence(
            uid=next(self._uids),
            request=request,
            branch=branch,
            prompt_ids=request.prompt_ids,
            prompt_len=prompt_len,
        )
        sequence.text = TextStream(
            tokenizer,
            request.prompt_ids,
            stops=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens or 0,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            num_hidden=self._num_hidden(request),
            text_stops=request.plan.text_stops,
        )
        if request.plan.driver is not None and request.plan.driver.kind.rewinds:
            sequence.undo = Undo(sequence.text)
        texts = None if tokenizer is None else TokenTexts(tokenizer)
        for observer, order in request.plan.observers:
            try:
                record = observer.open(order, texts)
                observer.planned(record, request.plan.report)
                sequence.records.append(record)
            except Exception as error:
                raise ValidationError(
                    f"observer {observer.name!r} cannot be opened: {type(error).__name__}: {error}",
                    parameter="observers",
                ) from error
        return sequence


def as_params(given: Any) -> SamplingParams:
    """Return `given` if it is SamplingParams; ParameterTypeError otherwise."""
    if isinstance(given, SamplingParams):
        return given
    raise ParameterTypeError(
        f"sampling_params must be SamplingParams, got {shown(given)}",
        parameter="sampling_params",
        value=given,
    )


def as_batch(prompts: Any) -> list[Any]:
    """Return `prompts` as a list of prompts; one prompt, ids included, becomes a list of one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ParameterTypeError(
            f"prompts must be a prompt or a sequence of prompts, got {shown(prompts)}",
            parameter="prompts",
            value=prompts,
        )
    if not len(prompts):
        raise ValidationError(
            "prompts must hold at least one prompt, and a prompt at least one token; got none",
            parameter="prompts",
            value=prompts,
        )
    items = list(prompts)
    whole = [isinstance(item, int) and not isinstance(item, bool) for item in items]
    if all(whole):
        return [items]
    if any(whole):
        place = whole.index(True)
        raise ParameterTypeError(
            f"prompts[{place}] is the token id {items[place]!r} among prompts of another kind; a "
            "tokenised prompt is a list of ids",
            parameter="prompts",
            value=items[place],
        )
    return items


def _split(prompt: Any) -> tuple[str | None, Sequence[int] | None]:
    """Return a prompt's text and ids, one of them at least."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        absent.check_prompt(prompt)
        unknown = sorted(set(prompt) - _KEYS)
        if unknown:
            raise ParameterTypeError(
                f"a prompt has no key {unknown[0]!r} (known: {', '.join(sorted(_KEYS))})",
                parameter=str(unknown[0]),
                value=prompt[unknown[0]],
            )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is not None:
            return text, _ids(ids)
        if isinstance(text, str):
            return text, None
    elif isinstance(prompt, Sequence):
        return None, _ids(prompt)
    raise ParameterTypeError(
        "a prompt must be text, a list of token ids, or a dict with 'prompt' or "
        f"'prompt_token_ids', got {shown(prompt)}",
        parameter="prompt",
        value=prompt,
    )


def _salt(prompt: Any) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValidationError(
            f"cache_salt must be a non-empty text, got {shown(salt)}",
            parameter="cache_salt",
            value=salt,
        )
    return salt


_KEYS = frozenset(
    {
        "prompt",
        "prompt_token_ids",
        "token_type_ids",
        "multi_modal_data",
        "mm_processor_kwargs",
        "multi_modal_uuids",
        "cache_salt",
        "prompt_embeds",
    }
)


def _ids(ids: Any) -> list[int]:
    listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    for place, token in enumerate(listed):
        if isinstance(token, bool) or not isinstance(token, int):
            raise ParameterTypeError(
                f"prompt_token_ids[{place}] must be an integer, got {shown(token)}",
                parameter="prompt_token_ids",
                value=token,
            )
    return listed
