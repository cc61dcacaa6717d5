"""Ends a sequence whose last `min_count` blocks are equal, of any length to `max_pattern_size`.

After each token, on generated tokens alone, for L = max(min_pattern_size, 1) ... max_pattern_size:

1. if L * min_count is more than the number of generated tokens, stop looking;
2. if the last L * min_count tokens are `min_count` equal blocks of length L, end the sequence.

Equal to the last (min_count - 1) * L tokens being those L places before. Lengths at which the last
token does not recur are passed over, so a text without repeats costs one search of its tail.
Asked last, and not before `min_tokens` exist; all tokens stay in the output. A table or a list of
equal lines repeats too: ask for a `min_count` that such text does not reach.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Checker, SequenceView, Stop, Verdict


class Repetition(Stop):
    """The same block of tokens, several times in a row."""

    name = "repetition"
    rank = 40

    def bind(self, ctx: BindContext) -> Checker | None:
        asked = ctx.request.repetition_detection
        if asked is None:
            return None
        shortest = max(asked.min_pattern_size, 1)
        longest, count = asked.max_pattern_size, asked.min_count
        verdict = Verdict("repetition", "repetition_detected")

        def check(sequence: SequenceView) -> Verdict | None:
            output = sequence.output_ids
            length = min(longest, len(output) // count)
            if length < shortest:
                return None
            # tail[L - 1] is the token L places before the last one
            tail = output[-2 : -2 - length : -1]
            size = shortest - 1
            while True:
                try:
                    size = tail.index(output[-1], size) + 1
                except ValueError:
                    return None
                span = size * (count - 1)
                if output[-span:] == output[-span - size : -size]:
                    return verdict

        return check


@hookimpl
def decodekit_stops() -> Iterable[Stop]:
    return [Repetition()]
