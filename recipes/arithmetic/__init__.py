"""Trains a language model to add numbers by reinforcement learning, with exact speculative rollouts."""
