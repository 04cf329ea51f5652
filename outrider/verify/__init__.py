"""Target distributions from logits, and the verification rules that accept draft tokens."""
