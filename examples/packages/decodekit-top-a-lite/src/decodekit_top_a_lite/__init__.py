"""Top-a, a cut whose bar falls with the best token's probability."""

from decodekit import hookimpl

from .top_a import TopA


@hookimpl
def decodekit_stages() -> list[type[TopA]]:
    """Offer the stage."""
    return [TopA]
