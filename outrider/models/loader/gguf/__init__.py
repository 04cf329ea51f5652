"""Read GGUF files of llama.cpp: the header, the configuration, the tokenizer and the weights."""
