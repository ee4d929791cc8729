"""``create_block_mask``: checks, plan and launch, and the arrays of a block mask for kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from fa_numba import device, mods
from fa_numba.checks import check_grid_size
from fa_numba.choices.arguments import Buffer
from fa_numba.dtypes import INDEX, STATE
from fa_numba.host import launch_cache, placement
from fa_numba.host.arrays import HOST, Operand, check_together, on_host, operand
from fa_numba.host.binding import Binding
from fa_numba.host.execution import execute
from fa_numba.host.held import holding
from fa_numba.host.plans import Launch, LaunchPlan
from fa_numba.integers import ceil_div
from fa_numba.kernels.simt.blocks import LISTING, make_blocks, make_lists
from fa_numba.mods.blocks import EMPTY, BlockMask, BlockSize, next_visited, states_of_tiles
from fa_numba.options import UNIFORM, Features
from fa_numba.problem import Problem, check_blocks

# Time of the emulator for one element of a mask, in multiply-adds of a tile.
STEPS_PER_ELEMENT = 40

# Block sizes for block_size="auto": (longest sequence, rows and columns of a block). Longer
# sequences get _LARGE. A mask of more than _MOST_BLOCKS blocks gets larger ones, up to _LARGEST.
_SIZES = ((2048, 16), (4096, 32))
_LARGE, _LARGEST = 64, 128
_MOST_BLOCKS = 2**20
# Most rows and most columns of a block. A kernel counts the elements of a block in float32.
MOST_ROWS = 1024


class Lists:
    """The arrays of a block mask that kernels read, for each tile size and device.

    The constructor takes the arrays for the block size with which the mask was made. ``made`` maps
    the names "block_mask", "next_column" and "next_row" to these arrays. ``size`` is the block
    size. ``seqlens`` is the pair (seqlen_q, seqlen_k).

    A call may have tiles of another size. The arrays for this tile size are computed on the host
    when they are first needed. Each array is computed once, and copied once to each device.
    """

    def __init__(self, made: Mapping[str, Any], size: BlockSize, seqlens: tuple[int, int]) -> None:
        found = {name: _operand(name, x) for name, x in made.items()}
        self._size, self._seqlens = size, seqlens
        self._at = {size: {next(iter(found.values())).ordinal: found}}
        self._states: dict[BlockSize, np.ndarray] = {}
        self._visited: dict[BlockSize, np.ndarray] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the function and the arguments with which ``pickle`` loads this object.

        Only the states of the blocks are stored, for the block size with which the mask was made.
        Loading computes the other arrays from the states, on the host.
        """
        return _of_states, (self.states(), self._size, self._seqlens)

    def at(self, ordinal: int, size: BlockSize | None = None) -> Mapping[str, Operand]:
        """Return the arrays for tiles of ``size``, by name, on a GPU or on the host.

        ``ordinal`` is the number of the GPU, or HOST. If ``size`` is None, the tiles have the block
        size with which the mask was made.
        """
        size = size or self._size
        there = self._at.get(size)
        if there is None:
            there = {
                HOST: {name: _operand(name, x) for name, x in listed(self.states(size)).items()}
            }
            self._at[size] = there
        if ordinal not in there:
            first = next(iter(there.values()))
            host = {name: on_host(name, x.owner) for name, x in first.items()}
            if ordinal != HOST:
                with device.on_device(ordinal):
                    host = {name: device.to_gpu(x) for name, x in host.items()}
                    device.synchronize()
            there[ordinal] = {name: _operand(name, x) for name, x in host.items()}
        return there[ordinal]

    def states(self, size: BlockSize | None = None) -> np.ndarray:
        """Return the states of all tiles of ``size`` on the host.

        The result is uint8, shape (batch or 1, heads or 1, row tiles, column tiles). A state is
        EMPTY, MIXED or FULL.
        """
        size = size or self._size
        if size not in self._states:
            if size == self._size:
                first = next(iter(self._at[size].values()))["block_mask"]
                found = np.array(on_host("block_mask", first.owner))
            else:
                found = states_of_tiles(self.states(), self._size, size, self._seqlens)
            found.flags.writeable = False  # because ``BlockMask.blocks`` returns this array
            self._states[size] = found
        return self._states[size]

    def visited(self, size: BlockSize | None = None) -> np.ndarray:
        """Return an array of bool on the host that says which tiles of ``size`` are visited.

        The array has the shape of ``states(size)``.
        """
        size = size or self._size
        if size not in self._visited:
            self._visited[size] = self.states(size) != EMPTY
            self._visited[size].flags.writeable = False
        return self._visited[size]


def _of_states(states: np.ndarray, size: BlockSize, seqlens: tuple[int, int]) -> Lists:
    """Return the ``Lists`` for blocks whose states are ``states``.

    ``size`` is the block size, and ``seqlens`` is the pair (seqlen_q, seqlen_k). ``pickle`` calls
    this function when it loads a ``Lists`` object.
    """
    return Lists(listed(states), size, seqlens)


def listed(states: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays of a block mask that kernels read, by name.

    ``states`` contains EMPTY, MIXED or FULL for each block. The result contains three arrays:

    - "block_mask": ``states``.
    - "next_column": for each block, the next visited block in the same row of blocks.
    - "next_row": for each block, the next visited block in the same column of blocks.

    The kernel ``make_lists`` computes equal arrays on a GPU.
    """
    visited = states != EMPTY
    next_column, next_row = next_visited(visited, -1), next_visited(visited, -2)
    return {"block_mask": states, "next_column": next_column, "next_row": next_row}


def _operand(name: str, array: Any) -> Operand:
    return operand(name, array, (STATE.name, INDEX.name))


def create(
    mask_mod: Any, sizes: tuple[int, int, int, int], block_size: Any, tiles: Any
) -> BlockMask:
    """Return the block mask of ``mask_mod``.

    ``sizes`` is (batch, heads, seqlen_q, seqlen_k). The other arguments are the arguments of
    ``fa_numba.create_block_mask``.
    """
    if tiles is not None:
        if not (isinstance(block_size, str) and block_size == "auto"):
            raise ValueError(
                "block_size must be 'auto' if tiles is given, because tiles.Br and tiles.Bc are "
                f"then the block size, got {block_size!r}; leave one of the two out"
            )
        check_blocks(tiles)
        block_size = tiles.Br, tiles.Bc
    binding = Binding.of({"mask_mod": mask_mod})
    B, H, Nq, Nk = sizes
    problem = Problem(B, H, H, Nq, Nk, 1, mask_mod=cast(Any, binding.fields.get("mask_mod")))
    replace(problem, sparse=True)  # raises an error if no call supports a block mask of these sizes
    if problem.mask_mod is None:
        raise TypeError("mask_mod must be a function of (b, h, i, j), got None")
    check_grid_size("batch", B)
    check_grid_size("heads", H)
    Nq, Nk = problem.seqlen_q, problem.seqlen_k
    size = block_size_of("block_size" if tiles is None else "tiles", block_size, problem)
    Tr, Tc = ceil_div(Nq, size.Br), ceil_div(Nk, size.Bc)
    if Tr * Tc >= 2**31:
        raise ValueError(
            f"block_size must cut the {Nq} rows and {Nk} columns into fewer than 2**31 blocks, got "
            f"{Tr * Tc} blocks of {size}; choose larger blocks"
        )
    kernel = make_blocks(Features(mask_mod=problem.mask_mod), *size)
    shape = B, H, Tr, Tc
    plan = LaunchPlan(
        launches=(
            Launch.of(kernel, (Tr * Tc, H, B), Nq=Nq, Nk=Nk),
            Launch.of(make_lists(), (ceil_div(max(Tr, Tc), LISTING), H, B)),
        ),
        outputs=(
            Buffer("block_mask", shape, STATE.name),
            Buffer("next_column", (B, H, Tr, Tc + 1), INDEX.name),
            Buffer("next_row", (B, H, Tc, Tr + 1), INDEX.name),
        ),
        uncounted=(*UNIFORM, *problem.mask_mod.fields),
    )
    inputs = binding.arrays or {"nothing": operand("nothing", np.zeros(1, np.float32))}
    first, *others = inputs.values()
    check_together([first], others)
    with placement.placed(first):
        steps = STEPS_PER_ELEMENT * B * H * Nq * Nk
        placement.check_steps(plan, f"mask_mod over {B * H} x {Nq} x {Nk} elements", steps)

        def run(found: dict[str, object], stream: Any) -> None:
            execute(plan, found, stream, lambda _: binding.values(problem, found, 1.0))

        made = launch_cache.run_and_keep(plan, inputs, None, None, run)
    held = holding("mask_mod", mask_mod)
    names = (output.name for output in plan.outputs)
    lists = Lists(dict(zip(names, made, strict=True)), size, (Nq, Nk))
    captured, reads = mods.captured("mask_mod", held), mods.parameters_read("mask_mod", held)
    return BlockMask(held, size, Nq, Nk, shape, captured, lists, reads, tiles)


def block_size_of(name: str, given: Any, problem: Problem) -> BlockSize:
    """Return the block size for the value ``given``, or choose a size if ``given`` is "auto".

    ``name`` is the argument that contains the value, "block_size" or "tiles", for error messages.
    """
    if isinstance(given, str) and given == "auto":
        longest = max(problem.seqlen_q, problem.seqlen_k)
        n = next((size for most, size in _SIZES if longest <= most), _LARGE)
        heads = problem.batch * problem.heads_q
        while n < _LARGEST and heads * _count(problem, n) > _MOST_BLOCKS:
            n *= 2
        return BlockSize(n, n)
    pair = given if isinstance(given, (tuple, list)) else (given, given)
    wanted = f"an integer from 1 to {MOST_ROWS}"
    if name == "tiles":
        wanted = f"{name}.Br and {name}.Bc must each be {wanted} in a block mask"
    else:
        wanted = f"{name} must be 'auto', {wanted}, or two of them for rows and columns"
    whole = [isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in pair]
    if len(pair) != 2 or not all(whole) or not all(1 <= n <= MOST_ROWS for n in pair):
        raise ValueError(f"{wanted}, got {given!r}")
    return BlockSize(*map(int, pair))


def _count(problem: Problem, size: int) -> int:
    """Return the number of blocks of one head, for blocks with ``size`` rows and columns."""
    return ceil_div(problem.seqlen_q, size) * ceil_div(problem.seqlen_k, size)
