"""Trains a target and a draft model of one family on a folder of text files."""
