"""The commands that measure an engine or a server, and what they share (`common/`)."""
