"""The matrix products of attention on tensor cores: 16-bit operands, and sums in float32 registers.

A thread holds TM rows and TN columns of S. O has 16 DN columns in a tile, and Q has 16 DK columns.
The registers of a thread have these shapes:

- ``rS: (TM, TN)`` and ``rP: (TM, TN)`` hold the thread's part of S or P.
- ``rO: (TM, 4 DN)`` holds the thread's part of O.
- ``rQ: (TM / 2, DK, 4)`` holds fragments of Q, in words of two 16-bit elements.
- In the backward pass S is transposed: ``rS: (TN, TM)``, with a row for each column of S.
"""

from functools import cache

from fa_numba.device import cuda, float32, int64, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.matrix import MMA, ldmatrix, ldmatrix_transposed
from fa_numba.intrinsics.shared import store2
from fa_numba.parts.dropout import kept_if
from fa_numba.parts.fragments.pairs import conversions
from fa_numba.parts.fragments.planes import make_score_factor as make_score_factor
from fa_numba.parts.fragments.planes import make_tile_factor as make_tile_factor
from fa_numba.parts.fragments.planes import make_units as make_units
from fa_numba.parts.fragments.value_scales import make_next_unit
from fa_numba.parts.fragments.value_scales import make_value_unit as make_value_unit
from fa_numba.parts.layout import make_column, make_row
from fa_numba.parts.layout import make_warp_column as make_warp_column
from fa_numba.parts.mma import planes, widened
from fa_numba.parts.mma.e4m3 import P_FACTOR
from fa_numba.parts.mma.fragments import make_load_fragment, make_place
from fa_numba.parts.mma.swizzle import make_further
from fa_numba.parts.namespace import part
from fa_numba.parts.softmax import make_normalise_rows
from fa_numba.tiling.mma_rows import CHUNK


def instructions(dtype):
    """Return two device functions for a 16-bit dtype: the matrix instruction, and the rounding of
    two floats to a word of this dtype.
    """
    pack, _ = conversions(dtype)
    return MMA[DTYPES[dtype].matrix], pack


@cache
def make_scores(spec):
    """Make ``scores(rS, rQ, sQ, sK, row0, col0)``, which computes S = Qi KjT in the registers rS.

    The warp computes the rows from ``row0`` on and the columns from ``col0`` on. With
    ``spec.keeps_q``, the registers rQ already hold the fragments of Q. Otherwise each fragment is
    loaded from sQ into rQ before its use.
    """
    if spec.features.page_scales:
        return widened.make_scores_of_e4m3(spec)
    return planes.make_scores_of_planes(spec) if spec.planes > 1 else _make_scores(spec)


@cache
def make_value_scores(spec):
    """Make ``value_scores(rdP, rV, sV, sdO, row0, col0)``, which computes dPT = V dOT in the
    registers rdP.

    The backward pass uses it. ``make_scores`` explains the arguments, with V in the place of Q and
    dO in the place of K.
    """
    return make_scores(spec.whole.of_values.scores)


@cache
def make_load_value_fragments(spec):
    """Make ``load_value_fragments(rV, sV, row0)``, which loads the fragments of V that
    ``value_scores`` multiplies from sV into the registers rV.

    The warp's rows of V begin at ``row0``.
    """
    return make_load_fragments(spec.whole.of_values.scores)


@part
def _make_scores(spec):
    """Make ``scores(rS, rQ, sQ, sK, row0, col0)``, which computes S = Qi KjT for 16-bit matrices.

    ``make_scores`` explains the arguments. The loops over registers are unrolled, because an index
    of registers must be a constant.
    """
    R, TN, K, pitch, keeps = spec.TM // 2, spec.TN, spec.DK, spec.rows.pitch, spec.keeps_q
    COLUMNS, RS = spec.TN // 4, spec.TM * spec.TN
    mma, _ = instructions(spec.dtype)
    place, further = make_place(spec.rows), make_further(spec.rows)
    load_fragment = make_load_fragment(spec)

    def scores(rS, rQ, sQ, sK, row0, col0):
        at_q = uint32(row0 * pitch + place(True, 0))
        at_k = uint32(col0 * pitch + place(False, 0))
        for e in range(RS):
            rS[e] = float32(0.0)
        for k in range(K):
            for r in range(R):
                if not keeps:
                    load_fragment(rQ, sQ, at_q, r, k)
            for c in range(COLUMNS):
                b = ldmatrix(sK, further(at_k, 16 * c, 16 * k))
                for r in range(R):
                    low = 2 * r * TN + 4 * c
                    high = low + TN
                    e = 4 * (r * K + k)
                    mma(rS, low, high, rQ[e], rQ[e + 1], rQ[e + 2], rQ[e + 3], b[0], b[1])
                    mma(rS, low + 2, high + 2, rQ[e], rQ[e + 1], rQ[e + 2], rQ[e + 3], b[2], b[3])

    return scores


@part
def make_add_output(spec):
    """Make ``add_output(rO, rP, sV, unit, options)``, which adds P V to O in registers.

    ``rP`` holds P in float32. Elements that ``drop`` has marked as dropped are negative. The
    function rounds P to 16 bits. ``unit`` is a factor of the product in kernels that work with
    planes or with V in e4m3. Other kernels ignore it.

    The function returns the ``unit`` for the next call. It differs from the argument only for V in
    e4m3 (``widened.make_add_output_of_e4m3``).
    """
    if spec.features.page_scales:
        return widened.make_add_output_of_e4m3(spec)
    add = _make_add_output(spec)

    def add_output(rO, rP, sV, unit, options):
        add(rO, rP, sV, unit, options)
        return unit

    return add_output


@part
def _make_add_output(spec):
    """Make the function that ``make_add_output`` describes, for 16-bit V and for planes."""
    if spec.planes > 1:
        return planes.make_add_output_of_planes(spec)
    add = add_fragment_product(spec, spec.features.dropout)

    def add_16_bit_output(rO, rP, sV, unit, options):
        add(rO, rP, sV, options)

    return add_16_bit_output


@part
def make_finish_output(spec):
    """Make ``finish_output(rO, unit)``, which completes O after the last tile, if V is e4m3.

    ``unit`` is the last result of ``add_output``. ``widened.make_finish_output_of_e4m3`` describes
    the function. For other V, it does nothing.
    """
    if spec.features.page_scales:
        return widened.make_finish_output_of_e4m3(spec)

    def finish_output(rO, unit):
        pass

    return finish_output


@cache
def make_add_ds(spec):
    """Make ``add_ds(rdQ, rdS, sK, options)``, which adds dS K to dQ in registers.

    ``rdS`` holds dS in float32. The function rounds dS to 16 bits.
    """
    return add_fragment_product(spec, False)


@part
def add_fragment_product(spec, drops):
    """Make ``add_product(rO, rP, sV, options)``, which adds P V to O in registers, for 16-bit
    matrices.

    ``rP`` holds P in float32. The function rounds P to 16 bits. If ``drops`` is true, negative
    elements of P are dropped elements and count as 0. The other elements are then multiplied by 1 /
    (1 - dropout_p). The function is also used for dQ += dS K, with dS as ``rP`` and K as ``sV``.
    """
    R, TN, DN, rows = spec.TM // 2, spec.TN, spec.DN, spec.value_rows
    K, RA = spec.TN // 4, 4 * (spec.TM // 2)
    mma, pack = instructions(spec.dtype)
    pitch, place, further = rows.pitch, make_place(rows), make_further(rows)
    warp_column = make_warp_column(spec)
    kept = kept_if(drops)

    def add_product(rO, rP, sV, options):
        rA = cuda.local.array(RA, uint32)
        at = uint32(warp_column() * pitch + place(True, 0))
        for k in range(K):
            for r in range(R):
                for n in range(4):
                    e = (2 * r + n % 2) * TN + 4 * k + n // 2 * 2
                    rA[4 * r + n] = pack(kept(rP[e], options), kept(rP[e + 1], options))
            for c in range(DN):
                b = ldmatrix_transposed(sV, further(at, 16 * k, 16 * c))
                for r in range(R):
                    low = 8 * r * DN + 4 * c
                    high = low + 4 * DN
                    e = 4 * r
                    mma(rO, low, high, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], b[0], b[1])
                    mma(rO, low + 2, high + 2, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], b[2], b[3])

    return add_product


@part
def _make_add_shared_product(R, DN, K, rows_p, rows, dtype, transposed, carries=False):
    """Make ``add_shared_product(rO, sP, at_p, sV, at_v, row0, col0)``, which adds A B to rO. Both
    operands are in shared memory.

    - A begins at index ``at_p`` of sP. It consists of the rows of sP from ``row0`` on. If
      ``transposed`` is true, it consists of the columns of sP from ``row0`` on.
    - B begins at index ``at_v`` of sV. It consists of the columns from ``col0`` on.
    - The result has 16 R rows and 16 DN columns. The sum has 16 K terms.

    ``rows_p`` and ``rows`` are the layouts of sP and sV. ``carries`` is the argument of
    ``make_further`` for the columns of B.
    """
    RA, pitch_p = 4 * R, rows_p.pitch
    mma, _ = instructions(dtype)
    load_a = ldmatrix_transposed if transposed else ldmatrix
    place_p, further_p = make_place(rows_p), make_further(rows_p)
    place, further = make_place(rows, carries), make_further(rows, carries)

    def add_shared_product(rO, sP, at_p, sV, at_v, row0, col0):
        rA = cuda.local.array(RA, uint32)
        if transposed:
            first = uint32(at_p + place_p(False, row0))
        else:
            first = uint32(at_p + row0 * pitch_p + place_p(True, 0))
        at = uint32(at_v + place(True, col0))
        for k in range(K):
            for r in range(R):
                if transposed:
                    a = load_a(sP, further_p(first, 16 * k, 16 * r))
                else:
                    a = load_a(sP, further_p(first, 16 * r, 16 * k))
                rA[4 * r] = a[0]
                rA[4 * r + 1] = a[1]
                rA[4 * r + 2] = a[2]
                rA[4 * r + 3] = a[3]
            for c in range(DN):
                b = ldmatrix_transposed(sV, further(at, 16 * k, 16 * c))
                for r in range(R):
                    low = 8 * r * DN + 4 * c
                    high = low + 4 * DN
                    e = 4 * r
                    mma(rO, low, high, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], b[0], b[1])
                    mma(rO, low + 2, high + 2, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], b[2], b[3])

    return add_shared_product


@cache
def make_add_stage(spec):
    """Make ``add_stage(rO, sP, at_p, sV, at_v, row0, col0)``, which adds the product P V of one
    stage to O in registers.

    A stage is a part of the sum: ``spec.step`` columns of P and rows of V. The stage begins at
    index ``at_p`` of sP and at index ``at_v`` of sV. This warp's rows of P begin at ``row0``, and
    its columns of V begin at ``col0``. Standard attention uses the function.
    """
    sizes = spec.TM // 2, spec.DN, spec.step // 16
    return _make_add_shared_product(*sizes, spec.rows_p, spec.value_rows, spec.dtype, False)


@part
def make_divide_rows(spec):
    """Make ``divide_rows(rO, rl, unit, head)``, which divides each row of O by its l and by the
    factor of P in e4m3, and multiplies O by the scale of V.

    If V has scales of blocks, ``unit`` is the scale of V. Otherwise ``unit`` is not used. A row
    without a visible column has l = 0. Its O becomes 0. Standard attention of e4m3 arrays uses the
    function.
    """
    RO, normalise_rows = spec.TM * spec.DN * 4, make_normalise_rows(spec)
    blocks, INVERSE = spec.features.value_block_scales, float32(1.0 / P_FACTOR)

    def divide_rows(rO, rl, unit, head):
        normalise_rows(rO, rl)
        if not blocks:
            unit = head.options.v_scale[head.b, head.hk]
        factor = float32(INVERSE * unit)
        for e in range(RO):
            rO[e] *= factor

    return divide_rows


@part
def make_to_unit(spec):
    """Make ``to_unit(rO, unit, tile)``, which changes the unit of O to that of the product P V of a
    tile, and returns the new unit.

    ``fragments.value_scales`` explains units. Standard attention of e4m3 arrays uses the function.
    """
    RO, next_unit = spec.TM * spec.DN * 4, make_next_unit(spec)

    def to_unit(rO, unit, tile):
        own, ratio = next_unit(unit, tile)
        if own != unit:
            for e in range(RO):
                rO[e] *= ratio
        return own

    return to_unit


@cache
def make_add_stage_transposed(spec):
    """Make ``add_stage_transposed(rO, sP, at_p, sV, at_v, row0, col0)``, which adds the product PT
    dO of one stage to rO.

    ``make_add_stage`` explains the arguments, with dO as ``sV``. The rows of the result are columns
    of P, so that ``row0`` is a column of P.
    """
    sizes = spec.TM // 2, spec.DN, spec.step // 16
    return _make_add_shared_product(*sizes, spec.rows_t, spec.rows, spec.dtype, True)


@part
def make_add_dv(spec):
    """Make ``add_dv(rdV, rP, sP, sdO, row0, col0, options)``, which adds PT dO to dV in registers.

    The warp computes the rows of PT from ``row0`` on and the columns of dO from ``col0`` on. ``rP``
    holds the P that this warp has computed. Elements that ``drop`` has marked as dropped are
    negative. If a warp multiplies only elements of PT that it has computed itself, the function
    takes PT from rP. Otherwise it takes PT from shared memory sP, where ``store_p`` has stored it.
    """
    add = _make_add_transposed_product(spec.of_values, planes.OF_DV, spec)
    if not spec.head_dim_v:
        return add
    WIDTH, WIDTH_V = spec.warp_parts[-1], spec.of_values.warp_parts[-1]

    def add_dv(rdV, rP, sP, sdO, row0, col0, options):
        add(rdV, rP, sP, sdO, row0, uint32(col0 // uint32(WIDTH) * WIDTH_V), options)

    return add_dv


@cache
def make_add_dk(spec):
    """Make ``add_dk(rdK, rdS, sdS, sQ, row0, col0, options)``, which adds dST Q to dK in registers.

    ``make_add_dv`` explains the arguments, with dS in the place of P and Q in the place of dO.
    """
    return _make_add_transposed_product(spec, planes.OF_DK, spec)


@part
def _make_add_transposed_product(spec, of, whole):
    """Make ``add(rdV, rP, sP, sT, row0, col0, options)``, which adds PT dO to dV, or dST Q to dK.

    ``make_add_dv`` explains the arguments of ``add``. The arguments of the factory are:

    - ``of``: ``planes.OF_DV`` for dV, or ``planes.OF_DK`` for dK.
    - ``whole``: the spec of the kernel.
    - ``spec``: equal to ``whole`` for dK. For dV, it has the head dimension of V.
    """
    if spec.planes > 1:
        return planes.make_add_transposed_of_planes(spec, of, whole)
    drops = spec.features.dropout and of == planes.OF_DV
    sizes = spec.TN // 2, spec.gradients.DN, spec.Br // 16
    from_registers = add_fragment_product(spec.gradients, drops)
    own, (*_, WIDTH) = spec.row_warps == 1, spec.warp_parts
    how = spec.rows_ds, spec.rows, spec.dtype, False, WIDTH // CHUNK % spec.rows.group != 0
    from_shared = _make_add_shared_product(*sizes, *how)

    def add(rdV, rP, sP, sT, row0, col0, options):
        if own:
            from_registers(rdV, rP, sT, options)
        else:
            from_shared(rdV, sP, 0, sT, 0, row0, col0)

    return add


@part
def make_dq(spec):
    """Make ``dq(rdQ, sdS, sK, turn)``, which adds this warp's part of dSij Kj to dQ in registers.

    dST is in shared memory sdS, and Kj is in sK. A large dQ is computed in ``spec.query_turns``
    turns, one after the other. ``turn`` is the number of the turn: 0 or 1.
    """
    if spec.planes > 1:
        return planes.make_dq_of_planes(spec)
    R, C, ALONG, DN = spec.query_fragments, spec.query_chunks, spec.chunk_warps, spec.DN
    K, RA, STEP = spec.Bc // 16, 4 * spec.query_fragments, spec.chunk_step
    mma, _ = instructions(spec.dtype)
    carries = STEP & (STEP - 1) != 0 and spec.rows.group > 2
    place, further = make_place(spec.rows, carries), make_further(spec.rows, carries)
    place_ds, further_ds = make_place(spec.rows_ds), make_further(spec.rows_ds)

    def dq(rdQ, sdS, sK, turn):
        rA = cuda.local.array(RA, uint32)
        warp = uint32(cuda.threadIdx.x) // uint32(32)
        chunk = uint32(warp % uint32(ALONG) + turn * ALONG)
        at_ds = place_ds(False, warp // uint32(ALONG) * (16 * R))
        at_k = place(True, chunk * 16)
        for k in range(K):
            for r in range(R):
                a = ldmatrix_transposed(sdS, further_ds(at_ds, 16 * k, 16 * r))
                rA[4 * r] = a[0]
                rA[4 * r + 1] = a[1]
                rA[4 * r + 2] = a[2]
                rA[4 * r + 3] = a[3]
            for c in range(C):
                if uint32(chunk + c * STEP) < uint32(DN):
                    b = ldmatrix_transposed(sK, further(at_k, 16 * k, 16 * c * STEP))
                    for r in range(R):
                        low = 8 * (r * C + c)
                        high = low + 2
                        e = 4 * r
                        mma(rdQ, low, high, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], b[0], b[1])
                        low += 4
                        high += 4
                        mma(rdQ, low, high, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], b[2], b[3])

    return dq


@part
def make_load_fragments(spec):
    """Make ``load_fragments(rQ, sQ, row0)``, which loads the fragments of Q from sQ into the
    registers rQ.

    The warp's rows begin at ``row0``. If ``spec.keeps_q`` is false, the kernel loads fragments
    during the product, and the function does nothing.
    """
    R, K, pitch, keeps = spec.TM // 2, spec.planes * spec.DK, spec.rows.pitch, spec.keeps_q
    place, load_fragment = make_place(spec.rows), make_load_fragment(spec)
    scaled, order = spec.features.page_scales, widened.make_order_queries(spec)

    def load_fragments(rQ, sQ, row0):
        if keeps:
            at = uint32(row0 * pitch + place(True, 0))
            for r in range(R):
                for k in range(K):
                    load_fragment(rQ, sQ, at, r, k)
            if scaled:
                order(rQ)

    return load_fragments


@cache
def make_store_p(spec):
    """Make ``store_p(sP, rP, tile)``, which rounds PT to 16 bits and stores it in shared memory sP.

    A row of sP is a column of S. ``drop`` has made the dropped elements of rP negative. They are
    stored as 0. With dropout, the other elements are multiplied by 1 / (1 - dropout_p). If the
    registers of each warp contain all elements of PT that the warp multiplies, the function stores
    nothing.
    """
    return _make_store(spec, planes.OF_DV)


@cache
def make_store_ds(spec):
    """Make ``store_ds(sdS, rdS, tile)``, which rounds dST to 16 bits and stores it in shared memory
    sdS.

    A row of sdS is a column of S.
    """
    return _make_store(spec, planes.OF_DQ)


@part
def _make_store(spec, of):
    """Make ``store(sT, rT, tile)``, which rounds PT or dST to 16 bits and stores it in shared
    memory sT.

    ``of`` is ``planes.OF_DV`` for PT (``make_store_p``) and ``planes.OF_DQ`` for dST
    (``make_store_ds``).
    """
    if spec.planes > 1:
        return planes.make_store_of_planes(spec, of)
    drops = spec.features.dropout and of == planes.OF_DV
    wanted = of == planes.OF_DQ or spec.row_warps > 1
    TM, TN, pitch = spec.TM, spec.TN, spec.rows_ds.pitch
    row_of, column_of = make_row(spec), make_column(spec)
    kept = kept_if(drops)
    pack, _ = conversions(spec.dtype)

    def store(sT, rT, tile):
        if wanted:
            thread, options = tile.thread, tile.head.options
            first = uint32(column_of(thread.tx, 0) * pitch + row_of(thread.ty, 0))
            for j in range(TN):
                for i in range(0, TM, 2):
                    e = j * TM + i
                    further = uint32(column_of(uint32(0), j) * pitch + row_of(uint32(0), i))
                    at = int64(first) + int64(further)
                    store2(sT, at, pack(kept(rT[e], options), kept(rT[e + 1], options)))

    return store
