"""Pickers: the step that chooses one token from what the chain left."""
