"""The commands `index`, `convert`, `inspect` and `layers`."""
