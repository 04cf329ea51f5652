"""The engine: scheduler, rounds, builder."""
