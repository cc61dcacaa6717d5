"""The parts of `decodekit compare`."""
