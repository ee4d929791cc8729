"""Device functions that kernels share, one topic per module.

Most of them are returned by a factory such as ``make_q(spec)``, and are compiled for one spec.
"""

from fa_numba.parts.namespace import bind as bind
