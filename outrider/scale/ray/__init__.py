"""Several engines on Ray: a server with replicas (`outrider scale`), and workers for rollouts (`RolloutPool`)."""
