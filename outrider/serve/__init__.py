"""The server: the OpenAI interface over one engine."""
