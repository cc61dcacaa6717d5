"""A constraint for `transformers.generate`: the same grammar stage in that library's loop.

`model.generate(**inputs, logits_processor=[GrammarProcessor(tokenizer, MyModel)])`. Text that the
model has not generated in this call is prompt. Batches, padding, sampling and beams all work.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .params import SamplingParams
from .registry import Registry
from .stage import BindContext, Stage
from .structured_params import StructuredOutputsConfig
from .tokenizer import tokenizer_from_hf


class GrammarProcessor:
    """A logits processor that keeps only what `structured_outputs` allows.

    `structured_outputs` is what SamplingParams takes: a pydantic model, a dict, or a
    StructuredOutputsParams. `end_ids`: ids at which the caller's `generate` stops, if they are not
    the tokenizer's own end. One object serves one call of `generate`, or several after `reset`.

    Raises ValidationError for a constraint that cannot be enforced.
    """

    def __init__(
        self,
        tokenizer: Any,
        structured_outputs: Any,
        *,
        end_ids: Sequence[int] | None = None,
        config: StructuredOutputsConfig | None = None,
    ) -> None:
        self._tokenizer = tokenizer_from_hf(tokenizer)
        self._wanted = SamplingParams(structured_outputs=structured_outputs).snapshot()
        ends = {tokenizer.eos_token_id} if end_ids is None else set(end_ids)
        self._end_ids = tuple(sorted(token for token in ends if token is not None))
        self._config = config or StructuredOutputsConfig()
        self._registry = Registry.load()
        self._stage_class, _ = self._registry.fields["structured_outputs"]
        self._stage: Stage = self._stage_class.prototype()
        self._bound: Any = None
        self.reset()

    def reset(self) -> None:
        """Forget the sequences of a former call."""
        self._prompt_len = -1
        self._states: dict[tuple[int, ...], Any] = {}  # generated ids -> state

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` [rows, vocab] with illegal tokens at -inf."""
        if self._bound is None:
            self._bound = self._bind(scores)
        if self._prompt_len < 0 or input_ids.shape[1] <= self._prompt_len:
            self._prompt_len = input_ids.shape[1]
            self._states = {}
        generated = [tuple(row) for row in input_ids[:, self._prompt_len :].tolist()]
        states = [
            self._follow(ids, input_ids[row, : self._prompt_len])
            for row, ids in enumerate(generated)
        ]
        self._states = dict(zip(generated, states, strict=True))
        masked = scores.clone()
        for row, state in enumerate(states):
            if state is None or self._stage_class.ended(state):  # only an end may follow
                masked[row] = -torch.inf
                masked[row, list(self._end_ids)] = scores[row, list(self._end_ids)]
                continue
            view: Any = SimpleNamespace(states=[state])
            self._stage.transform(masked[row : row + 1], view)
        return masked

    def _bind(self, scores: Tensor) -> Any:
        context = BindContext(
            vocab_size=scores.shape[1],
            tokenizer_size=min(self._tokenizer.max_token_id + 1, scores.shape[1]),
            max_model_len=2**31 - 1,
            eos_ids=self._end_ids,
            stop_ids=self._end_ids,
            device=scores.device,
            tokenizer=self._tokenizer,
            request=self._wanted,
            constraint_backends=self._registry.constraint_backends,
            structured_outputs_config=self._config,
        )
        field = self._registry.fields["structured_outputs"][1]
        params = self._stage_class.validate({field: self._wanted.structured_outputs})
        bound = self._stage_class.bind(params, context)
        pending = self._stage_class.pending(bound)
        if pending is not None:
            pending.result()
        return bound

    def _follow(self, ids: tuple[int, ...], prompt: Tensor) -> Any:
        """Return the state after `ids`; None once the sequence is over and only padded."""
        if not ids:
            return self._stage.open(self._bound, prompt.tolist())
        before = self._states.get(ids[:-1], False)
        if before is False:  # a row that was not here a step ago
            before = self._follow(ids[:-1], prompt)
        if before is None or ids[-1] in self._end_ids or self._stage_class.ended(before):
            return None
        state = self._stage.fork(before)
        self._stage.accept(state, ids[-1:])
        return state
