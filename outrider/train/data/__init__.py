"""The training data: prompts, the target's answers, its hidden states, and batches of them."""
