"""How the warpgroups of a block share a tile on Hopper's tensor cores (``wgmma``), in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fa_numba.integers import ceil_div, round_up
from fa_numba.options import PLAIN, Features
from fa_numba.problem import MAX_SEQLEN
from fa_numba.tiling.spec import Spec
from fa_numba.tiling.tiles import MOST_STAGES, Tiles

GROUP = 128  # threads of a warpgroup
GROUP_ROWS = 64  # rows of S that a warpgroup takes
PANEL = 64  # columns of 16-bit elements in 128 bytes
SHORT = 1024  # rows up to which other tiles are the fastest than of long sequences
TOLD = 4  # words that tell of a row tile: its number, first row, head and batch entry
# By the number of consumers: registers of a thread that produces, and of one that consumes.
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
# The same where a producer also finds where sequences end.
_REGISTERS_WITH_ENDS = {1: (56, 256), 2: (40, 232), 3: (32, 160)}
# And looks up pages.
_REGISTERS_WITH_PAGES = {1: (56, 256), 2: (56, 224), 3: (32, 160)}
# The most that an instruction names.
_MOST_REGISTERS = 255
# Registers of a consumer beside its parts of S, P and O; the same where blocks share them.
_OTHERS, _OTHERS_SHARED = 32, 20
# And what a window takes more there, by what the assembler spills.
_WINDOW = 16
# Beside what an instruction adds to, of the registers that a thread begins with: the assembler
# refuses others, whatever a consumer takes later.
_BESIDE_SUMS = 30
# Of one multiprocessor: registers, and bytes of shared memory, of which each block takes some more.
_POOL, _MEMORY, _RESERVED = 65536, 228 * 1024, 1024
MOST_BLOCKS = 3  # of low tiles side by side on a multiprocessor
_LEAST_COLUMNS = 64  # of a tile, however few keys there are
# Head dimensions whose three consumers hold 112 columns, and under a causal mask end first where
# there are so many rows; both as `python -m experiments tune --series fa2-wgmma` found.
_SMALL, _LONG = 80, 2048
# Rows, and columns of a window, up to which small heads' row tiles are too short for one block to
# have the next one's Q, K and V in time.
_SHORTER, _NARROW = 512, 256
# Columns of a tile where a bias is read, up to a head dimension: alone, with a causal mask and with
# other options that hold registers, as the assembler spills none.
_BIAS_COLUMNS = {64: (128, 112, 96), 128: (96, 96, 64), 192: (64, 64, 48), 256: (48, 32, 32)}
# What a tile of three consumers takes over one of two: up to a panel or of few columns, and wider.
_THREE, _THREE_WIDE = 1.29, 1.43
# What FlashAttention-2's forward kernel can do without: turns of the consumer warpgroups, products
# on their way during a softmax, blocks that stay for several row tiles, a counter that hands these
# out, the next one's first product begun ahead, with the last of this, and its being taken late.
WGMMA_MEASURES = dict.fromkeys(
    ("turns", "overlap", "persistent", "counter", "ahead", "late"), ("fa2",)
)
# Of four parts that three consumers have of registers to spare, what it takes to begin the next row
# tile's first product ahead. The parts, and those in `_taken`, are by what the assembler spills.
_SPARE, _AHEAD = 4, 2


def _taken(features: Features) -> int:
    """How many parts of three consumers' spare registers the options take."""
    ends = 2 if features.kv_lens or (features.splits and features.q_lens) else 0
    ends = 3 if features.packed else ends
    more = _SPARE + 1 if features.alibi or features.page_size else 0
    return ends + more + (3 if features.window else 0)


@dataclass(frozen=True)
class WgmmaSpec(Spec):
    """A forward kernel on Hopper's tensor cores: a warpgroup that produces, and ``consumers`` that
    take 64 rows of S each, and all columns.

    Thread (ty, tx) of a consumer is place tx of 4 in row ty of 64 (intrinsics/warpgroup.py).
    ``stages`` is how many tiles of K and of V are in shared memory, ``q_stages`` of Q.
    ``positive_scale``: the scale of the scores is above 0. ``ablated`` are those of WGMMA_MEASURES
    that are left out. ``blocks`` share a multiprocessor.
    """

    dtype: str = "float16"
    positive_scale: bool = False
    stages: int = 2
    q_stages: int = 2
    blocks: int = 1
    ablated: tuple[str, ...] = ()

    @property
    def takes_turns(self) -> bool:
        """Whether consumers begin their products one after the other."""
        return self.consumers > 1 and "turns" not in self.ablated

    @property
    def overlaps(self) -> bool:
        """Whether a consumer's products are on their way during its softmax."""
        return "overlap" not in self.ablated

    @property
    def persistent(self) -> bool:
        """Whether a block stays on its multiprocessor for several row tiles."""
        return "persistent" not in self.ablated

    @property
    def begins_next(self) -> bool:
        """Whether the first product of a block's next row tile is on its way with the last one of
        this: of one place of Q the next is not there yet, and options may leave three consumers no
        registers for it.
        """
        crowded = self.consumers == 3 and _taken(self.features) + _AHEAD > _SPARE
        return self.overlaps and self.q_stages > 1 and not crowded and "ahead" not in self.ablated

    @property
    def takes_late(self) -> bool:
        """Whether a block takes its next row tile when few column tiles of this one are left; else
        as soon as there is a place for its Q.
        """
        return "late" not in self.ablated

    @property
    def counts_tiles(self) -> bool:
        """Whether a counter hands out row tiles; else a block's are a grid's length apart."""
        return "counter" not in self.ablated

    @property
    def by_group(self) -> bool:
        """Whether the kernel finds the K/V head of each query head."""
        return self.grouped and self.tile_heads == 1

    @property
    def consumers(self) -> int:
        return self.Br // GROUP_ROWS

    @property
    def consumer_rows(self) -> int:
        """Rows of a tile from those of a consumer to those of the next."""
        return GROUP_ROWS

    @property
    def threads(self) -> int:
        return GROUP * (1 + self.consumers)

    @property
    def registers_at_first(self) -> int:
        """Of each thread of blocks that share a multiprocessor, before some give to others."""
        return _POOL // (self.blocks * self.threads) // 8 * 8

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that produces, and of one that consumes."""
        if self.blocks > 1:
            few = REGISTERS[2][0]
            given = self.registers_at_first * self.threads - few * GROUP
            consuming = given // (GROUP * self.consumers) // 8 * 8
            return few, min(REGISTERS[2][1], consuming)
        ends = self.query_ends or self.key_ends
        if self.features.page_size:
            return _REGISTERS_WITH_PAGES[self.consumers]
        return (_REGISTERS_WITH_ENDS if ends else REGISTERS)[self.consumers]

    @property
    def key_pieces(self) -> tuple[int, int]:
        return 1, 1

    @property
    def column_producers(self) -> int:
        """Threads that bring K and V: of pages, which are many boxes, one each."""
        return 2 if self.features.page_size else 1

    @property
    def loading_threads(self) -> int:
        return 1

    @property
    def panels(self) -> int:
        """Boxes of 64 columns that a row has."""
        return ceil_div(self.head_dim, PANEL)

    @property
    def tile_halves(self) -> tuple[int, int]:
        """16-bit elements of a tile of Q, and of one of K or V."""
        return self.panels * PANEL * self.Br, self.panels * PANEL * self.Bc

    @property
    def halves(self) -> int:
        """16-bit elements of all tiles."""
        rows, columns = self.tile_halves
        return self.q_stages * rows + 2 * self.stages * columns

    @property
    def barriers(self) -> int:
        return 1 + 3 * self.q_stages + 4 * self.stages

    @property
    def barrier_places(self) -> tuple[int, ...]:
        """The barrier at which the next row tile is taken; the first one of a row tile that is told
        of, of a full place of Q, of an empty one, of full ones of K and of V, of empty ones.
        """
        q, kv = self.q_stages, 1 + 3 * self.q_stages
        of_columns = (kv + n * self.stages for n in range(4))
        return 0, 1, 1 + q, 1 + 2 * q, *of_columns

    @property
    def first_index(self) -> int:
        """Words before those that tell of row tiles, behind tiles and barriers."""
        return self.halves // 2 + 2 * self.barriers

    @property
    def shared_bytes(self) -> int:
        return 4 * (self.first_index + TOLD * self.q_stages)

    @property
    def p_registers(self) -> int:
        """Words of a thread's part of P in 16 bits."""
        return self.TM * self.TN // 2

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
    def folds_scale(self) -> bool:
        return self.positive_scale and not self.features.changes_scores

    @property
    def accumulators(self) -> int:
        own = self.TM * (self.TN + 4 * self.DN) + self.p_registers
        return own + (self.bias_registers if self.reads_bias else 0)

    @property
    def fits_registers(self) -> bool:
        others = _OTHERS
        if self.blocks > 1:
            others = _OTHERS_SHARED + (_WINDOW if self.features.window else 0)
            sums = self.TM * max(self.TN, 4 * self.DN)  # of S or of O
            if sums + _BESIDE_SUMS > self.registers_at_first:
                return False
        return self.accumulators <= min(self.registers[1], _MOST_REGISTERS) - others

    @property
    def min_blocks(self) -> int:
        return self.blocks


_Specialised = TypeVar("_Specialised", bound=WgmmaSpec)


def within_registers(
    kind: type[_Specialised], tiles: Tiles, head_dim: int, **facts: object
) -> _Specialised:
    """The specialisation of a ``kind`` for ``tiles``, with the fields ``facts`` beside the sizes.

    Raises ValueError for other rows than 64, 128 or 192, columns that are no multiple of 16 up to
    256, another number of threads, and what does not fit registers.
    """
    allowed = [GROUP_ROWS * n for n in REGISTERS]
    if tiles.Br not in allowed or tiles.Bc % 16 or tiles.Bc > 256:
        raise ValueError(
            f"tiles: Br={tiles.Br}, Bc={tiles.Bc} on Hopper's tensor cores: allowed are "
            f"{', '.join(map(str, allowed))} rows and a multiple of 16 columns up to 256"
        )
    spec = kind(head_dim, tiles.Br, tiles.Bc, 4, tiles.Br // 2, **facts)  # type: ignore[arg-type]
    if tiles.threads not in (None, spec.threads):
        raise ValueError(
            f"tiles: threads={tiles.threads} does not fit Br={tiles.Br} on Hopper's tensor cores: "
            f"allowed is {spec.threads}"
        )
    if not spec.fits_registers:
        raise ValueError(
            f"tiles: Br={tiles.Br}, Bc={tiles.Bc} at head_dim={head_dim} leaves a thread's parts "
            "of S, P and O no registers; take smaller blocks"
        )
    return spec


def select_wgmma_spec(
    tiles: Tiles, head_dim: int, shared_limit: int, *, shares: bool = False, **facts: object
) -> WgmmaSpec:
    """The specialisation on Hopper's tensor cores for ``tiles``, with the fields ``facts`` beside
    the sizes; ``shared_limit`` in bytes a block. Two tiles of Q are in memory where they fit, more
    where there are more of K and V. With ``shares`` as many blocks of one consumer share a
    multiprocessor as fit.

    Raises ValueError as ``within_registers`` does, and for what does not fit memory.
    """
    places = {"stages": tiles.stages, "q_stages": max(2, tiles.stages)}
    spec = within_registers(WgmmaSpec, tiles, head_dim, **places, **facts)
    if shares and spec.consumers == 1:
        for blocks in range(MOST_BLOCKS, 1, -1):
            several = replace(spec, blocks=blocks)
            if several.fits_registers and blocks * (spec.shared_bytes + _RESERVED) <= _MEMORY:
                return several
    if spec.shared_bytes > shared_limit:
        spec = replace(spec, q_stages=1)
    if spec.shared_bytes > shared_limit:
        raise ValueError(
            f"tiles: Br={tiles.Br}, Bc={tiles.Bc}, stages={tiles.stages} at head_dim={head_dim} "
            f"needs {spec.shared_bytes} bytes of shared memory, the device has {shared_limit} a "
            "block"
        )
    return spec


def default_wgmma_tiles(
    seqlen_q: int,
    head_dim: int,
    causal: bool,
    features: Features = PLAIN,
    *,
    seqlen_k: int = MAX_SEQLEN,
    heads: int = 1,
    places: int = 0,
    lens: Sequence[int] | None = None,
    window: int = 0,
) -> Tiles:
    """Block sizes of the kernels on Hopper's tensor cores, the fastest of those measured: three
    consumers where registers allow it and their tiles end first, and as many columns as memory
    holds, or all there are. ``seqlen_q`` are the rows of all heads that share a tile, ``heads`` how
    many such there are with all batch entries, ``places`` the multiprocessors, 0 where they are not
    known, ``lens`` the rows of packed sequences, of which ``seqlen_q`` is the largest, ``window``
    the columns that a row sees. Few rows are left to one consumer, since then the columns' way from
    memory counts.
    """
    Bc = 128 if head_dim <= 128 else 112 if head_dim <= 192 and not features.crowds else 96
    Bc = 80 if head_dim > 192 else Bc
    if features.bias:  # whose tile is in registers too
        others = replace(features, bias=False, causal=False) != PLAIN
        columns = next(found for d, found in _BIAS_COLUMNS.items() if head_dim <= d)
        Bc = columns[2 if others else 1 if causal else 0]
    if seqlen_q <= GROUP_ROWS:
        return Tiles(GROUP_ROWS, 64 if PANEL < head_dim <= 2 * PANEL else min(Bc, 128), stages=2)
    if not features.page_size:
        Bc = min(Bc, max(_LEAST_COLUMNS, round_up(seqlen_k, 16)))
    if head_dim <= PANEL and takes_places(features):
        if features.window or causal:
            longest = max(seqlen_q, seqlen_k)
            if 0 < window <= _NARROW or (causal and longest <= _SHORTER):
                return Tiles(GROUP_ROWS, _LEAST_COLUMNS, stages=3)
            if longest <= SHORT and not features.window:
                return Tiles(GROUP_ROWS, 96, stages=2)
        elif seqlen_k <= 128:
            return Tiles(2 * GROUP_ROWS, Bc, stages=MOST_STAGES)
    two = Tiles(2 * GROUP_ROWS, Bc, stages=2)
    three = Tiles(3 * GROUP_ROWS, Bc, stages=2)
    if Bc == 128 and head_dim > PANEL:
        plain = head_dim <= _SMALL and replace(features, causal=False) == PLAIN
        three = replace(three, Bc=112 if plain else 96)
    if not _hold_three(three, head_dim, features) or (features.crowds and head_dim > PANEL):
        return two
    if causal:
        # Where all of two consumers have a place, the longest is what the call takes.
        if head_dim > _SMALL or ceil_div(seqlen_q, two.Br) * heads <= places:
            return two
        rows = sum(n * n for n in lens) // max(1, sum(lens)) if lens else seqlen_q
        return three if rows > (SHORT if head_dim <= PANEL else _LONG) else two
    # Rounds in which the tiles find a place, times what one takes over one of two consumers.
    takes = _THREE if head_dim <= PANEL or Bc < 128 else _THREE_WIDE

    def rounds(Br: int) -> int:
        if lens:  # a tile takes as long as its sequence is
            return sum(ceil_div(n, Br) * n for n in lens)
        tiles = ceil_div(seqlen_q, Br) * heads
        return ceil_div(tiles, places) if places else tiles

    return three if takes * rounds(three.Br) <= rounds(two.Br) else two


def takes_places(features: Features) -> bool:
    """Whether more places of Q, K and V, or more blocks, were measured beside these options."""
    return replace(features, causal=False, window=False) == PLAIN


def _hold_three(tiles: Tiles, head_dim: int, features: Features) -> bool:
    """Whether three consumers' registers hold the tiles; with a window or a cap they are slower."""
    spec = WgmmaSpec(head_dim, tiles.Br, tiles.Bc, 4, tiles.Br // 2)
    slower = features.window or features.softcap or features.bias
    return spec.fits_registers and not slower and _taken(features) <= _SPARE
