"""Proposers that look tokens up: n-grams, suffixes, datastores, recycled predictions."""
