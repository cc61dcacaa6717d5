"""CUT stages: truncations that keep a subset of the alive tokens."""
