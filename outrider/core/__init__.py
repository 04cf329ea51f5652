"""Data types of requests and rounds, sampling parameters, constraints, noise, trees, statistics."""
