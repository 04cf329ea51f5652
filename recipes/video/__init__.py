"""Trains the included video models of `outrider media` on videos that it draws itself."""
