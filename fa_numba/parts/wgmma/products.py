"""Products of a warpgroup: S = Q KT, and O += P V with P in registers."""

from functools import cache

from fa_numba.device import cuda, device_function, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.warpgroup import MULTIPLY, MULTIPLY_REGISTERS, STEP, wait_products
from fa_numba.tiling.wgmma import GROUP


@cache
def make_place(spec):
    """``place()``: which consumer warpgroup this thread is of, and its (ty, tx) there."""

    @device_function
    def place():
        thread = uint32(uint32(cuda.threadIdx.x) - GROUP)
        within = uint32(thread % uint32(GROUP))
        lane = uint32(thread % uint32(32))
        ty = uint32(within // uint32(32) * 16 + lane // uint32(4))
        return uint32(thread // uint32(GROUP)), ty, uint32(lane % uint32(4))

    return place


@cache
def make_begin_scores(spec):
    """``begin_scores(rS, sQ, first, sK, at)``: S = Q KT of the 64 rows from ``first`` on."""
    Br, Bc, STEPS = spec.Br, spec.Bc, ceil_div(spec.head_dim, STEP)
    multiply = MULTIPLY[DTYPES[spec.dtype].matrix]

    @device_function
    def begin_scores(rS, sQ, first, sK, at):
        multiply(rS, Bc, sQ, first, Br, 0, sK, at, Bc, 0, STEPS, 0)

    return begin_scores


@cache
def make_begin_output(spec):
    """``begin_output(rO, rP, sV, at)``: O += P V; V's rows run across the sum."""
    d, Bc, STEPS = spec.columns, spec.Bc, spec.Bc // STEP
    multiply = MULTIPLY_REGISTERS[DTYPES[spec.dtype].matrix]

    @device_function
    def begin_output(rO, rP, sV, at):
        multiply(rO, d, rP, sV, at, Bc, 1, STEPS, 1)

    return begin_output


@cache
def make_wait_scores(spec):
    """``wait_scores(rS, more)``: S is there; with ``more`` a later product may be on its way."""
    RS = spec.TM * spec.TN

    @device_function
    def wait_scores(rS, more):
        if more:
            wait_products(rS, RS, 1)
        else:
            wait_products(rS, RS, 0)

    return wait_scores


@cache
def make_wait_output(spec):
    """``wait_output(rO, more)``: O is there; with ``more`` a later product may be on its way."""
    RO = spec.TM * spec.DN * 4

    @device_function
    def wait_output(rO, more):
        if more:
            wait_products(rO, RO, 1)
        else:
            wait_products(rO, RO, 0)

    return wait_output


@cache
def make_round_p(spec):
    """``round_p(rP, rS)``: P in 16 bits, pairs of neighbours in a word."""
    WORDS = spec.p_registers
    pack, _ = CONVERSIONS[DTYPES[spec.dtype].matrix]

    @device_function
    def round_p(rP, rS):
        for n in range(WORDS):
            rP[n] = pack(rS[2 * n], rS[2 * n + 1])

    return round_p
