"""Encoder-decoder models: keys and values of the sources, and the attention of the decoder."""
