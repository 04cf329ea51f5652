"""Proposers that look draft tokens up: n-grams, suffixes, datastores, and past predictions of the target."""
