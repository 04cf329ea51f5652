"""The command `outrider fit`: from a model and prompts to a fast configuration."""
