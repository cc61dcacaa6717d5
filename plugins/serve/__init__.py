"""The OpenAI-compatible HTTP server, itself a plugin: it does nothing that AsyncLLM does not."""
