"""Prompt sets, clocks and number lists that benchmarks, training and tuning share."""
