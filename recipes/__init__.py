"""Recipes that make models and data for Outrider. Run them with python -m."""
