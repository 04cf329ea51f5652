"""Write a small trained Llama in the dimensions of a large one: the cost of the large, the text of the small."""
