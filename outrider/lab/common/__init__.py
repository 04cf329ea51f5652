"""Jobs, clocks, memory use and number lists that the measuring commands share."""
