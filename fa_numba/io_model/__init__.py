"""Global-memory accesses, FLOPs and workspace in closed form.

    standard, fa1, fa2, standard_backward ...   loads and stores of this package's kernels, exact
    with_prefix                                 of a prefix that sequences share, exact
    softmax                                     of the softmax of vectors alone, exact
    tiles_visited                               how many tiles of S they compute
    theta_standard, theta_flash, saha_ye        the published bounds, every constant set to 1;
    li_liang                                    of the backward pass
    fa1_paper                                   how the first paper counts its own
    ring, ring_messages, ring_break_even        bytes between devices that share a sequence, exact
    flops, workspace                            FLOPs as published, bytes beside inputs and outputs

Exact counts, bounds and the paper's own count are three kinds of numbers, not to be mixed. The
exact ones are in elements by array and hold for ragged edges, skipped tiles and sequences of their
own lengths; tests compare them with what the emulator counts. No kernel is imported here: the model
says on its own what a kernel does.

The formulas in the docstrings use these terms, for each batch entry:

    N_q, N_k     its valid rows and columns; N_q', N_k' those that its arrays have: seqlen_q and
                 seqlen_k, or in packed sequences, which have no others, N_q and N_k
    d            the head dimension; of V, O, dO, dV and, forward, of A that of V, `head_dim_v`,
                 where it is another. In what the papers publish there is one d, else it raises
                 ValueError
    B_r, B_c     the block sizes, T_r = ceil(N_q / B_r) and T_c = ceil(N_k / B_c) the tiles
    r_i, c_j     the valid rows of row tile i, the valid columns of column tile j

Tile (i, j) of S is visited when one of its rows sees one of its columns, by the causal mask and the
window, and the block mask has it; with neither, all T_r T_c are. A sum over r_i or c_j is over the
visited tiles: if all are, sum c_j is T_r N_k and sum r_i is T_c N_q.

"Per head" means summed over batch entries and query heads; each query head loads the K/V head that
it shares with others for itself, unless it says "per K/V head". Integers that all threads read at
one place (lengths, block mask), ALiBi slopes, sinks and what the caller's functions read are not
counted. Softcap, score_mod and dropout cost accesses in `standard_backward` alone. Where a float32
sum does not fit into an output, in 16 bits, there is an array `A` beside it.

`tiles` is anything with Br and Bc. `block_mask` is the bool array (T_r, T_c) of the longest
sequences, or that with leading axes that broadcast to (B, Hq); it must be given if and only if the
problem is sparse. Wrong arguments raise TypeError or ValueError with the argument's name, its value
and what is allowed.

>>> from types import SimpleNamespace
>>> from fa_numba.problem import Problem
>>> problem, tiles = Problem(1, 1, 1, 8, 8, 2), SimpleNamespace(Br=4, Bc=4)
>>> print(fa2(problem, tiles))
array         loads     stores
Q                16          0
K                32          0
V                32          0
O                 0         16
L                 0          8
elements         80         24
bytes           320         96
"""

from fa_numba.io_model.accesses import ELEMENT_BYTES, Accesses
from fa_numba.io_model.count_fa1 import fa1, fa1_backward
from fa_numba.io_model.count_fa2 import fa2, fa2_backward, with_prefix
from fa_numba.io_model.count_softmax import check_softmax, softmax
from fa_numba.io_model.count_standard import standard, standard_backward
from fa_numba.io_model.published import (
    fa1_paper,
    li_liang,
    saha_ye,
    theta_flash,
    theta_standard,
)
from fa_numba.io_model.ring import LinkTraffic, ring, ring_break_even, ring_messages
from fa_numba.io_model.visits import starts_in_first_pass, tiles_visited
from fa_numba.io_model.work import ALGORITHMS, PASSES, flops, multiply_adds, workspace
