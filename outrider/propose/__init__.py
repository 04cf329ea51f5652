"""Those who guess."""
