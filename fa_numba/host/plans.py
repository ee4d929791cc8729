"""Plans: the launches and arrays of a call by name, and what they cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fa_numba import device, io_model
from fa_numba.choices.decisions import Decision
from fa_numba.choices.requests import Request
from fa_numba.choices.units import unit_of
from fa_numba.device import Kernel
from fa_numba.dtypes import STORED
from fa_numba.emulator.counts import columns
from fa_numba.host.binding import LOG2E
from fa_numba.options import POWERS, UNIFORM
from fa_numba.problem import Problem
from fa_numba.tiling import Tiles

# Words that threads of a block read together: of options, of a scheduler, of planes.
UNCOUNTED = (*UNIFORM, "taken", "M", "power", *POWERS)


@dataclass(frozen=True)
class Buffer:
    """An array that launches take by ``name``: workspace, or an output.

    ``dtype`` is a name among ``STORED``. ``zeroed``: it is filled with zeros before the
    first launch. ``pitch`` is how many elements lie between a row's first and the next one's; None
    for as many as a row has. ``like`` is the input whose shape an output has, as the caller gave
    it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    zeroed: bool = False
    pitch: int | None = None
    like: str = ""

    @property
    def allocated(self) -> tuple[int, ...]:
        """The shape with whatever lies between rows."""
        return (*self.shape[:-1], self.pitch or self.shape[-1])

    @property
    def nbytes(self) -> int:
        return np.dtype(self.host_dtype).itemsize * math.prod(self.allocated)

    @property
    def host_dtype(self) -> str:
        """The NumPy dtype in which kernels see it."""
        return STORED[self.dtype].host


@dataclass(frozen=True)
class Untouched:
    """Stands for an array that a kernel has a parameter for, and as compiled never reads or writes:
    one with this shape and no memory of its own.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Boxes:
    """The array called ``name`` for a kernel that takes it by boxes of ``rows`` rows, of so many
    ``heads``, and with ``ends`` where a sequence's rows end (``device.TiledArray``); its dtype is
    the call's, unless said.
    """

    name: str
    rows: int
    dtype: str = ""
    heads: int = 1
    ends: bool = False


@dataclass(frozen=True)
class Grouped:
    """The array called ``name``, its heads by groups of so many ``heads`` behind the rows
    (``device.grouped``), for a kernel that has them in the rows of one tile.
    """

    name: str
    heads: int


# The name of an array or of a number of the call, a number itself, no array, one by boxes or one by
# groups of heads.
Argument = str | int | float | Untouched | Boxes | Grouped


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel over ``grid`` blocks.

    ``arguments`` are by the kernel's own parameter names, all but the last, ``options``. A string
    names an array (Q, K, V, O, dO, L, dQ, dK, dV, or one of the plan's workspace) or a number of
    the call (``scale``, ``score_scale``, ``group``, ``split_rows``; see ``host/execution.py``).
    """

    kernel: Kernel = field(compare=False)
    grid: tuple[int, int, int]
    arguments: Mapping[str, Argument]

    @classmethod
    def of(cls, kernel: Kernel, grid: tuple[int, int, int], **bound: Argument) -> Launch:
        """A launch whose parameters take what has their name, but for those ``bound`` to another.

        Raises TypeError for a name that the kernel has no parameter of.
        """
        names = parameters(kernel)
        for name in bound:
            if name not in names:
                raise TypeError(f"{name} is no parameter of {kernel.name}: it has {names}")
        return cls(kernel, grid, {name: bound.get(name, name) for name in names})


def takes_options(kernel: Kernel) -> bool:
    """Whether a kernel's last parameter is ``options``, the arguments of options by name."""
    return hasattr(kernel.argument_types[-1], "instance_class")


def parameters(kernel: Kernel) -> tuple[str, ...]:
    """The names of a kernel's parameters, but for ``options``."""
    code = kernel.function.__code__
    return code.co_varnames[: code.co_argcount - takes_options(kernel)]


@dataclass(frozen=True)
class KernelPlan:
    """One launch at a glance: ``grid`` in blocks, ``threads`` and ``shared_bytes`` a block."""

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The ``launches`` of a call in their order, over its inputs, ``outputs`` and ``workspace`` by
    name. Inputs that are ``updated`` are written where they lie; accesses to those
    ``uncounted``, which threads of a block read together, are no part of the emulator's counts.
    """

    launches: tuple[Launch, ...] = field(repr=False, hash=False)
    workspace: tuple[Buffer, ...] = ()
    outputs: tuple[Buffer, ...] = ()
    updated: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = UNCOUNTED

    @functools.cached_property
    def kernels(self) -> tuple[KernelPlan, ...]:
        return tuple(
            KernelPlan(k.name, launch.grid, k.threads, k.shared_bytes)
            for launch, k in zip(self.launches, self.launched, strict=True)
        )

    @property
    def launched(self) -> tuple[Kernel, ...]:
        return tuple(launch.kernel for launch in self.launches)

    @property
    def workspace_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.workspace)

    def compile(self) -> None:
        """Compile for the current GPU what a call would compile; nothing on the emulator.

        Kernels are kept on disk too (``fa_numba.device.kernel_cache``), for later processes.
        """
        if device.on_gpu():
            for kernel in self.launched:
                kernel.compiled()


class Reasons(dict[str, str]):
    """Why something was chosen, by its name; ``print`` shows a line of each."""

    def __str__(self) -> str:
        return "\n".join(f"{name.ljust(12)}  {why}" for name, why in self.items())


@dataclass(frozen=True, kw_only=True)
class Plan(LaunchPlan):
    """What a call of attention runs; ``print`` shows it as a table.

    A thread block takes ``split_rows`` rows of Q where FlashAttention-1's share a head;
    ``kv_splits`` blocks share the columns of a row tile of FlashAttention-2's, backward
    ``group_splits`` a column tile. Scores are multiplied by ``score_unit`` beside the scale:
    log2(e) where exponentials are powers of 2. ``warp_partition`` is what the warps of a block
    share of a tile: its "rows" or the "keys"; ``ablated`` names the measures that the kernel does
    without.

    ``accesses`` are exact loads and stores of global memory in elements by array, ``flops`` follows
    FlashAttention-2's convention, ``workspace_bytes`` is memory beside inputs and outputs. With a
    block mask accesses and FLOPs need it as ``block_mask``. ``launched`` are the functions behind
    ``kernels``. ``why`` has the reasons of "unit", "tiles" and, where there is a choice, of
    "kv_splits" or "group_splits".
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

    @classmethod
    def of(
        cls, request: Request, decided: Decision, launches: Sequence[Launch],
        workspace: Sequence[Buffer], count: Callable[..., io_model.Accesses], split_rows: int = 0,
    ) -> Plan:  # fmt: skip
        """Of the algorithm's own parts, with the outputs of the pass in the caller's shapes."""
        p, choices = request.problem, request.choices
        forward = choices.passes == "fwd"
        if forward:
            O, L = Buffer("O", p.o_shape, p.dtype), Buffer("L", p.lse_shape)
            outputs = [O, L] if choices.return_lse else [O]
        else:
            # What blocks add to in place begins at 0.
            added = choices.query_splits > 1 and request.dtype.sums_in_place
            outputs = [Buffer("dQ", p.q_shape, p.dtype)]
            of_keys = {"dK": p.k_shape, "dV": p.v_shape}
            outputs += [Buffer(*x, p.dtype, zeroed=added) for x in of_keys.items()]
            if p.bias is not None and choices.return_dbias:  # a sum of atomic adds
                outputs.append(Buffer("dbias", p.bias, zeroed=True, like="bias"))
            if choices.return_dsinks:
                outputs.append(Buffer("dsinks", (p.heads_q,)))
            if choices.return_dcaptured and p.score_mod is not None:  # and these
                of = p.score_mod.differentiated.items()
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
        return Reasons({"unit": unit_of(self.request)[1], **self.decided.why})

    @functools.cached_property
    def accesses(self) -> io_model.Accesses:
        return self.count(block_mask=self.block_mask)

    @functools.cached_property
    def flops(self) -> int:
        return io_model.flops(self.problem, self.passes, block_mask=self.block_mask)

    def __str__(self) -> str:
        return "\n".join(_table(self))


_PASSES = {"fwd": "forward", "bwd": "backward"}


def _table(plan: Plan) -> list[str]:
    """The lines that ``print(plan)`` shows."""
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
