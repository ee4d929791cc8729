"""Device functions for register fragments, which kernels of several tensor-core units share.

A fragment is the part of a matrix that the lanes of a warp hold in registers for one instruction.
The results of ``mma.sync`` and of ``wgmma`` have the same layout in registers. Each module has one
topic.
"""

from fa_numba.parts.fragments import pairs as pairs
from fa_numba.parts.fragments import planes as planes
from fa_numba.parts.fragments import rows as rows
