"""How the warps of a block share a tile in the backward pass on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa_numba.integers import ceil_div, round_up
from fa_numba.tiling.mma import MmaSpec, chosen
from fa_numba.tiling.mma_rows import TileRows
from fa_numba.tiling.spec import GradientSpec, ValuesSpec
from fa_numba.tiling.tiles import Tiles

# What products with scaled planes of dS or P are multiplied by, of a tile, as many words.
UNITS = 3


@dataclass(frozen=True)
class MmaBackwardSpec(GradientSpec, MmaSpec):
    """A backward kernel on tensor cores, which has the transposed ST and dPT in its registers.

    A warp takes 16 or 32 columns of S. With ``row_warps`` 1 it takes all rows: PT and dST are then
    first operands of dV += PT dO and dK += dST Q without leaving registers. With 2 two warps take
    half of the rows each, exchange PT and dST through shared memory, and make half of the columns
    of dK and dV each: half the registers. Thread (ty, tx) owns columns tx + 8 j and of
    each 8 rows 2 ty and 2 ty + 1, counted over the warps. dQ needs all columns: dST is in shared
    memory, and ``query_warps`` x ``chunk_warps`` warps share a tile of dQ.

    ``vector_adds``: atomic adds of two neighbours at once, which compute capability 9.0 has.
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
        """Registers of a thread's part of dK, and of dV."""
        return 4 * self.TN * self.gradients.DN

    @property
    def longest_arrays(self) -> tuple[int, int]:
        """Registers of K's or V's fragments, and of dK or dV in a thread, of the longer ones."""
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
        """To make ST = K QT and dPT = V dOT by the forward's parts: K, or V, is their Q."""
        rows = self.Br // self.row_warps
        kept = 4 * self.planes * self.TN * self.DN
        keeps = self.row_warps == 1 and self.accumulators + kept <= 176
        return self._transposed(16 * self.DN, rows, keeps)

    @property
    def gradients(self) -> TransposedSpec:
        """For the forward pass's product P V, to make dV = PT dO and dK = dST Q of one warp."""
        return self._transposed(16 * self.DN // self.row_warps, self.Br, False)

    def _transposed(self, head_dim: int, rows: int, keeps: bool) -> TransposedSpec:
        sizes = (head_dim, self.Bc, rows, 4, 8 * self.warps, self.features, self.aligned)
        return TransposedSpec(*sizes, dtype=self.dtype, keeps_q=keeps, whole=self)

    @property
    def accumulators(self) -> int:
        """Registers of a thread's parts of dK, dV, S and dP; of planes one has two sums."""
        columns = 4 * (self.DN + self.of_values.DN) // self.row_warps
        found = self.TN * (columns + 2 * self.TM)
        return found + (self.TN * self.TM if self.planes > 1 else 0)

    @property
    def warp_parts(self) -> tuple[int, int, int, int]:
        """Warps that share columns of S; a warp's rows and columns of S, columns of dK, dV."""
        U = self.row_warps
        return U, self.Br // U, 8 * self.TN, self.columns // U

    @property
    def query_warps(self) -> int:
        """Warps down the rows of dQ: the split that reads the least of dST and K."""
        return self.warps // self.chunk_warps

    @property
    def chunk_warps(self) -> int:
        """Warps along the columns of dQ, which they take in chunks of 16."""

        def reads(along: int) -> int:
            fragments = self.Br // 16 * along // self.warps
            chunks = ceil_div(self.DN, along)
            return 2 * fragments * chunks + fragments + chunks

        ways = [n for n in range(1, self.warps + 1) if self.warps % n == 0]
        return min((n for n in ways if self.Br // 16 % (self.warps // n) == 0), key=reads)

    @property
    def query_fragments(self) -> int:
        """Fragments of 16 rows of dQ in a warp."""
        return self.Br // 16 // self.query_warps

    @property
    def query_turns(self) -> int:
        """Turns of a warp's part of dQ: two where it is too large for registers at once."""
        chunks = ceil_div(self.DN, self.chunk_warps)
        return 2 if 8 * self.query_fragments * chunks > 80 else 1

    @property
    def chunk_step(self) -> int:
        """Chunks of 16 columns of dQ from one of a warp's to its next in the same turn."""
        return self.chunk_warps * self.query_turns

    @property
    def query_chunks(self) -> int:
        """Chunks of 16 columns of dQ in a warp at a time."""
        return ceil_div(self.DN, self.chunk_step)

    @property
    def rows_ds(self) -> TileRows:
        """Rows of dST in shared memory: no copy fills it, so they are padded."""
        return TileRows(self.Br, swizzled=False, padded=True)

    @property
    def plane_of_scores(self) -> int:
        """16-bit elements of a plane of dST in shared memory."""
        return self.Bc * self.rows_ds.pitch

    @property
    def tile_halves(self) -> tuple[int, ...]:
        """16-bit elements of a row tile, a column tile and a tile of dST in shared memory."""
        pitch = self.rows.pitch
        return self.Br * pitch, self.Bc * pitch, self.planes * self.plane_of_scores

    @property
    def shared_bytes(self) -> int:
        """Two stages of the row tiles, L and D; K, V, dST and, where warps exchange it, PT."""
        (rows, columns, scores), (rows_v, columns_v, _) = (
            self.tile_halves,
            self.of_values.tile_halves,
        )
        of_stage = rows + (self.row_tiles - 1) * rows_v
        halves = 2 * of_stage + columns + columns_v + self.row_warps * scores
        return 2 * halves + 16 * self.Br + 4 * self.unit_words

    @property
    def unit_words(self) -> int:
        """Words of shared memory for these, and for each warp's largest |dS|."""
        return round_up(UNITS + self.warps, 4) if self.features.scaled else 0


@dataclass(frozen=True)
class MmaDqSpec(ValuesSpec, MmaSpec):
    """The kernel of a deterministic backward pass that makes dQ: Q outer, as the forward
    pass, with S and dP in registers, and fragments of Q and dO.
    """

    @property
    def accumulators(self) -> int:
        """Registers of one thread's parts of dQ, S and dP."""
        return self.TM * (4 * self.DN + 2 * self.TN)

    @property
    def keeps_q(self) -> bool:
        """Whether the fragments of Q and dO stay in registers."""
        return self.accumulators + 4 * self.TM * self.DN <= 160

    @property
    def shared_bytes(self) -> int:
        """Q, dO, K and V."""
        return 2 * sum(sum(spec.tile_halves[:2]) for spec in (self, self.of_values))


@dataclass(frozen=True)
class TransposedSpec(MmaSpec):
    """A part of what the backward kernel ``whole`` multiplies, its rows being columns of S.

    ``head_dim`` counts whole fragments. Rows in shared memory and TM, the warp's groups of 8
    columns of S, are the kernel's.
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
    """``MmaBackwardSpec.row_warps``: beyond d = 64 registers hold too few columns for one."""
    return 1 if head_dim <= 64 else 2


def select_mma_backward_spec(
    tiles: Tiles, head_dim: int, shared_limit: int, **facts: Any
) -> MmaBackwardSpec:
    """The specialisation of a backward kernel on tensor cores for ``tiles``, as
    ``select_mma_spec``.

    A warp takes 32 or 16 columns, two beyond d = 64 the same ones; None takes 32 where it can.
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
