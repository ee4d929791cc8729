"""How the threads of a block share a tile on CUDA cores, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from fa_numba.integers import round_up
from fa_numba.tiling.spec import MAX_THREADS, GradientSpec, Spec, check_shared, with_threads
from fa_numba.tiling.tiles import Tiles

# 32-bit registers of a multiprocessor, and what a thread needs beside its accumulators.
REGISTERS = 65536
OTHER_REGISTERS = 96


# Floats in one word of each bank of shared memory: 32 banks of 4 bytes.
BANKS = 32


@dataclass(frozen=True)
class SharedRows:
    """Where the rows of a tile lie in shared memory, in floats.

    Column c of row r lies at ``r pitch + (c ^ unit (r // step % ways))``. Rows without padding keep
    the 32-byte sectors of global memory whole, which an asynchronous copy would else fetch twice;
    the exclusive or (a swizzle) puts rows that are read together in different banks all the same.
    """

    pitch: int
    unit: int = 4
    step: int = 1
    ways: int = 1

    @classmethod
    def swizzled(cls, columns: int, together: int, unit: int = 4) -> SharedRows:
        """Rows of ``columns`` floats without padding. ``unit`` floats at one place of ``together``
        neighbouring rows (both powers of two, at most 32 floats in all) lie in different banks.
        """
        places = BANKS // unit
        # Rows begin in this many different places and then in the first again.
        step = places // gcd(columns // unit, places)
        return cls(columns, unit, step, max(1, together // step))


@dataclass(frozen=True)
class SimtSpec(Spec):
    """A forward kernel on CUDA cores.

    Thread (ty, tx) owns the rows ty, ty + ty_count, ... and the columns tx, tx + tx_count, ... of
    S. Without the "swizzle" (in ``ablated``) rows in shared memory are padded, so that neighbouring
    lanes find theirs in different banks; without "padding" as well they are bare.
    """

    ablated: tuple[str, ...] = ()

    @property
    def key_pieces(self) -> tuple[int, int]:
        width = 4 if self.aligned else 1
        return self.d4 // width, self.columns // width

    @property
    def row_step(self) -> int:
        return self.ty_count

    @property
    def column_step(self) -> int:
        return self.tx_count

    @property
    def lane_step(self) -> int:
        return 2 if self.tx_count < BANKS and self.ty_count % 2 == 0 else 1

    @property
    def shares_evenly(self) -> bool:
        """Whether the threads cover the tile with equal parts, in whole warps."""
        whole = self.Bc % self.tx_count == 0 and self.Br % self.ty_count == 0
        return whole and self.threads % 32 == 0

    @property
    def d4(self) -> int:
        """Q's head dimension rounded up to whole 16-byte accesses."""
        return round_up(self.head_dim, 4)

    @property
    def whole_columns(self) -> int:
        """Columns of a row that is as wide as the threads reach, zeros beyond the head. Where a row
        ends amid a sector of global memory, an odd number of 16 bytes as there.
        """
        return self.columns + round_up(self.d_v, 4) % 8

    @property
    def width(self) -> int:
        """Floats of a row of Q or K in shared memory."""
        return self.d4

    @property
    def rows_q(self) -> SharedRows:
        """Rows of sQ: a column of 16 / TX of them is read at once, of neighbours in any case."""
        return self._rows(self.width, max(16 // self.tx_count, self.lane_step))

    @property
    def rows_k(self) -> SharedRows:
        """Rows of sK: a column of eight is read at once."""
        return self._rows(self.width, 8)

    @property
    def rows_v(self) -> SharedRows:
        """Rows of sV, which are read along."""
        return SharedRows(self.whole_columns)

    @property
    def rows_p(self) -> SharedRows:
        """Rows of sP: a warp writes TX neighbours of 32 / TX of them at once."""
        return self._rows(self.Bc, BANKS // self.tx_count, self.tx_count)

    def _rows(self, columns: int, together: int, unit: int = 4) -> SharedRows:
        if "swizzle" not in self.ablated:
            return SharedRows.swizzled(columns, together, unit)
        return SharedRows(columns + (0 if "padding" in self.ablated else unit))

    @property
    def tile_floats(self) -> tuple[int, ...]:
        """Floats of sQ, sK, sV and sP in shared memory."""
        columns = self.Bc * self.rows_k.pitch, self.Bc * self.rows_v.pitch
        return self.Br * self.rows_q.pitch, *columns, self.Br * self.rows_p.pitch

    @property
    def shared_bytes(self) -> int:
        return 4 * sum(self.tile_floats)

    @property
    def accumulators(self) -> int:
        """Registers of one thread's parts of O and of S or, once S is done with, of P V."""
        return self.TM * (4 * self.DN + max(self.TN, 4 * self.DN))

    @property
    def reads_per_fma(self) -> float:
        """16-byte reads of shared memory for each multiply-add of one thread, over both products:
        the split over threads with the fewest is the fastest.
        """
        reads = (self.TM + self.TN) * self.d4 / 4 + (self.TM / 4 + self.DN) * self.Bc
        return reads / (self.TM * self.TN * self.d4 + self.TM * 4 * self.DN * self.Bc)

    max_accumulators = 128  # of a thread

    @property
    def fits_registers(self) -> bool:
        most = min(self.max_accumulators, REGISTERS // self.threads - OTHER_REGISTERS)
        return self.threads <= MAX_THREADS and self.accumulators <= most

    @property
    def min_blocks(self) -> int:
        return 2 if self.threads <= 128 else 1


@dataclass(frozen=True)
class SimtBackwardSpec(GradientSpec, SimtSpec):
    """A backward kernel on CUDA cores: K serves two products, Q and dO lie as row tiles do, V as K.

    A thread owns CM rows of dK and dV, in groups of four.
    """

    @property
    def column_registers(self) -> int:
        """Registers of a thread's part of dK, and of dV."""
        return 4 * self.CM * self.DN

    @property
    def accumulators(self) -> int:
        """Registers of one thread's parts of dK and dV, and of S and dP."""
        columns = self.column_registers + self.of_values.column_registers
        return columns + 2 * self.TM * self.TN

    max_accumulators = 144  # at 256 columns dK and dV alone take 128

    @property
    def reads_per_fma(self) -> float:
        """16-byte reads of shared memory for each multiply-add, over the five products."""
        over_d = 2 * (self.TM + self.TN) * self.columns / 4
        over_rows = 2 * (self.CM / 4 + self.DN) * self.Br
        over_columns = (self.TM / 4 + self.DN) * self.Bc
        fmas = 2 * self.TM * self.TN * self.columns
        fmas += 4 * self.DN * (2 * self.CM * self.Br + self.TM * self.Bc)
        return (over_d + over_rows + over_columns) / fmas

    @property
    def shares_evenly(self) -> bool:
        return super().shares_evenly and self.Bc % (4 * self.ty_count) == 0

    @property
    def CM(self) -> int:
        """Rows of dK and dV in one thread."""
        return self.Bc // self.ty_count

    @property
    def width(self) -> int:
        """Floats of a row of Q, dO, K or V in shared memory."""
        return self.whole_columns

    @property
    def rows_v(self) -> SharedRows:
        """Rows of sV, which lie as K's: read along, they may."""
        return self.rows_k

    @property
    def tile_floats(self) -> tuple[int, ...]:
        """Floats of a row tile (sQ, sdO), a column tile (sK, sV) and a tile of S (sP, sdS)."""
        pitches = (self.rows_q.pitch, self.rows_k.pitch, self.rows_p.pitch)
        return (self.Br * pitches[0], self.Bc * pitches[1], self.Br * pitches[2])

    @property
    def shared_bytes(self) -> int:
        """Two tiles of each kind."""
        return 4 * (sum(self.tile_floats) + sum(self.of_values.tile_floats))


def splits(
    Br: int, Bc: int, head_dim: int, kind: type[SimtSpec] = SimtSpec, *,
    any_registers: bool = False, **facts: Any,
) -> list[SimtSpec]:  # fmt: skip
    """Every way to share a tile among the threads of a block, best first.

    ``kind`` is the specialisation wanted, ``facts`` its fields beside the sizes. ``any_registers``
    keeps those whose threads would not hold their parts in registers.
    """
    found = []
    for tx in (8, 16):
        for TM in (1, 2, 4, 6, 8):
            if Br % TM:
                continue
            spec = kind(head_dim, Br, Bc, tx, Br // TM, **facts)
            if spec.shares_evenly and (any_registers or spec.fits_registers):
                found.append(spec)
    return sorted(found, key=lambda s: (s.reads_per_fma, s.threads))


def select_spec(
    tiles: Tiles, head_dim: int, shared_limit: int, kind: type[SimtSpec] = SimtSpec, **facts: Any
) -> Any:
    """The kernel specialisation on CUDA cores for ``tiles``: of ``kind``, with the fields ``facts``
    beside the sizes; ``shared_limit`` in bytes a block.

    Raises ValueError when the tiles need more shared memory than there is, or no split of the tile
    over threads exists.
    """
    even = splits(tiles.Br, tiles.Bc, head_dim, kind, any_registers=True, **facts)
    if even:
        check_shared(min(even, key=lambda spec: spec.shared_bytes), shared_limit)
    found = splits(tiles.Br, tiles.Bc, head_dim, kind, **facts)
    found = [spec for spec in found if spec.shared_bytes <= shared_limit]
    if not found:
        raise ValueError(
            f"tiles must fit in the registers of at most {MAX_THREADS} threads, got Br={tiles.Br}, "
            f"Bc={tiles.Bc} at head_dim={head_dim} on unit 'simt'; choose other tiles"
        )
    return with_threads(found, tiles, f", head_dim={head_dim} on unit 'simt'")
