"""Specs of the forward kernels on tensor cores (``mma.sync``), for 16-bit inputs.

A spec says how the warps of a thread block share a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from fa_numba.integers import ceil_div, round_up
from fa_numba.tiling.mma_rows import CHUNK, TileRows
from fa_numba.tiling.spec import MAX_THREADS, Spec, check_shared, with_threads
from fa_numba.tiling.tiles import Tiles

# Measures that `ablate` can switch off in the forward kernels -> the algorithms that have them.
MEASURES = {
    "padding": ("fa1", "fa2"),
    "swizzle": ("fa1", "fa2"),
    "prefetch": ("fa1", "fa2"),
    "q_registers": ("fa1", "fa2"),
    "folded_scale": ("fa1", "fa2"),
    "wide_stores": ("fa2",),
}


@dataclass(frozen=True)
class MmaSpec(Spec):
    """A forward kernel on tensor cores.

    Normally a warp has 16 rows of S, or a multiple of 16, and all columns. With ``splits_keys`` a
    warp has all rows, and an equal part of the columns. Four threads share a row. Thread (ty, tx),
    with tx from 0 to 3, has the rows ty + 8 i. Of each 8 columns, it has the columns 2 tx and 2 tx
    + 1. The module ``intrinsics/matrix.py`` shows these elements in a table.

    field         meaning
    dtype         dtype of the 16-bit matrices
    splits_keys   whether the warps divide the columns of S instead of the rows
    ablated       the measures in ``MEASURES`` that are switched off
    stages        number of tiles of K, and of V, in shared memory

    Rows in shared memory are swizzled. If ``ablated`` contains "swizzle", they are padded instead.
    If ``ablated`` also contains "padding", they are neither swizzled nor padded.
    """

    dtype: str = "float16"
    splits_keys: bool = False
    ablated: tuple[str, ...] = ()
    stages: int = 1

    row_step = 8
    column_width = 2
    column_step = 8
    min_blocks = 1

    @property
    def folds_scale(self) -> bool:
        return super().folds_scale and "folded_scale" not in self.ablated

    @property
    def prefetches(self) -> bool:
        """Whether the next tiles are loaded while the kernel computes with the current tiles."""
        return "prefetch" not in self.ablated

    @property
    def stores_wide(self) -> bool:
        """Whether O is written to global memory in 16-byte stores.

        The threads then copy O from registers to the shared memory of sQ first.
        """
        fit = self.planes == 1 and self.columns == self.columns_k
        return self.aligned and fit and "wide_stores" not in self.ablated

    @property
    def DK(self) -> int:
        """Number of fragments of 16 columns along a row of Q or K. ``DN`` is the number for V."""
        return ceil_div(self.head_dim, 16) if self.head_dim_v else self.DN

    @property
    def columns_k(self) -> int:
        """Head dimension of Q and K, rounded up to a multiple of 16 (one fragment).

        ``columns`` is the rounded head dimension of V.
        """
        return 16 * self.DK if self.head_dim_v else self.columns

    @property
    def key_pieces(self) -> tuple[int, int]:
        rows = self.key_rows, self.value_rows
        of_k, of_v = (gcd(x.columns // (self.planes * CHUNK), self.threads) for x in rows)
        return of_k, of_v

    @property
    def warps(self) -> int:
        """Number of warps in a thread block."""
        return self.threads // 32

    @property
    def TM(self) -> int:
        return self.Br // 8 if self.splits_keys else super().TM

    @property
    def TN(self) -> int:
        return super().TN // (self.warps if self.splits_keys else 1)

    @property
    def warp_rows(self) -> int:
        """Distance in rows of S between the first rows of neighbouring warps.

        It is 0 with ``splits_keys``, because each warp then has all rows.
        """
        return 0 if self.splits_keys else 8 * self.TM

    @property
    def warp_columns(self) -> int:
        return 4 * self.TN if self.splits_keys else 0

    @property
    def rows(self) -> TileRows:
        """Layout of the rows of sQ in shared memory.

        The rows of sK have this layout too, except with pages of e4m3 (``key_rows``).
        """
        swizzled = "swizzle" not in self.ablated
        padded = not swizzled and "padding" not in self.ablated
        return TileRows(self.planes * self.columns_k, swizzled, padded)

    @property
    def key_rows(self) -> TileRows:
        """Layout of the rows of sK in shared memory.

        Normally it is the layout of sQ. With pages of e4m3, a row has half as many 16-bit elements,
        because each of these elements contains two e4m3 numbers.
        """
        if self.features.page_scales:
            return replace(self.rows, columns=self.columns_k // 2)
        return self.rows

    @property
    def value_rows(self) -> TileRows:
        """Layout of the rows of sV in shared memory.

        Normally it is the layout of the rows of O. With pages of e4m3, a row has half as many
        16-bit elements, because each of these elements contains two e4m3 numbers.
        """
        if self.features.page_scales:
            return replace(self.rows, columns=self.columns // 2)
        return self.output_rows

    @property
    def output_rows(self) -> TileRows:
        """Layout of the rows of O in shared memory."""
        columns = self.planes * self.columns
        return replace(self.rows, columns=columns) if self.head_dim_v else self.rows

    @property
    def scale_halves(self) -> int:
        """Number of 16-bit elements in shared memory for the scales of a tile of e4m3 K or V.

        There is a float32 scale for each 16 rows. The number is a multiple of 64.
        """
        return round_up(self.Bc // 8, 64) if self.features.page_scales else 0

    @property
    def plane_columns(self) -> tuple[int, int]:
        """Numbers of columns of one plane in global memory: first of Q or K, then of V."""
        return self.columns_k, getattr(self, "of_values", self).columns

    @property
    def row_halves(self) -> int:
        """Number of 16-bit elements of a row of Q in global memory, and of a row of 16-bit K.

        With planes, a row contains all planes, each padded to ``columns_k`` elements.
        """
        return self.head_dim if self.planes == 1 else self.planes * self.columns_k

    @property
    def row_halves_v(self) -> int:
        """Number of 16-bit elements of a row of 16-bit V in global memory.

        With planes, a row contains all planes, each padded to ``columns`` elements.
        """
        return self.d_v if self.planes == 1 else self.planes * self.columns

    @property
    def loads_aligned(self) -> bool:
        """Whether rows in global memory are aligned to 16 bytes. Rows of planes always are."""
        return self.aligned or self.planes > 1

    @property
    def tile_halves(self) -> tuple[int, ...]:
        """Numbers of 16-bit elements in shared memory: of sQ, one stage of sK, one stage of sV."""
        of_columns = (
            self.Bc * x.pitch + self.scale_halves for x in (self.key_rows, self.value_rows)
        )
        return self.Br * self.rows.pitch, *of_columns

    @property
    def exchange_floats(self) -> int:
        """Number of floats of sO, which is needed only if the warps divide the keys.

        The warps store their parts of O, l and m in sO. The warp that owns a row then reads them.
        """
        return (self.warps - 1) * self.Br * (self.columns + 2) if self.splits_keys else 0

    @property
    def shared_bytes(self) -> int:
        rows, *columns = self.tile_halves
        return 2 * (rows + self.stages * sum(columns)) + 4 * self.exchange_floats

    @property
    def accumulators(self) -> int:
        """Number of registers of a thread for its parts of O and S.

        With planes, a thread has two sums for each element of S.
        """
        return self.TM * (4 * self.DN + min(self.planes, 2) * self.TN)

    @property
    def reads_bias(self) -> bool:
        """Whether a tile's bias is loaded to registers while the scores are computed.

        The value is False if S and O leave too few registers for the bias.
        """
        scores = self.TM * self.TN
        return super().reads_bias and (scores <= 32 or self.accumulators + scores <= 160)

    @property
    def reads_state(self) -> bool:
        return super().reads_state and self.accumulators <= 160

    @property
    def keeps_q(self) -> bool:
        """Whether a thread holds all fragments of Q in registers during the loop over K and V.

        This needs three conditions:

        - Q has at most 128 columns.
        - Q, S and O together take at most 160 registers of a thread. With planes they take at most
          128 registers.
        - ``ablated`` does not contain "q_registers".
        """
        room = 160 if self.planes == 1 else 128
        fit = self.columns_k <= 128 and self.accumulators + self.q_registers <= room
        return fit and "q_registers" not in self.ablated

    @property
    def q_registers(self) -> int:
        """Number of registers of a thread for all of Q's fragments.

        If ``keeps_q`` is False, a thread holds only a few of the fragments at a time.
        """
        return self.planes * 2 * self.TM * self.DK

    @property
    def fits_registers(self) -> bool:
        """Whether O and S take at most 192 of a thread's 255 registers.

        The other registers are for operands, addresses, and numbers of each row such as l and m.
        With pages of e4m3, Q must be in registers too (``keeps_q``).
        """
        kept = self.keeps_q or not self.features.page_scales  # the order of Q's columns is changed
        return self.accumulators <= 192 and kept


@dataclass(frozen=True)
class StandardSpec(MmaSpec):
    """The kernels of standard attention on tensor cores.

    A kernel has a tile of S or a tile of O in registers, never both. If P or dS is an operand of a
    product, as in P V, the kernel loads the tile of P or dS in pieces of ``step`` columns. Shared
    memory has two stages: while the piece in one stage is multiplied, the next piece is loaded to
    the other stage.
    """

    folds_scale = False

    @property
    def step(self) -> int:
        """Number of columns of P or dS that one stage in shared memory contains.

        The number is 64, 32 or 16, whichever is the largest that divides ``Bc``. The products
        PT dO and dST Q load rows of P or dS instead of columns. In these products, a stage contains
        this number of rows.
        """
        return next(n for n in (64, 32, 16) if self.Bc % n == 0)

    @property
    def rows_s(self) -> TileRows:
        """Layout of the rows of sS: (Br, Bc) in shared memory."""
        return TileRows(self.Bc)

    @property
    def rows_p(self) -> TileRows:
        """Layout of the rows of one stage of sP: (Br, step) in shared memory."""
        return TileRows(self.step)

    @property
    def rows_t(self) -> TileRows:
        """Layout of the rows of one stage of the transposed sP: (step, Br) in shared memory."""
        return TileRows(self.Br)

    @property
    def tile_halves(self) -> tuple[int, ...]:
        """Numbers of 16-bit elements of sQ, sK and sS, for S = Q KT."""
        pitch = self.rows.pitch
        return self.Br * pitch, self.Bc * pitch, self.Br * self.rows_s.pitch

    @property
    def stage_halves(self) -> tuple[int, ...]:
        """Numbers of 16-bit elements of sP and sV in one stage of the product P V."""
        return self.Br * self.rows_p.pitch, self.step * self.value_rows.pitch

    @property
    def transposed_halves(self) -> tuple[int, ...]:
        """Numbers of 16-bit elements of sP and sdO in one stage of the product PT dO."""
        return self.step * self.rows_t.pitch, self.step * self.rows.pitch

    @property
    def shared_bytes(self) -> int:
        """Number of bytes of shared memory, for the kernel of this spec that needs the most."""
        stages = max(sum(self.stage_halves), sum(self.transposed_halves))
        return 2 * max(sum(self.tile_halves), 2 * stages)

    @property
    def accumulators(self) -> int:
        """Number of registers of a thread for its part of S or of O, whichever needs more
        registers.
        """
        return self.TM * max(self.TN, 4 * self.DN)

    @property
    def keeps_q(self) -> bool:
        return self.TM * (self.TN + 2 * self.DK) <= 160

    @property
    def fits_registers(self) -> bool:
        return self.accumulators <= 128

    @property
    def min_blocks_of_scores(self) -> int:
        """Number of thread blocks that must fit in a multiprocessor's registers, for the kernel S =
        Q KT.

        If S and the fragments of Q that a thread holds (``keeps_q``) take at most 96 registers, the
        number is 12 divided by the warps of a thread block, rounded down, and at least 1. Otherwise
        it is 1.
        """
        kept = self.q_registers if self.keeps_q else 0
        return max(1, 12 // self.warps) if self.TM * self.TN + kept <= 96 else 1

    @property
    def min_blocks_of_output(self) -> int:
        """Number of thread blocks that must fit in a multiprocessor's registers, for the kernel O =
        P V.

        If a thread's part of O takes at most 64 registers, the number is 16 divided by the warps of
        a thread block, rounded down, and at least 1. Otherwise it is 1.
        """
        return max(1, 16 // self.warps) if self.TM * 4 * self.DN <= 64 else 1


def select_mma_spec(
    tiles: Tiles,
    head_dim: int,
    shared_limit: int,
    kind: type[MmaSpec] = MmaSpec,
    **facts: Any,
) -> Any:
    """Return the spec on tensor cores for ``tiles``.

    ``kind`` is the class of the spec, and ``facts`` are the fields of the spec except the sizes.
    ``shared_limit`` is the shared memory of a thread block in bytes.

    The option ``splits_keys`` in ``facts`` decides which numbers of warps a thread block can have:

    splits_keys   numbers of warps   part of a tile of S that one warp has
    False         Br / 32, Br / 16   all columns, and 32 rows or 16 rows
    True          4, 8, 2            all rows, and Bc / 4, Bc / 8 or Bc / 2 columns

    A number is possible if it is an integer, and if the columns of a warp are a multiple of 16.
    ``tiles.threads`` selects one of the numbers: it must be 32 times the number of warps. If
    ``tiles.threads`` is None, the spec has the first possible number that fits in registers.

    Raise ValueError if Br or Bc is not a multiple of 16, if no number of warps is possible, or if
    the tiles do not fit in registers and shared memory.
    """
    splits_keys = facts.get("splits_keys", False)
    if tiles.Br % 16 or tiles.Bc % 16:
        raise ValueError(
            "tiles.Br and tiles.Bc must be multiples of 16 on unit 'mma', got "
            f"Br={tiles.Br}, Bc={tiles.Bc}"
        )
    if splits_keys and tiles.Bc % 32:
        raise ValueError(
            f"tiles.Bc must be a multiple of 32 with warp_partition='keys', got {tiles.Bc}; the "
            "columns are divided among 2, 4 or 8 warps, and the part of each warp must be a "
            "multiple of 16 columns"
        )
    counts = [tiles.Br // rows for rows in (32, 16) if tiles.Br % rows == 0]
    if splits_keys:
        counts = [warps for warps in (4, 8, 2) if tiles.Bc % (16 * warps) == 0]
    facts["stages"] = tiles.stages
    found = [kind(head_dim, tiles.Br, tiles.Bc, 4, 8 * warps, **facts) for warps in counts]
    return chosen(found, tiles, head_dim, shared_limit)


def chosen(found: list, tiles: Tiles, head_dim: int, shared_limit: int) -> Any:
    """Return the first spec in ``found`` that fits in registers.

    The specs in ``found`` differ only in the number of threads. If ``tiles.threads`` is a number,
    return the spec with this number of threads instead. ``shared_limit`` is the shared memory of a
    thread block in bytes. Raise ValueError if no spec fits in registers and shared memory, or if no
    spec has this number of threads.
    """
    staged = f", stages={tiles.stages}" if tiles.stages > 1 else ""
    found = [s for s in found if s.threads <= MAX_THREADS and s.fits_registers]
    if not found:
        raise ValueError(
            f"tiles must fit in the registers of at most {MAX_THREADS} threads, got Br={tiles.Br}, "
            f"Bc={tiles.Bc} at head_dim={head_dim} on unit 'mma'; choose smaller tiles"
        )
    check_shared(found[0], shared_limit, staged)
    return with_threads(found, tiles, " on unit 'mma'")
