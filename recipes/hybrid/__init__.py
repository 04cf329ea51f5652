"""A hybrid of Mamba-2 and attention layers, made from an attention model, with a module for multi-token prediction."""
