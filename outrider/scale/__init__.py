"""Many replicas: Ray (`ray/`), simulations (`fleet/`), and estimates (`estimate/`)."""
