"""What touches the device: tensor arithmetic that knows nothing of requests."""
