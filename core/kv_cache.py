"""The pool of key/value blocks: who holds which, by reference count."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Blocks 0 .. num_blocks - 1; a block is free when nobody refers to it.

    Knows nothing of tensors: it hands out numbers.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: few pages stay warm
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody refers to."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with one reference each, or None (and take nothing)."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> list[int]:
        """Add a reference to each of `blocks`, which must be in use, and return them."""
        shared = list(blocks)
        for block in shared:
            assert self._references[block] > 0, "a free block cannot be shared"
            self._references[block] += 1
        return shared

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each of `blocks`."""
        for block in blocks:
            self._references[block] -= 1
            assert self._references[block] >= 0, "a block was freed twice"
            if self._references[block] == 0:
                self._free.append(block)
