"""Block sizes, and how the threads of a block share a tile.

``tiles`` is what a caller chooses, ``spec`` what every kernel is compiled for, ``simt``, ``mma``
and ``wgmma`` each unit's own. What is taken where nobody chose says ``fa_numba.choices``.
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
