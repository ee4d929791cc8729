"""Matrix products of a warpgroup on Hopper: S = Q KT, and O += P V with P in registers.

A product begins at one call and ends at a later call of ``wait_...``.
"""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.float8 import pack_e4m3
from fa_numba.intrinsics.matrix import CONVERSIONS, PACK_POSITIVE
from fa_numba.intrinsics.warpgroup import MULTIPLY, MULTIPLY_REGISTERS, STEP, wait_products
from fa_numba.parts.dropout import make_scale_kept
from fa_numba.parts.fragments.planes import make_score_factor as make_score_factor
from fa_numba.parts.fragments.planes import make_tile_factor as make_tile_factor
from fa_numba.parts.fragments.value_scales import make_leave_unit as make_leave_unit
from fa_numba.parts.fragments.value_scales import make_next_unit as make_next_unit
from fa_numba.parts.fragments.value_scales import make_value_unit as make_value_unit
from fa_numba.parts.namespace import part
from fa_numba.parts.wgmma import planes
from fa_numba.tiling.wgmma import PANEL


@part
def make_begin_scores(spec):
    """Make ``begin_scores(rS, sQ, q_stage, w, sK, stage)``, which begins the product S = Q KT in
    the registers rS.

    The product is of warpgroup w's rows of Q in slot number ``q_stage`` of sQ, and all rows of K in
    slot number ``stage`` of sK.
    """
    (NQ, NK, _), own, multiply = spec.tile_halves, PANEL * spec.consumer_rows, make_multiply(spec)
    if spec.planes > 1:
        multiply = planes.make_multiply_planes(spec)

    def begin_scores(rS, sQ, q_stage, w, sK, stage):
        multiply(rS, sQ, uint32(q_stage * NQ + own * w), sK, uint32(stage * NK))

    return begin_scores


@part
def make_begin_output(spec):
    """Make ``begin_output(rO, rP, sV, stage)``, which begins the product O += P V, with P in
    registers and V in slot number ``stage`` of sV.

    With planes, it begins O = P V instead.
    """
    NV, add_product = spec.tile_halves[2], make_add_product(spec)
    if spec.planes > 1:
        add_product = planes.make_product_of_planes(spec, spec.products)

    def begin_output(rO, rP, sV, stage):
        add_product(rO, rP, sV, uint32(stage * NV))

    return begin_output


@part
def make_multiply(spec):
    """Make ``multiply(rS, sQ, first, sK, at)``, which begins the product S = Q KT for 64 rows of Q.

    These rows begin at element ``first`` of sQ. The tile of K begins at element ``at`` of sK.
    """
    Br, Bc, STEPS = spec.Br, spec.Bc, ceil_div(spec.head_dim, STEP * spec.per_half)
    multiply = MULTIPLY[DTYPES[spec.dtype].matrix]

    def multiply_rows(rS, sQ, first, sK, at):
        multiply(rS, Bc, sQ, first, Br, 0, sK, at, Bc, 0, STEPS, 0)

    return multiply_rows


@part
def make_add_product(spec):
    """Make ``add_product(rO, rP, sV, at)``, which begins the product O += P V.

    P is in the registers rP. The tile of V begins at element ``at`` of sV. For 16-bit inputs, a row
    of sV is a row of V, and the matrix instruction transposes V. The instruction cannot transpose
    e4m3. For e4m3, a row of sV is therefore a column of V.
    """
    d, STEPS, ROWS = spec.columns, spec.Bc // (STEP * spec.per_half), spec.value_tile[0]
    multiply, across = MULTIPLY_REGISTERS[DTYPES[spec.dtype].matrix], int(spec.per_half == 1)

    def add_product(rO, rP, sV, at):
        multiply(rO, d, rP, 0, sV, at, ROWS, across, STEPS, 1)

    return add_product


@cache
def make_wait_scores(spec):
    """Make ``wait_scores(rS, more)``, which waits until the product S is complete in the registers
    rS.

    If ``more`` is true, one product that was begun after S may still be running.
    """
    return wait_with(spec.TM * spec.TN, spec.products)


@cache
def make_wait_output(spec):
    """Make ``wait_output(rO, more)``, which waits until the product P V is complete in the
    registers rO.

    If ``more`` is true, one product that was begun after P V may still be running.
    """
    return wait_with(spec.TM * spec.DN * 4, spec.products)


@part
def wait_with(registers, later):
    """Make ``wait(rT, more)``, which waits until a product is complete in the registers rT.

    rT has ``registers`` registers. If ``more`` is true, up to ``later`` products that were begun
    after this product may still be running. A product of float32 matrices counts as several
    products, one for each pair of planes. If ``more`` is false, no later product may be running.
    """

    def wait(rT, more):
        if more:
            wait_products(rT, registers, later)
        else:
            wait_products(rT, registers, 0)

    return wait


@part
def wait_for(registers, later):
    """Make ``wait(rT)``, which waits until a product is complete in the registers rT.

    rT has ``registers`` registers. Up to ``later`` products that were begun after this product may
    still be running. A product of float32 matrices counts as several products, one for each pair of
    planes.
    """

    def wait(rT):
        wait_products(rT, registers, later)

    return wait


@part
def make_tile_sums(spec):
    """Make ``tile_sums(rO)``, which returns the registers in which the product P V of one tile is
    computed.

    Normally these are rO, because the product is added to O. With planes they are separate
    registers.
    """
    RO, apart = spec.TM * spec.DN * 4, spec.planes > 1

    def tile_sums(rO):
        rT = rO
        if apart:
            rT = cuda.local.array(RO, float32)
        return rT

    return tile_sums


@part
def make_end_output(spec):
    """Make ``end_output(rO, rT, more)``, which waits until the product P V of one tile is complete
    in the registers rT.

    ``more`` is the argument of ``wait_output``. Normally rT is rO. With planes, rT is separate, and
    the function adds rT to rO.
    """
    RO, apart, wait_output = spec.TM * spec.DN * 4, spec.planes > 1, make_wait_output(spec)

    def end_output(rO, rT, more):
        wait_output(rT, more)
        if apart:
            for e in range(RO):
                rO[e] += rT[e]

    return end_output


@part
def make_unscale_output(spec):
    """Make ``unscale_output(rO, head)``, which multiplies O by the factors that the products have
    left out.

    - For e4m3, the factor is the scale of V. If V has scales of blocks, ``leave_unit`` multiplies
      O by them instead.
    - With dropout, one factor is 1 / (1 - dropout_p).
    - With scaled planes, one factor undoes the powers of two.
    """
    if spec.features.scales and not spec.features.value_block_scales:
        return _make_scale_values(spec)
    return planes.make_scale_output(spec) if spec.planes > 1 else _make_unscale_kept(spec)


@part
def _make_scale_values(spec):
    """Make ``scale_values(rO, head)``, which multiplies O by the scale of the K/V head's V."""
    RO = spec.TM * spec.DN * 4

    def scale_values(rO, head):
        unit = head.options.v_scale[head.b, head.hk]
        for e in range(RO):
            rO[e] *= unit

    return scale_values


@part
def _make_unscale_kept(spec):
    """Make ``unscale_kept(rO, head)``, which multiplies O by 1 / (1 - dropout_p) if there is
    dropout.
    """
    scale_kept = make_scale_kept(spec)

    def unscale_kept(rO, head):
        scale_kept(rO, head.options)

    return unscale_kept


@part
def make_round_p(spec):
    """Make ``round_p(rP, rS)``, which rounds P in the registers rS to 16 bits in the registers rP.

    A word of rP contains two neighbouring elements. Elements that ``drop`` has marked as dropped
    become 0. With planes, rP gets the planes of P instead. In e4m3, a word contains four elements.
    """
    if spec.per_half > 1:
        return _make_round_p_to_e4m3(spec)
    WORDS, pack = spec.p_registers, pack_p(spec)
    if spec.planes > 1:
        return planes.make_split_p(spec)

    def round_p(rP, rS):
        for n in range(WORDS):
            rP[n] = pack(rS[2 * n], rS[2 * n + 1])

    return round_p


@part
def _make_round_p_to_e4m3(spec):
    """Make ``round_p(rP, rS)``, which rounds P in the registers rS to e4m3 in the registers rP.

    A 32-bit word of rP contains four elements of a row. They are the thread's elements in a group
    of 16 columns: the columns 2 tx, 2 tx + 1, 2 tx + 8 and 2 tx + 9. The matrix instruction takes
    them as four neighbouring columns. The rows of V must therefore be in another order, too
    (``kernels/turned_values.py``).
    """
    WORDS = spec.p_registers

    def round_p(rP, rS):
        for n in range(WORDS):
            rP[n] = pack_e4m3(rS[4 * n], rS[4 * n + 1], rS[4 * n + 2], rS[4 * n + 3])

    return round_p


@part
def make_round_pair(spec):
    """Make ``round_pair(rP, n, low, high)``, which rounds two neighbouring elements of P to 16 bits
    and stores them in word n of rP.

    With planes, it stores the planes of the elements instead: one word for each plane.
    """
    pack = pack_p(spec)
    if spec.planes > 1:
        return planes.make_split_pair(spec)

    def round_pair(rP, n, low, high):
        rP[n] = pack(low, high)

    return round_pair


def pack_p(spec):
    """Return ``pack(p0, p1)``, which rounds two elements of P to one word of two 16-bit elements.

    With dropout, elements that ``drop`` has marked as dropped become 0.
    """
    matrix = DTYPES[spec.dtype].matrix
    return PACK_POSITIVE[matrix] if spec.features.dropout else CONVERSIONS[matrix][0]
