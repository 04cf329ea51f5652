"""The commands that work on files: index, convert, inspect and layers."""
