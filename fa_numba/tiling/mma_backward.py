"""Specs of the backward kernels on tensor cores (``mma.sync``).

They say how the warps of a thread block share a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa_numba.integers import ceil_div, round_up
from fa_numba.tiling.mma import MmaSpec, chosen
from fa_numba.tiling.mma_rows import TileRows
from fa_numba.tiling.spec import GradientSpec, ValuesSpec
from fa_numba.tiling.tiles import Tiles

# Number of factors of a tile: one for each product with scaled planes of dS or P (dQ, dK and dV).
UNITS = 3


@dataclass(frozen=True)
class MmaBackwardSpec(GradientSpec, MmaSpec):
    """A backward kernel on tensor cores, with the transposed ST and dPT in registers.

    A warp has 16 or 32 columns of S. ``row_warps`` is the number of warps that share columns:

    row_warps   rows of a warp   PT and dST                 columns of dK and dV of a warp
    1           all              stay in registers          all
    2           half             pass through shared memory half

    PT and dST are first operands of the products dV += PT dO and dK += dST Q. Two row warps halve
    the registers for dK and dV. Thread (ty, tx) has the columns tx + 8 j and, of each 8 rows, the
    rows 2 ty and 2 ty + 1; ty and tx count over all warps. dQ needs all columns of dS. Therefore
    dST is in shared memory, and ``query_warps`` x ``chunk_warps`` warps share a tile of dQ.

    With ``vector_adds`` an atomic add adds two neighbouring elements at once. GPUs have such adds
    from compute capability 9.0 on.
    """

    row_warps: int = 1
    vector_adds: bool = False

    reads_bias = False
    row_width = 2
    column_width = 1

    @property
    def reads_state(self) -> bool:
        return self.asks_state

    @property
    def columns_k(self) -> int:
        return self.columns

    @property
    def column_registers(self) -> int:
        """Number of registers of a thread for its part of dK; of dV in the spec ``of_values``."""
        return 4 * self.TN * self.gradients.DN

    @property
    def longest_arrays(self) -> tuple[int, int]:
        """Sizes of a thread's register arrays for fragments of K or V, and for dK or dV.

        K and V have arrays of equal size: the larger size that one of them needs. So have dK and
        dV.
        """
        both = self, self.of_values
        fragments = max(spec.scores.q_registers for spec in both)
        return fragments, max(spec.column_registers for spec in both)

    @property
    def element_steps(self) -> tuple[int, int]:
        return 1, self.TM

    @property
    def TM(self) -> int:
        return self.Br // (4 * self.row_warps)

    @property
    def TN(self) -> int:
        return self.Bc * self.row_warps // (8 * self.warps)

    @property
    def DN(self) -> int:
        return ceil_div(self.head_dim, 16 * self.row_warps) * self.row_warps

    @property
    def scores(self) -> TransposedSpec:
        """Spec with which parts of the forward pass compute ST = K QT, and dPT = V dOT.

        K, or V, takes the place of Q in the forward pass.
        """
        rows = self.Br // self.row_warps
        kept = 4 * self.planes * self.TN * self.DN
        keeps = self.row_warps == 1 and self.accumulators + kept <= 176
        return self._transposed(16 * self.DN, rows, keeps)

    @property
    def gradients(self) -> TransposedSpec:
        """Spec with which the forward pass's product P V computes dV = PT dO and dK = dST Q.

        It describes the columns of dK and dV that one warp has.
        """
        return self._transposed(16 * self.DN // self.row_warps, self.Br, False)

    def _transposed(self, head_dim: int, rows: int, keeps: bool) -> TransposedSpec:
        sizes = (head_dim, self.Bc, rows, 4, 8 * self.warps, self.features, self.aligned)
        return TransposedSpec(*sizes, dtype=self.dtype, keeps_q=keeps, whole=self)

    @property
    def accumulators(self) -> int:
        """Number of registers of a thread for its parts of dK, dV, S and dP.

        With planes there is one more sum of the size of S.
        """
        columns = 4 * (self.DN + self.of_values.DN) // self.row_warps
        found = self.TN * (columns + 2 * self.TM)
        return found + (self.TN * self.TM if self.planes > 1 else 0)

    @property
    def warp_parts(self) -> tuple[int, int, int, int]:
        """Four numbers that say which part of a tile a warp has, in this order.

        1. Number of warps that share columns of S. 2. Number of rows of S of a warp. 3. Number of
        columns of S of a warp. 4. Number of columns of dK and dV of a warp.
        """
        U = self.row_warps
        return U, self.Br // U, 8 * self.TN, self.columns // U

    @property
    def query_warps(self) -> int:
        """Number of warps among which the rows of a tile of dQ are divided."""
        return self.warps // self.chunk_warps

    @property
    def chunk_warps(self) -> int:
        """Number of warps among which the columns of a tile of dQ are divided, in chunks of 16.

        It is the number with the fewest reads of dST and K from shared memory.
        """

        def reads(along: int) -> int:
            fragments = self.Br // 16 * along // self.warps
            chunks = ceil_div(self.DN, along)
            return 2 * fragments * chunks + fragments + chunks

        ways = [n for n in range(1, self.warps + 1) if self.warps % n == 0]
        return min((n for n in ways if self.Br // 16 % (self.warps // n) == 0), key=reads)

    @property
    def query_fragments(self) -> int:
        """Number of fragments of 16 rows of dQ in a warp."""
        return self.Br // 16 // self.query_warps

    @property
    def query_turns(self) -> int:
        """Number of turns in which a warp computes its part of dQ.

        It is 2 if the part takes more than 80 registers, otherwise 1.
        """
        chunks = ceil_div(self.DN, self.chunk_warps)
        return 2 if 8 * self.query_fragments * chunks > 80 else 1

    @property
    def chunk_step(self) -> int:
        """Distance between two consecutive chunks of 16 columns of dQ of a warp in one turn."""
        return self.chunk_warps * self.query_turns

    @property
    def query_chunks(self) -> int:
        """Number of chunks of 16 columns of dQ that a warp computes in one turn."""
        return ceil_div(self.DN, self.chunk_step)

    @property
    def rows_ds(self) -> TileRows:
        """Layout of the rows of dST in shared memory: padded, because no copy fills it."""
        return TileRows(self.Br, swizzled=False, padded=True)

    @property
    def plane_of_scores(self) -> int:
        """Number of 16-bit elements of one plane of dST in shared memory."""
        return self.Bc * self.rows_ds.pitch

    @property
    def tile_halves(self) -> tuple[int, ...]:
        """Numbers of 16-bit elements of a row tile, a column tile and a tile of dST."""
        pitch = self.rows.pitch
        return self.Br * pitch, self.Bc * pitch, self.planes * self.plane_of_scores

    @property
    def shared_bytes(self) -> int:
        """Number of bytes of shared memory of a thread block.

        There are two stages of the row tiles, L and D; and K, V, dST and, with two row warps, PT.
        """
        (rows, columns, scores), (rows_v, columns_v, _) = (
            self.tile_halves,
            self.of_values.tile_halves,
        )
        of_stage = rows + (self.row_tiles - 1) * rows_v
        halves = 2 * of_stage + columns + columns_v + self.row_warps * scores
        return 2 * halves + 16 * self.Br + 4 * self.unit_words

    @property
    def unit_words(self) -> int:
        """Number of 32-bit words for the factors of scaled planes, and each warp's largest |dS|.

        It is 0 if planes are not scaled.
        """
        return round_up(UNITS + self.warps, 4) if self.features.scaled else 0


@dataclass(frozen=True)
class MmaDqSpec(ValuesSpec, MmaSpec):
    """The kernel that computes dQ alone, in a deterministic backward pass.

    The loop order is Q outer, as in the forward pass. S and dP are in registers, and so are
    fragments of Q and dO if there are enough registers.
    """

    @property
    def accumulators(self) -> int:
        """Number of registers of a thread for its parts of dQ, S and dP."""
        return self.TM * (4 * self.DN + 2 * self.TN)

    @property
    def keeps_q(self) -> bool:
        """Whether the fragments of Q and dO stay in registers."""
        return self.accumulators + 4 * self.TM * self.DN <= 160

    @property
    def shared_bytes(self) -> int:
        """Number of bytes of shared memory, for Q, dO, K and V."""
        return 2 * sum(sum(spec.tile_halves[:2]) for spec in (self, self.of_values))


@dataclass(frozen=True)
class TransposedSpec(MmaSpec):
    """A forward spec for one product of the backward kernel ``whole``; its rows are columns of S.

    ``head_dim`` is a multiple of the size of a fragment. The layout of rows in shared memory is the
    layout of ``whole``. TM is the number of columns of S of a thread of ``whole``.
    """

    keeps_q: bool = False
    whole: MmaBackwardSpec = None  # type: ignore[assignment]

    @property
    def TM(self) -> int:
        return self.whole.TN

    @property
    def rows(self) -> TileRows:
        return self.whole.rows


def row_warps_of(head_dim: int) -> int:
    """Return ``MmaBackwardSpec.row_warps`` for a head dimension: 1 up to d = 64, otherwise 2.

    Above d = 64 the registers of one warp do not hold dK and dV of enough columns.
    """
    return 1 if head_dim <= 64 else 2


def select_mma_backward_spec(
    tiles: Tiles, head_dim: int, shared_limit: int, **facts: Any
) -> MmaBackwardSpec:
    """Return the spec of a backward kernel on tensor cores for ``tiles``; see ``select_mma_spec``.

    A warp has 32 or 16 columns; if ``tiles.threads`` is None it has 32 if it can. Above d = 64 two
    warps share their columns. Raise ValueError if the tiles are not multiples of 16 (rows: of 32
    above d = 64), or do not fit.
    """
    row_warps = row_warps_of(max(head_dim, facts.get("head_dim_v", 0)))
    if tiles.Br % (16 * row_warps) or tiles.Bc % 16:
        raise ValueError(
            f"tiles.Br must be a multiple of {16 * row_warps} and tiles.Bc a multiple of 16 in the "
            f"backward pass on unit 'mma' at head_dim={head_dim}, got Br={tiles.Br}, Bc={tiles.Bc}"
        )
    counts = [row_warps * (tiles.Bc // n) for n in (32, 16) if tiles.Bc % n == 0]
    sizes, facts = (head_dim, tiles.Br, tiles.Bc, 4), {"row_warps": row_warps, **facts}
    found = [MmaBackwardSpec(*sizes, 8 * warps, **facts) for warps in counts]
    return chosen(found, tiles, head_dim, shared_limit)
