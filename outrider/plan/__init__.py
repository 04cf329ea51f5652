"""How many tokens to draft: cost models and planners."""
