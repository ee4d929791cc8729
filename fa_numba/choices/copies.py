"""How the kernels of a unit take matrices, and over which grids they are launched.

``Copies`` is for kernels whose threads copy rows. ``BoxCopies`` is for kernels whose matrices the
copy engine of Hopper (TMA) copies in boxes. A plan asks the unit's object for everything that
differs between the two.
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

# Blocks along the three axes of a grid.
Grid = tuple[int, int, int]


class Taken(NamedTuple):
    """The grid of a kernel, the arguments with another name or form than the kernel's parameter,
    and the arrays of the workspace that only this kernel needs.
    """

    grid: Grid
    bound: dict[str, Argument]
    workspace: tuple[Buffer, ...] = ()


class Copies:
    """Threads copy the rows of a tile; a thread block computes one row tile or column tile.

    ``by_boxes``: whether the copy engine moves complete boxes, of 64 columns. The access model
    counts boxes as they are moved.
    """

    by_boxes = False

    def of_fa2_forward(self, request: Request, spec: Any, splits: int) -> Taken:
        """Return what FlashAttention-2's forward kernel takes."""
        p, heads = request.problem, spec.tile_heads
        bound: dict[str, Argument] = {}
        if heads > 1:
            bound = {name: Grouped(name, heads) for name in "QOL"}
        if splits > 1:
            bound |= _unwritten(request, heads)
        grid = (ceil_div(p.seqlen_q, spec.head_rows) * splits, p.heads_q // heads, p.batch)
        return Taken(grid, bound)

    def of_fa1_forward(self, spec: Any) -> dict[str, Argument]:
        """Return the arguments of FlashAttention-1's forward kernel."""
        return {}

    def of_backward(
        self, request: Request, tiles: Tiles, spec: Any, columns: bool
    ) -> dict[str, Argument]:
        """Return the arguments of a backward kernel. With ``columns`` it writes dK and dV, else
        their parts or sums.
        """
        return {}

    def over_columns(self, request: Request, tiles: Tiles, spec: Any, splits: int) -> Grid:
        """Return the grid of FlashAttention-2's backward kernel."""
        p = request.problem
        return _in_chunks(spec, ceil_div(p.seqlen_k, tiles.Bc), p.heads_k * splits, p.batch)

    def of_dq_kernel(self, request: Request, tiles: Tiles, spec: Any) -> Taken:
        """Return what the kernel that computes dQ alone takes."""
        p = request.problem
        return Taken((ceil_div(p.seqlen_q, tiles.Br), p.heads_q, p.batch), {})


class BoxCopies(Copies):
    """The copy engine copies boxes. Forward blocks stay for several row tiles, and those of packed
    sequences are counted for all sequences together.
    """

    by_boxes = True

    def of_fa2_forward(self, request: Request, spec: Any, splits: int) -> Taken:
        bound = _forward_boxes(spec)
        if spec.planes > 1:
            del bound["O"]
        grid = (_forward_blocks(request, spec, splits), 1, 1)
        return Taken(grid, bound, (Buffer("taken", (1,), "int32", zeroed=True),))

    def of_fa1_forward(self, spec: Any) -> dict[str, Argument]:
        return _forward_boxes(spec) | {"A": Boxes("A", GROUP_ROWS, "float32")}

    def of_backward(
        self, request: Request, tiles: Tiles, spec: Any, columns: bool
    ) -> dict[str, Argument]:
        found = _boxes(("Q", "dO"), tiles.Br, spec.query_ends)
        found |= _boxes("KV", tiles.Bc, spec.key_ends)
        if spec.planes > 1:  # results leave in float32
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
    """Return the grid over ``Tc`` column tiles of each of ``heads`` heads.

    With ``spec.chunk_tiles``, thread blocks take this number of column tiles of each head before
    the next column tiles.
    """
    chunk = spec.chunk_tiles
    return (chunk * heads, batch, ceil_div(Tc, chunk)) if chunk else (Tc, heads, batch)


def _unwritten(request: Request, heads: int) -> dict[str, Argument]:
    """Return O and L of a kernel that leaves them to the merge."""
    batch, heads_q, rows = request.row_shape
    shape = request.row_shape if heads == 1 else (batch, heads_q // heads, rows, heads)
    d, dtype = request.problem.d_v, request.problem.dtype
    return {"O": Untouched((*shape, d), dtype), "L": Untouched(shape)}


def _boxes(names: Iterable[str], rows: int, ends: bool) -> dict[str, Argument]:
    """Return boxes of ``rows`` rows of these arrays."""
    return {name: Boxes(name, rows, ends=ends) for name in names}


def _forward_boxes(spec: Any) -> dict[str, Argument]:
    """Return what a forward kernel takes by boxes."""
    page_size = spec.features.page_size
    rows = common_rows(page_size, spec.Bc) if page_size else spec.Bc
    Q = Boxes("Q", GROUP_ROWS, heads=spec.tile_heads, ends=spec.query_ends)
    O = replace(Q, name="O", ends=spec.features.packed)
    return {"Q": Q, **_boxes("KV", rows, spec.key_ends), "O": O}


def _forward_blocks(request: Request, spec: Any, splits: int) -> int:
    """Return the blocks that are handed FA-2's forward row tiles, or splits of these
    (parts/wgmma/scheduler).
    """
    p = request.problem
    tiles = ceil_div(p.seqlen_q, spec.head_rows) * p.batch
    if p.packed:
        tiles = _tiles_of_all(p.q_shape[0], spec.head_rows, p)
    tiles *= p.heads_q // spec.tile_heads * splits
    multiprocessors = request.multiprocessors or device.EMULATED_MULTIPROCESSORS
    return min(multiprocessors * spec.blocks, tiles) if spec.persistent else tiles


def _tiles_of_all(rows: int, rows_of_tile: int, problem: Problem) -> int:
    """Return the number of tiles that cover a head of packed sequences with ``rows`` rows in all.

    Some of the tiles are empty (parts/wgmma/scheduler).
    """
    return rows // rows_of_tile + problem.batch
