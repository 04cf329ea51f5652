"""Training drafts on the hidden states of a target."""
