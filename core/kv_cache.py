"""The pool of key/value blocks: who holds which, and which full blocks can be found by content.

A full block is named by a digest of its tokens, of every block before it, and of whatever else its
content depends on (the salt of the request). Blocks that nobody holds keep their content until
they are needed, the least recently freed going first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

Digest = bytes


class BlockPool:
    """Blocks 0 .. num_blocks - 1; a block is free when nobody refers to it.

    Knows nothing of tensors: it hands out numbers.
    """

    def __init__(self, num_blocks: int, block_size: int, *, caches_prefixes: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caches_prefixes = caches_prefixes
        self.num_queried = 0  # prompt tokens looked up, since the start
        self.num_hit = 0  # of those, tokens found
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: few pages stay warm
        self._idle: OrderedDict[int, Digest] = OrderedDict()  # free with content, oldest first
        self._references = [0] * num_blocks
        self._digests: dict[int, Digest] = {}  # of every block with known content
        self._by_digest: dict[Digest, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._blank) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that somebody refers to."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with one reference each, or None (and take nothing)."""
        if count > self.num_free:
            return None
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> list[int]:
        """Add a reference to each of `blocks` and return them; idle ones come back to life."""
        shared = list(blocks)
        for block in shared:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1
        return shared

    def is_own(self, block: int) -> bool:
        """Whether one holder alone refers to `block`, and its content has no name."""
        return self._references[block] == 1 and block not in self._digests

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each of `blocks`; the last of a list is reused first."""
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            assert self._references[block] >= 0, "a block was freed twice"
            if self._references[block] == 0:
                digest = self._digests.get(block)
                if digest is None:
                    self._blank.append(block)
                else:
                    self._idle[block] = digest

    # --- prefixes -------------------------------------------------------------------------------

    def digest(self, before: Digest, tokens: Sequence[int]) -> Digest:
        """Return the name of a full block of `tokens` that follows the block named `before`."""
        return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()

    def find(self, digests: Iterable[Digest]) -> list[int]:
        """Return the blocks of the longest known prefix of `digests`; takes no reference."""
        found: list[int] = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, block: int, digest: Digest) -> None:
        """Name a full block in use; the first block of a name is the one that is found."""
        if block not in self._digests and digest not in self._by_digest:
            self._digests[block] = digest
            self._by_digest[digest] = block

    def forget(self) -> None:
        """Forget all content; blocks in use stay with their holders."""
        self._blank += reversed(self._idle)
        self._idle.clear()
        self._digests.clear()
        self._by_digest.clear()

    def _evict(self) -> int:
        block, digest = self._idle.popitem(last=False)
        del self._digests[block]
        del self._by_digest[digest]
        return block
