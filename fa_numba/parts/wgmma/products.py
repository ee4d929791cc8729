"""Products of a warpgroup: S = Q KT, and O += P V with P in registers."""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.matrix import CONVERSIONS, PACK_POSITIVE
from fa_numba.intrinsics.warpgroup import MULTIPLY, MULTIPLY_REGISTERS, STEP, wait_products
from fa_numba.parts.dropout import make_scale_kept
from fa_numba.parts.fragments.planes import make_score_factor as make_score_factor
from fa_numba.parts.namespace import part
from fa_numba.parts.wgmma import planes
from fa_numba.tiling.wgmma import PANEL


@part
def make_begin_scores(spec):
    """``begin_scores(rS, sQ, q_stage, w, sK, stage)``: S = Q KT of warpgroup w's rows of a slot of
    Q, with a slot of K.
    """
    (NQ, NK, _), own, multiply = spec.tile_halves, PANEL * spec.consumer_rows, make_multiply(spec)
    if spec.planes > 1:
        multiply = planes.make_multiply_planes(spec)

    def begin_scores(rS, sQ, q_stage, w, sK, stage):
        multiply(rS, sQ, uint32(q_stage * NQ + own * w), sK, uint32(stage * NK))

    return begin_scores


@part
def make_begin_output(spec):
    """``begin_output(rO, rP, sV, stage)``: O += P V, with a slot of V; of planes O = P V."""
    NV, add_product = spec.tile_halves[2], make_add_product(spec)
    if spec.planes > 1:
        add_product = planes.make_product_of_planes(spec, spec.products)

    def begin_output(rO, rP, sV, stage):
        add_product(rO, rP, sV, uint32(stage * NV))

    return begin_output


@part
def make_multiply(spec):
    """``multiply(rS, sQ, first, sK, at)``: S = Q KT of the 64 rows from ``first`` on."""
    Br, Bc, STEPS = spec.Br, spec.Bc, ceil_div(spec.head_dim, STEP)
    multiply = MULTIPLY[DTYPES[spec.dtype].matrix]

    def multiply_rows(rS, sQ, first, sK, at):
        multiply(rS, Bc, sQ, first, Br, 0, sK, at, Bc, 0, STEPS, 0)

    return multiply_rows


@part
def make_add_product(spec):
    """``add_product(rO, rP, sV, at)``: O += P V, V's tile from ``at`` on, whose rows in memory run
    across the sum.
    """
    d, Bc, STEPS = spec.columns, spec.Bc, spec.Bc // STEP
    multiply = MULTIPLY_REGISTERS[DTYPES[spec.dtype].matrix]

    def add_product(rO, rP, sV, at):
        multiply(rO, d, rP, 0, sV, at, Bc, 1, STEPS, 1)

    return add_product


@cache
def make_wait_scores(spec):
    """``wait_scores(rS, more)``: S is there; with ``more`` a later product may be on its way."""
    return wait_with(spec.TM * spec.TN, spec.products)


@cache
def make_wait_output(spec):
    """``wait_output(rO, more)``: O is there; with ``more`` a later product may be on its way."""
    return wait_with(spec.TM * spec.DN * 4, spec.products)


@part
def wait_with(registers, later):
    """``wait(rT, more)``: T is there, of so many registers; with ``more`` so many later products
    may be on their way.
    """

    def wait(rT, more):
        if more:
            wait_products(rT, registers, later)
        else:
            wait_products(rT, registers, 0)

    return wait


@part
def wait_for(registers, later):
    """``wait(rT)``: T is there, of so many registers; so many later products may be on their
    way.
    """

    def wait(rT):
        wait_products(rT, registers, later)

    return wait


@part
def make_tile_sums(spec):
    """``tile_sums(rO)``: registers for P V of one tile: O itself, of planes others."""
    RO, apart = spec.TM * spec.DN * 4, spec.planes > 1

    def tile_sums(rO):
        rT = rO
        if apart:
            rT = cuda.local.array(RO, float32)
        return rT

    return tile_sums


@part
def make_end_output(spec):
    """``end_output(rO, rT, more)``: O is there (``wait_output``), with T, one tile's P V: T is O
    itself, or, of planes, added to it.
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
    """``unscale_output(rO, head)``: O over 1 - p of dropout, or over the powers of planes."""
    return planes.make_scale_output(spec) if spec.planes > 1 else _make_unscale_kept(spec)


@part
def _make_unscale_kept(spec):
    scale_kept = make_scale_kept(spec)

    def unscale_kept(rO, head):
        scale_kept(rO, head.options)

    return unscale_kept


@part
def make_round_p(spec):
    """``round_p(rP, rS)``: P, without what ``drop`` has marked, in 16 bits, pairs of neighbours in
    a word.
    """
    WORDS, pack = spec.p_registers, pack_p(spec)
    if spec.planes > 1:
        return planes.make_split_p(spec)

    def round_p(rP, rS):
        for n in range(WORDS):
            rP[n] = pack(rS[2 * n], rS[2 * n + 1])

    return round_p


@part
def make_round_pair(spec):
    """``round_pair(rP, n, low, high)``: two neighbours in P in 16 bits, to word n."""
    pack = pack_p(spec)
    if spec.planes > 1:
        return planes.make_split_pair(spec)

    def round_pair(rP, n, low, high):
        rP[n] = pack(low, high)

    return round_pair


def pack_p(spec):
    """``pack(p0, p1)``: two of P in 16 bits; 0 for those that ``drop`` has marked."""
    matrix = DTYPES[spec.dtype].matrix
    return PACK_POSITIVE[matrix] if spec.features.dropout else CONVERSIONS[matrix][0]
