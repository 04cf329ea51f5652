"""`outrider audit --server`: test that the output of a running server is the model's own."""
