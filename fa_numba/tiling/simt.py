"""Specs of the float32 kernels on CUDA cores: how the threads of a block share a tile."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from fa_numba.integers import round_up
from fa_numba.tiling.spec import MAX_THREADS, GradientSpec, Spec, check_shared, with_threads
from fa_numba.tiling.tiles import Tiles

# Number of 32-bit registers of a multiprocessor, and registers that a thread needs in addition to
# its accumulators.
REGISTERS = 65536
OTHER_REGISTERS = 96


# Number of banks of shared memory. A bank is 4 bytes wide.
BANKS = 32


@dataclass(frozen=True)
class SharedRows:
    """The layout of a tile's rows in shared memory.

    ``pitch`` is the number of floats from the start of a row to the start of the next row. Column c
    of row r is at the index ``r * pitch + (c ^ swizzle)``, where ``swizzle`` is
    ``unit * (r // step % ways)``. The exclusive or puts elements that are read together into
    different banks:

    - ``unit`` neighbouring floats of a row stay together.
    - ``step`` neighbouring rows have the same swizzle.
    - ``ways`` is the number of different swizzles.

    Rows are not padded. An asynchronous copy then fetches each 32-byte sector of global memory only
    once.
    """

    pitch: int
    unit: int = 4
    step: int = 1
    ways: int = 1

    @classmethod
    def swizzled(cls, columns: int, together: int, unit: int = 4) -> SharedRows:
        """Return a layout of rows of ``columns`` floats without padding.

        With this layout, a warp can read elements of ``together`` neighbouring rows at once. If it
        reads the same ``unit`` neighbouring columns of each row, all elements are in different
        banks of shared memory. ``unit`` and ``together`` must be powers of two whose product is at
        most 32.
        """
        places = BANKS // unit
        # Rows begin in ``step`` different banks; row ``step`` begins in the first bank again.
        step = places // gcd(columns // unit, places)
        return cls(columns, unit, step, max(1, together // step))


@dataclass(frozen=True)
class SimtSpec(Spec):
    """A forward kernel on CUDA cores.

    Thread (ty, tx) has the rows ty, ty + ty_count, ... and the columns tx, tx + tx_count, ... of S.
    ``ablated`` contains the measures that are switched off:

    ablated                    rows in shared memory
    none                       swizzled
    "swizzle"                  padded, so that neighbouring lanes read different banks
    "swizzle" and "padding"    neither
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
        """Whether the threads have equal parts of the tile, and the number of threads is a multiple
        of 32.
        """
        whole = self.Bc % self.tx_count == 0 and self.Br % self.ty_count == 0
        return whole and self.threads % 32 == 0

    @property
    def d4(self) -> int:
        """Q's head dimension rounded up to a multiple of 4, which are 16 bytes."""
        return round_up(self.head_dim, 4)

    @property
    def whole_columns(self) -> int:
        """Number of floats of a row in shared memory, including the zeros at the end of the row.

        Normally the number is ``columns``. It is ``columns`` + 4 if V's head dimension, rounded up
        to a multiple of 4, is not a multiple of 8. An example is a head dimension of 20. Every
        other row in global memory then begins in the middle of a 32-byte sector. With the four
        additional floats, every other row in shared memory begins in the middle of 32 bytes, too.
        """
        return self.columns + round_up(self.d_v, 4) % 8

    @property
    def width(self) -> int:
        """Number of floats of a row of Q or K in shared memory."""
        return self.d4

    @property
    def rows_q(self) -> SharedRows:
        """Layout of sQ in shared memory.

        The threads that load at the same time read the same 4 columns (16 bytes) of n neighbouring
        rows. The layout puts these elements into different banks. n is the larger of
        16 / tx_count (rounded down) and ``lane_step``.
        """
        return self._rows(self.width, max(16 // self.tx_count, self.lane_step))

    @property
    def rows_k(self) -> SharedRows:
        """Layout of sK in shared memory.

        The threads that load at the same time read the same 4 columns (16 bytes) of eight
        neighbouring rows. The layout puts these elements into different banks.
        """
        return self._rows(self.width, 8)

    @property
    def rows_v(self) -> SharedRows:
        """Layout of sV in shared memory. Threads read along rows, so no swizzle is needed."""
        return SharedRows(self.whole_columns)

    @property
    def rows_p(self) -> SharedRows:
        """Layout of sP in shared memory.

        A warp writes 32 elements at once: tx_count neighbouring columns of each of 32 / tx_count
        rows. The layout puts these elements into different banks.
        """
        return self._rows(self.Bc, BANKS // self.tx_count, self.tx_count)

    def _rows(self, columns: int, together: int, unit: int = 4) -> SharedRows:
        if "swizzle" not in self.ablated:
            return SharedRows.swizzled(columns, together, unit)
        return SharedRows(columns + (0 if "padding" in self.ablated else unit))

    @property
    def tile_floats(self) -> tuple[int, ...]:
        """Numbers of floats of sQ, sK, sV and sP in shared memory."""
        columns = self.Bc * self.rows_k.pitch, self.Bc * self.rows_v.pitch
        return self.Br * self.rows_q.pitch, *columns, self.Br * self.rows_p.pitch

    @property
    def shared_bytes(self) -> int:
        return 4 * sum(self.tile_floats)

    @property
    def accumulators(self) -> int:
        """Number of registers of a thread for its part of O, and for its part of S or of P V.

        P V is stored in the registers of S, because S is not needed any more by then.
        """
        return self.TM * (4 * self.DN + max(self.TN, 4 * self.DN))

    @property
    def reads_per_fma(self) -> float:
        """Number of 16-byte reads of shared memory per multiply-add, in the products Q KT and P V
        together.

        There can be several ways to share a tile among threads. The way with the smallest number is
        the fastest.
        """
        reads = (self.TM + self.TN) * self.d4 / 4 + (self.TM / 4 + self.DN) * self.Bc
        return reads / (self.TM * self.TN * self.d4 + self.TM * 4 * self.DN * self.Bc)

    max_accumulators = 128  # most accumulators of a thread

    @property
    def fits_registers(self) -> bool:
        most = min(self.max_accumulators, REGISTERS // self.threads - OTHER_REGISTERS)
        return self.threads <= MAX_THREADS and self.accumulators <= most

    @property
    def min_blocks(self) -> int:
        return 2 if self.threads <= 128 else 1


@dataclass(frozen=True)
class SimtBackwardSpec(GradientSpec, SimtSpec):
    """A backward kernel on CUDA cores.

    The tile of dO in shared memory has the layout of the tile of Q (``rows_q``). The tile of V has
    the layout of the tile of K (``rows_k``). A thread computes CM rows of dK and dV, in groups of
    four rows.
    """

    @property
    def column_registers(self) -> int:
        """Number of registers of a thread for its part of dK.

        The spec ``of_values``, which describes tiles of V and dV, has the number for dV.
        """
        return 4 * self.CM * self.DN

    @property
    def accumulators(self) -> int:
        """Number of registers of a thread for its parts of dK, dV, S and dP."""
        columns = self.column_registers + self.of_values.column_registers
        return columns + 2 * self.TM * self.TN

    max_accumulators = 144  # with 256 columns, dK and dV together take 128

    @property
    def reads_per_fma(self) -> float:
        """Number of 16-byte reads of shared memory per multiply-add, in all five products of the
        pass.
        """
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
        """Number of rows of dK and dV that a thread computes."""
        return self.Bc // self.ty_count

    @property
    def width(self) -> int:
        """Number of floats of a row of Q, dO, K or V in shared memory."""
        return self.whole_columns

    @property
    def rows_v(self) -> SharedRows:
        """Layout of sV: the layout of sK, since dP = dO VT reads V as S = Q KT reads K."""
        return self.rows_k

    @property
    def tile_floats(self) -> tuple[int, ...]:
        """Numbers of floats in shared memory of three tiles.

        The tiles are a row tile (Q or dO), a column tile (K or V), and a tile of P or dS.
        """
        pitches = (self.rows_q.pitch, self.rows_k.pitch, self.rows_p.pitch)
        return (self.Br * pitches[0], self.Bc * pitches[1], self.Br * pitches[2])

    @property
    def shared_bytes(self) -> int:
        """Number of bytes of shared memory of a thread block, for Q, dO, K, V, P and dS."""
        return 4 * (sum(self.tile_floats) + sum(self.of_values.tile_floats))


def splits(
    Br: int, Bc: int, head_dim: int, kind: type[SimtSpec] = SimtSpec, *,
    any_registers: bool = False, **facts: Any,
) -> list[SimtSpec]:  # fmt: skip
    """Return one spec for every way to share a tile among the threads of a thread block.

    The spec with the fewest reads of shared memory per multiply-add is the first. ``kind`` is the
    class of the specs, and ``facts`` are the fields of the specs except the sizes. With
    ``any_registers`` the result also contains specs whose threads have too few registers for their
    parts of the tile.
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
    """Return the spec on CUDA cores for ``tiles``.

    ``kind`` is the class of the spec, and ``facts`` are the fields of the spec except the sizes.
    ``shared_limit`` is the shared memory of a thread block in bytes. Raise ValueError in these
    cases:

    - The tiles need more than ``shared_limit`` bytes of shared memory.
    - The tiles do not fit in registers, in whatever way the threads share them.
    - The threads of a block cannot share the tiles if their number is ``tiles.threads``.
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
