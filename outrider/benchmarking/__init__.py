"""Jobs, the timed run of an engine, and memory use, for every command that measures an engine."""
