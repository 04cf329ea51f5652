"""Proposers that run a draft model or a trained head."""
