"""Cost models and planners, which decide how many tokens to draft in each round."""
