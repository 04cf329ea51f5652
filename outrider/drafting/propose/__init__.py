"""Proposers: they draft the tokens that the target verifies."""
