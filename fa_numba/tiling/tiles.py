"""Tiles: the papers' rules for block sizes, and how the threads of a block share a tile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fa_numba.options import PLAIN, Features

MAX_ACCUMULATORS = 128
STAGES = (1, 2)
MAX_THREADS = 512
# Of a multiprocessor, and what a thread needs beside its accumulators.
REGISTERS = 65536
OTHER_REGISTERS = 96
# Measures that the forward kernels on tensor cores can do without, and whose they are.
MEASURES = {
    "padding": ("fa1", "fa2"),
    "prefetch": ("fa1", "fa2"),
    "q_registers": ("fa1", "fa2"),
    "folded_scale": ("fa1", "fa2"),
    "wide_stores": ("fa2",),
}


@dataclass(frozen=True)
class Tiles:
    """Block sizes of a tiled algorithm, and how a thread block holds them.

    ``Br`` rows of Q and ``Bc`` rows of K and V make one tile of S. ``threads`` is the number of
    threads in a block; None takes the split with the fewest shared-memory reads. ``stages`` is how
    many tiles of K and of V are in shared memory; FlashAttention-2's forward kernel on tensor cores
    takes 2 too, and has then the next ones on their way all the time.

    Raises ValueError when Br is no multiple of 4, Bc no multiple of 8, either is not positive, or
    stages is not 1 or 2; TypeError for what is no int.
    """

    Br: int
    Bc: int
    threads: int | None = None
    stages: int = 1

    def __post_init__(self) -> None:
        for name, value, step in (("Br", self.Br, 4), ("Bc", self.Bc, 8)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"tiles: {name} must be an int, not {value!r}")
            if value < 1 or value % step:
                raise ValueError(
                    f"tiles: {name} must be a positive multiple of {step}, not {value}"
                )
        if self.threads is not None and (
            isinstance(self.threads, bool) or not isinstance(self.threads, int)
        ):
            raise TypeError(f"tiles: threads must be an int or None, not {self.threads!r}")
        if isinstance(self.stages, bool) or not isinstance(self.stages, int):
            raise TypeError(f"tiles: stages must be an int, not {self.stages!r}")
        if self.stages not in STAGES:
            raise ValueError(f"tiles: stages must be 1 or 2, not {self.stages}")


@dataclass(frozen=True)
class Spec:
    """The compile-time facts of a kernel: everything it closes over.

    Thread (ty, tx) of a ``ty_count`` x ``tx_count`` block owns TM = Br / ty_count rows, TN columns
    of S and 4 DN columns of O. Pitches are row lengths in shared memory, in floats; the padding
    puts rows that neighbouring lanes read into different banks. ``grouped`` is for several query
    heads to a K/V head.
    """

    head_dim: int
    Br: int
    Bc: int
    tx_count: int
    ty_count: int
    features: Features = PLAIN
    aligned: bool = True
    return_lse: bool = False
    grouped: bool = True

    @property
    def folds_scale(self) -> bool:
        """Whether the softmax multiplies by the scale, in the exponent."""
        return False

    @property
    def row_width(self) -> int:
        """Neighbouring rows of S that a thread owns."""
        return 1

    @property
    def row_step(self) -> int:
        """Rows from the first of them to the first of the next."""
        return self.ty_count

    @property
    def column_width(self) -> int:
        """The same of columns."""
        return 1

    @property
    def column_step(self) -> int:
        return self.tx_count

    @property
    def element_steps(self) -> tuple[int, int]:
        """Registers of S from a row to the next, and from a column to the next."""
        return self.TN, 1

    @property
    def warp_columns(self) -> int:
        """Columns of S from one warp's to the next; 0 where every warp takes all."""
        return 0

    @property
    def shares_evenly(self) -> bool:
        """Whether the threads cover the tile with equal parts, in whole warps."""
        whole = self.Bc % self.tx_count == 0 and self.Br % self.ty_count == 0
        return whole and self.threads % 32 == 0

    @property
    def threads(self) -> int:
        return self.tx_count * self.ty_count

    @property
    def TM(self) -> int:
        return self.Br // self.ty_count

    @property
    def TN(self) -> int:
        return self.Bc // self.tx_count

    @property
    def DN(self) -> int:
        return -(-self.head_dim // (4 * self.tx_count))

    @property
    def d4(self) -> int:
        """The head dimension rounded up to whole 16-byte accesses."""
        return -(-self.head_dim // 4) * 4

    @property
    def pitch_qk(self) -> int:
        return self.d4 + 4

    @property
    def pitch_v(self) -> int:
        return 4 * self.tx_count * self.DN

    @property
    def pitch_p(self) -> int:
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
    def cap_registers(self) -> int:
        """Slopes of a cap on the scores, kept from S to dS; 1 stands for none."""
        return self.TM * self.TN if self.features.softcap else 1

    @property
    def accumulators(self) -> int:
        """Registers of one thread's parts of O and of S or, once S is done with, of P V."""
        return self.TM * (4 * self.DN + max(self.TN, 4 * self.DN))

    @property
    def reads_per_fma(self) -> float:
        """16-byte shared-memory reads per multiply-add of one thread over both products."""
        reads = (self.TM + self.TN) * self.d4 / 4 + (self.TM / 4 + self.DN) * self.Bc
        return reads / (self.TM * self.TN * self.d4 + self.TM * 4 * self.DN * self.Bc)

    @property
    def max_accumulators(self) -> int:
        return MAX_ACCUMULATORS

    @property
    def fits_registers(self) -> bool:
        """Whether a thread has registers for its accumulators and the rest."""
        share = REGISTERS // self.threads - OTHER_REGISTERS
        return self.threads <= MAX_THREADS and self.accumulators <= min(
            self.max_accumulators, share
        )

    @property
    def min_blocks(self) -> int:
        """Blocks of the flash kernels that ptxas should make room for on a multiprocessor."""
        return 2 if self.threads <= 128 else 1


@dataclass(frozen=True)
class BackwardSpec(Spec):
    """The same for a backward kernel: every tile serves two products and has one pitch.

    A thread owns CM rows of dK and dV, in groups of four.
    """

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
        """The same over the five products."""
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
        return self.Bc // self.ty_count

    @property
    def columns(self) -> int:
        """The head dimension rounded up to what the threads of a row cover."""
        return 4 * self.tx_count * self.DN

    @property
    def pitch_qk(self) -> int:
        return self.columns + 4

    @property
    def pitch_v(self) -> int:
        return self.pitch_qk

    @property
    def tile_floats(self) -> tuple[int, ...]:
        """Floats of a row tile, a column tile, and a tile of P."""
        return (self.Br * self.pitch_qk, self.Bc * self.pitch_qk, self.Br * self.pitch_p)

    @property
    def shared_bytes(self) -> int:
        return 8 * sum(self.tile_floats)


@dataclass(frozen=True)
class MmaSpec(Spec):
    """The same for tensor cores: a warp takes 16 rows, or several times 16, and all columns; or,
    with ``splits_keys``, all rows and an equal part of the columns.

    Thread (ty, tx) is place tx of 4 in group ty of a fragment (``intrinsics/matrix.py``): it owns
    rows ty + 8 i and of each 8 columns 2 tx and 2 tx + 1. Pitches are in 16-bit elements; the
    padding of 16 bytes a row spreads the rows that an ``ldmatrix`` reads over all banks.
    ``ablated`` are those of MEASURES that are left out.
    """

    dtype: str = "float16"
    positive_scale: bool = False
    splits_keys: bool = False
    ablated: tuple[str, ...] = ()
    stages: int = 1

    @property
    def folds_scale(self) -> bool:
        """Only a positive scale keeps the scores' order, and only plain scores are its product."""
        features = self.features
        plain = not (features.softcap or features.alibi or features.bias)
        return self.positive_scale and plain and "folded_scale" not in self.ablated

    @property
    def prefetches(self) -> bool:
        """Whether tiles are on their way while others are computed with."""
        return "prefetch" not in self.ablated

    @property
    def stores_wide(self) -> bool:
        """Whether O leaves in 16-byte stores, by way of shared memory."""
        return self.aligned and "wide_stores" not in self.ablated

    @property
    def row_step(self) -> int:
        return 8

    @property
    def column_width(self) -> int:
        return 2

    @property
    def column_step(self) -> int:
        return 8

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def TM(self) -> int:
        return self.Br // 8 if self.splits_keys else super().TM

    @property
    def TN(self) -> int:
        return super().TN // (self.warps if self.splits_keys else 1)

    @property
    def warp_rows(self) -> int:
        """Rows from one warp's to the next; 0 where every warp takes all."""
        return 0 if self.splits_keys else 8 * self.TM

    @property
    def warp_columns(self) -> int:
        return 4 * self.TN if self.splits_keys else 0

    @property
    def columns(self) -> int:
        """The head dimension rounded up to whole fragments."""
        return 16 * self.DN

    @property
    def pitch(self) -> int:
        return self.columns + (0 if "padding" in self.ablated else 8)

    @property
    def tile_halves(self) -> tuple[int, ...]:
        """16-bit elements of sQ and of a stage of sK and of sV in shared memory."""
        return self.Br * self.pitch, self.Bc * self.pitch, self.Bc * self.pitch

    @property
    def exchange_floats(self) -> int:
        """Floats of sO: O, l and m of every warp but the one that owns the row."""
        return (self.warps - 1) * self.Br * (self.columns + 2) if self.splits_keys else 0

    @property
    def shared_bytes(self) -> int:
        rows, *columns = self.tile_halves
        return 2 * (rows + self.stages * sum(columns)) + 4 * self.exchange_floats

    @property
    def accumulators(self) -> int:
        """Registers of one thread's parts of O and of S."""
        return self.TM * (4 * self.DN + self.TN)

    @property
    def keeps_q(self) -> bool:
        """Whether Q's fragments stay in registers: where S, O and they leave room for the rest."""
        fit = self.columns <= 128 and self.accumulators + 2 * self.TM * self.DN <= 160
        return fit and "q_registers" not in self.ablated

    @property
    def q_registers(self) -> int:
        """Registers of Q's fragments; where they do not stay there few are in use at a time."""
        return 2 * self.TM * self.DN

    @property
    def fits_registers(self) -> bool:
        return self.accumulators <= 192

    @property
    def min_blocks(self) -> int:
        return 1


@dataclass(frozen=True)
class MmaBackwardSpec(MmaSpec):
    """The same for a backward kernel, whose S and dP stand transposed in registers.

    A warp takes 16 or 32 columns of S. With ``row_warps`` 1 it takes all rows: PT and dST are then
    first operands of dV += PT dO and dK += dST Q without leaving registers. With 2 two warps take
    half of the rows each, exchange PT and dST through shared memory, and make half of the columns
    of dK and dV each: half the registers. Thread (ty, tx) owns columns tx + 8 j and of
    each 8 rows 2 ty and 2 ty + 1, counted over the warps. dQ needs all columns: dST is in shared
    memory, and ``query_warps`` x ``chunk_warps`` warps share a tile of dQ. ``row_tiles`` counts Q,
    dO and, for FlashAttention-1, O. ``vector_adds`` is for atomic adds of two neighbours, which
    sm_90 has; ``splits_queries`` for blocks that share dK and dV.
    """

    row_warps: int = 1
    row_tiles: int = 2
    splits_queries: bool = False
    vector_adds: bool = False

    @property
    def row_width(self) -> int:
        return 2

    @property
    def column_width(self) -> int:
        return 1

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
        return -(-self.head_dim // (16 * self.row_warps)) * self.row_warps

    @property
    def scores(self) -> TransposedSpec:
        """ST = K QT and dPT = V dOT of a warp, with K and V in Q's place in the forward pass."""
        rows = self.Br // self.row_warps
        keeps = self.row_warps == 1 and self.accumulators + 4 * self.TN * self.DN <= 176
        return self._transposed(16 * self.DN, rows, keeps)

    @property
    def gradients(self) -> TransposedSpec:
        """dV = PT dO and dK = dST Q of a warp, as P V in the forward pass."""
        return self._transposed(16 * self.DN // self.row_warps, self.Br, False)

    def _transposed(self, head_dim: int, rows: int, keeps: bool) -> TransposedSpec:
        return TransposedSpec(
            head_dim,
            self.Bc,
            rows,
            4,
            8 * self.warps,
            self.features,
            self.aligned,
            dtype=self.dtype,
            keeps_q=keeps,
            whole=self,
        )

    @property
    def accumulators(self) -> int:
        """Registers of one thread's parts of dK and dV, and of S and dP."""
        return 2 * self.TN * (4 * self.DN // self.row_warps + self.TM)

    @property
    def query_warps(self) -> int:
        """Warps down the rows of dQ: as they read the least of dST and K."""
        return self.warps // self.chunk_warps

    @property
    def chunk_warps(self) -> int:
        """Warps along the 16-column chunks of dQ."""

        def reads(along: int) -> int:
            fragments = self.Br // 16 * along // self.warps
            chunks = -(-self.DN // along)
            return 2 * fragments * chunks + fragments + chunks

        ways = [n for n in range(1, self.warps + 1) if self.warps % n == 0]
        return min((n for n in ways if self.Br // 16 % (self.warps // n) == 0), key=reads)

    @property
    def query_fragments(self) -> int:
        """Fragments of 16 rows of dQ in a warp."""
        return self.Br // 16 // self.query_warps

    @property
    def query_chunks(self) -> int:
        """Chunks of 16 columns of dQ in a warp."""
        return -(-self.DN // self.chunk_warps)

    @property
    def pitch_ds(self) -> int:
        return self.Br + 8

    @property
    def tile_halves(self) -> tuple[int, ...]:
        """16-bit elements of a row tile, a column tile and a tile of dST in shared memory."""
        return self.Br * self.pitch, self.Bc * self.pitch, self.Bc * self.pitch_ds

    @property
    def shared_bytes(self) -> int:
        """Two stages of the row tiles, L and D; K, V, dST and, where warps exchange it, PT."""
        rows, columns, scores = self.tile_halves
        halves = 2 * self.row_tiles * rows + 2 * columns + self.row_warps * scores
        return 2 * halves + 16 * self.Br


@dataclass(frozen=True)
class MmaSweepSpec(MmaSpec):
    """The same for the sweep that makes dQ: S and dP, and fragments of Q and dO."""

    @property
    def accumulators(self) -> int:
        return self.TM * (4 * self.DN + 2 * self.TN)

    @property
    def keeps_q(self) -> bool:
        return self.accumulators + 4 * self.TM * self.DN <= 160


@dataclass(frozen=True)
class TransposedSpec(MmaSpec):
    """Columns of S in the place of rows: a part of what the kernel of ``whole`` multiplies.

    ``head_dim`` counts whole fragments; pitch and TM, the warp's 8-column groups, are the kernel's.
    """

    keeps_q: bool = False
    whole: MmaBackwardSpec = None  # type: ignore[assignment]

    @property
    def TM(self) -> int:
        return self.whole.TN

    @property
    def pitch(self) -> int:
        return self.whole.pitch


@dataclass(frozen=True)
class StandardSpec(MmaSpec):
    """The same for standard attention, whose kernels hold a tile of S or of O, never both.

    The products with S take ``step`` of a tile's columns at a time, in two stages: while one is
    multiplied the next is on its way.
    """

    @property
    def folds_scale(self) -> bool:
        return False

    @property
    def step(self) -> int:
        return next(n for n in (64, 32, 16) if self.Bc % n == 0)

    @property
    def pitch_s(self) -> int:
        """Of a tile of S, Br x Bc."""
        return self.Bc + 8

    @property
    def pitch_p(self) -> int:
        """Of one step of it, Br x step."""
        return self.step + 8

    @property
    def pitch_t(self) -> int:
        """Of one step of the transposed one, step x Br."""
        return self.Br + 8

    @property
    def tile_halves(self) -> tuple[int, ...]:
        """16-bit elements of sQ, sK and sS."""
        return self.Br * self.pitch, self.Bc * self.pitch, self.Br * self.pitch_s

    @property
    def stage_halves(self) -> tuple[int, ...]:
        """16-bit elements of one stage: sP and sV."""
        return self.Br * self.pitch_p, self.step * self.pitch

    @property
    def transposed_halves(self) -> tuple[int, ...]:
        """The same of the transposed product: sP and sdO."""
        return self.step * self.pitch_t, self.step * self.pitch

    @property
    def shared_bytes(self) -> int:
        """Of the kernel that takes most."""
        stages = max(sum(self.stage_halves), sum(self.transposed_halves))
        return 2 * max(sum(self.tile_halves), 2 * stages)

    @property
    def accumulators(self) -> int:
        """Registers of one thread's part of S, or of O."""
        return self.TM * max(self.TN, 4 * self.DN)

    @property
    def keeps_q(self) -> bool:
        return self.TM * (self.TN + 2 * self.DN) <= 160

    @property
    def fits_registers(self) -> bool:
        return self.accumulators <= 128

    @property
    def min_blocks_of_scores(self) -> int:
        """12 warps on a multiprocessor where S and Q leave the registers for it."""
        kept = self.q_registers if self.keeps_q else 0
        return max(1, 12 // self.warps) if self.TM * self.TN + kept <= 96 else 1

    @property
    def min_blocks_of_output(self) -> int:
        """The same of 16 warps and O."""
        return max(1, 16 // self.warps) if self.TM * 4 * self.DN <= 64 else 1


def select_mma_spec(
    tiles: Tiles,
    head_dim: int,
    shared_limit: int,
    kind: type[MmaSpec] = MmaSpec,
    **facts: Any,
) -> Any:
    """The tensor-core specialisation for ``tiles``; ``shared_limit`` in bytes a block.

    ``tiles.threads`` is 32 a warp, and a warp takes 16 or 32 rows; None takes 32 where it can.
    With ``splits_keys`` 2, 4 or 8 warps share the columns, by 16 or several times 16; None takes 4.
    Raises ValueError for tiles that are no multiples of 16, or do not fit.
    """
    splits_keys = facts.get("splits_keys", False)
    if tiles.Br % 16 or tiles.Bc % 16:
        raise ValueError(
            f"tiles: Br={tiles.Br}, Bc={tiles.Bc} on tensor cores: allowed are multiples of 16"
        )
    if splits_keys and tiles.Bc % 32:
        raise ValueError(
            f"tiles: Bc={tiles.Bc} with warp_partition='keys': allowed are multiples of 32, 16 "
            "columns for each of two warps or more"
        )
    counts = [tiles.Br // rows for rows in (32, 16) if tiles.Br % rows == 0]
    if splits_keys:
        counts = [warps for warps in (4, 8, 2) if tiles.Bc % (16 * warps) == 0]
    facts["stages"] = tiles.stages
    found = [kind(head_dim, tiles.Br, tiles.Bc, 4, 8 * warps, **facts) for warps in counts]
    return _chosen(found, tiles, head_dim, shared_limit)


def _chosen(found: list, tiles: Tiles, head_dim: int, shared_limit: int) -> Any:
    """The first of these specialisations that can be, or the one with the threads asked for."""
    part = "all" if found[0].splits_keys else "16 or 32 of"
    staged = f", stages={tiles.stages}" if tiles.stages > 1 else ""
    found = [s for s in found if s.threads <= MAX_THREADS and s.fits_registers]
    if not found:
        raise ValueError(
            f"tiles: Br={tiles.Br}, Bc={tiles.Bc} at head_dim={head_dim} leaves no split over "
            f"warps of {part} its rows and at most {MAX_THREADS} threads whose parts fit their "
            "registers; take smaller blocks"
        )
    if found[0].shared_bytes > shared_limit:
        raise ValueError(
            f"tiles: Br={tiles.Br}, Bc={tiles.Bc}{staged} at head_dim={head_dim} needs "
            f"{found[0].shared_bytes} bytes of shared memory, the device has {shared_limit} a block"
        )
    if tiles.threads is not None:
        allowed = sorted({spec.threads for spec in found})
        found = [spec for spec in found if spec.threads == tiles.threads]
        if not found:
            raise ValueError(
                f"tiles: threads={tiles.threads} does not fit Br={tiles.Br}, Bc={tiles.Bc} on "
                f"tensor cores; allowed: {allowed}"
            )
    return found[0]


def default_mma_tiles(
    algorithm: str,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    shared_limit: int,
    features: Features = PLAIN,
    splits_keys: bool = False,
) -> Tiles:
    """Block sizes of the tensor-core kernels: 128 x 64, halved until memory and registers fit.

    FlashAttention-1 takes as many columns as registers hold: every pass over them moves O. Where 32
    rows a warp would spill registers, or an option's own values make them, it takes 16 or Bc less.
    Where the warps split the keys each has all of Br, and its part of O: 32 x 256, then less.
    """
    d, crowded = -(-head_dim // 16) * 16, features.crowds
    Bc = 64
    if algorithm == "fa1" and d <= 128:
        Bc = 256 if d <= 64 and not crowded else 128
    elif algorithm == "fa1" and d > 192 and not splits_keys:
        Bc = 32 if crowded else 48
    elif algorithm == "fa2" and d == 128 and features.bias:
        Bc = 32
    least = 32 if splits_keys else 16
    most = 128 if not splits_keys else 32 if d <= 64 else 16
    Br = min(most, max(16, 2 * _power_of_two(max(1, seqlen_q - 1))))
    Bc = min(Bc, max(least, 2 * _power_of_two(max(1, seqlen_k - 1))))
    older = shared_limit < 200 * 1024  # than compute capability 9.0
    narrow = algorithm == "fa1" or 64 < d < 128
    narrow |= (d == 64 and features.packed) or (
        d == 128 and (crowded or (older and features.causal))
    )
    make = functools.partial(
        select_mma_spec, head_dim=head_dim, shared_limit=shared_limit, splits_keys=splits_keys
    )
    found = _shrunk_mma(Br, Bc, make, 16, least)
    return replace(found, threads=2 * found.Br) if narrow and found.Br % 128 == 0 else found


def _shrunk_mma(
    Br: int, Bc: int, specialised: Callable[[Tiles], Any], rows: int = 16, columns: int = 16
) -> Tiles:
    """The first tiles that can be specialised, columns halved first to whole fragments; not below
    ``rows`` x ``columns``.
    """
    while (Br, Bc) != (rows, columns) and not is_valid(Tiles(Br, Bc), specialised):
        Br, Bc = (Br, -(-Bc // 32) * 16) if Bc > 32 or Br == rows else (Br // 2, Bc)
    specialised(Tiles(Br, Bc))
    return Tiles(Br, Bc)


def is_valid(tiles: Tiles, specialised: Callable[[Tiles], Any]) -> bool:
    """Whether ``specialised`` takes the tiles; it refuses them with a ValueError."""
    try:
        specialised(tiles)
    except ValueError:
        return False
    return True


def _row_warps(head_dim: int) -> int:
    """Warps that share their columns: beyond d = 64 one's registers would hold too few of them."""
    return 1 if head_dim <= 64 else 2


def select_mma_backward_spec(
    tiles: Tiles, head_dim: int, shared_limit: int, **facts: Any
) -> MmaBackwardSpec:
    """The tensor-core specialisation of a backward kernel for ``tiles``, as ``select_mma_spec``.

    A warp takes 32 or 16 columns, two beyond d = 64 the same ones; None takes 32 where it can.
    """
    row_warps = _row_warps(head_dim)
    if tiles.Br % (16 * row_warps) or tiles.Bc % 16:
        raise ValueError(
            f"tiles: Br={tiles.Br}, Bc={tiles.Bc} on tensor cores at head_dim={head_dim}, "
            f"backward: allowed are multiples of {16 * row_warps} and 16"
        )
    found = [
        MmaBackwardSpec(
            head_dim,
            tiles.Br,
            tiles.Bc,
            4,
            8 * row_warps * (tiles.Bc // columns),
            row_warps=row_warps,
            **facts,
        )
        for columns in (32, 16)
        if tiles.Bc % columns == 0
    ]
    return _chosen(found, tiles, head_dim, shared_limit)


def default_mma_backward_tiles(
    seqlen_q: int, seqlen_k: int, head_dim: int, shared_limit: int, **facts: Any
) -> Tiles:
    """Block sizes of the backward kernels on tensor cores: 32 x 128, 64 x 128 where two warps share
    their columns, and 32 x 64 beyond d = 128 or where that takes too much memory; halved until
    memory and registers hold them.

    FlashAttention-1, which also reads O and dQ, spills registers with these: it takes 64 x 64 in
    place of 64 x 128, and 16 columns a warp.
    """
    first = facts.get("row_tiles") == 3
    Br, Bc = (32, 128) if head_dim <= 64 else (64, 128) if head_dim <= 128 else (32, 64)
    if first and 64 < head_dim <= 128:
        Bc = 64
    make = functools.partial(
        select_mma_backward_spec, head_dim=head_dim, shared_limit=shared_limit, **facts
    )
    if (Br, Bc) == (64, 128) and not is_valid(Tiles(Br, Bc), make):
        Br, Bc = 32, 64
    row_warps = _row_warps(head_dim)
    smallest = 16 * row_warps
    Br = min(Br, max(smallest, 2 * _power_of_two(max(1, seqlen_q - 1))))
    Bc = min(Bc, max(16, 2 * _power_of_two(max(1, seqlen_k - 1))))
    found = _shrunk_mma(Br, Bc, make, smallest)
    return Tiles(found.Br, found.Bc, 2 * row_warps * found.Bc) if first else found


def sweep_tiles(head_dim: int, shared_limit: int) -> Tiles:
    """Block sizes of the second sweep on tensor cores: 64 x 64, halved until they fit."""
    make = functools.partial(
        select_mma_spec, head_dim=head_dim, shared_limit=shared_limit, kind=MmaSweepSpec
    )
    return _shrunk_mma(64, 64, make)


def default_mma_standard_tiles(
    seqlen_q: int, seqlen_k: int, head_dim: int, shared_limit: int, passes: str = "fwd"
) -> Tiles:
    """The same of standard attention: 128 x 64, or ``passes`` "bwd", where each column tile reads
    all of Q and dO, 128 x 128 with 16 rows a warp.
    """
    Br = min(128, max(16, 2 * _power_of_two(max(1, seqlen_q - 1))))
    Bc = min(64 if passes == "fwd" else 128, max(16, 2 * _power_of_two(max(1, seqlen_k - 1))))
    make = functools.partial(
        select_mma_spec, head_dim=head_dim, shared_limit=shared_limit, kind=StandardSpec
    )
    found = _shrunk_mma(Br, Bc, make)
    return Tiles(found.Br, found.Bc, 2 * found.Br) if found.Br == found.Bc == 128 else found


def splits(
    Br: int,
    Bc: int,
    head_dim: int,
    kind: type[Spec] = Spec,
    *,
    any_registers: bool = False,
    **facts: Any,
) -> list[Spec]:
    """Every way to share a tile among the threads of a block, best first.

    ``any_registers`` keeps those whose threads would not hold their parts in registers.
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
    tiles: Tiles, head_dim: int, shared_limit: int, kind: type[Spec] = Spec, **facts
) -> Any:
    """The kernel specialisation for ``tiles``; ``shared_limit`` in bytes a block.

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


def paper_rule(M: int, head_dim: int) -> tuple[int, int]:
    """(Br, Bc) of FlashAttention's Algorithm 1, line 1, for M floats of on-chip memory."""
    Bc = -(-M // (4 * head_dim))
    return min(Bc, head_dim), Bc


def _power_of_two(n: int) -> int:
    """The largest power of two that is at most ``n``."""
    return 1 << (n.bit_length() - 1)


def default_tiles(
    algorithm: str, seqlen_q: int, seqlen_k: int, head_dim: int, shared_limit: int
) -> Tiles:
    """Block sizes for ``algorithm`` on a device with ``shared_limit`` bytes a block.

    FlashAttention-1 takes Bc from its line 1 (ceil(M / 4d), as a power of two up to 128); the
    Q-outer kernels and the inner block take FlashAttention-2's choice from {64, 128} (section 3.3).
    Both are halved, the larger first, until shared memory and registers hold them, and no block is
    larger than the sequence needs.
    """
    Br, Bc = 128, 64
    if algorithm == "fa1":
        Bc = min(128, _power_of_two(paper_rule(shared_limit // 4, head_dim)[1]))
    Br = min(Br, max(16, 2 * _power_of_two(max(1, seqlen_q - 1))))
    Bc = min(Bc, max(16, 2 * _power_of_two(max(1, seqlen_k - 1))))
    return _shrunk(Br, Bc, head_dim, shared_limit, Spec)


def default_backward_tiles(seqlen_q: int, seqlen_k: int, head_dim: int, shared_limit: int) -> Tiles:
    """Block sizes of the backward kernels: 64 x 64, halved until memory and registers hold them."""
    Br = min(64, max(16, 2 * _power_of_two(max(1, seqlen_q - 1))))
    Bc = min(64, max(16, 2 * _power_of_two(max(1, seqlen_k - 1))))
    return _shrunk(Br, Bc, head_dim, shared_limit, BackwardSpec)


def _shrunk(Br: int, Bc: int, head_dim: int, shared_limit: int, kind: type[Spec]) -> Tiles:
    """The first tiles that fit, the larger block halved first."""
    while (Br, Bc) != (4, 8):
        found = splits(Br, Bc, head_dim, kind)
        if found and found[0].shared_bytes <= shared_limit:
            return Tiles(Br, Bc)
        if Br >= Bc and Br > 4:
            Br //= 2
        else:
            Bc //= 2
    return Tiles(Br, Bc)
