"""Choose what runs in a step: continuous batching under a token budget, chunks, preemption.

Knows sequences, slots and block numbers; knows no tensors.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field

from .kv_cache import BlockPool
from .request import Sequence, Status

MOST_DRAFTED_ROWS = 256  # guessed tokens of one step, each of which has a row of logits


@dataclass(slots=True)
class Schedule:
    """One step's work: each sequence with how many of its tokens are computed."""

    work: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # got a slot in this step
    starved: list[Sequence] = field(default_factory=list)  # can never get another block


class Scheduler:
    """Waiting and running sequences.

    Both lists are in the order (priority, arrival, branch); running ones come first. When blocks
    run out the last of the running sequences gives its blocks back and computes its tokens again
    later.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill: bool = True,
        by_priority: bool = False,
    ) -> None:
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.by_priority = by_priority
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.held: list[Sequence] = []  # in no order: they join `waiting` when released
        self.num_preemptions = 0
        self._ran_out = False  # blocks ran out in this step, so nobody new is let in
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._taken: Counter[int] = Counter()  # slots by request, of those that need several
        self._reserved = 0  # free slots that such requests have a claim on

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running; held ones are not."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.status = Status.WAITING
        bisect.insort(self.waiting, sequence, key=self._rank)

    def hold(self, sequence: Sequence) -> None:
        """Keep a sequence that may not run yet; `release` puts it where it would stand by now."""
        sequence.status = Status.HELD
        self.held.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Queue a held sequence by its arrival."""
        self.held.remove(sequence)
        self.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever it was doing, and free what it holds."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.HELD:
            self.held.remove(sequence)
        self._release(sequence)
        sequence.status = Status.FINISHED

    def schedule(self) -> Schedule:
        """Plan one step and allocate its blocks."""
        step = Schedule()
        self._ran_out = False
        budget = self.max_num_batched_tokens
        place = 0
        while place < len(self.running) and budget > 0:
            sequence = self.running[place]
            count = min(sequence.num_tokens - sequence.num_computed, budget)
            if count == 0:  # all is computed: it waits for the lanes beside it
                place += 1
                continue
            if not self._grow(sequence, count, step):
                continue  # this sequence left the list, so its place holds the next one
            step.work.append((sequence, count))
            budget -= count
            place += 1
        if not self._ran_out:
            budget = self._admit(step, budget)
            self._take_drafts(step, budget)
        return step

    def publish(self, sequence: Sequence) -> None:
        """Make the full blocks that a sequence has computed known to later prompts."""
        if not self.pool.caches_prefixes:
            return
        size = self.pool.block_size
        full = sequence.num_computed // size
        digests = sequence.digests
        while len(digests) < full:
            self._name_next(sequence)
        for place in range(sequence.num_published, full):
            self.pool.publish(sequence.blocks[place], digests[place])
        sequence.num_published = max(full, sequence.num_published)

    def preempt_all(self) -> None:
        """Take every running sequence off the device; they are computed again later."""
        for sequence in list(self.running):
            self._preempt(sequence)
        while self._reclaim_waiting():
            pass

    def fork_children(self, parent: Sequence) -> list[tuple[int, int]]:
        """Give each waiting branch of `parent` the blocks of the prompt that `parent` has computed.

        Whole blocks are shared, the last partial one is to be copied, and the last prompt token is
        computed once more by the branch. Where no block is free the branch computes by itself.
        Returns the blocks to copy, as (source, target).
        """
        copies: list[tuple[int, int]] = []
        keep = parent.prompt_len - 1
        whole, rest = divmod(keep, self.pool.block_size)
        for child in parent.request.sequences:
            if child.fork_from is not parent:
                continue
            child.fork_from = None
            fresh = self.pool.allocate(1) if rest else []
            if child.status is not Status.WAITING or keep < 1 or fresh is None:
                self.pool.free(fresh or [])
                continue
            child.blocks = self.pool.share(parent.blocks[:whole]) + fresh
            child.num_computed = keep
            child.num_published = whole
            if rest:
                copies.append((parent.blocks[whole], fresh[0]))
        return copies

    # --- parts --------------------------------------------------------------------------------

    def _rank(self, sequence: Sequence) -> tuple[int, int, int]:
        request = sequence.request
        priority = request.priority if self.by_priority else 0
        return priority, request.arrival_index, sequence.branch

    def _grow(self, sequence: Sequence, count: int, step: Schedule) -> bool:
        """Allocate blocks for `count` tokens, preempting others; False if it cannot run now."""
        need = self.pool.blocks_for(sequence.num_computed + count) - len(sequence.blocks)
        while need > 0:
            blocks = self.pool.allocate(need)
            if blocks is not None:
                sequence.blocks += blocks
                break
            if self._trim():
                continue
            self._ran_out = True
            if self._reclaim_waiting():
                continue
            victim = self.running[-1]
            if victim is sequence and len(self.running) == 1:
                self.finish(sequence)
                step.starved.append(sequence)
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _trim(self) -> bool:
        """Take back blocks that held guesses which proved wrong; False if there were none."""
        found = False
        for sequence in self.running:
            keep = self.pool.blocks_for(sequence.num_tokens)
            if len(sequence.blocks) > keep:
                self.pool.free(sequence.blocks[keep:])
                del sequence.blocks[keep:]
                found = True
        return found

    def _take_drafts(self, step: Schedule, budget: int) -> None:
        """Let guessed tokens into what no real token wants of the step's tokens and blocks."""
        rows = MOST_DRAFTED_ROWS
        for place, (sequence, count) in enumerate(step.work):
            if not sequence.draft:
                continue
            start = sequence.num_computed + count
            num = min(len(sequence.draft), budget, rows) if start == sequence.num_tokens else 0
            need = self.pool.blocks_for(start + num) - len(sequence.blocks)
            if need > 0:
                sequence.blocks += self.pool.allocate(min(need, self.pool.num_free)) or []
                num = min(num, len(sequence.blocks) * self.pool.block_size - start)
            sequence.draft = sequence.draft[:num]
            step.work[place] = (sequence, count + num)
            budget -= num
            rows -= num

    def _preempt(self, victim: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(victim)
        self._release(victim)
        self.add(victim)

    def _reclaim_waiting(self) -> bool:
        """Take back blocks that a waiting branch was given in advance."""
        for sequence in reversed(self.waiting):
            if sequence.blocks:
                self.pool.free(sequence.blocks)
                sequence.blocks = []
                sequence.num_computed = 0
                return True
        return False

    def _admit(self, step: Schedule, budget: int) -> int:
        """Let waiting sequences in; return what is left of the budget."""
        place = 0
        is_full = False  # somebody waits for more slots than are free, so none is taken from them
        while place < len(self.waiting) and budget > 0 and self._free_slots:
            sequence = self.waiting[place]
            if not self._may_enter(sequence, is_full):
                is_full = True
                place += 1
                continue
            is_forked = sequence.fork_from is not None and not sequence.fork_from.is_finished
            if is_forked or sequence.is_pending:
                place += 1  # its prompt, or what it goes on with, is on the way in another lane
                continue
            self._reuse(sequence)
            count = sequence.num_tokens - sequence.num_computed
            if count > budget:
                if not self.chunked_prefill and step.work:
                    self._give_back(sequence)
                    break
                count = min(count, budget) if self.chunked_prefill else count
            need = self.pool.blocks_for(sequence.num_computed + count) - len(sequence.blocks)
            blocks = self.pool.allocate(max(need, 0))
            if blocks is None:
                self._give_back(sequence)
                if self._trim():
                    continue
                if not self.running and self._reclaim_waiting():
                    continue
                break
            del self.waiting[place]
            if sequence.request.num_cached_tokens is None:
                sequence.request.num_cached_tokens = sequence.num_reused
            sequence.blocks += blocks
            self._take_slot(sequence)
            sequence.status = Status.RUNNING
            bisect.insort(self.running, sequence, key=self._rank)
            step.admitted.append(sequence)
            self.pool.num_queried += sequence.num_tokens
            self.pool.num_hit += sequence.num_reused
            step.work.append((sequence, count))
            budget -= count
        return budget

    def _reuse(self, sequence: Sequence) -> None:
        """Give a sequence that has computed nothing the known blocks of its first tokens.

        The last token is always left to compute, as its logits are wanted.
        """
        if not self.pool.caches_prefixes or sequence.blocks or sequence.num_computed:
            return
        if sequence.request.params.skip_reading_prefix_cache:
            return
        size = self.pool.block_size
        most = (sequence.num_tokens - 1) // size
        while len(sequence.digests) < most:
            self._name_next(sequence)
        blocks = self.pool.find(sequence.digests[:most])
        sequence.blocks = self.pool.share(blocks)
        sequence.num_computed = sequence.num_reused = len(blocks) * size
        sequence.num_published = len(blocks)

    def _give_back(self, sequence: Sequence) -> None:
        """Undo `_reuse` for a sequence that cannot be let in yet."""
        if sequence.num_reused and sequence.num_computed == sequence.num_reused:
            self._release(sequence)

    def _name_next(self, sequence: Sequence) -> None:
        digests, size = sequence.digests, self.pool.block_size
        before = digests[-1] if digests else sequence.request.cache_root
        start = len(digests) * size
        digests.append(self.pool.digest(before, sequence.token_range(start, start + size)))

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_reused = sequence.num_published = 0
        sequence.draft = ()
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
            wanted = sequence.request.num_slots
            if wanted > 1:
                taken = self._taken[id(sequence.request)] = self._taken[id(sequence.request)] - 1
                self._reserved += 1 if taken else 1 - wanted
                if not taken:
                    del self._taken[id(sequence.request)]

    def _may_enter(self, sequence: Sequence, is_full: bool) -> bool:
        """Whether there is a slot for a sequence, and for those beside it that it would wait for.

        Lanes that wait for each other and each hold a slot that another needs would wait for ever.
        """
        if sequence.request.num_slots > 1 and self._taken[id(sequence.request)]:
            return True
        return not is_full and len(self._free_slots) - self._reserved >= sequence.request.num_slots

    def _take_slot(self, sequence: Sequence) -> None:
        sequence.slot = self._free_slots.pop()
        wanted = sequence.request.num_slots
        if wanted > 1:
            self._reserved += -1 if self._taken[id(sequence.request)] else wanted - 1
            self._taken[id(sequence.request)] += 1
