"""The command `fleet`: a discrete-event simulation of many replicas of the server."""
