"""Metrics, latencies and the request log."""
