"""Draft heads, which are trained on the hidden states of a target: descriptions, modules, and checkpoint formats."""
