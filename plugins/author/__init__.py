"""The kit for plugin authors: toys and checks."""
