"""A schema becomes a mask: specs, exactness, backends, and the stage that applies them."""
