"""Native CPU kernels in C++: forward passes, sampling and verification."""
