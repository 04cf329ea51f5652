"""The engine: its rounds, the scheduler, structured output and the builder."""
