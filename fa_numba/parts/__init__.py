"""Device functions that kernels share, one topic per module.

Each ``make_...`` factory takes a spec, and returns a device function that is compiled for this
spec.
"""

from fa_numba.parts.namespace import bind as bind
