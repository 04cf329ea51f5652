"""Inflates a small trained Llama to the dimensions of a large one: the cost of the large, the text of the small."""
