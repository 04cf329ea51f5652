"""KV caches: static, paged and shared."""
