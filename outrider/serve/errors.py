"""Errors of the server that are no mistake of a client."""

from outrider.errors import OutriderError


class QueueFull(OutriderError):
    """The server cannot accept a request now: the queue is full, or the server stops."""
