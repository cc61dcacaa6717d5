"""Drivers: plugins that own the sequences of a request."""
