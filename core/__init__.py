"""The words every room shares, the engine that plans and runs chains, and the doors to it."""
