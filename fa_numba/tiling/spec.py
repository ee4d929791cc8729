"""What every kernel specialisation says, whatever unit computes: sizes, and who owns which part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fa_numba.checks import one_of
from fa_numba.integers import ceil_div
from fa_numba.mods import Text
from fa_numba.options import PLAIN, Features
from fa_numba.tiling.tiles import Tiles

MAX_THREADS = 512
# Of sums in fragments (kernels/mma/rows.py): rows, and floats, eight columns of these.
FRAGMENT_ROWS, FRAGMENT = 16, 128


_Own = TypeVar("_Own", bound="ValuesSpec")


@dataclass(frozen=True)
class Spec(ABC):
    """The compile-time facts of a kernel: everything that its factory closes over.

    ``Br`` x ``Bc`` is a tile of S, shared by a block of ``ty_count`` x ``tx_count`` threads. Thread
    (ty, tx) has TM of its rows, TN of its columns and, of the same rows, 4 DN columns of O. Which
    ones these are is said by ``row_width``, ``row_step``, ``column_width`` and ``column_step``
    (parts/layout.py counts with them). ``features`` are the options that the kernel is compiled
    for. ``aligned``: rows in global memory are contiguous and start at 16-byte addresses.
    ``grouped``: several query heads read one K/V head. ``tile_heads``: so many of them share the
    rows of a tile, row r of head n at n + r tile_heads. ``head_dim_v`` is that of V and O, 0 where
    it is Q's. ``positive_scale``: the scale of the scores is above 0.
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
    tile_heads: int = 1
    head_dim_v: int = 0
    positive_scale: bool = False

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return self.tx_count * self.ty_count

    @property
    def launch(self) -> tuple[int, int, int]:
        """What a kernel says of its launch: threads and bytes of shared memory a block, and blocks
        that a multiprocessor should have registers for.
        """
        return self.threads, self.shared_bytes, self.min_blocks

    @property
    def reasons(self) -> dict[str, str]:
        """Reasons that a plan prints in addition to those for the unit, tiles and splits."""
        return {}

    @property
    def products(self) -> int:
        """Pairs of planes that are multiplied for one product."""
        return sum(range(1, self.planes + 1))

    @property
    def planes(self) -> int:
        """16-bit matrices whose sum Q, K and V are each, side by side in a row of all."""
        return self.features.planes

    @property
    def head_rows(self) -> int:
        """Rows of one head in a tile."""
        return self.Br // self.tile_heads

    @property
    def key_pieces(self) -> tuple[int, int]:
        """How many neighbouring threads share a row of K, and of V, while they load a tile."""
        raise NotImplementedError

    @property
    def loading_threads(self) -> int:
        """Threads of a block that load K and V."""
        return self.threads

    @property
    def lane_step(self) -> int:
        """Lanes from one thread of a row to the next."""
        return 1

    @property
    def TM(self) -> int:
        """Rows of S in one thread."""
        return self.Br // self.ty_count

    @property
    def TN(self) -> int:
        """Columns of S in one thread."""
        return self.Bc // self.tx_count

    @property
    def d_v(self) -> int:
        """The head dimension of V and O."""
        return self.head_dim_v or self.head_dim

    @property
    def DN(self) -> int:
        """Groups of four columns of O in one thread."""
        return ceil_div(self.d_v, 4 * self.tx_count)

    @property
    def columns(self) -> int:
        """V's head dimension rounded up to what the threads of a row cover."""
        return 4 * self.tx_count * self.DN

    @property
    def row_width(self) -> int:
        """A thread's rows of S come in runs of this many neighbours."""
        return 1

    @property
    @abstractmethod
    def row_step(self) -> int:
        """Rows from the start of one run to the start of the thread's next."""

    @property
    def column_width(self) -> int:
        """A thread's columns of S come in runs of this many neighbours."""
        return 1

    @property
    @abstractmethod
    def column_step(self) -> int:
        """Columns from the start of one run to the start of the thread's next."""

    @property
    def element_steps(self) -> tuple[int, int]:
        """Registers of S from a thread's row to its next, and from a column to its next."""
        return self.TN, 1

    @property
    def warp_columns(self) -> int:
        """Columns of S from one warp's to the next warp's; 0 where every warp takes all columns."""
        return 0

    @property
    def folds_scale(self) -> bool:
        """Whether the scale is applied in the softmax's exponent, and not to the scores before:
        where it keeps their order, and they are the products alone.
        """
        return self.positive_scale and not self.features.changes_scores

    @property
    def reads_bias(self) -> bool:
        """Whether registers can have a bias before its scores: a thread's columns come in pairs."""
        return self.features.bias and self.column_width % 2 == 0

    @property
    def asks_state(self) -> bool:
        """Whether a mask_mod asks for the state of a tile's block."""
        return self.features.sparse and self.features.mask_mod is not None

    @property
    def reads_state(self) -> bool:
        """Whether a block's state is in the bias's register, before the tile's scores are there."""
        return self.asks_state and not self.reads_bias

    @property
    def slots_name_next(self) -> bool:
        """Whether who loads a tile writes beside it which comes next, and the block's state."""
        return False

    @property
    def query_ends(self) -> bool:
        """Whether sequences end within the arrays of queries."""
        return self.features.packed or self.features.q_lens

    @property
    def key_ends(self) -> bool:
        """Whether sequences end within the arrays of keys."""
        return self.features.packed or self.features.kv_lens

    @property
    def adds_whole_bias(self) -> bool:
        """Whether a bias is added without a look at each element's place, where all are inside."""
        return False

    @property
    def bias_registers(self) -> int:
        """Registers for a bias; 1 where there is none, since an array of registers has one."""
        return self.TM * self.TN if self.reads_bias else 1

    @property
    def stays(self) -> Text | None:
        """Backward, the caller's function that is given scores after their mask; else None."""
        return None

    @property
    def sums_rows(self) -> bool:
        """Whether the kernel adds up rows of S, those beyond the matrix too."""
        return False

    @property
    def block_columns(self) -> int:
        """Columns of a block of a block mask."""
        return self.Bc

    @property
    def cap_registers(self) -> int:
        """Registers for the slopes of a cap and of a function on the scores, and behind them for
        the scores that it is given, kept from S to dS; 1 where there is neither, since an array of
        registers has at least one.
        """
        each = self.features.slopes + self.features.keeps_scores
        return max(1, each * self.TM * self.TN)

    @property
    @abstractmethod
    def accumulators(self) -> int:
        """Registers of one thread's parts of the tiles that the kernel has in registers at once."""

    @property
    @abstractmethod
    def fits_registers(self) -> bool:
        """Whether a thread's parts of the tiles leave it registers for everything else."""

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block takes."""

    @property
    @abstractmethod
    def min_blocks(self) -> int:
        """Blocks that ptxas should leave registers for on one multiprocessor."""


class ValuesSpec(Spec):
    """Sizes are those of Q, K and their gradients; ``of_values`` has those of V, O and theirs."""

    @property
    def of_values(self: _Own) -> _Own:
        """This specification as if Q had the head dimension of V."""
        if not self.head_dim_v:
            return self
        return replace(self, head_dim=self.head_dim_v, head_dim_v=0)

    @property
    def d_v(self) -> int:
        return self.head_dim


@dataclass(frozen=True)
class GradientSpec(ValuesSpec):
    """A kernel that makes dK and dV. ``splits_queries``: several blocks add to one of each."""

    algorithm: str = "fa2"
    splits_queries: bool = False

    @property
    def chunk_tiles(self) -> int:
        """Column tiles of each head that go before the next ones; 0: all of them."""
        return 0

    @property
    def adders(self) -> int:
        """Atomic adds to each element of dQ per visited tile."""
        return 1

    @property
    def adds_fragments(self) -> bool:
        """Whether dQ is added to a sum in fragments."""
        return False

    @property
    def row_tiles(self) -> int:
        """Matrices with a row tile in shared memory: Q, dO and, for FlashAttention-1, O."""
        return 3 if self.algorithm == "fa1" else 2

    @property
    def sums_rows(self) -> bool:
        return True


def check_shared(spec: Spec, shared_limit: int, staged: str = "") -> None:
    """Raise ValueError unless ``spec`` fits in shared memory of so many bytes a block."""
    if spec.shared_bytes > shared_limit:
        raise ValueError(
            f"tiles must fit in {shared_limit} bytes of shared memory (the device's limit for a "
            f"thread block), got {spec.shared_bytes} bytes for Br={spec.Br}, Bc={spec.Bc}{staged} "
            f"at head_dim={spec.head_dim}; choose smaller tiles or a smaller head_dim"
        )


def with_threads(found: Sequence[Any], tiles: Tiles, of: str) -> Any:
    """The first of these specialisations, or that with the threads asked for; else ValueError."""
    if tiles.threads is None:
        return found[0]
    for spec in found:
        if spec.threads == tiles.threads:
            return spec
    raise ValueError(
        f"tiles.threads must be {one_of(sorted({spec.threads for spec in found}))}, or None, for "
        f"Br={tiles.Br}, Bc={tiles.Bc}{of}, got {tiles.threads}"
    )
