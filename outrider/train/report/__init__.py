"""The log, tables and plots of a training."""
