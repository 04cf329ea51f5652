"""Targets on torch: the Target protocol and the Hugging Face backend."""
