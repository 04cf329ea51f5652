"""Training data: answers, hidden states, batches."""
