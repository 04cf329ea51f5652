"""Memory of what the model has read."""
