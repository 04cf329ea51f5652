"""`outrider bench`: the speed of speculation, measured against plain decoding in the same run."""
