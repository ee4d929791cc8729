"""The online softmax of scores in registers, and the state O, l and m of a row tile.

``tx_count`` lanes share a row, and they are ``lane_step`` lanes apart. The scores and m are in
units of log2 unless a function says otherwise. ``rO`` holds a thread's part of O: row number i of
the thread is in the registers i DN4 to (i + 1) DN4 - 1, with DN4 = 4 ``spec.DN``. ``rl``, ``rm``
and ``rf`` have one register for each of the thread's TM rows.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.intrinsics.arithmetic import LN2, LOG2E, NEG_INF, exp2, log2, maximum
from fa_numba.parts.dropout import make_drop as make_drop
from fa_numba.parts.dropout import make_kept as make_kept
from fa_numba.parts.dropout import make_scale_kept as make_scale_kept
from fa_numba.parts.lanes import FULL_WARP, max_of_lanes, sum_of_lanes
from fa_numba.parts.layout import make_head_of_row, make_owns, make_row
from fa_numba.parts.namespace import part

# Up to this number of registers of O, O is scaled without a test whether a maximum is new.
LARGEST_SCALED = 64


@cache
def make_start(spec):
    """Make ``start(rO, rl, rm, tile, split)``, which sets O = 0, l = 0 and m = -inf in registers.

    With sinks, l and m are then set to the values of the sink, but only in key split number 0
    (``take_sinks``).
    """
    return _make_start(spec, whole_rows=True)


@cache
def make_start_of_lanes(spec):
    """Make ``start_of_lanes(rO, rl, rm, tile, split)``, which works as ``start`` for kernels in
    which l is a partial sum.

    In these kernels, a thread's l is the sum over its own columns only. ``sum_lanes`` later adds
    the sums of the lanes that share a row. Therefore only one of these lanes starts with the sink's
    share of l.
    """
    return _make_start(spec, whole_rows=False)


@part
def _make_start(spec, whole_rows):
    """Make ``start(rO, rl, rm, tile, split)``, which sets O = 0, l = 0 and m = -inf, and includes
    sinks.

    ``whole_rows`` says whether l is the sum of a complete row, or only of this thread's columns.
    """
    TM, RO, take_sinks = spec.TM, spec.TM * spec.DN * 4, _make_take_sinks(spec, whole_rows)

    def start(rO, rl, rm, tile, split):
        for e in range(RO):
            rO[e] = float32(0.0)
        for i in range(TM):
            rl[i] = float32(0.0)
            rm[i] = NEG_INF
        take_sinks(rl, rm, tile, split)

    return start


@cache
def make_take_sinks(spec):
    """Make ``take_sinks(rl, rm, tile, split)``, which sets l = 1 and m = s for a row with a sink,
    before its first column tile.

    s is the logit of the sink, in units of log2. Only key split number 0 includes the sink. In
    other splits, and in calls without sinks, the function does nothing.
    """
    return _make_take_sinks(spec, whole_rows=True)


@part
def _make_take_sinks(spec, whole_rows):
    """Make the function ``take_sinks(rl, rm, tile, split)`` that ``make_take_sinks`` describes.

    ``whole_rows`` says whether l is the sum of a complete row. Otherwise, l is the sum of this
    thread's columns, and only the lane with tx = 0 sets l = 1.
    """
    TM, sinks, q_lens = spec.TM, spec.features.sinks, spec.features.q_lens
    row_of, head_of_row, owns = make_row(spec), make_head_of_row(spec), make_owns(spec)

    def take_sinks(rl, rm, tile, split):
        if sinks and split == uint32(0):
            head, thread = tile.head, tile.thread
            for i in range(TM):
                there = owns(i)
                if q_lens:  # a row past the end has no sink
                    there = there and uint32(tile.i0 + row_of(thread.ty, i)) < head.Nq
                if there:
                    rm[i] = LOG2E * head.options.sinks[head_of_row(head, thread.ty, i)]
                    if whole_rows or thread.tx == uint32(0):
                        rl[i] = float32(1.0)

    return take_sinks


@part
def make_scale_rows(spec):
    """Make ``scale_rows(rO, rf)``, which multiplies each row of O by its factor in rf."""
    TM, DN4 = spec.TM, 4 * spec.DN

    def scale_rows(rO, rf):
        for i in range(TM):
            for c in range(DN4):
                rO[i * DN4 + c] *= rf[i]

    return scale_rows


@part
def make_rescale_rows(spec):
    """Make ``rescale_rows(rO, rf)``, which multiplies each row of O by its factor f = exp(m_old -
    m_new) in rf.

    In a long row, m seldom changes, and f is 1. If a thread holds more than LARGEST_SCALED
    registers of O, it skips the multiplication when every f is 1. If it holds fewer, it always
    multiplies: without a branch, the multiplications can run between other instructions.
    """
    TM, tests = spec.TM, spec.TM * 4 * spec.DN > LARGEST_SCALED
    scale_rows = make_scale_rows(spec)

    def rescale_rows(rO, rf):
        changes = not tests
        if tests:
            for i in range(TM):
                if rf[i] != float32(1.0):
                    changes = True
        if changes:
            scale_rows(rO, rf)

    return rescale_rows


@part
def make_normalise_rows(spec):
    """Make ``normalise_rows(rO, rl)``, which divides each row of O by its softmax sum l.

    A row without a visible column has l = 0. Its O becomes 0, even if it contains NaN.
    """
    TM, DN4 = spec.TM, 4 * spec.DN

    def normalise_rows(rO, rl):
        for i in range(TM):
            factor = float32(0.0)
            if rl[i] != float32(0.0):
                factor = float32(1.0) / rl[i]
            for c in range(DN4):
                # V can contain NaN or inf, and 0 times NaN or inf is NaN.
                rO[i * DN4 + c] = rO[i * DN4 + c] * factor if factor != float32(0.0) else factor

    return normalise_rows


@device_function
def exp_of_difference(s, m):
    """Return e^(s - m).

    ``s`` and ``m`` are in natural units, not in units of log2. The result is 0 if s is -inf, for
    every m.
    """
    p = float32(0.0)
    if s != NEG_INF:
        p = exp2((s - m) * LOG2E)
    return p


@part
def make_merge_block(warps, sinks):
    """Make ``merge_block(m, l, sm, sl, head, row)``, which returns m and l of a complete row, from
    the m and l of all threads of a block.

    Each thread passes the m and l of its own columns of the row, in natural units. Every thread
    gets the result, which includes a sink if ``sinks`` is true. ``sm`` and ``sl`` are shared memory
    with one float for each of the ``warps`` warps. The function contains a ``syncthreads``.
    """

    def merge_block(m, l, sm, sl, head, row):
        thread = uint32(cuda.threadIdx.x)
        lane = 16
        while lane > 0:
            m_other = cuda.shfl_xor_sync(FULL_WARP, m, lane)
            l_other = cuda.shfl_xor_sync(FULL_WARP, l, lane)
            m_new = maximum(m, m_other)
            l = l * exp_of_difference(m, m_new) + l_other * exp_of_difference(m_other, m_new)
            m = m_new
            lane //= 2
        if thread % uint32(32) == uint32(0):
            sm[thread // uint32(32)] = m
            sl[thread // uint32(32)] = l
        cuda.syncthreads()
        l, m = float32(0.0), NEG_INF
        if sinks and row < head.Nq:
            l, m = float32(1.0), head.options.sinks[head.h]
        for w in range(warps):
            m_new = maximum(m, sm[w])
            l = l * exp_of_difference(m, m_new) + sl[w] * exp_of_difference(sm[w], m_new)
            m = m_new
        return m, l

    return merge_block


@part
def make_row_maximum(spec):
    """Make ``row_maximum(rS, i, scale, m)``, which returns the new maximum m of the thread's row
    number i.

    ``m`` is the maximum of the columns before this tile. The result is ``m`` or the maximum of the
    row in this tile, whichever is larger. The lanes that share the row exchange their maxima. With
    ``spec.folds_scale``, rS holds products without the scale, and their maximum is multiplied by
    ``scale``. If ``spec.p_exponent`` is not 0, this number is subtracted from the maximum of the
    tile, so that P = exp(S - m) becomes larger.
    """
    TN, TX, STEP, folds = spec.TN, spec.tx_count, spec.lane_step, spec.folds_scale
    EXPONENT, lowers = float32(spec.p_exponent), spec.p_exponent > 0
    starts = folds or lowers

    def row_maximum(rS, i, scale, m):
        m_new = m
        if starts:
            m_new = NEG_INF
        for j in range(TN):
            m_new = maximum(m_new, rS[i * TN + j])
        if folds:
            m_new = m_new * scale
        if lowers:
            m_new = m_new - EXPONENT
        if starts:
            m_new = maximum(m, m_new)
        m_new = max_of_lanes(m_new, TX, STEP)
        return m_new

    return row_maximum


@cache
def make_online(spec):
    """Make ``online(rS, scale, rm, rl, rf)``, which computes one step of the online softmax.

    Before the call, rS holds the scores of a tile, and rm and rl hold m and l of the columns
    before. After the call:

    - rS holds P = exp(S - m_new),
    - rm holds m_new,
    - rf holds the factor f = exp(m - m_new), by which O must be multiplied,
    - rl holds l_new = f l + rowsum(P).

    With ``spec.folds_scale``, rS holds Q KT before the call, and the function computes the scores
    by multiplying with ``scale``. Otherwise ``scale`` is not used. A row that has seen no column
    keeps m = -inf and l = 0, and its P is 0.
    """
    return _make_online(spec, whole_rows=True)


@cache
def make_online_of_lanes(spec):
    """Make ``online_of_lanes(rS, scale, rm, rl, rf)``, which works as ``online`` for kernels in
    which l is a partial sum.

    In these kernels, a thread's l is the sum over its own columns only. ``sum_lanes`` later adds
    the sums of the lanes that share a row.
    """
    return _make_online(spec, whole_rows=False)


@part
def _make_online(spec, whole_rows):
    """Make ``online_softmax(rS, scale, rm, rl, rf)``, which computes one step of the online
    softmax.

    ``make_online`` explains the arguments. ``whole_rows`` says whether l is the sum of a complete
    row, or only of this thread's columns.
    """
    TM, TN, folds, row_maximum = spec.TM, spec.TN, spec.folds_scale, make_row_maximum(spec)
    SHARING, STEP = spec.tx_count if whole_rows else 1, spec.lane_step

    def online_softmax(rS, scale, rm, rl, rf):
        for i in range(TM):
            m_new = row_maximum(rS, i, scale, rm[i])
            shift = m_new
            if m_new == NEG_INF:  # -inf - -inf would be NaN
                shift = float32(0.0)
            rowsum = float32(0.0)
            for j in range(TN):
                s = rS[i * TN + j]
                if folds:
                    s = s * scale
                p = exp2(s - shift)
                rS[i * TN + j] = p
                rowsum += p
            rowsum = sum_of_lanes(rowsum, SHARING, STEP)
            rf[i] = exp2(rm[i] - shift)
            rl[i] = rf[i] * rl[i] + rowsum
            rm[i] = m_new

    return online_softmax


@part
def make_sum_lanes(spec):
    """Make ``sum_lanes(rl)``, which adds each row's l over the lanes that share the row.

    Each of these lanes gets the sum.
    """
    TM, TX, STEP = spec.TM, spec.tx_count, spec.lane_step

    def sum_lanes(rl):
        for i in range(TM):
            rl[i] = sum_of_lanes(rl[i], TX, STEP)

    return sum_lanes


@part
def make_from_lse(spec):
    """Make ``from_lse(rS, scale, rL)``, which replaces the scores in the registers rS by P = exp(S
    - L).

    ``rL: (TM,)`` holds the logsumexp L of each row, in natural units. A row with L = -inf has P =
    0, because all scores of the row are -inf. With ``spec.folds_scale``, the scores are first
    multiplied by ``scale``. Otherwise ``scale_and_mask`` has done this before.
    """
    TM, TN, (EI, EJ), folds = spec.TM, spec.TN, spec.element_steps, spec.folds_scale

    def from_lse(rS, scale, rL):
        for i in range(TM):
            shift = LOG2E * rL[i]
            if rL[i] == NEG_INF:
                shift = float32(0.0)
            for j in range(TN):
                s = rS[i * EI + j * EJ]
                if folds:
                    s = s * scale
                rS[i * EI + j * EJ] = exp2(s - shift)

    return from_lse


@part
def make_logsumexp(spec):
    """Make ``logsumexp(rv, rm, rl)``, which sets rv to L = m + log l in natural units.

    ``rm`` holds m in units of log2. L is -inf in a row with l = 0. ``rv`` may be the same array as
    ``rl``.
    """
    TM = spec.TM

    def logsumexp(rv, rm, rl):
        for i in range(TM):
            rv[i] = LN2 * (rm[i] + log2(rl[i]))

    return logsumexp
