"""Specs of the backward kernels on tensor cores (``mma.sync``).

A spec says how the warps of a thread block share a tile.
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

    A warp has 16 or 32 columns of S. ``row_warps`` is the number of warps that have the same
    columns:

    - If it is 1, a warp has all rows of S, and computes all columns of dK and dV. PT and dST, the
      first operands of the products dV += PT dO and dK += dST Q, are in registers.
    - If it is 2, a warp has half of the rows of S, and computes half of the columns of dK and dV.
      This halves the registers for dK and dV. The products need all rows of S, so that PT and dST
      are read from shared memory.

    Thread (ty, tx) has the columns tx + 8 j of S. Of each 8 rows, it has the rows 2 ty and 2 ty +
    1. The numbers ty and tx include the position of the warp in the tile. The product dQ = dS K
    needs all columns of dS. Therefore dST is also stored in shared memory. The tile of dQ is
    divided among all warps: its rows among ``query_warps`` warps, and its columns among
    ``chunk_warps`` warps.

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
        """Number of registers of a thread for its part of dK.

        The spec ``of_values``, which describes tiles of V and dV, has the number for dV.
        """
        return 4 * self.TN * self.gradients.DN

    @property
    def longest_arrays(self) -> tuple[int, int]:
        """Two numbers of registers: for fragments of K or V, and for sums of dK or dV.

        1. A thread has fragments of K and of V in arrays of one size. The first number is this
           size. It is enough for K and for V.
        2. A thread has sums of dK and of dV in arrays of one size. The second number is this size.
           It is enough for dK and for dV.
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
        """Spec with which the forward pass's function for Q KT computes ST = K QT and dPT = V dOT.

        K (or V) takes the place of Q, as the first operand. Q (or dO) takes the place of K.
        """
        rows = self.Br // self.row_warps
        kept = 4 * self.planes * self.TN * self.DN
        keeps = self.row_warps == 1 and self.accumulators + kept <= 176
        return self._transposed(16 * self.DN, rows, keeps)

    @property
    def gradients(self) -> TransposedSpec:
        """Spec with which the forward pass's function for P V computes dV = PT dO and dK = dST Q.

        ``head_dim`` of this spec is the number of columns of dK and dV that one warp computes.
        """
        return self._transposed(16 * self.DN // self.row_warps, self.Br, False)

    def _transposed(self, head_dim: int, rows: int, keeps: bool) -> TransposedSpec:
        sizes = (head_dim, self.Bc, rows, 4, 8 * self.warps, self.features, self.aligned)
        return TransposedSpec(*sizes, dtype=self.dtype, keeps_q=keeps, whole=self)

    @property
    def accumulators(self) -> int:
        """Number of registers of a thread for its parts of dK, dV, S and dP.

        With planes, one more sum of the size of S is in registers.
        """
        columns = 4 * (self.DN + self.of_values.DN) // self.row_warps
        found = self.TN * (columns + 2 * self.TM)
        return found + (self.TN * self.TM if self.planes > 1 else 0)

    @property
    def warp_parts(self) -> tuple[int, int, int, int]:
        """Four numbers that say which part of a tile a warp has.

        The numbers are, in this order:

        1. number of warps that share columns of S,
        2. number of rows of S of a warp,
        3. number of columns of S of a warp,
        4. number of columns of dK and dV of a warp.
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

        The number is chosen such that the warps read dST and K from shared memory least often.
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
        """Number of steps, one after the other, in which a warp computes its part of dQ.

        Normally it is 1. It is 2 if the complete part takes more than 80 registers of a thread.
        """
        chunks = ceil_div(self.DN, self.chunk_warps)
        return 2 if 8 * self.query_fragments * chunks > 80 else 1

    @property
    def chunk_step(self) -> int:
        """Distance, in chunks, from a chunk of dQ to the next chunk that the same warp computes.

        A chunk is 16 columns of dQ, and chunks are numbered from left to right. A warp computes its
        chunks in ``query_turns`` steps. The numbers of consecutive chunks of one step differ by
        this value. The chunks in between belong to other warps, or to the warp's other step.
        """
        return self.chunk_warps * self.query_turns

    @property
    def query_chunks(self) -> int:
        """Number of chunks of 16 columns of dQ that a warp computes in one step.

        ``query_turns`` is the number of steps.
        """
        return ceil_div(self.DN, self.chunk_step)

    @property
    def rows_ds(self) -> TileRows:
        """Layout of the rows of dST in shared memory.

        The rows are padded and not swizzled. Padding slows down copies from global memory, but dST
        is not copied: threads write it from registers.
        """
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

        Shared memory contains these arrays:

        - Two stages of each row tile (Q, dO and, for FA-1, O), and two stages of L and D.
        - One tile each of K, V and dST. With two row warps also one tile of PT.
        - With scaled planes also the words that ``unit_words`` counts.
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

    The loop order is Q outer, as in the forward pass. S and dP are in registers. Fragments of Q and
    dO are in registers too, if there are enough registers (``keeps_q``).
    """

    @property
    def accumulators(self) -> int:
        """Number of registers of a thread for its parts of dQ, S and dP."""
        return self.TM * (4 * self.DN + 2 * self.TN)

    @property
    def keeps_q(self) -> bool:
        """Whether a thread holds all fragments of Q and dO in registers during the loop."""
        return self.accumulators + 4 * self.TM * self.DN <= 160

    @property
    def shared_bytes(self) -> int:
        """Number of bytes of shared memory, for Q, dO, K and V."""
        return 2 * sum(sum(spec.tile_halves[:2]) for spec in (self, self.of_values))


@dataclass(frozen=True)
class TransposedSpec(MmaSpec):
    """A spec with which device functions of the forward pass compute products of the backward pass.

    The backward kernel has S transposed in registers. The forward pass computes with rows of S,
    where the backward kernel has columns of S. This spec therefore exchanges rows and columns:
    ``Br`` is the number of columns of the backward kernel's tile. ``TM`` is the number of columns
    of S that a thread has.

    field      meaning
    whole      the spec of the backward kernel. Rows in shared memory have the layout of ``whole``
    keeps_q    whether a thread holds the first operand, K or V, in registers
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
    """Return the spec of a backward kernel on tensor cores for ``tiles``.

    ``facts`` are the fields of the spec except the sizes. ``shared_limit`` is the shared memory of
    a thread block in bytes. A warp has 32 or 16 columns of a tile, and ``tiles.threads`` decides
    which. If ``tiles.threads`` is None, a warp has 32 columns if this is possible, otherwise 16.
    For head dimensions above 64, two warps share the same columns (``row_warps_of``).

    Raise ValueError if Bc is not a multiple of 16, or if the tiles do not fit in registers and
    shared memory. Br must be a multiple of 16, or of 32 for head dimensions above 64.
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
