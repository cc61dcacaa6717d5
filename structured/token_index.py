"""A vocabulary arranged by its bytes: which tokens start how, and which bytes they are.

Built once and shared by everything that computes masks of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np

from ..core.constraint import Vocabulary

Ints = np.ndarray[Any, np.dtype[np.int32]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


class TokenIndex:
    """The text tokens of one vocabulary; control ids and padding are left out."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = Lock()
        self._trie: TokenTrie | None = None

    @cached_property
    def ids_of(self) -> dict[bytes, tuple[int, ...]]:
        """Bytes -> every id that spells them."""
        found: dict[bytes, tuple[int, ...]] = {}
        controls = self.vocabulary.control_ids
        for token_id, token in enumerate(self.vocabulary.tokens):
            if token and token_id not in controls:
                found[token] = (*found.get(token, ()), token_id)
        return found

    @cached_property
    def sorted_tokens(self) -> list[bytes]:
        """Every distinct token, in the order of bytes."""
        return sorted(self.ids_of)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.ids_of), default=0)

    def has_longer(self, prefix: bytes) -> bool:
        """Whether some token starts with `prefix` and goes on."""
        tokens = self.sorted_tokens
        place = bisect_left(tokens, prefix)
        if place < len(tokens) and tokens[place] == prefix:
            place += 1
        return place < len(tokens) and tokens[place].startswith(prefix)

    @property
    def trie(self) -> TokenTrie:
        """The same tokens as a trie of bytes."""
        with self._lock:
            if self._trie is None:
                self._trie = TokenTrie(self)
            return self._trie


class TokenTrie:
    """A trie of all text tokens in flat arrays, level by level; node 0 is the root.

    byte [nodes]: last byte of the node's prefix. first_child, num_children [nodes]: its children
    are neighbours. first_token, num_tokens [nodes]: the ids in `tokens` whose bytes end here.
    """

    def __init__(self, index: TokenIndex) -> None:
        words = index.sorted_tokens
        lengths = np.array([len(word) for word in words], dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        flat = np.frombuffer(b"".join(words), dtype=np.uint8)
        ids = [index.ids_of[word] for word in words]

        at = np.zeros(len(words), dtype=np.int64)  # node that each word has reached
        byte, parent = [np.zeros(1, np.uint8)], [np.full(1, -1, np.int64)]
        num_nodes = 1
        node_of_word = np.zeros(len(words), dtype=np.int64)
        live = np.arange(len(words))
        for depth in range(index.longest):
            live = live[lengths[live] > depth]
            above, letter = at[live], flat[offsets[live] + depth]
            is_new = np.ones(len(live), dtype=np.bool_)
            is_new[1:] = (above[1:] != above[:-1]) | (letter[1:] != letter[:-1])
            nodes = num_nodes + np.cumsum(is_new) - 1
            at[live] = nodes
            byte.append(letter[is_new])
            parent.append(above[is_new])
            num_nodes += int(is_new.sum())
            ended = lengths[live] == depth + 1
            node_of_word[live[ended]] = nodes[ended]

        self.byte = np.concatenate(byte)
        above = np.concatenate(parent)[1:]  # sorted: levels follow each other, and so do parents
        self.num_children = np.bincount(above, minlength=num_nodes)
        self.first_child = 1 + np.concatenate([[0], np.cumsum(self.num_children)[:-1]])
        counts = np.zeros(num_nodes, dtype=np.int64)
        order = np.argsort(node_of_word, kind="stable")
        counts[node_of_word] = [len(same) for same in ids]
        self.num_tokens = counts
        self.first_token = np.concatenate([[0], np.cumsum(counts)[:-1]])
        self.tokens = np.array([i for place in order for i in ids[place]], dtype=np.int64)

    @property
    def num_nodes(self) -> int:
        """Distinct prefixes of tokens, the empty one among them."""
        return len(self.byte)

    def legal(self, moves: Ints, state: int) -> Any:
        """Return the ids whose bytes lead from `state` to a state that is not dead.

        moves [states, 256] int32: state after a byte, -1 is dead.
        """
        nodes = np.zeros(1, dtype=np.int64)
        states = np.array([state], dtype=np.int64)
        found = []
        while len(nodes):
            counts = self.num_children[nodes]
            children = spread(self.first_child[nodes], counts)
            after = moves[np.repeat(states, counts), self.byte[children]]
            alive = after >= 0
            nodes, states = children[alive], after[alive]
            ended = nodes[self.num_tokens[nodes] > 0]
            if len(ended):
                found.append(self.tokens[spread(self.first_token[ended], self.num_tokens[ended])])
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def spread(starts: Any, counts: Any) -> Any:
    """Return start, start + 1, ... for each start, `counts` of them, one after the other."""
    total = int(counts.sum())
    before = np.cumsum(counts) - counts
    return np.arange(total) + np.repeat(starts - before, counts)
