"""The decoder step for CPUs, in C++: weights read once, at the speed of the memory, with nothing in between."""
