"""FORCE stages: exactly one token stays alive."""
