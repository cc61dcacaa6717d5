"""Triton: the same operations as `reference`, one read of the logits for a whole chain."""
