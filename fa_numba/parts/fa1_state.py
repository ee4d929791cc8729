"""The logsumexp of FlashAttention-1, computed after the last pass from l and m in global memory."""

from fa_numba.device import uint32
from fa_numba.parts.grid import make_query_rows
from fa_numba.parts.namespace import part
from fa_numba.parts.softmax import make_logsumexp
from fa_numba.parts.values import make_read, make_write


@part
def make_write_logsumexp(spec):
    """Make ``write_logsumexp(rl, rm, L, state, row0, rows_end, head, thread)``, which stores L.

    The function reads l and m from global memory, computes L = m + log l, and stores it in the
    array L. The rows are the rows ``row0`` to ``rows_end`` - 1 of the head. ``state`` is any record
    with the fields l and m: the head's arrays, with one value per row. ``rl`` and ``rm`` are
    registers that the function may overwrite. If the call does not return L, the function does
    nothing.
    """
    query_rows = make_query_rows(spec)
    Br, logsumexp, return_lse = spec.Br, make_logsumexp(spec), spec.return_lse
    read_values, write_values = make_read(spec), make_write(spec)

    def write_logsumexp(rl, rm, L, state, row0, rows_end, head, thread):
        if return_lse:
            Lh = query_rows(L, head)
            i0 = row0
            while i0 < rows_end:
                read_values(rl, state.l, i0, rows_end, thread)
                read_values(rm, state.m, i0, rows_end, thread)
                logsumexp(rl, rm, rl)
                write_values(rl, Lh, i0, rows_end, thread)
                i0 = uint32(i0 + Br)

    return write_logsumexp
