"""The command `train`: train draft heads and draft models for a target."""
