"""Errors of the server that a client has not caused."""

from outrider.errors import OutriderError


class QueueFull(OutriderError):
    """The server cannot accept a request now: the queue is full, or the server stops."""
