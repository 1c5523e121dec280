"""Native kernels for CPUs: C++ sources, how they are built, and the calls."""
