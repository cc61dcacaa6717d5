"""Stages in other libraries: `model.generate` of transformers, and engines of vLLM's interface.

    from decodekit.adapters import TransformersProcessor, vllm_processor

    model.generate(**inputs, logits_processor=[TransformersProcessor(TopA(a=0.2), NoRepeat(n=3))])
    TopAProcessor = vllm_processor(TopA)  # name it in logits_processors=["my_module:TopAProcessor"]

The stage is the same class and gives the same kept set and, given a seed, the same token.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..kernels.reference.noise import seed_key
from .errors import ValidationError
from .params import SamplingParams
from .stage import BindContext, Picker, Stage
from .stage_rows import (
    Build,
    ForeignRow,
    StageRunner,
    bind_all,
    instances_of,
    refuse_unsuited,
)
from .tokenizer import Tokenizer, tokenizer_from_hf
from .vllm_processors import BatchUpdate, LogitsProcessor

NO_LIMIT = 2**31 - 1  # of the context


class TransformersProcessor:
    """Stages as one logits processor of `transformers.generate`.

    `stages` run in the order given; a picker may stand last, and then leaves its choice alone
    alive, whether `do_sample` or not. Rows are followed by their tokens, so beams may change
    places. `tokenizer`: a transformers one, for stages that look words up. `eos_token_id` and
    `pad_token_id`: as given to `generate`; padding on the left of a prompt is no history.
    `max_new_tokens` as given to `generate`, for stages that look at the end.

    `seed` (needed where a stage draws): row i of the batch draws as branch i of that seed, so that
    row 0 draws as a request with that seed does here; a list gives each row a seed of its own.

    One object serves one call of `generate` after another (see `reset`). Raises ValidationError
    for parameters that are refused, and StageError for what a stage does at run time.
    """

    supports_continuous_batching: ClassVar[bool] = False

    def __init__(
        self,
        *stages: Stage,
        tokenizer: Any = None,
        eos_token_id: int | Iterable[int] | None = None,
        pad_token_id: int | None = None,
        max_new_tokens: int | None = None,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        for stage in stages:
            if not isinstance(stage, Stage):
                raise ValidationError(
                    f"stages must be Stage objects such as TopK(k=5), got {stage!r}",
                    parameter="stages",
                    value=stage,
                )
        if not stages:
            raise ValidationError("stages must hold at least one stage", parameter="stages")
        self.stages = stages
        kinds = [type(stage) for stage in stages]
        refuse_unsuited(kinds, "transformers")
        draws = next((kind.name for kind in kinds if kind.caps.random), None)
        if draws is not None and seed is None:
            raise ValidationError(
                f"seed must be given, since the stage {draws!r} draws", parameter="seed"
            )
        self.seed = seed
        self.end_ids = _ids(eos_token_id)
        self.pad_token_id = pad_token_id
        self._tokenizer = _wrapped(tokenizer)
        self._request = SamplingParams(max_tokens=max_new_tokens).snapshot()
        self._runner = StageRunner(kinds, instances_of(kinds, [stage.id for stage in stages]))
        self.reset()

    def reset(self) -> None:
        """Forget the rows; needed before a call whose prompt is what the last call wrote."""
        self._prompt_len = -1
        self._rows: dict[tuple[int, ...], ForeignRow] = {}  # by all tokens of the row
        self._chains: dict[tuple[int, ...], list[Build]] = {}  # by prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` [rows, vocab] after the stages, in their dtype."""
        texts: list[tuple[int, ...]] = [tuple(row) for row in input_ids.tolist()]
        if not self._goes_on(texts):
            self._prompt_len, self._rows, self._chains = len(texts[0]), {}, {}
        live = [at for at, text in enumerate(texts) if not self._has_ended(text)]
        rows = [self._row(texts[at], at) for at in live]
        self._rows = {texts[at]: row for at, row in zip(live, rows, strict=True)}
        if not live:
            return scores
        chains = [self._chain(row.prompt_ids, scores) for row in rows]
        size = self._tokenizer_size(scores.shape[1])
        result = scores.clone()
        result[live] = self._runner.run(rows, chains, scores[live], size).to(scores.dtype)
        return result

    def _goes_on(self, texts: Sequence[tuple[int, ...]]) -> bool:
        """Say whether these rows are those of the last call with one token more."""
        if self._prompt_len < 0 or len(texts[0]) <= self._prompt_len:
            return False
        return any(text[:-1] in self._rows for text in texts)

    def _has_ended(self, text: tuple[int, ...]) -> bool:
        return any(token in self.end_ids for token in text[self._prompt_len :])

    def _row(self, text: tuple[int, ...], at: int) -> ForeignRow:
        """Return the row of these tokens: it goes on from the one that had all but the last."""
        before = self._rows.get(text[:-1])
        key, branch = self._address(at)
        row = ForeignRow(self._prompt(text), text[self._prompt_len :], key, branch)
        if before is not None and before.states is not None:
            row.states = before.forked(self._chains[before.prompt_ids])
            row.known = list(before.known)
        return row

    def _address(self, at: int) -> tuple[int, int]:
        if self.seed is None or isinstance(self.seed, int):
            return seed_key(self.seed or 0), at
        if at >= len(self.seed):
            raise ValidationError(
                f"seed must have one number a row; it has {len(self.seed)}, and row {at} came",
                parameter="seed",
                value=self.seed,
            )
        return seed_key(self.seed[at]), 0

    def _prompt(self, text: tuple[int, ...]) -> tuple[int, ...]:
        prompt = text[: self._prompt_len]
        start = 0
        while start < len(prompt) and prompt[start] == self.pad_token_id:
            start += 1
        return prompt[start:]

    def _chain(self, prompt: tuple[int, ...], scores: Tensor) -> list[Build]:
        if prompt not in self._chains:
            context = BindContext(
                vocab_size=scores.shape[1],
                tokenizer_size=self._tokenizer_size(scores.shape[1]),
                max_model_len=NO_LIMIT,
                eos_ids=self.end_ids,
                stop_ids=self.end_ids,
                device=scores.device,
                tokenizer=self._tokenizer,
                request=self._request,
                prompt_ids=prompt,
            )
            kinds = [type(stage) for stage in self.stages]
            self._chains[prompt] = bind_all(kinds, [stage.params for stage in self.stages], context)
        return self._chains[prompt]

    def _tokenizer_size(self, vocab_size: int) -> int:
        known = vocab_size if self._tokenizer is None else self._tokenizer.max_token_id + 1
        return min(known, vocab_size)


class StageProcessor(LogitsProcessor):
    """One stage behind vLLM's batch interface; `vllm_processor` makes a class of it for each.

    A request asks by `extra_args={key: {parameter: value, ...}}`; rows of others are left alone.
    """

    stage: ClassVar[type[Stage]]
    key: ClassVar[str]
    tokenizer: ClassVar[Any] = None
    invariant: ClassVar[bool] = False

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request whose parameters the stage refuses; ValidationError, a ValueError."""
        given = cls._asked(sampling_params)
        if given is not None:
            cls.stage.validate(given)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        model = getattr(vllm_config, "model_config", None)
        self._max_model_len = int(getattr(model, "max_model_len", NO_LIMIT))
        hf_config = getattr(model, "hf_config", None)
        self._end_ids = _ids(getattr(hf_config, "eos_token_id", None))
        self._wrapped = _wrapped(self.tokenizer)
        self._runner = StageRunner([self.stage], [self.stage.name])
        self._rows: dict[int, _Asking] = {}

    def is_argmax_invariant(self) -> bool:
        """Say whether no parameters of the stage can change the winner."""
        return self.invariant

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows: removed, then added, then moved."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, prompt, output in batch_update.added:
            self._rows.pop(row, None)
            given = self._asked(params)
            if given is not None:
                self._rows[row] = _Asking(params, given, prompt, output)
        for source, target, direction in batch_update.moved:
            moving, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if moving is not None:
                self._rows[target] = moving
            if other is not None and direction.name == "SWAP":  # of whichever enumeration
                self._rows[source] = other

    def apply(self, logits: Tensor) -> Tensor:
        """Run the stage on the rows that ask for it; the others keep their bits."""
        if not self._rows:
            return logits
        places = sorted(self._rows)
        asking = [self._rows[place] for place in places]
        chains = [[self._bound(each, logits)] for each in asking]
        size = self._size(logits.shape[1])
        part = self._runner.run([each.row for each in asking], chains, logits[places], size)
        logits[places] = part.to(logits.dtype)
        return logits

    @classmethod
    def _asked(cls, params: Any) -> Mapping[str, object] | None:
        given = (getattr(params, "extra_args", None) or {}).get(cls.key)
        if given is not None and not isinstance(given, Mapping):
            raise ValidationError(
                f"extra_args[{cls.key!r}] must be a dict of the stage's parameters, got {given!r}",
                parameter="extra_args",
                value=given,
            )
        return given

    def _bound(self, asking: _Asking, logits: Tensor) -> Build:
        if asking.bound is None:
            params = asking.params
            stops = getattr(params, "all_stop_token_ids", None) or ()
            context = BindContext(
                vocab_size=logits.shape[1],
                tokenizer_size=self._size(logits.shape[1]),
                max_model_len=self._max_model_len,
                eos_ids=self._end_ids,
                stop_ids=tuple(sorted({*stops, *self._end_ids})),
                device=logits.device,
                tokenizer=self._wrapped,
                request=SimpleNamespace(max_tokens=getattr(params, "max_tokens", None)),
                prompt_ids=asking.row.prompt_ids,
            )
            asking.bound = bind_all([self.stage], [asking.given], context)[0]
        return asking.bound

    def _size(self, vocab_size: int) -> int:
        known = vocab_size if self._wrapped is None else self._wrapped.max_token_id + 1
        return min(known, vocab_size)


class _Asking:
    """A request that asks for the stage."""

    def __init__(
        self,
        params: Any,
        given: Mapping[str, object],
        prompt: Sequence[int] | None,
        output: Sequence[int],
    ) -> None:
        seed = getattr(params, "seed", None)
        key = int.from_bytes(os.urandom(8), "little") if seed is None else seed_key(seed)
        self.params = params
        self.given = given
        self.row = ForeignRow(tuple(prompt or ()), output, key)
        self.bound: Build | None = None


def vllm_processor(
    stage: type[Stage],
    *,
    key: str | None = None,
    tokenizer: Any = None,
    argmax_invariant: bool = False,
    base: type[Any] | None = None,
) -> type[Any]:
    """Return a processor class of vLLM's batch interface (v1) that runs `stage`.

    Requests ask for it by `SamplingParams(extra_args={key: {...}})`, the key being the stage's name
    if none is given. `tokenizer`: a transformers one, for stages that look words up.
    `argmax_invariant`: say True only of a stage that never changes the winner, whatever its
    parameters; vLLM runs it after min-p then, and skips it for greedy requests. `base`: vLLM's
    LogitsProcessor where that library checks for it.

    Bind the result to a name of a module: vLLM imports it by that name. Raises ValidationError for
    pickers and stages that need the engine.
    """
    refuse_unsuited([stage], "vLLM")
    if issubclass(stage, Picker):
        raise ValidationError(
            f"{stage.name!r} is a picker, and vLLM's processors cannot choose the token",
            parameter="stage",
            value=stage.name,
        )
    bases = (StageProcessor,) if base is None else (StageProcessor, base)
    body = {
        "__doc__": f"The stage {stage.name!r} behind vLLM's interface.",
        "stage": stage,
        "key": key or stage.name,
        "tokenizer": tokenizer,
        "invariant": argmax_invariant,
    }
    return type(f"{stage.__name__}Processor", bases, body)


def _ids(given: int | Iterable[int] | None) -> tuple[int, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(sorted(set(given)))


def _wrapped(tokenizer: Any) -> Any:
    """Return our tokenizer of a transformers one; what is no such thing stays as it is."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    return tokenizer_from_hf(tokenizer) if hasattr(tokenizer, "backend_tokenizer") else tokenizer


__all__ = ["StageProcessor", "TransformersProcessor", "vllm_processor"]
