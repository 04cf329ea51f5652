"""OpenAI's Responses API, whose inputs and outputs are items."""
