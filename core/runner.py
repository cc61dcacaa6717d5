"""Run one scheduled step on the device: flat tokens, forward, logits, chain. Knows no queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blame import stage_error
from .chain import ChainRunner, StepResult
from .models.config import CausalLM, Embeds
from .request import Sequence as TokenSequence
from .scheduler import Schedule
from .stage import AttentionBackend, AttentionPlan

PROMPT_ROWS = 128  # prompt positions whose logits are held at once


class Drafted(NamedTuple):
    """A sequence's guessed tokens in a step."""

    row: int  # of the logits after the first of them; the others follow
    tokens: Sequence[int]
    position: int  # of the first, among the generated tokens


@dataclass(slots=True)
class StepOutcome:
    """The sequences that got a token in this step, and the tokens."""

    sampled: list[TokenSequence]
    result: StepResult
    broken: list[tuple[TokenSequence, Exception]]  # whose prompt log-probs failed
    logits: Tensor | None = None  # [rows, vocab], kept where tokens were guessed
    drafted: dict[TokenSequence, Drafted] = field(default_factory=dict)


class Runner:
    """Owns the model and the cache of one engine."""

    def __init__(self, model: CausalLM, backend: AttentionBackend, chain: ChainRunner) -> None:
        self.model = model
        self.backend = backend
        self.chain = chain
        self.device = model.spec.device

    @torch.inference_mode()
    def run(self, schedule: Schedule) -> StepOutcome:
        """Compute the scheduled tokens and choose the next one of each complete sequence."""
        work = schedule.work
        hidden = self._forward(work)  # [T, hidden]
        sampled: list[TokenSequence] = []
        last_rows: list[int] = []
        further_rows: list[int] = []  # after guessed tokens
        drafted: dict[TokenSequence, Drafted] = {}
        broken: list[tuple[TokenSequence, Exception]] = []
        start = 0
        for sequence, count in work:
            done = sequence.num_computed + count
            collector = sequence.request.prompt_logprobs
            if collector is not None and sequence.branch == 0:
                try:
                    self._collect(collector, sequence, hidden[start : start + count])
                except Exception as error:
                    broken.append((sequence, stage_error(error, "prompt_logprobs", "prompt", 0)))
            start += count
            if done >= sequence.num_tokens:
                extra = done - sequence.num_tokens
                sampled.append(sequence)
                last_rows.append(start - 1 - extra)
                if extra:
                    done -= extra  # a guess counts when it has proved right
                    position = len(sequence.output_ids)
                    drafted[sequence] = Drafted(len(further_rows), sequence.draft, position)
                    further_rows += range(start - extra, start)
                sequence.draft = ()
            sequence.num_computed = done
        if not sampled:
            return StepOutcome([], StepResult([]), broken)
        wanted = last_rows + further_rows
        rows = hidden if len(wanted) == hidden.shape[0] and not drafted else hidden[wanted]
        logits = self.model.logits(rows)
        count = len(sampled)
        result = self.chain.run(sampled, logits[:count] if drafted else logits)
        if not drafted:
            return StepOutcome(sampled, result, broken)
        return StepOutcome(sampled, result, broken, logits[count:], drafted)

    @torch.inference_mode()
    def go_on(self, outcome: StepOutcome, sequences: list[TokenSequence], depth: int) -> StepResult:
        """Choose a token for each sequence from its logits after `depth` guessed tokens."""
        assert outcome.logits is not None
        rows = [outcome.drafted[sequence].row + depth - 1 for sequence in sequences]
        return self.chain.run(sequences, outcome.logits[rows])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy cache blocks (source, target)."""
        with torch.inference_mode():
            self.backend.copy_blocks(pairs)

    def _forward(self, work: Sequence[tuple[TokenSequence, int]]) -> Tensor:
        ids: list[int] = []
        positions: list[int] = []
        counts: list[int] = []
        ends: list[int] = []
        for sequence, count in work:
            begin = sequence.num_computed
            ids.extend(sequence.token_range(begin, begin + count))
            if begin + count > sequence.num_tokens:
                ids.extend(sequence.draft)
            positions.extend(range(begin, begin + count))
            counts.append(count)
            ends.append(begin + count)
        plan = AttentionPlan(counts, ends, [sequence.blocks for sequence, _ in work])
        return self.model.forward(
            torch.tensor(ids, dtype=torch.int64, device=self.device),
            torch.tensor(positions, dtype=torch.int64, device=self.device),
            self.backend.begin(plan),
            self._embeds(work),
        )

    def _embeds(self, work: Sequence[tuple[TokenSequence, int]]) -> Embeds | None:
        """Return the embeddings of this step's prompt positions that have no token id."""
        rows: list[int] = []
        values: list[Tensor] = []
        start = 0
        for sequence, count in work:
            given = sequence.request.prompt_embeds
            begin = sequence.num_computed
            if given is not None and begin < sequence.prompt_len:
                part = given[begin : begin + count]
                rows.extend(range(start, start + len(part)))
                values.append(part)
            start += count
        if not values:
            return None
        return Embeds(torch.tensor(rows, device=self.device), torch.cat(values))

    def _collect(self, collector: Any, sequence: TokenSequence, hidden: Tensor) -> None:
        """Hand the raw logits of prompt positions to the collector, a few rows at a time."""
        prompt = sequence.prompt_ids
        first = sequence.num_computed  # hidden[i] predicts the token at first + i + 1
        begin = max(collector.next_position - 1 - first, 0)
        end = min(hidden.shape[0], len(prompt) - 1 - first)
        for low in range(begin, end, PROMPT_ROWS):
            high = min(low + PROMPT_ROWS, end)
            targets = torch.tensor(
                prompt[first + low + 1 : first + high + 1], dtype=torch.int64, device=self.device
            )
            collector.add(self.model.logits(hidden[low:high]).float(), targets)
