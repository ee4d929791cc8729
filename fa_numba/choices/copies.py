"""The grids of kernels, and the arguments whose form depends on the unit.

``Copies`` is for kernels whose threads copy the rows of tiles. These kernels take plain arrays.
``BoxCopies`` is for kernels whose tiles are copied in boxes by Hopper's copy engine (TMA). These
kernels take arrays with tensor maps. Each unit has an object of one of the two classes. Code that
makes plans calls this object, and does not depend on the unit itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from fa_numba import device
from fa_numba.choices.arguments import Argument, Boxes, Buffer, Grouped, Untouched
from fa_numba.choices.requests import Request
from fa_numba.integers import ceil_div
from fa_numba.parts.pages import common_rows
from fa_numba.problem import Problem
from fa_numba.tiling import Tiles
from fa_numba.tiling.wgmma import GROUP_ROWS

# Numbers of thread blocks along the three axes of a grid.
Grid = tuple[int, int, int]


class Taken(NamedTuple):
    """The grid of a kernel's launch, the arguments that are not plain arrays, and the workspace.

    field       meaning
    grid        numbers of thread blocks along the three axes
    bound       maps the name of a kernel parameter to its argument. A parameter that is missing in
                the mapping takes the plain array with the name of the parameter
    workspace   arrays of the workspace that only this kernel needs
    """

    grid: Grid
    bound: dict[str, Argument]
    workspace: tuple[Buffer, ...] = ()


class Copies:
    """Grids and arguments of kernels whose threads copy the rows of a tile.

    A thread block computes one row tile or one column tile. The attribute ``by_boxes`` says whether
    the copy engine (TMA) copies the tiles in boxes. It is False in this class, and True in the
    subclass ``BoxCopies``. If it is True, the access model counts complete boxes of 64 columns.
    """

    by_boxes = False

    def of_fa2_forward(self, request: Request, spec: Any, splits: int) -> Taken:
        """Return the grid and the arguments of FA-2's forward kernel with ``splits`` key splits."""
        p, heads = request.problem, spec.tile_heads
        bound: dict[str, Argument] = {}
        if heads > 1:
            bound = {name: Grouped(name, heads) for name in "QOL"}
        if splits > 1:
            bound |= _unwritten(request, heads)
        grid = (ceil_div(p.seqlen_q, spec.head_rows) * splits, p.heads_q // heads, p.batch)
        return Taken(grid, bound)

    def of_fa1_forward(self, spec: Any) -> dict[str, Argument]:
        """Return the arguments of FA-1's forward kernel that are not plain arrays.

        The keys are the names of the kernel's parameters. A parameter that is missing in the result
        takes the array with the name of the parameter.
        """
        return {}

    def of_backward(
        self, request: Request, tiles: Tiles, spec: Any, columns: bool
    ) -> dict[str, Argument]:
        """Return the arguments of a backward kernel that are not plain arrays.

        The keys are the names of the kernel's parameters. A parameter that is missing in the result
        takes the array with the name of the parameter. ``columns`` says whether the kernel writes
        dK and dV itself. If it is False, the kernel writes parts or sums of dK and dV in float32,
        and another kernel computes dK and dV from them.
        """
        return {}

    def over_columns(self, request: Request, tiles: Tiles, spec: Any, splits: int) -> Grid:
        """Return the grid of FA-2's backward kernel with ``splits`` group splits."""
        p = request.problem
        return _in_chunks(spec, ceil_div(p.seqlen_k, tiles.Bc), p.heads_k * splits, p.batch)

    def of_dq_kernel(self, request: Request, tiles: Tiles, spec: Any) -> Taken:
        """Return the grid and the arguments of the kernel that computes dQ alone."""
        p = request.problem
        return Taken((ceil_div(p.seqlen_q, tiles.Br), p.heads_q, p.batch), {})


class BoxCopies(Copies):
    """Grids and arguments of kernels whose tiles are copied in boxes by the copy engine.

    Thread blocks of FA-2's forward kernel compute several work tiles. For packed sequences, the
    grid is over the tiles of all sequences together.
    """

    by_boxes = True

    def of_fa2_forward(self, request: Request, spec: Any, splits: int) -> Taken:
        bound = _forward_boxes(spec)
        if spec.stores_floats:
            del bound["O"]
        grid = (_forward_blocks(request, spec, splits), 1, 1)
        return Taken(grid, bound, (Buffer("taken", (1,), "int32", zeroed=True),))

    def of_fa1_forward(self, spec: Any) -> dict[str, Argument]:
        bound = _forward_boxes(spec)
        if spec.stores_floats:
            bound["O"] = "O"
        return bound | {"A": Boxes("A", GROUP_ROWS, "float32")}

    def of_backward(
        self, request: Request, tiles: Tiles, spec: Any, columns: bool
    ) -> dict[str, Argument]:
        found = _boxes(("Q", "dO"), tiles.Br, spec.query_ends)
        found |= _boxes("KV", tiles.Bc, spec.key_ends)
        if spec.planes > 1:  # results are stored in float32, not by boxes
            return found
        if columns:
            found |= _boxes(("dK", "dV"), GROUP_ROWS, request.problem.packed)
        if request.choices.algorithm == "fa1":
            return {**found, "O": Boxes("O", tiles.Br)}
        if spec.adds_fragments:
            return found
        return {**found, "A": Boxes("A", GROUP_ROWS, "float32", ends=spec.query_ends)}

    def over_columns(self, request: Request, tiles: Tiles, spec: Any, splits: int) -> Grid:
        p = request.problem
        if not p.packed:
            return super().over_columns(request, tiles, spec, splits)
        return _in_chunks(spec, _tiles_of_all(p.k_shape[0], tiles.Bc, p), p.heads_k * splits, 1)

    def of_dq_kernel(self, request: Request, tiles: Tiles, spec: Any) -> Taken:
        p, grid = request.problem, super().of_dq_kernel(request, tiles, spec).grid
        if p.packed:
            grid = (_tiles_of_all(p.q_shape[0], tiles.Br, p), p.heads_q, 1)
        bound = _boxes(("Q", "dO"), GROUP_ROWS, spec.query_ends)
        bound |= _boxes("KV", tiles.Bc, spec.key_ends)
        return Taken(grid, bound | _boxes(("dQ",), GROUP_ROWS, spec.features.packed))


def _in_chunks(spec: Any, Tc: int, heads: int, batch: int) -> Grid:
    """Return the grid of a backward kernel with one thread block for each column tile and head.

    ``Tc`` is the number of column tiles of a head, ``heads`` the number of heads, and ``batch`` the
    number of batch entries. The field ``chunk_tiles`` of the spec decides the axes of the grid:

    spec.chunk_tiles   grid
    0                  (Tc, heads, batch)
    C above 0          (C * heads, batch, ceil(Tc / C))

    In the second grid, a chunk consists of C column tiles of each head. All thread blocks of a
    chunk come before the thread blocks of the next chunk.
    """
    chunk = spec.chunk_tiles
    return (chunk * heads, batch, ceil_div(Tc, chunk)) if chunk else (Tc, heads, batch)


def _unwritten(request: Request, heads: int) -> dict[str, Argument]:
    """Return stand-ins for O and L, for a kernel that does not write these arrays.

    With key splits, the kernel stores parts of O and L in other arrays, and a second kernel merges
    the parts. ``heads`` is the number of query heads whose rows share a row tile.
    """
    batch, heads_q, rows = request.row_shape
    shape = request.row_shape if heads == 1 else (batch, heads_q // heads, rows, heads)
    d, dtype = request.problem.d_v, request.problem.o_dtype
    return {"O": Untouched((*shape, d), dtype), "L": Untouched(shape)}


def _boxes(names: Iterable[str], rows: int, ends: bool) -> dict[str, Argument]:
    """Return arguments that pass the arrays in ``names`` with tensor maps, by name of the array.

    The kernel copies the arrays in boxes of ``rows`` rows. ``ends`` says whether a box stops at the
    end of a sequence.
    """
    return {name: Boxes(name, rows, ends=ends) for name in names}


def _forward_boxes(spec: Any) -> dict[str, Argument]:
    """Return arguments that pass Q, K, V and O of a forward kernel with tensor maps.

    The keys are the names of the kernel's parameters.
    """
    page_size = spec.features.page_size
    rows = common_rows(page_size, spec.Bc) if page_size else spec.Bc
    Q = Boxes("Q", GROUP_ROWS, heads=spec.tile_heads, ends=spec.query_ends)
    O = replace(Q, name="O", dtype=spec.out_dtype, ends=spec.features.packed)
    found = {"Q": Q, **_boxes("KV", rows, spec.key_ends), "O": O}
    if spec.per_half > 1:
        found["V"] = Boxes("VT", spec.value_tile[0])
    return found


def _forward_blocks(request: Request, spec: Any, splits: int) -> int:
    """Return the number of thread blocks of FA-2's forward kernel.

    Normally thread blocks are persistent: each thread block computes several work tiles. The result
    is then the number of thread blocks that the GPU runs at the same time, or the number of work
    tiles if there are fewer work tiles. Without persistence, each work tile has its own thread
    block (parts/wgmma/scheduler.py).
    """
    p = request.problem
    tiles = ceil_div(p.seqlen_q, spec.head_rows) * p.batch
    if p.packed:
        tiles = _tiles_of_all(p.q_shape[0], spec.head_rows, p)
    tiles *= p.heads_q // spec.tile_heads * splits
    multiprocessors = request.multiprocessors or device.EMULATED_MULTIPROCESSORS
    return min(multiprocessors * spec.blocks, tiles) if spec.persistent else tiles


def _tiles_of_all(rows: int, rows_of_tile: int, problem: Problem) -> int:
    """Return an upper limit of the number of tiles of one head, for all packed sequences together.

    ``rows`` is the number of rows of all sequences. A tile does not cross the end of a sequence, so
    each sequence may need one tile that is not full. Some of the tiles may therefore be empty
    (parts/wgmma/scheduler.py).
    """
    return rows // rows_of_tile + problem.batch
