"""An HTTP server with OpenAI's API on one engine."""
