"""Trains a small encoder-decoder model that corrects typing errors, and a draft model for it."""
