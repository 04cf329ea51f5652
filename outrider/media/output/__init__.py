"""Files of finished outputs."""
