"""Several processes that run one model together, started by torchrun."""
