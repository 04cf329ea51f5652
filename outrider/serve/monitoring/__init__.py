"""Metrics, the drift alarm and the request log."""
