"""Speech as the source of an encoder-decoder model: recordings, features, and the beginnings of transcripts."""
