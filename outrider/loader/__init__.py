"""From a folder to a checked model."""
