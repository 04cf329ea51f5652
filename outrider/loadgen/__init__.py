"""Load for a server, and how long it lets people wait."""
