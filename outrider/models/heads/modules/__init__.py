"""The torch modules of draft heads."""
