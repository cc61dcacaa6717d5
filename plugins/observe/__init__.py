"""Observers: they read logits, kept sets and tokens, and change nothing."""
