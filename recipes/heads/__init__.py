"""Trains a draft head for any chat model on a GPU or CPU within minutes, on prompts made from text at hand."""
