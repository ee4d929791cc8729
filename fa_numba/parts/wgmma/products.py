"""Products of warpgroups, copies of tiles."""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.barriers import arrive_named, sync_named
from fa_numba.intrinsics.bulk_copy import commit_boxes, fence_async_proxy, load_box, store_box, wait_boxes_read
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.mbarrier import (
    expect_bytes,
)
from fa_numba.intrinsics.shared import store2
from fa_numba.intrinsics.warpgroup import MULTIPLY, MULTIPLY_REGISTERS, wait_products


@cache
def make_load_rows(spec):
    """A tile of Bc rows."""
    return _load(spec, spec.Bc, spec.Bc)


@cache
def make_load_q(spec):
    return _load(spec, spec.Br, 64)


@cache
def _load(spec, rows, box):
    panels = spec.panels
    size = 2 * panels * 64 * rows

    @device_function
    def load_rows(sT, at, T, b, h, row0, barriers, barrier):
        expect_bytes(barriers, barrier, size)
        for n in range(panels):
            for r in range(rows // box):
                load_box(
                    sT, uint32(at + n * 64 * rows + r * box * 64), T, b, h,
                    uint32(row0 + r * box), 64 * n, barriers, barrier,
                )

    return load_rows


@cache
def make_begin_scores(spec):
    Br, Bc, STEPS = spec.Br, spec.Bc, -(-spec.head_dim // 16)
    multiply = MULTIPLY[DTYPES[spec.dtype].matrix]

    @device_function
    def begin_scores(rS, sQ, first, sK, at):
        multiply(rS, Bc, sQ, first, Br, 0, sK, at, Bc, 0, STEPS, 0)

    return begin_scores


@cache
def make_begin_output(spec):
    Bc, STEPS, N = spec.Bc, spec.Bc // 16, spec.columns
    multiply = MULTIPLY_REGISTERS[DTYPES[spec.dtype].matrix]

    @device_function
    def begin_output(rO, rP, sV, at):
        multiply(rO, N, rP, sV, at, Bc, 1, STEPS, 1)

    return begin_output


@cache
def make_wait_scores(spec):
    RS = spec.TM * spec.TN
    @device_function
    def wait_scores(rS):
        wait_products(rS, RS, 1)
    return wait_scores


@cache
def make_wait_first(spec):
    RS = spec.TM * spec.TN
    @device_function
    def wait_first(rS):
        wait_products(rS, RS, 0)
    return wait_first


@cache
def make_wait_output(spec):
    RO = spec.TM * spec.DN * 4
    @device_function
    def wait_output(rO):
        wait_products(rO, RO, 0)
    return wait_output


@cache
def make_pack(spec):
    TM, TN = spec.TM, spec.TN
    pack2, _ = CONVERSIONS[DTYPES[spec.dtype].matrix]

    @device_function
    def pack(rP, rS):
        for i in range(TM):
            for n in range(TN // 2):
                rP[i * (TN // 2) + n] = pack2(rS[i * TN + 2 * n], rS[i * TN + 2 * n + 1])

    return pack


@cache
def make_take_turn(spec):
    turns, count, C = spec.takes_turns, 128 * spec.consumers, spec.consumers

    @device_function
    def take_turn(wg):
        if turns:
            sync_named(uint32(1 + wg), count)

    return take_turn


@cache
def make_end_turn(spec):
    turns, count, C = spec.takes_turns, 128 * spec.consumers, spec.consumers

    @device_function
    def end_turn(wg):
        if turns:
            if C == 2:
                arrive_named(uint32(2 - wg), count)
            else:
                a = uint32(wg + 1) if wg < uint32(2) else uint32(0)
                b = uint32(wg + 2) if wg < uint32(1) else uint32(wg - 1)
                arrive_named(uint32(1 + a), count)
                arrive_named(uint32(1 + b), count)

    return end_turn


@cache
def make_first_turn(spec):
    turns, count, C = spec.takes_turns, 128 * spec.consumers, spec.consumers

    @device_function
    def first_turn(wg):
        if turns:
            if wg > uint32(0):
                arrive_named(uint32(1), count)
            if C == 3 and wg > uint32(1):
                arrive_named(uint32(2), count)

    return first_turn


@cache
def make_write_tile(spec):
    """O of a warpgroup's 64 rows by way of its rows of sQ."""
    TM, DN4, Br, panels = spec.TM, 4 * spec.DN, spec.Br, spec.panels
    pack2, _ = CONVERSIONS[DTYPES[spec.dtype].matrix]

    @device_function
    def write_tile(rO, sQ, at, O, wg, row0, b, h, ty, tx):
        first = uint32(at + (wg * 64 + ty) * 64 + 2 * tx)
        turn = uint32((ty % 8) * 8)
        for i in range(TM):
            for n in range(DN4 // 2):
                place = uint32(n // 8 * 64 * Br + first + i * 8 * 64)
                place = uint32(place + (uint32(8 * (n % 8)) ^ turn))
                store2(sQ, place, pack2(rO[i * DN4 + 2 * n], rO[i * DN4 + 2 * n + 1]))
        fence_async_proxy()
        sync_named(uint32(5 + wg), 128)
        if ty == uint32(0) and tx == uint32(0):
            for n in range(panels):
                store_box(O, b, h, row0, 64 * n, sQ, uint32(at + n * 64 * Br + wg * 64 * 64))
            commit_boxes()
            wait_boxes_read()

    return write_tile


@cache
def make_rescale(spec):
    TM, DN4, tests = spec.TM, 4 * spec.DN, spec.tests_factor

    @device_function
    def rescale(rO, rf):
        changes = True
        if tests:
            changes = rf[0] != float32(1.0) or rf[1] != float32(1.0)
        if changes:
            for i in range(TM):
                for c in range(DN4):
                    rO[i * DN4 + c] *= rf[i]

    return rescale
