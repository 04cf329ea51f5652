"""Trains the embedded video models of `outrider media` on videos that it draws itself."""
