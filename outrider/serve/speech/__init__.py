"""Speech over HTTP and in Python: transcripts of recordings of any length."""
