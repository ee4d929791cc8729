"""How the warps of a block share a tile on tensor cores (``mma.sync``), in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from fa_numba.integers import ceil_div
from fa_numba.tiling.mma_rows import CHUNK, TileRows
from fa_numba.tiling.spec import MAX_THREADS, Spec, check_shared, with_threads
from fa_numba.tiling.tiles import Tiles

# Measures that the forward kernels on tensor cores can do without, and whose they are.
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

    A warp takes 16 rows of S, or several times 16, and all columns; or, with ``splits_keys``, all
    rows and an equal part of the columns. Thread (ty, tx) is place tx of 4 in group ty of a
    fragment (intrinsics/matrix.py): it owns the rows ty + 8 i and, of each 8 columns, 2 tx and
    2 tx + 1. ``ablated`` are those of MEASURES that are left out: without its swizzle a row is
    padded, unless that is left out too. ``stages`` is how many tiles of K and of V are in shared
    memory.
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
        """Whether tiles are on their way while others are computed with."""
        return "prefetch" not in self.ablated

    @property
    def stores_wide(self) -> bool:
        """Whether O leaves in 16-byte stores, by way of Q's rows in shared memory."""
        fit = self.planes == 1 and self.columns == self.columns_k
        return self.aligned and fit and "wide_stores" not in self.ablated

    @property
    def DK(self) -> int:
        """``DN`` of Q and K: fragments along their head dimension."""
        return ceil_div(self.head_dim, 16) if self.head_dim_v else self.DN

    @property
    def columns_k(self) -> int:
        """``columns`` of Q and K."""
        return 16 * self.DK if self.head_dim_v else self.columns

    @property
    def key_pieces(self) -> tuple[int, int]:
        of_k, of_v = (gcd(n // CHUNK, self.threads) for n in (self.columns_k, self.columns))
        return of_k, of_v

    @property
    def warps(self) -> int:
        """Warps in a block."""
        return self.threads // 32

    @property
    def TM(self) -> int:
        return self.Br // 8 if self.splits_keys else super().TM

    @property
    def TN(self) -> int:
        return super().TN // (self.warps if self.splits_keys else 1)

    @property
    def warp_rows(self) -> int:
        """Rows of S from one warp's to the next warp's; 0 where every warp takes all rows."""
        return 0 if self.splits_keys else 8 * self.TM

    @property
    def warp_columns(self) -> int:
        return 4 * self.TN if self.splits_keys else 0

    @property
    def rows(self) -> TileRows:
        """How rows of sQ and sK lie in shared memory."""
        swizzled = "swizzle" not in self.ablated
        padded = not swizzled and "padding" not in self.ablated
        return TileRows(self.planes * self.columns_k, swizzled, padded)

    @property
    def value_rows(self) -> TileRows:
        """How rows of sV lie in shared memory."""
        columns = self.planes * self.columns
        return replace(self.rows, columns=columns) if self.head_dim_v else self.rows

    @property
    def plane_columns(self) -> tuple[int, int]:
        """Columns of a plane of Q or K in global memory, and of V."""
        return self.columns_k, getattr(self, "of_values", self).columns

    @property
    def row_halves(self) -> int:
        """16-bit elements of a row of Q or K in global memory; of planes it is padded too."""
        return self.head_dim if self.planes == 1 else self.planes * self.columns_k

    @property
    def row_halves_v(self) -> int:
        """16-bit elements of a row of V in global memory; of planes it is padded too."""
        return self.d_v if self.planes == 1 else self.planes * self.columns

    @property
    def loads_aligned(self) -> bool:
        """Whether rows in global memory are aligned to 16 bytes: planes always are."""
        return self.aligned or self.planes > 1

    @property
    def tile_halves(self) -> tuple[int, ...]:
        """16-bit elements of sQ and of a stage of sK and of sV in shared memory."""
        pitch = self.rows.pitch
        return self.Br * pitch, self.Bc * pitch, self.Bc * self.value_rows.pitch

    @property
    def exchange_floats(self) -> int:
        """Floats of sO, where warps that split the keys leave O, l and m for a row's owner."""
        return (self.warps - 1) * self.Br * (self.columns + 2) if self.splits_keys else 0

    @property
    def shared_bytes(self) -> int:
        rows, *columns = self.tile_halves
        return 2 * (rows + self.stages * sum(columns)) + 4 * self.exchange_floats

    @property
    def accumulators(self) -> int:
        """Registers of one thread's parts of O and of S; of planes S has two sums."""
        return self.TM * (4 * self.DN + min(self.planes, 2) * self.TN)

    @property
    def reads_bias(self) -> bool:
        """Whether a bias is read ahead: the widest S and O leave no registers for it."""
        scores = self.TM * self.TN
        return super().reads_bias and (scores <= 32 or self.accumulators + scores <= 160)

    @property
    def reads_state(self) -> bool:
        return super().reads_state and self.accumulators <= 160

    @property
    def keeps_q(self) -> bool:
        """Whether Q's fragments stay in registers: where S, O and they leave room for the rest."""
        room = 160 if self.planes == 1 else 128
        fit = self.columns_k <= 128 and self.accumulators + self.q_registers <= room
        return fit and "q_registers" not in self.ablated

    @property
    def q_registers(self) -> int:
        """Registers of Q's fragments; where they do not stay there few are in use at a time."""
        return self.planes * 2 * self.TM * self.DK

    @property
    def fits_registers(self) -> bool:
        """192 of a thread's 255; the rest is for operands, addresses and values of rows."""
        return self.accumulators <= 192


@dataclass(frozen=True)
class StandardSpec(MmaSpec):
    """Standard attention's kernels on tensor cores, which hold a tile of S or of O, never both.

    The products with S take ``step`` of a tile's columns at a time, in two stages: while one is
    multiplied the next is on its way.
    """

    folds_scale = False

    @property
    def step(self) -> int:
        """Columns of S in one stage of a product with it."""
        return next(n for n in (64, 32, 16) if self.Bc % n == 0)

    @property
    def rows_s(self) -> TileRows:
        """How rows of sS, Br x Bc, lie in shared memory."""
        return TileRows(self.Bc)

    @property
    def rows_p(self) -> TileRows:
        """How rows of a stage of sP, Br x step, lie in shared memory."""
        return TileRows(self.step)

    @property
    def rows_t(self) -> TileRows:
        """How rows of a stage of the transposed sP, step x Br, lie in shared memory."""
        return TileRows(self.Br)

    @property
    def tile_halves(self) -> tuple[int, ...]:
        """16-bit elements of sQ, sK and sS."""
        pitch = self.rows.pitch
        return self.Br * pitch, self.Bc * pitch, self.Br * self.rows_s.pitch

    @property
    def stage_halves(self) -> tuple[int, ...]:
        """16-bit elements of one stage of P V: sP and sV."""
        return self.Br * self.rows_p.pitch, self.step * self.value_rows.pitch

    @property
    def transposed_halves(self) -> tuple[int, ...]:
        """16-bit elements of one stage of PT dO: sP and sdO."""
        return self.step * self.rows_t.pitch, self.step * self.rows.pitch

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of the one of these kernels that takes most."""
        stages = max(sum(self.stage_halves), sum(self.transposed_halves))
        return 2 * max(sum(self.tile_halves), 2 * stages)

    @property
    def accumulators(self) -> int:
        """Registers of one thread's part of S, or of O."""
        return self.TM * max(self.TN, 4 * self.DN)

    @property
    def keeps_q(self) -> bool:
        return self.TM * (self.TN + 2 * self.DK) <= 160

    @property
    def fits_registers(self) -> bool:
        return self.accumulators <= 128

    @property
    def min_blocks_of_scores(self) -> int:
        """``min_blocks`` of S = Q KT: 12 warps on a multiprocessor where S and Q are few enough."""
        kept = self.q_registers if self.keeps_q else 0
        return max(1, 12 // self.warps) if self.TM * self.TN + kept <= 96 else 1

    @property
    def min_blocks_of_output(self) -> int:
        """``min_blocks`` of O = P V: 16 warps on a multiprocessor where O is small enough."""
        return max(1, 16 // self.warps) if self.TM * 4 * self.DN <= 64 else 1


def select_mma_spec(
    tiles: Tiles,
    head_dim: int,
    shared_limit: int,
    kind: type[MmaSpec] = MmaSpec,
    **facts: Any,
) -> Any:
    """The specialisation on tensor cores for ``tiles``: of ``kind``, with the fields ``facts``
    beside the sizes; ``shared_limit`` in bytes a block.

    ``tiles.threads`` is 32 a warp, and a warp takes 16 or 32 rows; None takes 32 where it can.
    With ``splits_keys`` 2, 4 or 8 warps share the columns, by 16 or several times 16; None takes 4.
    Raises ValueError for tiles that are no multiples of 16, or do not fit.
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
    """The first of these specialisations that fits, or the one with the threads asked for."""
    staged = f", stages={tiles.stages}" if tiles.stages > 1 else ""
    found = [s for s in found if s.threads <= MAX_THREADS and s.fits_registers]
    if not found:
        raise ValueError(
            f"tiles must fit in the registers of at most {MAX_THREADS} threads, got Br={tiles.Br}, "
            f"Bc={tiles.Bc} at head_dim={head_dim} on unit 'mma'; choose smaller tiles"
        )
    check_shared(found[0], shared_limit, staged)
    return with_threads(found, tiles, " on unit 'mma'")
