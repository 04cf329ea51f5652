"""Access to the operating system: threads, hardware description, files and memory."""
