"""Plain torch and numpy, on any device: the meaning of every operation."""
