"""A warpgroup's products of float32 matrices on Hopper, where each matrix is a sum of planes.

A product of float32 matrices becomes several products of planes (``parts.fragments.planes``). They
are added to one sum, from the smallest to the largest. Each tile has a sum of its own. The planes
of a matrix are stored one after the other, both in shared memory and in the registers of P.
"""

from functools import cache

from fa_numba.device import device_function, float32, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.warpgroup import MULTIPLY, MULTIPLY_REGISTERS, STEP
from fa_numba.parts.fragments.planes import P_SCALE, make_split, make_units, pairs_of_planes
from fa_numba.parts.fragments.rows import make_write_fragments, make_write_rows
from fa_numba.parts.grid import make_query_rows
from fa_numba.parts.namespace import part
from fa_numba.tiling.wgmma import PANEL


@device_function
def _nothing(a, b, c, d, e):
    pass


@device_function
def _no_product(a, b, c, d):
    pass


@cache
def make_multiply_planes(spec):
    """Make ``multiply(rS, sQ, first, sK, at)``, which begins S = Q KT for planes.

    ``products.make_multiply`` explains the arguments.
    """
    rows, columns = ((n, spec.plane_panels * PANEL * n, 0) for n in (spec.Br, spec.Bc))
    return multiply_pairs(
        spec, spec.products, spec.Bc, rows, columns, ceil_div(spec.head_dim, STEP)
    )


@part
def multiply_pairs(spec, count, N, a, b, steps):
    """Make ``multiply(rT, sA, first, sB, at)``, which begins the product of 64 rows of A and ``N``
    columns of B, where A and B are split into planes.

    A begins at element ``first`` of sA, and B at element ``at`` of sB. The product is a sum of
    products of planes, the smallest first. Only the first ``count`` of these products are computed.
    The product of two planes takes ``steps`` instructions, and each instruction adds 16 terms of
    the sum.

    ``a`` describes the tile of A, and ``b`` describes the tile of B. Both are three numbers:

    1. the number of rows of the tile,
    2. the number of elements of a plane,
    3. 1 if the sum of the matrix product is over the rows of the tile, or 0 if it is over the
       columns.
    """
    (ROWS_A, plane_a, across_a), (ROWS_B, plane_b, across_b) = a, b
    i, j = pairs_of_planes(spec.planes)[count - 1]
    A, B, adds = i * plane_a, j * plane_b, int(count > 1)
    multiply = MULTIPLY[DTYPES[spec.dtype].matrix]
    before = multiply_pairs(spec, count - 1, N, a, b, steps) if adds else _nothing

    def multiply_planes(rT, sA, first, sB, at):
        before(rT, sA, first, sB, at)
        place_a, place_b = uint32(first + A), uint32(at + B)
        multiply(rT, N, sA, place_a, ROWS_A, across_a, sB, place_b, ROWS_B, across_b, steps, adds)

    return multiply_planes


@part
def make_product_of_planes(spec, count):
    """Make ``product(rT, rP, sV, at)``, which begins the first ``count`` products of a plane of P
    and a plane of V, and adds them in T.

    A plane is one of the 16-bit matrices whose sum is a float32 matrix. The planes of P are in the
    registers rP. The tile of V begins at element ``at`` of sV.
    """
    d, Bc, STEPS, WORDS = spec.columns, spec.Bc, spec.Bc // STEP, spec.p_registers // spec.planes
    i, j = pairs_of_planes(spec.planes)[count - 1]
    A, B, ADDS = i * WORDS, j * spec.plane_panels_v * PANEL * Bc, count > 1
    multiply, adds = MULTIPLY_REGISTERS[DTYPES[spec.dtype].matrix], int(ADDS)
    before = make_product_of_planes(spec, count - 1) if ADDS else _no_product

    def product(rT, rP, sV, at):
        before(rT, rP, sV, at)
        multiply(rT, d, rP, A, sV, uint32(at + B), Bc, 1, STEPS, adds)

    return product


@part
def make_split_pair(spec, times=P_SCALE):
    """Make ``split_pair(rP, n, low, high)``, which splits two elements of P, ``low`` and ``high``,
    into planes.

    rP contains the words of the first plane, then the words of the next plane, and so on. A word
    contains one plane of both elements. The function stores it as word number n of this plane. With
    scaled planes, both elements are first multiplied by ``times``.
    """
    WORDS, scaled = spec.p_registers // spec.planes, spec.features.scaled
    split, P = make_split(spec.dtype, spec.planes), times

    def split_pair(rP, n, low, high):
        if scaled:
            low, high = P * low, P * high
        split(rP, n, WORDS, low, high)

    return split_pair


@part
def make_split_p(spec, times=P_SCALE):
    """Make ``split_p(rP, rS)``, which splits P in the registers rS into planes in the registers rP.

    With scaled planes, P is first multiplied by ``times``.
    """
    WORDS, split_pair = spec.p_registers // spec.planes, make_split_pair(spec, times)

    def split_p(rP, rS):
        for n in range(WORDS):
            split_pair(rP, n, rS[2 * n], rS[2 * n + 1])

    return split_p


@part
def make_scale_output(spec):
    """Make ``scale_output(rO, head)``, which multiplies O by the factor that the products of planes
    have left out.

    The factor undoes the powers of two of scaled planes. With dropout, it also contains 1 / (1 -
    dropout_p).
    """
    RO, units = spec.TM * spec.DN * 4, make_units(spec)

    def scale_output(rO, head):
        _, unit = units(float32(1.0), head)
        for e in range(RO):
            rO[e] *= unit

    return scale_output


@part
def make_write_floats(spec):
    """Make ``write_floats(rO, O, row0, head, thread)``, which writes a warpgroup's rows of O in
    float32.

    If ``spec.aligned`` is false, the rows of O can start at any address.
    """
    query_rows = make_query_rows(spec)
    write = make_write_fragments(spec) if spec.aligned else make_write_rows(spec)

    def write_floats(rO, O, row0, head, thread):
        Oh = query_rows(O, head)
        write(rO, Oh, row0, uint32(Oh.shape[0]), thread)

    return write_floats
