"""OpenAI's API: requests, responses, tools and errors."""
