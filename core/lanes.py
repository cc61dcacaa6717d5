"""Lanes: sequences that continue others. Cache blocks, stage states, records and text follow.

Nothing here decides anything; `drive.py` says which lane goes on from which.
"""

from __future__ import annotations

from collections.abc import Sequence

from .chain import ChainRunner
from .request import Sequence as TokenSequence
from .request import Status
from .runner import Runner
from .scheduler import Scheduler


def twin(sequence: TokenSequence, into: TokenSequence | None = None) -> TokenSequence:
    """Copy what a sequence has said, and nothing that it holds, to `into` or to a new one.

    A new twin counts as finished, so that no scheduler looks at it.
    """
    if into is None:
        into = TokenSequence(
            uid=sequence.uid,
            request=sequence.request,
            branch=sequence.branch,
            prompt_ids=sequence.prompt_ids,
            prompt_len=sequence.prompt_len,
            status=Status.FINISHED,
        )
    into.output_ids = list(sequence.output_ids)
    into.text = sequence.text.clone()
    into.records = [
        observer.fork(record)
        for (observer, _), record in zip(sequence.plan.observers, sequence.records, strict=True)
    ]
    into.score = sequence.score
    into.note = sequence.note
    into.num_sent = sequence.num_sent
    return into


class Lanes:
    """Lets lanes of one engine continue others."""

    def __init__(self, scheduler: Scheduler, chain: ChainRunner, runner: Runner) -> None:
        self._scheduler = scheduler
        self._chain = chain
        self._runner = runner

    def follow(self, pairs: Sequence[tuple[TokenSequence, TokenSequence]]) -> None:
        """Make each lane an independent copy of its parent; (lane, parent), all at once.

        A lane that is no parent loses what it held. One without a slot is queued. The parents'
        last tokens must be computed, or their blocks given back.
        """
        self._share_cache(pairs)
        for lane, parent in pairs:
            twin(parent, into=lane)
            lane.states = self._chain.fork(parent)
            if lane.slot >= 0:
                self._chain.fork_history(parent, lane)
            lane.is_pending = False

    def rewind(self, lane: TokenSequence, count: int) -> None:
        """Take the last `count` tokens of a lane back; StageError for what a stage raises."""
        keep = len(lane.output_ids) - count
        self._chain.rewind(lane, keep)
        lane.undo.take_back(lane, keep)
        lane.draft = ()
        self._cut_cache(lane)

    def _cut_cache(self, lane: TokenSequence) -> None:
        """Give back what was computed of tokens that are gone.

        The last token is computed again, as its logits are wanted. A block that somebody else
        holds, or that is known by its content, is copied before it is written to.
        """
        pool = self._scheduler.pool
        keep = lane.num_tokens - 1
        if lane.num_computed <= keep:
            return
        whole, rest = divmod(keep, pool.block_size)
        gone = lane.blocks[whole:]
        del lane.blocks[whole:]
        if rest and pool.is_own(gone[0]):
            lane.blocks.append(gone.pop(0))
        elif rest:
            fresh = pool.allocate(1)
            if fresh is None:
                keep = whole * pool.block_size
            else:
                self._runner.copy_blocks([(gone[0], fresh[0])])
                lane.blocks += fresh
        pool.free(gone)
        lane.num_computed = keep
        lane.num_reused = min(lane.num_reused, keep)
        lane.num_published = min(lane.num_published, whole)
        del lane.digests[whole:]

    def drop(self, lane: TokenSequence) -> None:
        """End a lane that nobody continues; it says nothing."""
        if not lane.is_finished:
            self._scheduler.finish(lane)
        lane.request.sequences.remove(lane)

    def _share_cache(self, pairs: Sequence[tuple[TokenSequence, TokenSequence]]) -> None:
        pool = self._scheduler.pool
        taken: list[tuple[list[int], list[int]]] = []  # whole blocks, and the partial one
        for _, parent in pairs:
            whole, rest = divmod(parent.num_computed, pool.block_size)
            shared = pool.share(parent.blocks[:whole])
            taken.append((shared, pool.share(parent.blocks[whole : whole + 1]) if rest else []))
        for lane, _ in pairs:
            pool.free(lane.blocks)
            lane.blocks = []
        copies: list[tuple[int, int]] = []
        for (lane, parent), (shared, partial) in zip(pairs, taken, strict=True):
            fresh = pool.allocate(1) if partial else []
            if fresh is None:  # no room: computed again when there is
                pool.free(shared)
                lane.num_computed = lane.num_reused = lane.num_published = 0
                lane.digests = []
                continue
            copies += zip(partial, fresh, strict=True)
            lane.blocks = shared + fresh
            lane.num_computed = parent.num_computed
            lane.num_reused = 0
            lane.num_published = min(parent.num_published, len(shared))
            lane.digests = parent.digests[: len(shared)]
        if copies:
            self._runner.copy_blocks(copies)
        for _, partial in taken:
            pool.free(partial)
