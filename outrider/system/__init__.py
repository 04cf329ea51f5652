"""The machine: threads, hardware, files."""
