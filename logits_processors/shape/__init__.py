"""SHAPE stages: strictly increasing maps of a row, the temperature family."""
