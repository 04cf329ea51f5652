"""KV caches: static, paged and shared, and snapshots of recurrent states."""
