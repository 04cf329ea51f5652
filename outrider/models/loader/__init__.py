"""Load a model folder, choose its backend, and check the backend against the model."""
