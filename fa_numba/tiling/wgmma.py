"""Specs of the forward kernels on Hopper's tensor cores (``wgmma``).

A spec says how the warpgroups of a thread block share a tile, and where tiles and barriers are in
shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeVar

from fa_numba.checks import one_of
from fa_numba.dtypes import DTYPES, SCALED_ROWS
from fa_numba.integers import ceil_div
from fa_numba.options import Features
from fa_numba.tiling.spec import Spec, check_shared, with_threads
from fa_numba.tiling.tiles import Tiles

GROUP = 128  # threads of a warpgroup
GROUP_ROWS = 64  # rows of S that a warpgroup takes
PANEL = 64  # columns of 16-bit elements in 128 bytes
# The exponent of P in e4m3. P is 2^(S - m + 8) and at most 256, so that it uses the range of e4m3.
P_EXPONENT = 8.0
WORK_WORDS = 4  # words of a work tile: number, first row, head, batch entry together with the split
# Number of consumers -> registers of a producer thread, and of a consumer thread.
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
# The same for calls in which a producer also looks up where sequences end.
_REGISTERS_WITH_ENDS = {1: (56, 256), 2: (40, 232), 3: (32, 160)}
# The same for calls in which a producer also looks up pages.
_REGISTERS_WITH_PAGES = {1: (56, 256), 2: (56, 224), 3: (32, 160)}
# The greatest number of registers that an instruction can address.
_MOST_REGISTERS = 255
# Registers of a consumer thread in addition to its parts of S, P and O; and the same if several
# thread blocks share a multiprocessor.
_OTHERS, _OTHERS_SHARED = 32, 20
# Further registers for a window in the latter case, by what the assembler spills.
_WINDOW = 16
# Registers in addition to a product's sums that a thread must have at launch. With fewer registers
# the assembler refuses the kernel, even if a consumer takes more registers later.
_BESIDE_SUMS = 30
# Of one multiprocessor: registers, and bytes of shared memory. Of a thread block: bytes that are
# reserved in addition to its shared memory.
_POOL, _MEMORY, _RESERVED = 65536, 228 * 1024, 1024
MOST_BLOCKS = 3  # most thread blocks with one consumer that share a multiprocessor
# Measures that `ablate` can switch off in FA-2's forward kernel, see the properties of WgmmaSpec:
# takes_turns, overlaps, persistent, counts_tiles, begins_next, takes_late, specialised.
WGMMA_MEASURES = dict.fromkeys(
    ("turns", "overlap", "persistent", "counter", "ahead", "late", "specialisation"), ("fa2",)
)
# Three consumers have few registers to spare. They are counted in SPARE equal parts. _AHEAD parts
# are needed to begin the next row tile's first product ahead (by what the assembler spills).
SPARE, _AHEAD = 4, 2


class Pipeline(NamedTuple):
    """The barriers of a pipeline, whose slots in shared memory are filled and emptied in turn.

    Each slot has two barriers: one completes when the slot is full, the other when the slot is
    empty. The barriers for full slots have consecutive indices, in the order of the slots. The
    barriers for empty slots do too.

    field    meaning
    full     index of the barrier that completes when slot 0 is full
    empty    index of the barrier that completes when slot 0 is empty
    slots    number of slots
    groups   number of parts of a slot with their own barriers. Normally it is 1. Above 1, it is the
             number of consumer warpgroups, and each of them has one part of each slot
    """

    full: int
    empty: int
    slots: int
    groups: int = 1


# Barriers to initialise: pairs of a number of slots, and the kinds of barriers of each slot. A kind
# is the index of its first barrier, and the number of arrivals that complete a barrier.
Arrivals: TypeAlias = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


class ForwardPipelines(NamedTuple):
    """The pipelines of FA-2's forward kernel.

    field   contents of a slot
    q       Q
    k       K
    v       V
    work    words that describe a work tile. Q of this work tile is in the slot of ``q`` with the
            same index
    late    no data. Its only barrier completes when it is time to take the next work tile
    """

    q: Pipeline
    k: Pipeline
    v: Pipeline
    work: Pipeline
    late: Pipeline


def spare_taken(features: Features) -> int:
    """Return how many parts of a consumer thread's spare registers the options of a call take.

    With three consumer warpgroups, a consumer thread has few registers to spare. They are counted
    in ``SPARE`` equal parts. Each of these options takes some parts, and the result is their sum:

    - Packed sequences take 3 parts.
    - Without packed sequences, ``kv_lens`` takes 2 parts. Key splits together with ``q_lens`` take
      2 parts, too, but not in addition to ``kv_lens``.
    - ``alibi_slopes``, ``block_table`` and ``dropout_p`` take SPARE + 1 parts, which is more than
      there are. Several of these three options together take this number only once.
    - ``window`` takes 3 parts.
    """
    ends = 2 if features.kv_lens or (features.splits and features.q_lens) else 0
    ends = 3 if features.packed else ends
    more = SPARE + 1 if features.alibi or features.page_size or features.dropout else 0
    return ends + more + (3 if features.window else 0)


@dataclass(frozen=True)
class WgmmaSpec(Spec):
    """A forward kernel on Hopper's tensor cores.

    A thread block has one producer warpgroup, and ``consumers`` consumer warpgroups. If the measure
    "specialisation" is switched off, there is no producer warpgroup, and a consumer thread loads
    all tiles. A consumer has 64 rows of S and all columns. Four threads share two rows. Thread (ty,
    tx) of a consumer, with tx from 0 to 3, has elements of the consumer's rows ty and ty + 8: the
    columns 2 tx and 2 tx + 1 of each 8 columns.

    field      meaning
    dtype      dtype of the 16-bit matrices
    stages     number of slots for tiles of K, and of V
    q_stages   number of slots for tiles of Q
    blocks     number of thread blocks that share a multiprocessor
    ablated    the measures in ``WGMMA_MEASURES`` that are switched off
    out_dtype  dtype of O; "" stands for ``dtype``

    In e4m3, kernels move two neighbouring elements as one 16-bit element. V is then stored with one
    row for each column of the head, see ``kernels/turned_values.py``.
    """

    dtype: str = "float16"
    stages: int = 2
    q_stages: int = 2
    blocks: int = 1
    ablated: tuple[str, ...] = ()
    out_dtype: str = ""

    key_pieces = (1, 1)
    loading_threads = 1
    row_step = 8
    column_width = 2
    column_step = 8

    @property
    def per_half(self) -> int:
        return 2 // DTYPES[self.dtype].bytes

    @property
    def p_exponent(self) -> float:
        return P_EXPONENT if self.per_half > 1 else 0.0

    @property
    def output(self) -> str:
        """The dtype of O."""
        return self.out_dtype or self.dtype

    @property
    def stores_floats(self) -> bool:
        """Whether threads write O from registers to global memory directly, in float32.

        Otherwise O goes through shared memory, and is written in boxes.
        """
        return self.planes > 1 or self.output == "float32"

    @property
    def value_ends(self) -> bool:
        """Whether sequences can end before the end of V's array as the kernel reads it.

        For e4m3, the array is a workspace. It contains zeros after the end of each sequence.
        """
        return self.key_ends and self.per_half == 1

    @property
    def specialised(self) -> bool:
        """Whether a thread block has a producer warpgroup, which only loads tiles.

        Otherwise a thread of the first consumer loads all tiles, and computes too.
        """
        return "specialisation" not in self.ablated

    @property
    def takes_turns(self) -> bool:
        """Whether consumers begin their products one after the other (ping-pong)."""
        return self.consumers > 1 and "turns" not in self.ablated

    @property
    def overlaps(self) -> bool:
        """Whether the tensor cores compute a consumer's products during its softmax."""
        return "overlap" not in self.ablated

    @property
    def persistent(self) -> bool:
        """Whether a thread block computes several work tiles, one after the other."""
        return "persistent" not in self.ablated

    @property
    def begins_next(self) -> bool:
        """Whether a work tile's last product overlaps with the first product of the next work tile.

        case                                                                value
        shared memory has one slot for Q, so the next Q is not loaded yet   False
        "overlap" or "ahead" is switched off (``ablated``)                  False
        "specialisation" is switched off: there is no next work tile        False
        three consumers, and options leave few registers (`spare_taken`)    False
        all other cases                                                     True
        """
        crowded = self.consumers == 3 and spare_taken(self.features) + _AHEAD > SPARE
        ready = self.specialised and self.q_stages > 1 and not crowded
        return ready and self.overlaps and "ahead" not in self.ablated

    @property
    def takes_late(self) -> bool:
        """Whether a thread block takes its next work tile near the end of the current work tile.

        Otherwise a thread block takes its next work tile as soon as a slot of Q is empty.
        """
        return self.specialised and "late" not in self.ablated

    @property
    def counts_tiles(self) -> bool:
        """Whether a counter in global memory hands out work tiles.

        Otherwise a thread block takes every n-th work tile, where n is the size of the grid.
        """
        return "counter" not in self.ablated

    @property
    def by_group(self) -> bool:
        """Whether kernels divide the number of a query head to get the number of its K/V head.

        The divisor is the size of a group: the number of query heads that share a K/V head. If the
        value is False, both numbers are equal, for one of two reasons:

        - Every query head has a K/V head of its own.
        - A row tile has rows of several query heads of a group (``tile_heads``), and kernels count
          groups instead of query heads.
        """
        return self.grouped and self.tile_heads == 1

    @property
    def consumers(self) -> int:
        """Number of consumer warpgroups."""
        return self.Br // GROUP_ROWS

    @property
    def consumer_rows(self) -> int:
        """Distance in rows of a tile between the first rows of neighbouring consumers."""
        return GROUP_ROWS

    @property
    def first_consumer(self) -> int:
        """Number of the first consumer thread in a block, after the producer warpgroup."""
        return GROUP if self.specialised else 0

    @property
    def threads(self) -> int:
        return self.first_consumer + GROUP * self.consumers

    @property
    def registers_at_first(self) -> int:
        """Number of registers of each thread at launch if thread blocks share a multiprocessor.

        After the launch, producer threads release registers, and consumer threads take them.
        Without a producer warpgroup, this is the number also if there is only one thread block.
        """
        return _POOL // (self.blocks * self.threads) // 8 * 8

    @property
    def registers(self) -> tuple[int, int]:
        """Numbers of registers of a producer thread and of a consumer thread.

        Producer threads release registers after the launch, and consumer threads take them. These
        are the numbers after this exchange. Options with which producers need more registers have
        tables of their own at the top of this file. Without a producer warpgroup, threads exchange
        no registers. Both numbers are then the number of registers at launch.
        """
        if not self.specialised:
            return 2 * (min(_MOST_REGISTERS, self.registers_at_first),)
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
    def loads_own_rows(self) -> bool:
        """Whether each consumer has its own producer thread that loads its rows of Q."""
        return False

    @property
    def column_producers(self) -> int:
        """Number of threads that load K and V.

        Normally one thread loads both. With pages (``block_table``) one thread loads K and another
        thread loads V, because a tile then consists of many boxes.
        """
        return 2 if self.features.page_size else 1

    @property
    def plane_panels(self) -> int:
        """Number of panels (64 columns) of one plane of a row of Q or K."""
        return ceil_div(self.head_dim, PANEL * self.per_half)

    @property
    def plane_panels_v(self) -> int:
        """Number of panels (64 columns) of one plane of a row of V."""
        return ceil_div(self.d_v, PANEL)

    @property
    def plane_columns(self) -> tuple[int, int]:
        """Numbers of columns of one plane of Q or K, and of one plane of V.

        A plane is one of the 16-bit matrices whose sum is a float32 matrix. Both numbers are
        rounded up to a multiple of 64, the columns of a panel.
        """
        return PANEL * self.plane_panels, PANEL * self.plane_panels_v

    @property
    def panels(self) -> int:
        """Number of panels (64 columns) of all planes of a row of Q or K."""
        return self.planes * self.plane_panels

    @property
    def panels_v(self) -> int:
        """Number of panels (64 columns) of all planes of a row of V or O."""
        return self.planes * self.plane_panels_v

    @property
    def value_tile(self) -> tuple[int, int]:
        """Number of rows of a tile of V in shared memory, and number of panels (64 columns) of a
        row.

        Normally a row contains the columns of one key. For e4m3, V is stored by columns: a row
        contains the keys of one column.
        """
        if self.per_half > 1:
            return self.columns, ceil_div(self.Bc, PANEL * self.per_half)
        return self.Bc, self.panels_v

    @property
    def tile_halves(self) -> tuple[int, int, int]:
        """Numbers of 16-bit elements of a slot of Q, of a slot of K, and of a slot of V.

        A slot of Q also holds O before O is written to global memory, unless Q is in e4m3 and O in
        float32.
        """
        of_o = 0 if self.per_half > 1 and self.stores_floats else self.panels_v
        rows, panels = self.value_tile
        return (
            max(self.panels, of_o) * PANEL * self.Br,
            self.panels * PANEL * self.Bc,
            panels * PANEL * rows,
        )

    @property
    def tile_registers(self) -> tuple[int, int, int]:
        """Numbers of registers of a thread for its parts of S, of O, and of P.

        A register of P contains two 16-bit elements or four elements of e4m3.
        """
        return self.TM * self.TN, self.TM * self.DN * 4, self.p_registers

    @property
    def group_rows(self) -> int:
        """Number of rows of each query head among the 64 rows of a consumer."""
        return GROUP_ROWS // self.tile_heads

    @property
    def halves(self) -> int:
        """Number of 16-bit elements of all slots of Q, K and V."""
        rows, keys, values = self.tile_halves
        return self.q_stages * rows + self.stages * (keys + values)

    @property
    def tile_floats(self) -> int:
        """Number of elements of a slot of O in float32. Only FA-1 has such slots."""
        return 0

    @property
    def first_barrier(self) -> int:
        """Index of the first barrier in shared memory, in units of 8 bytes, after the tiles."""
        return (self.halves // 2 + self.q_stages * self.tile_floats) // 2

    @property
    def barriers(self) -> int:
        """Number of barriers."""
        return 1 + 3 * self.q_stages + 4 * self.stages

    @property
    def pipelines(self) -> ForwardPipelines:
        """The pipelines of the kernel.

        ``work`` and ``q`` have the same barriers for empty slots.
        """
        q, kv, stages = self.q_stages, 1 + 3 * self.q_stages, self.stages
        return ForwardPipelines(
            Pipeline(1 + q, 1 + 2 * q, q),
            Pipeline(kv, kv + 2 * stages, stages),
            Pipeline(kv + stages, kv + 3 * stages, stages),
            Pipeline(1, 1 + 2 * q, q),
            Pipeline(0, 0, 1),
        )

    @property
    def arrivals(self) -> Arrivals:
        """The barriers to initialise, and for each barrier the number of arrivals that complete it.

        barrier says that                       arrivals that complete the barrier
        a slot of Q, K or V is full             1
        a slot of a work tile is full           1
        a slot of Q is empty                    1 of each consumer warpgroup, and 1 of each thread
                                                that loads K or V
        a slot of K or V is empty               1 of each consumer warp
        the thread block takes its next work    1
        tile (the pipeline ``late``)

        The threads that load K or V arrive for a slot of Q too, because they read the work tile
        that belongs to the slot. Without a producer warpgroup, one thread loads Q, K and V, and
        only the consumer warpgroups arrive for a slot of Q.
        """
        q, k, v, work, late = self.pipelines
        loaders = self.column_producers if self.specialised else 0
        readers, warps = self.consumers + loaders, 4 * self.consumers
        return (
            (1, ((late.full, 1),)),
            (q.slots, ((work.full, 1), (q.full, 1), (q.empty, readers))),
            (k.slots, ((k.full, 1), (v.full, 1), (k.empty, warps), (v.empty, warps))),
        )

    @property
    def first_index(self) -> int:
        """Index in shared memory, in units of 4 bytes, of the integers that describe work tiles.

        These integers are stored after the tiles and the barriers (``index_words``).
        """
        return 2 * (self.first_barrier + self.barriers)

    @property
    def shared_bytes(self) -> int:
        return 4 * (self.first_index + self.index_words)

    @property
    def index_words(self) -> int:
        """Number of 32-bit words that describe work tiles: ``WORK_WORDS`` for each slot of Q.

        With a block mask, each slot of K has one more word, which says which column tile comes
        next.
        """
        return WORK_WORDS * self.q_stages + (self.stages if self.slots_name_next else 0)

    @property
    def p_registers(self) -> int:
        """Number of registers of a thread for its part of P, of all planes."""
        return self.planes * self.TM * self.TN // (2 * self.per_half)

    @property
    def slots_name_next(self) -> bool:
        return self.features.sparse

    @property
    def accumulators(self) -> int:
        sums = min(self.planes, 2) * 4 * self.DN  # O, and with planes also P V of one tile
        own = self.TM * (self.TN + sums) + self.p_registers
        return own + (self.bias_registers if self.reads_bias else 0)

    @property
    def fits_registers(self) -> bool:
        others = _OTHERS
        if self.blocks > 1:
            others = _OTHERS_SHARED + (_WINDOW if self.features.window else 0)
            sums = self.TM * max(self.TN, 4 * self.DN)  # S or O
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
    """Return the spec of class ``kind`` for ``tiles``, without a check of shared memory.

    ``facts`` are the fields of the spec except the sizes. Raise ValueError in these cases:

    - Br is not 64, 128 or 192.
    - Bc is not a multiple of 16 (of 32 for e4m3), or above 256.
    - Q, K or V has scales of blocks, and Bc is not the number of rows of a block.
    - ``tiles.threads`` is a number, but not the number of threads of the spec.
    - The tiles do not fit in registers.
    """
    allowed = [GROUP_ROWS * n for n in REGISTERS]
    if tiles.Br not in allowed or tiles.Bc % 16 or tiles.Bc > 256:
        raise ValueError(
            f"on unit 'wgmma', tiles.Br must be {one_of(allowed)}, and tiles.Bc a multiple of 16 "
            f"up to 256, got Br={tiles.Br}, Bc={tiles.Bc}"
        )
    spec = kind(head_dim, tiles.Br, tiles.Bc, 4, tiles.Br // 2, **facts)  # type: ignore[arg-type]
    if spec.per_half > 1 and tiles.Bc % 32:
        raise ValueError(
            f"tiles.Bc must be a multiple of 32 for {spec.dtype} on unit 'wgmma', got {tiles.Bc}"
        )
    if spec.features.block_scales and tiles.Bc != SCALED_ROWS:
        raise ValueError(
            f"tiles.Bc must be {SCALED_ROWS} with scales of blocks of {SCALED_ROWS} rows, got "
            f"{tiles.Bc}; choose this number of columns, or tiles=None"
        )
    with_threads([spec], tiles, " on unit 'wgmma'")
    if not spec.fits_registers:
        raise ValueError(
            "tiles must leave each thread enough registers for its parts of S, P and O, got "
            f"Br={tiles.Br}, Bc={tiles.Bc} at head_dim={head_dim} on unit 'wgmma'; choose smaller "
            "tiles"
        )
    return spec


def select_wgmma_spec(
    tiles: Tiles, head_dim: int, shared_limit: int, *, shares: bool = False, **facts: object
) -> WgmmaSpec:
    """Return the spec of FA-2's forward kernel on Hopper's tensor cores for ``tiles``.

    ``facts`` are the fields of the spec except the sizes. ``shared_limit`` is the shared memory of
    a thread block in bytes.

    Normally one thread block runs on a multiprocessor. If ``shares`` is True, and a thread block
    has one consumer, several thread blocks may share a multiprocessor. The spec is then for three
    thread blocks if they fit, otherwise for two if they fit, otherwise for one.

    The number of slots for Q is max(2, stages), or 1 if shared memory does not hold more slots.
    Raise ValueError as ``within_registers`` does, for tiles that do not fit in shared memory, and
    for pages or a block mask if the measure "specialisation" is switched off.
    """
    slots = {"stages": tiles.stages, "q_stages": max(2, tiles.stages)}
    spec = within_registers(WgmmaSpec, tiles, head_dim, **slots, **facts)
    if not spec.specialised and (spec.features.page_size or spec.features.sparse):
        option = "block_table" if spec.features.page_size else "block_mask"
        raise ValueError(
            f"ablate must not contain 'specialisation' with {option}, because only a producer "
            f"warpgroup looks up which tile comes next, got ablate={spec.ablated!r}"
        )
    if shares and spec.consumers == 1:
        for blocks in range(MOST_BLOCKS, 1, -1):
            several = replace(spec, blocks=blocks)
            if several.fits_registers and blocks * (spec.shared_bytes + _RESERVED) <= _MEMORY:
                return several
    if spec.shared_bytes > shared_limit:
        spec = replace(spec, q_stages=1)
    check_shared(spec, shared_limit, f", stages={tiles.stages}")
    return spec
