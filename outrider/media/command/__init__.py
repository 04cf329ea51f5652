"""The commands `outrider media demo`, `bench` and `tune`."""
