"""From logits to accepted tokens: sampling distributions and verification rules."""
