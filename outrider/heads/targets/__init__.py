"""Trained draft heads as targets, so that a draft-model proposer can run them."""
