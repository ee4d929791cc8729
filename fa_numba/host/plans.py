"""Plans: the launches and arrays of a call, with their accesses and FLOPs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from fa_numba import device, io_model
from fa_numba.choices.arguments import Argument, Buffer
from fa_numba.choices.decisions import Decision
from fa_numba.choices.requests import Request
from fa_numba.device import Kernel
from fa_numba.emulator.counts import columns, html_table
from fa_numba.host.binding import LOG2E
from fa_numba.mods import Mod
from fa_numba.options import POWERS, UNIFORM
from fa_numba.problem import Problem
from fa_numba.tiling import Tiles

# Arrays whose elements all threads of a thread block read together: arrays among the options, the
# counter ``taken`` of the tile scheduler, and the factors of scaled planes.
UNCOUNTED = (*UNIFORM, "taken", "M", "power", *POWERS)


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel over a grid of thread blocks.

    Attributes
    ----------
    kernel : Kernel
        The kernel.
    grid : tuple of int
        Number of thread blocks along the three axes of the grid.
    arguments : mapping of str to Argument
        Maps the name of each parameter of the kernel, except the last parameter ``options``, to an
        argument. A string is the name of an array (Q, K, V, O, dO, L, dQ, dK, dV or workspace) or
        of a number of the call (``scale``, ``score_scale``, ``group``, ``split_rows``; see
        ``host/execution.py``).
    """

    kernel: Kernel = field(compare=False)
    grid: tuple[int, int, int]
    arguments: Mapping[str, Argument]

    @classmethod
    def of(cls, kernel: Kernel, grid: tuple[int, int, int], **bound: Argument) -> Launch:
        """Return a launch in which each parameter takes the array or number of the same name.

        Parameters
        ----------
        kernel : Kernel
            The kernel.
        grid : tuple of int
            Number of thread blocks along the three axes of the grid.
        **bound : Argument
            Maps the name of a parameter to its argument, for arguments with another name.

        Returns
        -------
        Launch
            The launch.

        Raises
        ------
        TypeError
            If a name in ``bound`` is no parameter of the kernel.
        ValueError
            If ``grid`` does not consist of three numbers.
        """
        if len(grid) != 3:
            raise ValueError(f"grid must consist of three numbers, got {grid}")
        names = parameters(kernel)
        for name in bound:
            if name not in names:
                raise TypeError(
                    f"kernel {kernel.name} has no parameter {name}; the parameters are "
                    f"{', '.join(names)}"
                )
        return cls(kernel, grid, {name: bound.get(name, name) for name in names})


def takes_options(kernel: Kernel) -> bool:
    """Return whether a kernel's last parameter is ``options``, the tuple of option arguments."""
    return hasattr(kernel.argument_types[-1], "instance_class")


def parameters(kernel: Kernel) -> tuple[str, ...]:
    """Return the names of a kernel's parameters, except the last parameter ``options``."""
    code = kernel.function.__code__
    return code.co_varnames[: code.co_argcount - takes_options(kernel)]


@dataclass(frozen=True)
class KernelPlan:
    """One launch of a plan: the kernel, the grid and the size of a thread block.

    Attributes
    ----------
    name : str
        Name of the kernel, such as "fa2_forward".
    grid : tuple of int
        Number of thread blocks along the three axes of the grid.
    threads : int
        Number of threads of a thread block.
    shared_bytes : int
        Shared memory of a thread block in bytes.

    See Also
    --------
    fa_numba.plan : Return a plan; its ``kernels`` are of this class.
    """

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The launches of a call in their order, and the arrays that they use.

    Attributes
    ----------
    launches : tuple of Launch
        The launches in their order.
    workspace : tuple of Buffer
        Arrays of the workspace: temporary device memory, besides inputs and outputs.
    outputs : tuple of Buffer
        Arrays that the call returns.
    updated : tuple of str
        Names of the inputs that the launches write to.
    uncounted : tuple of str
        Names of the arrays whose accesses the emulator does not count. All threads of a thread
        block read the elements of these arrays together.
    kernels : tuple of KernelPlan
        Name, grid, threads and shared memory of each launch.
    launched : tuple of Kernel
        The ``Kernel`` object of each launch.
    workspace_bytes : int
        Size of the workspace in bytes.
    """

    launches: tuple[Launch, ...] = field(repr=False, hash=False)
    workspace: tuple[Buffer, ...] = ()
    outputs: tuple[Buffer, ...] = ()
    updated: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = UNCOUNTED

    @functools.cached_property
    def kernels(self) -> tuple[KernelPlan, ...]:
        """Name, grid, threads and shared memory of each launch."""
        return tuple(
            KernelPlan(k.name, launch.grid, k.threads, k.shared_bytes)
            for launch, k in zip(self.launches, self.launched, strict=True)
        )

    @property
    def launched(self) -> tuple[Kernel, ...]:
        """The ``Kernel`` object of each launch."""
        return tuple(launch.kernel for launch in self.launches)

    @property
    def workspace_bytes(self) -> int:
        """Size of the workspace in bytes: temporary device memory, besides inputs and outputs."""
        return sum(buffer.nbytes for buffer in self.workspace)

    def compile(self) -> None:
        """Compile the kernels for the current GPU, before the first call needs them.

        Without a GPU, this method does nothing. Compiled kernels are also kept on disk for later
        processes, in the folder that ``fa_numba.show_config`` prints.
        """
        device.compile_together(self.launched)


class Reasons(dict[str, str]):
    """Reasons for the choices in a plan: a dictionary from the name of a choice to a sentence.

    ``print`` shows one line for each choice. Every plan has the names "unit" and "tiles". A plan of
    algorithm "fa2" also has "kv_splits" in a forward pass, and "group_splits" in a backward pass.
    With a prefix, the names for the pass over the prefix begin with "prefix: ". A backward pass on
    unit "wgmma" also has "variant", which describes the variant of the kernel and the reason for
    it.
    """

    def __str__(self) -> str:
        return "\n".join(f"{name.ljust(12)}  {why}" for name, why in self.items())


@dataclass(frozen=True, kw_only=True)
class Plan(LaunchPlan):
    """The plan of a call of attention: launches, workspace, accesses and FLOPs.

    ``fa_numba.plan`` returns a plan. ``print`` shows a plan as a table. ``pickle`` stores the
    request of a plan. Loading makes the plan again, for the device that the plan was made for.

    Attributes
    ----------
    algorithm : str
        "fa2", "fa1" or "standard".
    passes : str
        "fwd" for a forward pass, "bwd" for a backward pass.
    unit : str
        Which instructions multiply matrices: "simt", "mma" or "wgmma".
    problem : Problem
        Sizes, dtype and options of the call.
    tiles : Tiles
        Block sizes, threads and stages of the main kernel.
    kernels : tuple of KernelPlan
        Name, grid, threads and shared memory of each launch, in their order.
    workspace : tuple of Buffer
        Arrays of the workspace: temporary device memory, besides inputs and outputs.
    workspace_bytes : int
        Size of the workspace in bytes.
    outputs : tuple of Buffer
        Arrays that the call returns.
    accesses : Accesses
        Number of loads and stores of global memory in elements, by array, from the closed form.
        The numbers are those that the emulator counts. The arrays in ``uncounted`` are left out.
        With a ``block_table`` and no ``kv_lens``, all pages of each sequence are taken as full.
    flops : int
        FLOPs of the matrix products, by FlashAttention-2's convention (section 4.1).
    why : Reasons
        Reasons for the unit, the tiles and the splits.
    kv_splits : int
        Number of thread blocks that share the columns of a row tile. Forward pass of "fa2", else 1.
    group_splits : int
        Number of thread blocks that share a column tile of a K/V head. Backward pass of "fa2", else
        1.
    split_rows : int
        Number of rows of q that one thread block of "fa1" takes; 0 for the other algorithms.
    warp_partition : str
        How the warps of a thread block divide the work: by "rows" of q, or by "keys", the rows of k
        and v.
    ablated : tuple of str
        Names of the optimisations that are switched off.
    score_unit : float
        Factor of the scores in addition to ``scale``. It is log2(e) for "fa1" and "fa2", which
        compute powers of 2, and 1 for "standard".
    block_mask : numpy.ndarray of bool or None
        Visited blocks of S, if the call has a block mask.
    launches : tuple of Launch
        The kernels with their grids and arguments, in the order of the launches.
    launched : tuple of Kernel
        The ``Kernel`` object of each launch.
    updated : tuple of str
        Names of the inputs that the launches write to; none for attention.
    uncounted : tuple of str
        Names of the arrays whose accesses are not counted, such as ``sinks`` and lengths.
    count : function
        Function that computes ``accesses``. Its argument ``block_mask`` says which tiles are
        visited.
    request : Request
        Choices, problem and device that the plan was made for, with the unit that was chosen.
    asked : Request or None
        The request before a unit was chosen. It contains "auto" or None where the caller chose
        nothing.
    decided : Decision
        Unit, tiles, compile-time constants and splits of the main kernel.

    See Also
    --------
    fa_numba.plan : Make a plan.

    Notes
    -----
    The method ``compile`` compiles the kernels before the first call needs them. The class method
    ``of`` makes a plan; fa_numba itself calls it.

    Examples
    --------
    >>> import fa_numba
    >>> p = fa_numba.plan((1, 2, 64, 16), (1, 2, 64, 16), algorithm="fa1")
    >>> [kernel.name for kernel in p.kernels], p.workspace_bytes
    (['fa1_forward'], 1024)
    >>> p.accesses.loads["K"], p.accesses.stores["O"]
    (2048, 2048)
    >>> sorted(p.why)
    ['tiles', 'unit']
    """

    algorithm: str
    passes: str
    unit: str
    problem: Problem
    tiles: Tiles
    warp_partition: str
    ablated: tuple[str, ...]
    split_rows: int
    kv_splits: int
    group_splits: int
    score_unit: float
    block_mask: np.ndarray | None = field(default=None, compare=False, repr=False)
    count: Callable[..., io_model.Accesses] = field(compare=False, repr=False)
    request: Request = field(compare=False, repr=False)
    decided: Decision = field(compare=False, repr=False)
    asked: Request | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, request: Request, decided: Decision, launches: Sequence[Launch],
        workspace: Sequence[Buffer], count: Callable[..., io_model.Accesses], split_rows: int = 0,
    ) -> Plan:  # fmt: skip
        """Return a plan from the launches and the workspace of an algorithm.

        This method adds the outputs of the pass.

        Parameters
        ----------
        request : Request
            Choices, problem and device that the plan is for.
        decided : Decision
            Unit, tiles, compile-time constants and splits of the main kernel.
        launches : sequence of Launch
            The launches in their order.
        workspace : sequence of Buffer
            Arrays of the workspace.
        count : function
            Function that computes the accesses. Its argument ``block_mask`` says which tiles are
            visited.
        split_rows : int, default 0
            Number of rows of q that one thread block of "fa1" takes.

        Returns
        -------
        Plan
            The plan. Each output has the shape of the array that the call returns.
        """
        p, choices = request.problem, request.choices
        forward = choices.passes == "fwd"
        if forward:
            O, L = Buffer("O", p.o_shape, p.o_dtype), Buffer("L", p.lse_shape)
            outputs = [O, L] if choices.return_lse else [O]
        else:
            # Thread blocks add to these arrays, which must be 0 at the start.
            added = choices.query_splits > 1 and request.dtype.sums_in_place
            outputs = [Buffer("dQ", p.q_shape, p.dtype)]
            of_keys = {"dK": p.k_shape, "dV": p.v_shape}
            outputs += [Buffer(*x, p.dtype, zeroed=added) for x in of_keys.items()]
            if choices.return_dbias:  # atomic adds
                shape = cast(tuple, p.bias)
                outputs.append(Buffer("dbias", shape, zeroed=True, like="bias"))
            if choices.return_dsinks:
                outputs.append(Buffer("dsinks", (p.heads_q,)))
            if choices.return_dcaptured:  # atomic adds
                of = cast(Mod, p.score_mod).differentiated.items()
                outputs += [Buffer(name, (), zeroed=True, like=field) for name, field in of]
        return cls(
            algorithm=choices.algorithm,
            passes=choices.passes,
            unit=request.unit,
            problem=p,
            tiles=decided.tiles,
            warp_partition=choices.warp_partition,
            ablated=choices.ablate,
            split_rows=split_rows,
            kv_splits=decided.splits if forward else 1,
            group_splits=1 if forward else decided.splits,
            uncounted=(*UNCOUNTED, *(x for m in p.mods for x in (*m.fields, *m.differentiated))),
            score_unit=1.0 if choices.algorithm == "standard" else LOG2E,
            launches=tuple(launches),
            workspace=tuple(workspace),
            outputs=tuple(outputs),
            count=count,
            request=request,
            decided=decided,
        )

    @property
    def why(self) -> Reasons:
        """Reasons for the unit, the tiles and the splits; ``print`` shows one line for each."""
        return Reasons(self.decided.why)

    @functools.cached_property
    def accesses(self) -> io_model.Accesses:
        """Number of loads and stores of global memory in elements, by array, from the closed form.

        The arrays in ``uncounted`` are left out.
        """
        return self.count(block_mask=self.block_mask)

    @functools.cached_property
    def flops(self) -> int:
        """FLOPs of the matrix products, by FlashAttention-2's convention (section 4.1)."""
        return io_model.flops(self.problem, self.passes, block_mask=self.block_mask)

    def __str__(self) -> str:
        return "\n".join(_table(self))

    def __repr__(self) -> str:
        p, tiles = self.problem, self.tiles
        options = "".join(f", {name}={value!r}" for name, value in p.options.items())
        return (
            f"<Plan: {self.algorithm} {_PASSES[self.passes]}, unit {self.unit}, {p.dtype}, "
            f"q {p.q_shape}, k {p.k_shape}{options}, tiles {tiles.Br} x {tiles.Bc}, "
            f"kernels: {', '.join(kernel.name for kernel in self.kernels)}>"
        )

    def _repr_html_(self) -> str:
        """Return the kernels, accesses and workspace as tables for a notebook."""
        p = self.problem
        title = f"{self.algorithm} {_PASSES[self.passes]}, unit {self.unit}, {p.dtype}"
        heads = ("kernel", "grid", "threads", "shared memory, bytes")
        kernels = [
            (k.name, f"{k.grid}", f"{k.threads}", f"{k.shared_bytes:,}") for k in self.kernels
        ]
        moved = self.accesses
        arrays = [
            (name, f"{moved.loads.get(name, 0):,}", f"{moved.stores.get(name, 0):,}")
            for name in moved.loads | moved.stores
        ]
        all_ = ("all", f"{moved.total_loads:,}", f"{moved.total_stores:,}")
        return "\n".join(
            (
                f"<p>{title}: q {p.q_shape}, k {p.k_shape}, "
                f"tiles {self.tiles.Br} x {self.tiles.Bc}, "
                f"workspace {self.workspace_bytes:,} bytes, {self.flops:,} FLOPs</p>",
                html_table([heads, *kernels]),
                html_table([("array", "elements loaded", "elements stored"), *arrays, all_]),
            )
        )


_PASSES = {"fwd": "forward", "bwd": "backward"}


def _table(plan: Plan) -> list[str]:
    """Return the lines that ``print(plan)`` shows."""
    p, tiles = plan.problem, plan.tiles
    options = [f"{name}={value}" for name, value in p.options.items()]
    lines = [
        f"{plan.algorithm} {_PASSES[plan.passes]}, unit {plan.unit}, {p.dtype}",
        f"problem    {', '.join((f'q {p.q_shape}', f'k {p.k_shape}', *options))}",
        f"tiles      Br={tiles.Br}, Bc={tiles.Bc}, threads={tiles.threads}, stages={tiles.stages}",
    ]
    if plan.kv_splits > 1:
        lines.append(f"kv_splits  {plan.kv_splits} blocks share the columns of a row tile")
    if plan.group_splits > 1:
        lines.append(f"group_splits  {plan.group_splits} blocks share a column tile of a K/V head")
    heads = ("kernels  ", "grid", "threads", "shared bytes")
    rows = [(k.name, f"{k.grid}", f"{k.threads}", f"{k.shared_bytes:,}") for k in plan.kernels]
    lines += columns([heads, *rows])
    buffers = ", ".join(f"{x.name} {x.dtype} {x.shape}" for x in plan.workspace) or "nothing"
    lines.append(f"workspace  {plan.workspace_bytes:,} bytes: {buffers}")
    if p.sparse and plan.block_mask is None:
        return [*lines, "accesses   depend on the block mask"]
    loads, stores = plan.accesses.loads, plan.accesses.stores
    names = dict.fromkeys((*loads, *stores))
    counts = [(n, f"{loads.get(n, 0):,}", f"{stores.get(n, 0):,}") for n in names]
    total = ("all", f"{plan.accesses.total_loads:,}", f"{plan.accesses.total_stores:,}")
    lines += columns([("accesses ", "loads", "stores"), *counts, total])
    return [*lines, f"FLOPs      {plan.flops:,}"]
