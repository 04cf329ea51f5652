"""Trains small audio models for `outrider media` on sounds that it makes itself."""
