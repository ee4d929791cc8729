"""Device functions that kernels share, one topic per module. Each is compiled for one spec."""

from fa_numba.parts.namespace import bind as bind
