"""The files that `decodekit plugin new` writes, with $names to fill in."""
