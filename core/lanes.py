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
