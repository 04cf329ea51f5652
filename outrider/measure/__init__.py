"""What all measuring programs share: prompts, clocks, lists of numbers."""
