"""How the threads of a block share a tile on CUDA cores, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa_numba.integers import round_up
from fa_numba.tiling.spec import MAX_THREADS, Spec
from fa_numba.tiling.tiles import Tiles

MAX_ACCUMULATORS = 128
# 32-bit registers of a multiprocessor, and what a thread needs beside its accumulators.
REGISTERS = 65536
OTHER_REGISTERS = 96


@dataclass(frozen=True)
class SimtSpec(Spec):
    """A forward kernel on CUDA cores.

    Thread (ty, tx) owns the rows ty, ty + ty_count, ... and the columns tx, tx + tx_count, ... of
    S. Pitches are the lengths of rows in shared memory, in floats, padded so that the rows that
    neighbouring lanes read lie in different banks.
    """

    @property
    def row_step(self) -> int:
        return self.ty_count

    @property
    def column_step(self) -> int:
        return self.tx_count

    @property
    def shares_evenly(self) -> bool:
        """Whether the threads cover the tile with equal parts, in whole warps."""
        whole = self.Bc % self.tx_count == 0 and self.Br % self.ty_count == 0
        return whole and self.threads % 32 == 0

    @property
    def d4(self) -> int:
        """The head dimension rounded up to whole 16-byte accesses."""
        return round_up(self.head_dim, 4)

    @property
    def pitch_qk(self) -> int:
        """Floats from a row of sQ or sK to the next."""
        return self.d4 + 4

    @property
    def pitch_v(self) -> int:
        """Floats from a row of sV to the next."""
        return self.columns

    @property
    def pitch_p(self) -> int:
        """Floats from a row of sP to the next."""
        return self.Bc + self.tx_count

    @property
    def tile_floats(self) -> tuple[int, ...]:
        """Floats of sQ, sK, sV and sP in shared memory."""
        return (
            self.Br * self.pitch_qk,
            self.Bc * self.pitch_qk,
            self.Bc * self.pitch_v,
            self.Br * self.pitch_p,
        )

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

    @property
    def max_accumulators(self) -> int:
        """Most accumulators that a thread takes."""
        return MAX_ACCUMULATORS

    @property
    def fits_registers(self) -> bool:
        share = REGISTERS // self.threads - OTHER_REGISTERS
        return self.threads <= MAX_THREADS and self.accumulators <= min(
            self.max_accumulators, share
        )

    @property
    def min_blocks(self) -> int:
        return 2 if self.threads <= 128 else 1


@dataclass(frozen=True)
class SimtBackwardSpec(SimtSpec):
    """A backward kernel on CUDA cores: every tile serves two products, so all rows of Q, K, V and
    dO have one pitch.

    A thread owns CM rows of dK and dV, in groups of four.
    """

    @property
    def column_registers(self) -> int:
        """Registers of a thread's part of dK, and of dV."""
        return 4 * self.CM * self.DN

    @property
    def accumulators(self) -> int:
        """Registers of one thread's parts of dK and dV, and of S and dP."""
        return 2 * (4 * self.CM * self.DN + self.TM * self.TN)

    @property
    def max_accumulators(self) -> int:
        """At 256 columns dK and dV alone take 128."""
        return 144

    @property
    def reads_per_fma(self) -> float:
        """As that of the forward kernels, over the five products."""
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
    def pitch_qk(self) -> int:
        """Floats from a row of sQ, sdO or sK to the next."""
        return self.columns + 4

    @property
    def pitch_v(self) -> int:
        return self.pitch_qk

    @property
    def tile_floats(self) -> tuple[int, ...]:
        """Floats of a row tile (sQ, sdO), a column tile (sK, sV) and a tile of S (sP, sdS)."""
        return (self.Br * self.pitch_qk, self.Bc * self.pitch_qk, self.Br * self.pitch_p)

    @property
    def shared_bytes(self) -> int:
        """Two tiles of each kind."""
        return 8 * sum(self.tile_floats)


def splits(
    Br: int,
    Bc: int,
    head_dim: int,
    kind: type[SimtSpec] = SimtSpec,
    *,
    any_registers: bool = False,
    **facts: Any,
) -> list[SimtSpec]:
    """Every way to share a tile among the threads of a block, best first.

    ``kind`` is the specialisation wanted, ``facts`` its fields beside the sizes. ``any_registers``
    keeps those whose threads would not hold their parts in registers.
    """
    found = []
    for tx in (8, 16):
        for TM in (1, 2, 4, 8):
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
        smallest = min(spec.shared_bytes for spec in even)
        if smallest > shared_limit:
            raise ValueError(
                f"tiles: Br={tiles.Br}, Bc={tiles.Bc} at head_dim={head_dim} needs {smallest} "
                f"bytes of shared memory, the device has {shared_limit} a block"
            )
    found = splits(tiles.Br, tiles.Bc, head_dim, kind, **facts)
    found = [spec for spec in found if spec.shared_bytes <= shared_limit]
    if not found:
        raise ValueError(
            f"tiles: Br={tiles.Br}, Bc={tiles.Bc} at head_dim={head_dim} leaves no split over 32 "
            f"to {MAX_THREADS} threads whose parts of the tiles fit their registers; take "
            "smaller blocks"
        )
    if tiles.threads is not None:
        allowed = sorted({spec.threads for spec in found})
        found = [spec for spec in found if spec.threads == tiles.threads]
        if not found:
            raise ValueError(
                f"tiles: threads={tiles.threads} does not fit Br={tiles.Br}, Bc={tiles.Bc}, "
                f"head_dim={head_dim}; allowed: {allowed}"
            )
    return found[0]
