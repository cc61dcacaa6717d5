"""Ends a sequence where its text first matches a regular expression, as stop strings do.

`stops=[{"stop": "regex", "pattern": "\\n\\n|END"}]`. The text ends before the match, or after it
with `include`; the pattern is the stop_reason. The match is that of `re.search` in the text so far,
so that a repeat at its end is as long as it is by then. No match may be longer than `span`
characters, which a stream withholds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pydantic import Field

from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, StageParams, Stop, TextStop


class Regex(Stop):
    """A regular expression in the text."""

    name = "regex"
    rank = 50

    class Params(StageParams):
        """The expression, whether case counts, and the longest match in characters."""

        pattern: str = Field(min_length=1)
        ignore_case: bool = False
        include: bool = False
        span: int = Field(default=100, ge=1, le=10_000)

    def bind(self, ctx: BindContext) -> TextStop | None:
        wish = ctx.wish
        if wish is None:
            return None
        if ctx.tokenizer is None or not ctx.request.detokenize:
            raise ValidationError(
                "stop 'regex' reads the text, so it needs the tokenizer and detokenize=True",
                parameter="stops",
            )
        try:
            pattern = re.compile(wish.pattern, re.IGNORECASE if wish.ignore_case else 0)
        except re.error as error:
            raise ValidationError(
                f"stop 'regex' has the pattern {wish.pattern!r}, which is no regular expression: "
                f"{error}",
                parameter="stops",
                value=wish.pattern,
            ) from None
        if pattern.match(""):
            raise ValidationError(
                f"stop 'regex' has the pattern {wish.pattern!r}, which matches the empty text",
                parameter="stops",
                value=wish.pattern,
            )

        def find(text: str, start: int) -> tuple[int, int] | None:
            match = pattern.search(text, start)
            return None if match is None else match.span()

        return TextStop(find, wish.pattern, wish.span, wish.include)


@hookimpl
def decodekit_stops() -> Iterable[Stop]:
    return [Regex()]
