"""A client of servers with OpenAI's API, for the commands that measure or audit a server."""
