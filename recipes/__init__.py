"""Ways to make models and data that Outrider works with; run them with python -m."""
