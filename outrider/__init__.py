"""Outrider: exact speculative decoding."""
