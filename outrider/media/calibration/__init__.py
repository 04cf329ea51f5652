"""The threshold of a quality gate: its choice, its file, and a check that it still holds."""
