"""Rows of tiles in shared memory: no bank conflicts, and sectors of 32 bytes fetched once."""

import numpy as np
import pytest
from mma_helpers import half_inputs

import fa_numba
from fa_numba import Tiles
from fa_numba.parts.mma.chunks import ChunkMap
from fa_numba.tiling.mma_rows import TileRows

COLUMNS = range(16, 257, 16)
# Kernels that move each element of these arrays in copies.
COPIED = ("Q", "K", "V", "dO", "O", "S", "P", "dS", "dP")


def places(rows):
    """Places in elements, (16, chunks): of chunk c of row r, as TileRows says in words."""
    chunks = rows.columns // 8
    g = max(n for n in (1, 2, 4, 8) if chunks % n == 0) if rows.swizzled else 1
    r, c = np.ogrid[:16, :chunks]
    return r * rows.pitch + 8 * (c ^ (r // (8 // g)) % g)


@pytest.mark.parametrize("columns", COLUMNS)
def test_eight_rows_of_a_chunk_lie_in_other_banks(columns):
    for rows in (TileRows(columns), TileRows(columns, swizzled=False, padded=True)):
        at = places(rows)
        assert sorted(at.flat) == sorted({*at.flat})
        for first in (0, 8):
            banks = at[first : first + 8] // 8 % 8
            assert all(sorted(column) == list(range(8)) for column in banks.T)
    assert rows.pitch == columns + 8 and TileRows(columns).pitch == columns


@pytest.mark.parametrize("columns", COLUMNS)
def test_the_chunks_of_a_sector_stay_together(columns):
    pieces = places(TileRows(columns)) // 16
    assert (pieces[:, ::2] == pieces[:, 1::2]).all()
    padded = places(TileRows(columns, swizzled=False, padded=True)) // 16
    assert (padded[1::2, ::2] != padded[1::2, 1::2]).all()


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_turn_ends_with_a_group_of_chunks(columns):
    """So that what threads exchange is among the chunks that they copy in one turn."""
    for threads in range(32, 513, 32):
        assert ChunkMap(16, columns // 8, threads).width % TileRows(columns).group == 0


def counted(algorithm, d, N, passes, **options):
    """What the emulator counts of one call, and its plan."""
    q, k, v = half_inputs("float16", 1, 1, 1, N, N, d)
    dout = half_inputs("float16", 1, 1, 1, N, N, d, seed=1)[0]
    how = {"algorithm": algorithm, **options}
    with fa_numba.device.using("emulator"):
        if passes == "fwd":
            with fa_numba.count_accesses() as counts:
                fa_numba.attention(q, k, v, **how)
            return counts
        out, lse = fa_numba.attention(q, k, v, algorithm=algorithm, return_lse=True)
        with fa_numba.count_accesses() as counts:
            fa_numba.attention_backward(dout, q, k, v, out, lse, **how)
        return counts


def assert_sectors_are_bytes(counts):
    """Copies of whole sectors alone: each counts its own 32 bytes, once."""
    kinds = {}
    for access, traffic in counts.traffic.items():
        if access.space == "global" and access.array in COPIED:
            of = kinds.setdefault((access.array, access.kind), [])
            of.append(traffic.sectors)
    arrays = {array for array, kind in kinds if kind == "copy"}
    alone = {a for a in arrays if (a, "load") not in kinds and (a, "atomic") not in kinds}
    assert {"Q", "K", "V"} & alone
    for array in alone:
        assert sum(kinds[array, "copy"]) == counts.load_bytes[array] / 32, array


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "standard"])
@pytest.mark.parametrize("d", [16, 80, 96, 128])
def test_a_forward_pass_fetches_each_sector_once(algorithm, d):
    counts = counted(algorithm, d, 64, "fwd", tiles=Tiles(32, 32))
    assert_sectors_are_bytes(counts)
    assert counts.total(space="shared").conflicts == 0


@pytest.mark.parametrize(
    "algorithm, d",
    [("standard", 64), *((name, d) for name in ("fa1", "fa2") for d in (64, 96, 192))],
)
def test_a_backward_pass_fetches_each_sector_once(algorithm, d):
    counts = counted(algorithm, d, 64, "bwd", tiles=Tiles(32, 32))
    assert_sectors_are_bytes(counts)
    assert counts.total(space="shared").conflicts == 0


def test_what_padding_and_nothing_cost():
    """Padded rows take half as many sectors more, bare ones bank conflicts."""
    found = {}
    for left_out in ((), ("swizzle",), ("swizzle", "padding")):
        counts = counted("fa2", 64, 128, "fwd", tiles=Tiles(64, 64), ablate=left_out)
        copies = counts.total(space="global", kind="copy").sectors
        found[len(left_out)] = copies / (sum(counts.load_bytes[n] for n in "QKV") / 32)
        conflicts = counts.total(space="shared").conflicts
        assert (conflicts > 0) == (len(left_out) == 2)
    assert found == {0: 1.0, 1: 1.5, 2: 1.0}
