"""Proposers draft tokens (`propose/`). Planners choose how many (`plan/`)."""
