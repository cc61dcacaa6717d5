"""Phrases that an answer may not contain."""

from decodekit import hookimpl

from .phrases import PhraseBan


@hookimpl
def decodekit_stages() -> list[type[PhraseBan]]:
    """Offer the stage."""
    return [PhraseBan]
