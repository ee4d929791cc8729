"""The base classes of specs: the facts for which the kernels of every unit are compiled."""

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
# Size of a fragment of a sum that is stored in fragments (kernels/mma/rows.py): number of rows, and
# number of floats. A fragment has eight columns.
FRAGMENT_ROWS, FRAGMENT = 16, 128


_Own = TypeVar("_Own", bound="ValuesSpec")


@dataclass(frozen=True)
class Spec(ABC):
    """The facts for which a kernel is compiled; the factory of the kernel takes a spec.

    A tile of S has ``Br`` rows and ``Bc`` columns. The ``ty_count`` x ``tx_count`` threads of a
    thread block share the tile. Thread (ty, tx) computes the elements of S in TM of the rows and TN
    of the columns. It also computes 4 DN columns of O in these TM rows. The properties
    ``row_width``, ``row_step``, ``column_width`` and ``column_step`` say which rows and columns of
    S these are (``parts/layout.py``). There is a subclass for each unit and pass. Backward kernels
    on tensor cores have S transposed, and define TM and TN again.

    field            meaning
    head_dim         head dimension of Q and K
    Br, Bc           rows and columns of a tile of S
    tx_count         number of threads that share a row of S
    ty_count         number of groups of such threads
    features         options for which the kernel is compiled
    aligned          whether rows in global memory are contiguous and start at 16-byte addresses
    return_lse       whether FA-1's forward kernel stores the logsumexp; FA-2's kernel always does
    grouped          whether several query heads read one K/V head
    tile_heads       number of query heads whose rows share a row tile: row r of the n-th of these
                     heads is row n + r * tile_heads of the tile
    head_dim_v       head dimension of V and O; 0 if it is equal to ``head_dim``
    positive_scale   whether the scale of the scores is known to be positive
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
        """Number of threads in a thread block."""
        return self.tx_count * self.ty_count

    @property
    def launch(self) -> tuple[int, int, int]:
        """Arguments of ``cuda.jit``: threads, bytes of shared memory, and ``min_blocks``."""
        return self.threads, self.shared_bytes, self.min_blocks

    @property
    def reasons(self) -> dict[str, str]:
        """Reasons for choices that the spec itself makes, as a mapping from choice to reason.

        A key is the name of the choice, such as "variant". The reasons are added to ``plan.why``,
        after the reasons for the unit and the tiles. Most specs make no choice, and the mapping is
        empty.
        """
        return {}

    @property
    def products(self) -> int:
        """Number of products of planes that the kernel computes for one product of matrices.

        Without planes the number is 1. With n planes it is n (n + 1) / 2.
        """
        return sum(range(1, self.planes + 1))

    @property
    def planes(self) -> int:
        """Number of 16-bit planes whose sum is Q, K or V; 1 without planes.

        A row in memory contains the rows of all planes, one after the other.
        """
        return self.features.planes

    @property
    def per_half(self) -> int:
        """Number of elements of Q, K and V in 16 bits: 2 for e4m3, otherwise 1."""
        return 1

    @property
    def p_exponent(self) -> float:
        """The exponent x of the factor 2^x by which a kernel scales P; normally 0.

        Kernels compute P = 2^(S - m), where S is the score times log2(e). m is normally the largest
        S of the row, so that P is at most 1. In kernels with an x above 0, m is the largest S minus
        x, so that P is at most 2^x. P in e4m3 then uses more of the range of e4m3. The sums l and
        P V contain the same factor as P. O and the logsumexp m + log2(l) therefore need no
        correction.
        """
        return 0.0

    @property
    def head_rows(self) -> int:
        """Number of rows of each query head in a row tile."""
        return self.Br // self.tile_heads

    @property
    def key_pieces(self) -> tuple[int, int]:
        """Numbers of threads that load one row together: first for K, then for V."""
        raise NotImplementedError

    @property
    def loading_threads(self) -> int:
        """Number of threads of a thread block that load K and V."""
        return self.threads

    @property
    def lane_step(self) -> int:
        """Distance in lanes between neighbouring threads of a row, (ty, tx) and (ty, tx + 1)."""
        return 1

    @property
    def TM(self) -> int:
        """Number of rows of S that a thread has."""
        return self.Br // self.ty_count

    @property
    def TN(self) -> int:
        """Number of columns of S that a thread has."""
        return self.Bc // self.tx_count

    @property
    def d_v(self) -> int:
        """The head dimension of V and O."""
        return self.head_dim_v or self.head_dim

    @property
    def DN(self) -> int:
        """Number of groups of four columns of O that a thread has."""
        return ceil_div(self.d_v, 4 * self.tx_count)

    @property
    def columns(self) -> int:
        """V's head dimension, rounded up to 4 * tx_count * DN columns.

        The ``tx_count`` threads that share a row have ``DN`` groups of four columns each.
        """
        return 4 * self.tx_count * self.DN

    @property
    def row_width(self) -> int:
        """Number of neighbouring rows in a run. A thread's rows of S consist of such runs."""
        return 1

    @property
    @abstractmethod
    def row_step(self) -> int:
        """Distance in rows between the starts of two consecutive runs of rows of a thread."""

    @property
    def column_width(self) -> int:
        """Number of neighbouring columns in a run. A thread's columns of S consist of such runs."""
        return 1

    @property
    @abstractmethod
    def column_step(self) -> int:
        """Distance in columns between the starts of two consecutive runs of columns of a thread."""

    @property
    def element_steps(self) -> tuple[int, int]:
        """(EI, EJ): element (i, j) of a thread's part of S is in register i * EI + j * EJ."""
        return self.TN, 1

    @property
    def warp_columns(self) -> int:
        """Distance in columns of S between the first columns of neighbouring warps.

        It is 0 if each warp has all columns.
        """
        return 0

    @property
    def folds_scale(self) -> bool:
        """Whether the softmax multiplies by the scale inside the exponent.

        Otherwise the scores are multiplied by the scale before the softmax. The value is True if
        the scale is known to be positive, and no option changes the scores. A positive scale keeps
        the order of the scores, so that their maximum can be found before the multiplication.
        """
        return self.positive_scale and not self.features.changes_scores

    @property
    def reads_bias(self) -> bool:
        """Whether the kernel may load a tile's bias to registers while the scores are computed.

        This is possible only if the columns of a thread come in pairs of neighbours.
        """
        return self.features.bias and self.column_width % 2 == 0

    @property
    def asks_state(self) -> bool:
        """Whether the kernel needs the state of a tile's block in the block mask.

        The state says whether the ``mask_mod`` hides all, some or no elements of the block. In a
        block with the state ``FULL`` no element is hidden, so the kernel does not call the
        ``mask_mod``. The value is False without a block mask or without a ``mask_mod``.
        """
        return self.features.sparse and self.features.mask_mod is not None

    @property
    def reads_state(self) -> bool:
        """Whether the state of a tile's block is loaded before the scores of the tile are ready.

        The load then overlaps with the product Q KT. The state is the entry of the block mask for
        the tile (``asks_state``). It is stored in a register that a tile of the bias would use.
        Therefore the value is False if the kernel loads a bias in this way (``reads_bias``).
        """
        return self.asks_state and not self.reads_bias

    @property
    def slots_name_next(self) -> bool:
        """Whether the thread that loads a tile tells the other threads which tile comes next.

        Forward kernels on Hopper do this for a block mask. The thread stores one 32-bit integer in
        shared memory for each slot of the pipeline. The integer contains the first row or column of
        the next tile. With ``reads_state``, it also contains the state of the tile in the block
        mask.
        """
        return False

    @property
    def query_ends(self) -> bool:
        """Whether sequences can end before the end of the arrays of queries."""
        return self.features.packed or self.features.q_lens

    @property
    def key_ends(self) -> bool:
        """Whether sequences can end before the end of the arrays of keys."""
        return self.features.packed or self.features.kv_lens

    @property
    def adds_whole_bias(self) -> bool:
        """Whether the bias is added without a check of each element, for tiles completely in S.

        In a tile that extends beyond the end of S, each element is checked.
        """
        return False

    @property
    def bias_registers(self) -> int:
        """Number of registers for a tile's bias; at least 1, because arrays need a size."""
        return self.TM * self.TN if self.reads_bias else 1

    @property
    def stays(self) -> Text | None:
        """Source text of the function that changes scores after masking, or None.

        Most kernels compute ``score_mod`` first, and hide masked scores afterwards. Their value is
        None. Some backward kernels on Hopper have the opposite order (``Features.scores_stay``).
        They compute scores in two steps, and each step has its own spec:

        1. Multiply the product Q KT by a factor, apply an inner function such as tanh, and replace
           hidden scores by a finite number.
        2. Compute ``score_mod`` and the other options that change scores, together with dS.

        The value is not None in the spec of step 1, which ``wgmma_backward.hidden_alone`` returns.
        The text is the function that step 2 computes (``Features.kept_scores_text``). It can be
        empty. Two attributes of the text are for step 1: ``score_factor`` is the factor, and
        ``inner`` is the inner function (``mods.Text``). Without ``score_factor``, the factor is the
        scale.
        """
        return None

    @property
    def sums_rows(self) -> bool:
        """Whether the kernel adds up rows of S, including rows beyond the end of Q.

        Rows beyond the end must then contribute 0.
        """
        return False

    @property
    def block_columns(self) -> int:
        """Number of columns of a block of the block mask."""
        return self.Bc

    @property
    def slope_registers(self) -> int:
        """Number of registers of a thread for slopes of scores and scores before ``score_mod``.

        Slopes (derivatives of the scores) are stored with a softcap or a ``score_mod``. They take
        TM * TN registers. The scores before ``score_mod`` are stored if gradients of captured
        arrays need them. They take TM * TN registers too. The number is at least 1, because a
        register array needs a size.
        """
        each = self.features.slopes + self.features.keeps_scores
        return max(1, each * self.TM * self.TN)

    @property
    @abstractmethod
    def accumulators(self) -> int:
        """Number of registers of a thread for its parts of the tiles that are in registers at the
        same time.
        """

    @property
    @abstractmethod
    def fits_registers(self) -> bool:
        """Whether ``accumulators`` leave a thread enough registers for everything else."""

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Number of bytes of shared memory that a thread block needs."""

    @property
    @abstractmethod
    def min_blocks(self) -> int:
        """Number of thread blocks that must fit in the registers of one multiprocessor.

        The compiler limits the registers of a thread accordingly.
        """


class ValuesSpec(Spec):
    """A spec of a kernel in which Q, K, dQ and dK can have another head dimension than V, O, dO and
    dV.

    The spec describes tiles of Q, K, dQ and dK. The spec ``of_values`` describes tiles of V, O, dO
    and dV.
    """

    @property
    def of_values(self: _Own) -> _Own:
        """This spec with the head dimension of V in place of the head dimension of Q."""
        if not self.head_dim_v:
            return self
        return replace(self, head_dim=self.head_dim_v, head_dim_v=0)

    @property
    def d_v(self) -> int:
        return self.head_dim


@dataclass(frozen=True)
class GradientSpec(ValuesSpec):
    """A spec of a kernel that computes dK and dV.

    ``algorithm`` is "fa1" or "fa2". With ``splits_queries`` several thread blocks add to the same
    dK and dV (FA-1's query splits).
    """

    algorithm: str = "fa2"
    splits_queries: bool = False

    @property
    def chunk_tiles(self) -> int:
        """Number of column tiles of each head in a chunk, or 0 if the grid has no chunks.

        The thread blocks for the first chunk of all heads come first in the grid, then the thread
        blocks for the second chunk of all heads, and so on.
        """
        return 0

    @property
    def adders(self) -> int:
        """Number of atomic adds to each element of dQ per visited tile."""
        return 1

    @property
    def adds_fragments(self) -> bool:
        """Whether the sum of dQ in global memory is in fragments (``kernels/mma/rows.py``)."""
        return False

    @property
    def row_tiles(self) -> int:
        """Number of matrices that have row tiles in shared memory: Q, dO and, for FA-1, O."""
        return 3 if self.algorithm == "fa1" else 2

    @property
    def sums_rows(self) -> bool:
        return True


def check_shared(spec: Spec, shared_limit: int, staged: str = "") -> None:
    """Raise ValueError if a thread block of a spec needs more shared memory than ``shared_limit``.

    ``shared_limit`` is in bytes. ``staged`` is text about the stages for the error message.
    """
    if spec.shared_bytes > shared_limit:
        raise ValueError(
            f"tiles must fit in {shared_limit} bytes of shared memory (the device's limit for a "
            f"thread block), got {spec.shared_bytes} bytes for Br={spec.Br}, Bc={spec.Bc}{staged} "
            f"at head_dim={spec.head_dim}; choose smaller tiles or a smaller head_dim"
        )


def with_threads(found: Sequence[Any], tiles: Tiles, of: str) -> Any:
    """Return the spec of ``found`` that has ``tiles.threads`` threads.

    If ``tiles.threads`` is None, return the first spec. Raise ValueError if no spec has this number
    of threads. ``of`` is text about the unit for the error message.
    """
    if tiles.threads is None:
        return found[0]
    for spec in found:
        if spec.threads == tiles.threads:
            return spec
    raise ValueError(
        f"tiles.threads must be {one_of(sorted({spec.threads for spec in found}))}, or None, for "
        f"Br={tiles.Br}, Bc={tiles.Bc}{of}, got {tiles.threads}"
    )
