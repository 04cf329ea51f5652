"""Relaxed verification rules: lossy rules that declare a bound on the distance from the target's distribution."""
