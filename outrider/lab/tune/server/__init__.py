"""`outrider tune --server`: measures a running server and says what to set."""
