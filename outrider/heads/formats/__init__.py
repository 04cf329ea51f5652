"""Trained drafts in the formats of other projects: from config and tensors to a description and weights, and back."""
