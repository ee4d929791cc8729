"""Device functions that kernels share, one idea a file, specialised at compile time."""
