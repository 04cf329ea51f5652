"""The drafts that can be trained, and their initial weights."""
