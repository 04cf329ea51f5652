"""Turns committed tokens into the text chunks of a stream."""
