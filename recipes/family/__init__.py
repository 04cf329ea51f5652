"""A target and a draft of one family, from a folder of texts."""
