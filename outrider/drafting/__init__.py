"""What drafts (`propose/`), and how far (`plan/`)."""
