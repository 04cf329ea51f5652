"""The torch modules of trained draft heads."""
