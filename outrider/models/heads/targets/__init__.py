"""Targets that run draft heads, so that draft-model proposers can use them."""
