"""The version, in a module without imports, so that any layer can read it."""

__version__ = "0.1.0"
