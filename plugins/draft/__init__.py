"""Proposers: what guesses tokens for speculation."""
