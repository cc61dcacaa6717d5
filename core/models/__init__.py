"""The decoder families, their layers, and the loader that fills them from safetensors or GGUF."""
