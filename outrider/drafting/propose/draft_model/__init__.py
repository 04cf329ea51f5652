"""Proposers that run a draft model or a draft head."""
