"""What is trained, and its initial weights."""
