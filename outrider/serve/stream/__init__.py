"""Streams: committed tokens as text chunks."""
