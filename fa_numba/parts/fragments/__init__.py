"""Register fragments: what kernels of several tensor-core units share, a module an idea.

A fragment is the part of a matrix that the lanes of a warp have in registers for one instruction.
The results of ``mma.sync`` and ``wgmma`` lie in registers alike.
"""

from fa_numba.parts.fragments import pairs as pairs
from fa_numba.parts.fragments import planes as planes
from fa_numba.parts.fragments import rows as rows
