"""The command `outrider load`: a load generator for servers with OpenAI's API."""
