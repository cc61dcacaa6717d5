"""Stops: reasons to end a sequence after a token was accepted."""
