"""Projections: what speculation should gain on a machine that is not here."""
