"""The OpenAI schema: requests, responses, tools and errors."""
