"""MASK stages: tokens that are illegal become -inf."""
