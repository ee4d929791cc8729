"""Device functions that kernels share, one idea a file, specialised at compile time."""

from fa_numba.parts.namespace import bind as bind
