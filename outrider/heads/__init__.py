"""Drafts trained on a target's hidden states: what they are, and the modules that training and proposing share."""
