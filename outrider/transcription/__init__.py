"""Transcripts of recordings of any length, with a speech model as target."""
