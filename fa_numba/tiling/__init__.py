"""Tile sizes, specs, and the rules for which thread has which elements of a tile.

file                contents
tiles               `Tiles`: the sizes that a caller may choose
spec                `Spec`: the facts for which a kernel of any unit is compiled
simt                specs of unit "simt" (CUDA cores)
mma_rows            layout of rows of 16-bit elements in shared memory
mma, mma_backward   specs of unit "mma" (tensor cores), forward and backward
wgmma, wgmma_*      specs of unit "wgmma" (Hopper's tensor cores)

The functions `select_*` return the spec for given tiles, or raise ValueError. If the caller gives
no tiles, ``fa_numba.choices`` chooses them. This package does not import ``choices`` or kernels.
"""

from fa_numba.tiling.mma import MEASURES, MmaSpec, StandardSpec, select_mma_spec
from fa_numba.tiling.mma_backward import (
    MmaBackwardSpec,
    MmaDqSpec,
    TransposedSpec,
    select_mma_backward_spec,
)
from fa_numba.tiling.simt import SimtBackwardSpec, SimtSpec, select_spec, splits
from fa_numba.tiling.spec import MAX_THREADS, Spec
from fa_numba.tiling.tiles import MOST_STAGES, Tiles, is_valid
from fa_numba.tiling.wgmma import WGMMA_MEASURES, WgmmaSpec, select_wgmma_spec
from fa_numba.tiling.wgmma_backward import (
    WgmmaBackwardSpec,
    WgmmaDqSpec,
    select_wgmma_backward_spec,
    select_wgmma_dq_spec,
    wgmma_dq_tiles,
)
from fa_numba.tiling.wgmma_fa1 import WgmmaFa1Spec, select_wgmma_fa1_spec
from fa_numba.tiling.wgmma_variants import (
    FA1_VARIANTS,
    FA2_VARIANTS,
    LARGEST_ATOMIC,
    BackwardCall,
    Variant,
    default_wgmma_backward_tiles,
)
