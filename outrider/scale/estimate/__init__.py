"""The command `project`: estimate the speedup of speculation on any machine."""
