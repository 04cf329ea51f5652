"""Import and export of draft heads in the checkpoint formats of other projects."""
