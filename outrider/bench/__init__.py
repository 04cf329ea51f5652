"""Speed, measured against plain decoding in the same run."""
