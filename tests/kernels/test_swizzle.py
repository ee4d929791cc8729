"""Where tiles lie in shared memory on CUDA cores: whole sectors, and no bank conflicts."""

import functools
import itertools

import numpy as np
import pytest
from backward_helpers import random_gradients

import fa_numba
from fa_numba import Tiles
from fa_numba.choices import units
from fa_numba.host import planning
from fa_numba.tiling import SimtBackwardSpec, SimtSpec, select_spec, splits

KB = 1024
KINDS = (SimtSpec, SimtBackwardSpec)


def place(rows, r, c):
    """Where column c of row r lies; r and c are numbers or arrays."""
    return r * rows.pitch + (c ^ rows.unit * (r // rows.step % rows.ways))


def lie_apart(places, width):
    """Whether lanes, along the last axis, find ``width`` floats each in banks of their own."""
    banks = np.sort(places // width % (32 // width), axis=-1)
    return (np.diff(banks, axis=-1) > 0).all()


def table(*axes):
    """Numbers to combine, each array along an axis of its own."""
    return np.ix_(*(np.asarray(axis) for axis in axes))


def every_spec(head_dims, tiles=((4, 8), (12, 24), (16, 40), (32, 64), (64, 48), (128, 128))):
    """Every way to share the tiles, once for each way that rows lie and are read."""
    seen = set()
    for d, (Br, Bc), kind in itertools.product(head_dims, tiles, KINDS):
        for spec in splits(Br, Bc, d, kind):
            facts = (kind, Br, Bc, d, spec.tx_count, spec.ty_count)
            if facts not in seen:
                seen.add(facts)
                yield spec


def tiles_of(spec):
    """(rows, how many) of the tiles of Q, K, V and P."""
    both = (spec.rows_q, spec.rows_k, spec.rows_v, spec.rows_p)
    return list(zip(both, (spec.Br, spec.Bc, spec.Bc, spec.Br), strict=True))


def test_every_head_dim_lies_without_bank_conflicts_in_whole_sectors():
    """By brute force, over what warps do in parts/simt."""
    checked = set()
    tuned = every_spec([128], [(128, 96)])
    for spec in itertools.chain(every_spec(range(1, 257), [(32, 64), (64, 24)]), tuned):
        TX, (q, k, v, p) = spec.tx_count, (rows for rows, _ in tiles_of(spec))
        facts = (q, k, v, p, spec.d4, TX, type(spec))
        if facts in checked:
            continue
        checked.add(facts)
        # A column of Q or P in 16 / TX rows, of K in eight; a row of V, and of what else is read so
        r, c, n = table(range(0, 16, 2), range(0, spec.d4, 4), range(16 // TX))
        assert lie_apart(place(q, r + n, c), 4)
        r, c, n = table(range(0, 16, 8), range(0, spec.d4, 4), range(8))
        assert lie_apart(place(k, r + n, c), 4)
        r, c, n = table(range(8), range(0, spec.columns, 32), range(8))
        for rows in (q, k, v) if isinstance(spec, SimtBackwardSpec) else (v,):
            assert lie_apart(place(rows, r, c + 4 * n), 4)
        r, c, n = table(range(0, spec.Br, 2), range(0, spec.Bc, 4), range(16 // TX))
        assert lie_apart(place(p, r + n, c), 4)
        # P is written, TX neighbours of 32 / TX rows
        r, c, n = table(range(0, spec.Br, 32 // TX), range(0, spec.Bc, TX), range(32))
        assert lie_apart(place(p, r + n // TX, c + n % TX), 1)

        # Both halves of a sector of global memory lie in one 32 bytes of shared memory.
        r, c = np.meshgrid(np.arange(16), np.arange(0, spec.d4 - 4, 4))
        for rows in (q, k, v):
            found = place(rows, r, c) // 8 == place(rows, r, c + 4) // 8
            assert found[(r * spec.d4 + c) % 8 == 0].all()
        r, c = table(range(16), range(0, spec.Bc, 8))
        assert (place(p, r, c) // 8 == place(p, r, c + 4) // 8).all()
    assert len(checked) > 256


# --- on the emulator -------------------------------------------------------------------------

# A value a row, which one lane reads or writes, and sums of dQ, which are added one by one.
PARTIAL = {"L", "l", "m", "D"}


def both_splits(d, kind):
    """Tiles whose threads lie in rows of 8, and of 16."""
    found = {}
    for Br, Bc in ((32, 64), (64, 32), (64, 64)):
        for threads in sorted({s.threads for s in splits(Br, Bc, d, kind)}):
            tiles = Tiles(Br, Bc, threads)
            found.setdefault(select_spec(tiles, d, 227 * KB, kind).tx_count, tiles)
    assert set(found) == {8, 16}
    return found.values()


def counted(algorithm, passes, tiles, N, d, causal):
    """What a call of one head moves: (counts, result)."""
    q, k, v, dout = (x[:1] for x in random_gradients(1, 1, 1, N, N, d))
    how = {"algorithm": algorithm, "causal": causal}
    if passes == "fwd":
        with fa_numba.count_accesses() as counts:
            result = fa_numba.attention(q, k, v, tiles=tiles, **how)
    else:
        out, lse = fa_numba.attention(q, k, v, return_lse=True, **how)
        with fa_numba.count_accesses() as counts:
            result = fa_numba.attention_backward(dout, q, k, v, out, lse, tiles=tiles, **how)
    return counts, result


def excess(counts, algorithm):
    """Sectors beyond those of the bytes that are moved, by array, but where there is a reason."""
    partial = PARTIAL | ({"dQ"} if algorithm == "fa2" else set())
    names = {a.array for a in counts.traffic if a.space == "global"} - partial
    moved = {n: counts.load_bytes[n] + counts.store_bytes[n] for n in names}
    assert all(moved.values())
    return {
        n: counts.total(space="global", array=n).sectors / (moved[n] / 32) - 1
        for n in names
        if 32 * counts.total(space="global", array=n).sectors != moved[n]
    }


ALGORITHMS = ("fa1", "fa2", "standard")


@pytest.mark.parametrize("passes, kind", [("fwd", SimtSpec), ("bwd", SimtBackwardSpec)])
@pytest.mark.parametrize("algorithm, d", [*((name, 64) for name in ALGORITHMS), ("fa1", 40)])
def test_sectors_are_the_count_and_banks_do_not_conflict(passes, kind, algorithm, d):
    for tiles in both_splits(d, kind):
        counts, _ = counted(algorithm, passes, tiles, 72, d, causal=True)
        assert excess(counts, algorithm) == {}
        assert counts.total(space="shared").conflicts == 0


@pytest.mark.parametrize("algorithm", ("fa1", "fa2"))
def test_rows_that_end_amid_a_sector_share_it_alone(algorithm):
    """Five chunks a row: what lies at a multiple of 32 bytes is still fetched once."""
    for passes, tiles in (("fwd", Tiles(32, 64)), ("bwd", Tiles(32, 32))):
        counts, _ = counted(algorithm, passes, tiles, 64, 20, causal=False)
        found = excess(counts, algorithm)
        assert counts.total(space="shared").conflicts == 0
        if passes == "fwd":
            assert set(found) <= {"V", "O"}
        for name in set(found) & {"Q", "K", "V", "dO"}:
            # Every other row of five chunks has a half of two sectors: six for five.
            assert found[name] == pytest.approx(1 / 5), name


def without(monkeypatch, *ablated):
    """Have plans take kernels on CUDA cores without these."""
    planning.planned.cache_clear()
    select = functools.partial(select_spec, ablated=ablated)
    monkeypatch.setattr(units.tiling, "select_spec", select)


@pytest.mark.parametrize("algorithm", ("fa1", "fa2"))
def test_what_padding_costs_in_sectors_and_bare_rows_in_conflicts(monkeypatch, algorithm):
    """And the results are the same, bit by bit."""
    results = {}
    for passes, ablated in itertools.product(
        ("fwd", "bwd"), ((), ("swizzle",), ("padding", "swizzle"))
    ):
        without(monkeypatch, *ablated)
        counts, result = counted(algorithm, passes, Tiles(32, 64), 64, 32, causal=True)
        results.setdefault(passes, result)
        assert np.array_equal(results[passes], result)
        sectors = {n: counts.total(space="global", kind="copy", array=n).sectors for n in "QK"}
        bytes_ = {n: counts.load_bytes[n] for n in "QK"}
        conflicts_ = counts.total(space="shared").conflicts
        padded = ablated == ("swizzle",)
        assert all(32 * sectors[n] == bytes_[n] * (1.5 if padded else 1) for n in "QK")
        assert (conflicts_ > 0) == (len(ablated) == 2)
    planning.planned.cache_clear()
