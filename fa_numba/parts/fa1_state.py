"""What FlashAttention-1 leaves of the l and m that it passed through global memory: L."""

from fa_numba.device import uint32
from fa_numba.parts.grid import make_query_rows
from fa_numba.parts.namespace import part
from fa_numba.parts.softmax import make_logsumexp
from fa_numba.parts.values import make_read, make_write


@part
def make_write_logsumexp(spec):
    """``write_logsumexp(rl, rm, L, state, row0, rows_end, head, thread)``: L of a head's rows from
    their l and m in global memory, where the caller wants it.
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
