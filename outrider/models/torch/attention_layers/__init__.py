"""Attention layers whose attention function transformers cannot replace, or which do not work on packed sequences."""
