"""The commands `index`, `convert`, `export`, `inspect` and `layers`."""
