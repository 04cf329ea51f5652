"""Training steps and their losses."""
