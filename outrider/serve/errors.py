"""Errors of the server that a client has not caused."""

from outrider.errors import OutriderError

STOPPED = "the server stops; send the request again later, or to another server"


class QueueFull(OutriderError):
    """The server cannot accept a request now."""


class ServerStops(QueueFull):
    """The server accepts no more requests."""
