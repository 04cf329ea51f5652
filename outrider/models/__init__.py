"""What computes: models on torch, native kernels, KV caches, draft heads, and the loader."""
