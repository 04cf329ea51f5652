"""Measures routers: trials, their figures, the controls of a gate, tables and plots."""
