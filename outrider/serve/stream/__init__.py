"""From committed tokens to the text of a stream."""
