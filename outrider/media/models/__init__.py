"""The embedded video models, and the files of a set of models."""
