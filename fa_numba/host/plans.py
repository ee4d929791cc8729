"""What a call runs: kernels, grids, tiles, accesses and workspace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fa_numba import device, io_model
from fa_numba.device import Kernel
from fa_numba.io_model import ALGORITHMS
from fa_numba.kernels import mma
from fa_numba.kernels.simt import (
    fa1_backward,
    fa1_forward,
    fa2_backward,
    fa2_forward,
    standard,
    standard_backward,
)
from fa_numba.options import PLAIN, Features
from fa_numba.problem import Problem, as_size
from fa_numba.tiling import (
    MEASURES,
    MmaSpec,
    MmaSweepSpec,
    SimtBackwardSpec,
    StandardSpec,
    Tiles,
    default_backward_tiles,
    default_mma_backward_tiles,
    default_mma_standard_tiles,
    default_mma_tiles,
    default_tiles,
    select_mma_backward_spec,
    select_mma_spec,
    select_spec,
    sweep_tiles,
)
from fa_numba.tiling.tuned import tuned_tiles

PASSES = ("fwd", "bwd")
UNITS = ("auto", "simt", "mma")
PARTITIONS = ("rows", "keys")
# What each unit has kernels for.
_UNIT_DTYPES = {"simt": ("float32",), "mma": ("float16", "bfloat16")}

_MAX_GRID_YZ = 65535


@dataclass(frozen=True)
class KernelPlan:
    """One launch: ``grid`` in blocks, ``threads`` and ``shared_bytes`` a block."""

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Plan:
    """What a call runs.

    ``warp_partition`` is what the warps of a block share of a tile: its "rows" or the "keys";
    ``ablated`` names the measures that the kernel does without.
    ``accesses`` are exact loads and stores of global memory in elements by array, ``flops`` follows
    FlashAttention-2's convention, ``workspace_bytes`` is memory beside inputs and outputs. With a
    block mask both need it as ``block_mask``. ``launched`` are the functions behind ``kernels``.
    """

    algorithm: str
    passes: str
    unit: str
    problem: Problem
    tiles: Tiles
    kernels: tuple[KernelPlan, ...]
    workspace_bytes: int
    warp_partition: str = "rows"
    ablated: tuple[str, ...] = ()
    block_mask: np.ndarray | None = field(default=None, compare=False, repr=False)
    count: Callable[..., io_model.Accesses] = field(default=None, compare=False, repr=False)  # type: ignore[assignment]
    launched: tuple[Kernel, ...] = field(default=(), compare=False, repr=False)

    def compile(self) -> None:
        """Compile for the current GPU what a call would compile; nothing on the emulator.

        Kernels are kept on disk too (``fa_numba.device.kernel_cache``), for later processes.
        """
        if device.on_gpu():
            for kernel in self.launched:
                kernel.compiled()

    @functools.cached_property
    def accesses(self) -> io_model.Accesses:
        return self.count(block_mask=self.block_mask)

    @functools.cached_property
    def flops(self) -> int:
        return io_model.flops(self.problem, self.passes, block_mask=self.block_mask)


@dataclass(frozen=True)
class Run:
    """A plan, and its kernels in the order of their launches."""

    plan: Plan
    split_rows: int = 0

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return self.plan.launched

    def of(self, name: str) -> list[int]:
        """The places of the kernels with this name."""
        return [n for n, kernel in enumerate(self.kernels) if kernel.name == name]


def check_algorithm(algorithm: Any) -> None:
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}: allowed is one of {', '.join(ALGORITHMS)}")


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: allowed is True or False")


def _check(problem: Problem, algorithm: Any, tiles: Any) -> None:
    check_algorithm(algorithm)
    if tiles is not None and not isinstance(tiles, Tiles):
        raise TypeError(f"tiles is {tiles!r}: allowed is a Tiles(Br=..., Bc=...) or None")
    for name, size in (("batch", problem.batch), ("heads of q", problem.heads_q)):
        if size > _MAX_GRID_YZ:
            raise ValueError(f"{name} is {size}: allowed is at most {_MAX_GRID_YZ}, a grid's limit")


def _unit(unit: Any, problem: Problem) -> str:
    """The unit that computes: CUDA cores ("simt") or tensor cores ("mma"); "auto" is by dtype."""
    if not isinstance(unit, str) or unit not in UNITS:
        raise ValueError(f"unit is {unit!r}: allowed is one of {', '.join(UNITS)}")
    found = unit
    if unit == "auto":
        found = "simt" if problem.dtype in _UNIT_DTYPES["simt"] else "mma"
    if problem.dtype not in _UNIT_DTYPES[found]:
        raise ValueError(
            f"unit is {unit!r} with dtype {problem.dtype}: {found} takes "
            f"{' or '.join(_UNIT_DTYPES[found])}"
        )
    return found


def _check_stages(tiles: Tiles, algorithm: str, passes: str, unit: str) -> None:
    if tiles.stages != 1 and (algorithm, passes, unit) != ("fa2", "fwd", "mma"):
        raise ValueError(
            f"tiles: stages={tiles.stages} with algorithm {algorithm!r}, pass {passes!r} on unit "
            f"{unit!r}: only the forward pass of fa2 on tensor cores ('mma') has a choice, allowed "
            "is 1"
        )


def _check_partition(warp_partition: Any, algorithm: str, unit: str) -> None:
    if not isinstance(warp_partition, str) or warp_partition not in PARTITIONS:
        raise ValueError(
            f"warp_partition is {warp_partition!r}: allowed is one of {', '.join(PARTITIONS)}"
        )
    if warp_partition == "keys" and (algorithm, unit) != ("fa1", "mma"):
        raise ValueError(
            f"warp_partition is 'keys' with algorithm {algorithm!r} on unit {unit!r}: only fa1 on "
            "tensor cores ('mma') splits the keys over the warps of a block, allowed is 'rows'"
        )


def _measures(ablate: Any, algorithm: str, unit: str) -> tuple[str, ...]:
    """The measures to leave out, each once, in one order."""
    found = [name for name, owners in MEASURES.items() if unit == "mma" and algorithm in owners]
    names = ablate if isinstance(ablate, (tuple, list)) else (ablate,)
    for name in names:
        if not isinstance(name, str) or name not in found:
            raise ValueError(
                f"ablate is {ablate!r}: {algorithm} on unit {unit!r} can do without "
                f"{', '.join(found) or 'none of its measures'}; allowed is a tuple of these names"
            )
    return tuple(name for name in found if name in names)


def forward(
    problem: Problem,
    algorithm: str,
    tiles: Any,
    aligned: bool,
    return_lse: Any,
    query_splits: Any,
    unit: Any = "auto",
    warp_partition: Any = "rows",
    ablate: Any = (),
) -> Run:
    """The forward pass of ``algorithm``, checked."""
    _check(problem, algorithm, tiles)
    unit = _unit(unit, problem)
    _check_flag("return_lse", return_lse)
    query_splits = as_size("query_splits", query_splits, axis=False)
    if query_splits != 1 and algorithm != "fa1":
        raise ValueError(f"query_splits is {query_splits}: only fa1 splits its queries")
    _check_partition(warp_partition, algorithm, unit)
    ablated = _measures(ablate, algorithm, unit)
    if tiles and tiles.stages != 1 and "prefetch" in ablated:
        raise ValueError(
            f"tiles: stages={tiles.stages} with ablate={ablate!r}: two stages are there for tiles "
            "that are prefetched, allowed is 1"
        )
    limit = device.shared_bytes_limit()
    if unit == "mma":
        how = (return_lse, query_splits, limit, warp_partition, ablated)
        return _mma_forward(problem, algorithm, tiles, aligned, *how)
    return _forward(problem, algorithm, tiles, aligned, return_lse, query_splits, limit)


@functools.lru_cache(maxsize=1024)
def _forward(problem, algorithm, tiles, aligned, return_lse, query_splits, limit) -> Run:
    d, Nq, Nk = problem.head_dim, problem.seqlen_q, problem.seqlen_k
    if tiles is None:
        tiles = default_tiles(algorithm, Nq, Nk, d, limit)
    features = Features.of(problem)
    facts = {"features": features, "aligned": aligned, "grouped": problem.group > 1}
    spec = select_spec(tiles, d, limit, return_lse=return_lse and algorithm == "fa1", **facts)
    tiles = replace(tiles, threads=spec.threads)
    Tr = -(-Nq // tiles.Br)
    heads, split_rows = problem.heads_q, 0
    if algorithm == "fa2":
        launches = [(fa2_forward.make_forward(spec), Tr, heads)]
        count = functools.partial(io_model.fa2, problem, tiles)
    elif algorithm == "fa1":
        split_rows = -(-Tr // query_splits) * tiles.Br
        launches = [(fa1_forward.make_forward(spec), -(-Nq // split_rows), heads)]
        how = {"query_splits": query_splits, "return_lse": return_lse}
        count = functools.partial(io_model.fa1, problem, tiles, **how)
    else:
        row = _row_floats(Nk, limit)
        scores = replace(spec, features=replace(features, dropout=False))
        output = replace(spec, features=_lengths_of(features))
        softmax = replace(_lengths_of(features), dropout=features.dropout)
        launches = [
            (standard.make_standard_scores(scores), Tr, heads),
            (standard.make_standard_softmax(row, _row_warps(Nk), return_lse, softmax), Nq, heads),
            (standard.make_standard_output(output), Tr, heads),
        ]
        how = {"return_lse": return_lse, "row_resident": row > 0}
        count = functools.partial(io_model.standard, problem, tiles, **how)
    workspace = io_model.workspace(algorithm, problem, return_lse=return_lse)
    return _run("fwd", algorithm, problem, tiles, launches, count, workspace, split_rows)


@functools.lru_cache(maxsize=1024)
def _mma_forward(
    problem, algorithm, tiles, aligned, return_lse, query_splits, limit, warp_partition, ablated
) -> Run:
    d, Nq, Nk = problem.head_dim, problem.seqlen_q, problem.seqlen_k
    features, splits_keys = Features.of(problem), warp_partition == "keys"
    kind = StandardSpec if algorithm == "standard" else MmaSpec
    if tiles is None:
        fits = functools.partial(select_mma_spec, head_dim=d, shared_limit=limit, kind=kind)
        # Measured on plain calls: others need more registers.
        if aligned and replace(features, causal=False) == PLAIN and not splits_keys:
            tiles = tuned_tiles("mma", algorithm, "fwd", Nq, Nk, d, fits)
    if tiles is None and algorithm == "standard":
        tiles = default_mma_standard_tiles(Nq, Nk, d, limit)
    elif tiles is None:
        tiles = default_mma_tiles(algorithm, Nq, Nk, d, limit, features, splits_keys)
    facts: dict[str, Any] = {"features": features, "aligned": aligned, "splits_keys": splits_keys}
    facts |= {"dtype": problem.dtype, "positive_scale": problem.scale > 0.0}
    facts |= {"return_lse": return_lse and algorithm == "fa1", "grouped": problem.group > 1}
    spec = select_mma_spec(tiles, d, limit, kind, ablated=ablated, **facts)
    tiles = replace(tiles, threads=spec.threads)
    Tr, heads, split_rows = -(-Nq // tiles.Br), problem.heads_q, 0
    if algorithm == "fa2":
        launches = [(mma.fa2_forward.make_forward(spec), Tr, heads)]
        count = functools.partial(io_model.fa2, problem, tiles)
    elif algorithm == "standard":
        launches, resident = _mma_standard_launches(spec, problem, return_lse, limit)
        how = {"return_lse": return_lse, "row_resident": resident}
        count = functools.partial(io_model.standard, problem, tiles, **how)
    else:
        split_rows = -(-Tr // query_splits) * tiles.Br
        launches = [(mma.fa1_forward.make_forward(spec), -(-Nq // split_rows), heads)]
        how = {"query_splits": query_splits, "return_lse": return_lse}
        count = functools.partial(io_model.fa1, problem, tiles, **how)
    workspace = io_model.workspace(algorithm, problem, return_lse=return_lse)
    run = _run("fwd", algorithm, problem, tiles, launches, count, workspace, split_rows, "mma")
    how = {"warp_partition": warp_partition, "ablated": ablated}
    return replace(run, plan=replace(run.plan, **how))


def _mma_standard_launches(
    spec: StandardSpec, problem: Problem, return_lse: bool, limit: int
) -> tuple[list, bool]:
    """The forward kernels, and whether a row of S stays in shared memory."""
    features, Nk, heads = spec.features, problem.seqlen_k, problem.heads_q
    row, warps, Tr = _row_halves(Nk, limit), _row_warps(Nk, 8), -(-problem.seqlen_q // spec.Br)
    scores = replace(spec, features=replace(features, dropout=False))
    softmax = replace(_lengths_of(features), dropout=features.dropout)
    make_softmax = mma.standard.make_standard_softmax
    launches = [
        (mma.standard.make_standard_scores(scores), Tr, heads),
        (make_softmax(row, warps, return_lse, softmax, spec.dtype), problem.seqlen_q, heads),
        (mma.standard.make_standard_output(_only_lengths(spec)), Tr, heads),
    ]
    return launches, row > 0


def backward(
    problem: Problem,
    algorithm: str,
    tiles: Any,
    aligned: bool,
    deterministic: Any,
    return_dbias: Any,
    unit: Any = "auto",
    query_splits: Any = 1,
) -> Run:
    """The backward pass of ``algorithm``, checked."""
    _check(problem, algorithm, tiles)
    unit = _unit(unit, problem)
    _check_flag("deterministic", deterministic)
    _check_flag("return_dbias", return_dbias)
    if deterministic and algorithm != "fa2":
        raise ValueError(
            "deterministic is True: only fa2 has a choice, the others' sums always have one order"
        )
    if return_dbias and problem.bias is None:
        raise ValueError("return_dbias is True without a bias: allowed is False")
    if return_dbias and deterministic and problem.bias != problem.score_shape:
        raise ValueError(
            f"deterministic is True with return_dbias and a bias of shape {problem.bias}: its "
            f"gradient is summed in no fixed order, allowed is a bias of {problem.score_shape}"
        )
    query_splits = as_size("query_splits", query_splits, axis=False)
    if query_splits != 1 and (algorithm, unit) != ("fa1", "mma"):
        raise ValueError(
            f"query_splits is {query_splits} in the backward pass of {algorithm} on {unit}: only "
            "fa1 on tensor cores splits its queries"
        )
    limit = device.shared_bytes_limit()
    if unit == "mma":
        if algorithm == "standard":
            return _mma_standard_backward(problem, tiles, aligned, return_dbias, limit)
        how = (deterministic, return_dbias, query_splits, limit)
        return _mma_backward(problem, algorithm, tiles, aligned, *how)
    return _backward(problem, algorithm, tiles, aligned, deterministic, return_dbias, limit)


@functools.lru_cache(maxsize=1024)
def _mma_standard_backward(problem, tiles, aligned, return_dbias, limit) -> Run:
    d, Nq, Nk = problem.head_dim, problem.seqlen_q, problem.seqlen_k
    if tiles is None:
        tiles = default_mma_standard_tiles(Nq, Nk, d, limit, "bwd")
    features = Features.of(problem, dbias=return_dbias)
    facts = {"features": features, "aligned": aligned, "dtype": problem.dtype}
    spec = select_mma_spec(tiles, d, limit, StandardSpec, **facts)
    tiles = replace(tiles, threads=spec.threads)
    across = select_mma_spec(Tiles(tiles.Bc, tiles.Br), d, limit, StandardSpec, **facts)
    Tr, Tc = -(-Nq // tiles.Br), -(-Nk // tiles.Bc)
    heads_q, heads_k, lengths = problem.heads_q, problem.heads_k, _lengths_of(features)
    row, pair = _row_halves(Nk, limit), _row_halves(Nk, limit, rows=2)
    warps, dtype = _row_warps(Nk, 8), problem.dtype
    forward, backward = mma.standard, mma.standard_backward
    masked = replace(spec, features=replace(features, dropout=False, dbias=False))
    plain = _only_lengths(spec)
    summed = replace(lengths, dropout=features.dropout, dbias=features.dbias)
    transposed = backward.make_standard_transposed_output(_only_lengths(across))
    launches = [
        (forward.make_standard_scores(masked), Tr, heads_q),
        (forward.make_standard_softmax(row, warps, False, lengths, dtype), Nq, heads_q),
        (forward.make_standard_scores(plain), Tr, heads_q),
        (backward.make_standard_score_gradients(pair, warps, summed, dtype), Nq, heads_q),
        (transposed, Tc, heads_k),
        (forward.make_standard_output(plain), Tr, heads_q),
        (transposed, Tc, heads_k),
    ]
    if features.softcap:
        capped = replace(plain, features=replace(lengths, softcap=True))
        launches.append((forward.make_standard_scores(capped, slopes=True), Tr, heads_q))
    how = {"dbias": return_dbias, "row_resident": pair > 0, "forward_resident": row > 0}
    count = functools.partial(io_model.standard_backward, problem, tiles, **how)
    workspace = io_model.workspace("standard", problem, passes="bwd")
    return _run("bwd", "standard", problem, tiles, launches, count, workspace, unit="mma")


@functools.lru_cache(maxsize=1024)
def _backward(problem, algorithm, tiles, aligned, deterministic, return_dbias, limit) -> Run:
    d, Nq, Nk = problem.head_dim, problem.seqlen_q, problem.seqlen_k
    if tiles is None:
        tiles = default_backward_tiles(Nq, Nk, d, limit)
    features = Features.of(problem, dbias=return_dbias)
    facts = {"features": features, "aligned": aligned, "grouped": problem.group > 1}
    spec = select_spec(tiles, d, limit, SimtBackwardSpec, **facts)
    tiles = replace(tiles, threads=spec.threads)
    Tr, Tc = -(-Nq // tiles.Br), -(-Nk // tiles.Bc)
    heads_q, heads_k = problem.heads_q, problem.heads_k
    lengths = _lengths_of(features)
    how: dict[str, Any] = {"dbias": return_dbias}
    if algorithm == "fa2":
        sums = fa2_backward.make_row_sums(d, not deterministic, lengths)
        launches = [
            (sums, -(-Nq // fa2_backward.WARPS), heads_q),
            (fa2_backward.make_backward(spec, not deterministic), Tc, heads_k),
        ]
        if deterministic:
            sweep = replace(spec, features=replace(features, dbias=False))
            launches.append((fa2_backward.make_query_gradients(sweep), Tr, heads_q))
        how["deterministic"] = deterministic
    elif algorithm == "fa1":
        launches = [(fa1_backward.make_backward(spec), 1, heads_k)]
    else:
        # The forward kernels' tiles, at the same block sizes, with and without the mask.
        size = Tiles(tiles.Br, tiles.Bc)
        marks = replace(features, dropout=False, dbias=False)
        masked = select_spec(size, d, limit, features=marks, aligned=aligned)
        plain = select_spec(size, d, limit, features=lengths, aligned=aligned)
        row, pair = _row_floats(Nk, limit), _row_floats(Nk, limit, rows=2)
        columns = replace(spec, features=lengths)
        transposed = standard_backward.make_standard_transposed_output(columns)
        summed = replace(lengths, dropout=features.dropout, dbias=features.dbias)
        gradients = standard_backward.make_standard_score_gradients(pair, _row_warps(Nk), summed)
        softmax = standard.make_standard_softmax(row, _row_warps(Nk), False, lengths)
        launches = [
            (standard.make_standard_scores(masked), Tr, heads_q),
            (softmax, Nq, heads_q),
            (standard.make_standard_scores(plain), Tr, heads_q),
            (gradients, Nq, heads_q),
            (transposed, Tc, heads_k),
            (standard.make_standard_output(plain), Tr, heads_q),
            (transposed, Tc, heads_k),
        ]
        if features.softcap:
            capped = replace(plain, features=replace(lengths, softcap=True))
            launches.append((standard.make_standard_scores(capped, slopes=True), Tr, heads_q))
        how |= {"row_resident": pair > 0, "forward_resident": row > 0}
    models: dict[str, Callable] = {
        "standard": io_model.standard_backward,
        "fa1": io_model.fa1_backward,
        "fa2": io_model.fa2_backward,
    }
    count = functools.partial(models[algorithm], problem, tiles, **how)
    workspace = io_model.workspace(algorithm, problem, passes="bwd")
    return _run("bwd", algorithm, problem, tiles, launches, count, workspace)


@functools.lru_cache(maxsize=1024)
def _mma_backward(
    problem, algorithm, tiles, aligned, deterministic, return_dbias, query_splits, limit
) -> Run:
    d, dtype, Nq, Nk = problem.head_dim, problem.dtype, problem.seqlen_q, problem.seqlen_k
    row_tiles = 3 if algorithm == "fa1" else 2
    features = Features.of(problem, dbias=return_dbias)
    if tiles is None and aligned and replace(features, causal=False) == PLAIN:
        fits = functools.partial(
            select_mma_backward_spec, head_dim=d, shared_limit=limit, row_tiles=row_tiles
        )
        tiles = tuned_tiles("mma", algorithm, "bwd", Nq, Nk, d, fits)
    if tiles is None:
        tiles = default_mma_backward_tiles(Nq, Nk, d, limit, row_tiles=row_tiles)
    facts: dict[str, Any] = {"aligned": aligned, "dtype": dtype, "grouped": problem.group > 1}
    facts["positive_scale"] = problem.scale > 0.0
    own = {"row_tiles": row_tiles, "splits_queries": query_splits > 1}
    own["vector_adds"] = device.compute_capability() >= (9, 0)
    spec = select_mma_backward_spec(tiles, d, limit, features=features, **facts, **own)
    tiles = replace(tiles, threads=spec.threads)
    Tr, Tc = -(-Nq // tiles.Br), -(-Nk // tiles.Bc)
    heads_q, heads_k = problem.heads_q, problem.heads_k
    how: dict[str, Any] = {"dbias": return_dbias}
    count_of: Callable = io_model.fa2_backward
    lengths, split_rows, WARPS = _lengths_of(features), 0, mma.fa2_backward.WARPS
    rounds = functools.partial(mma.fa2_backward.make_round_rows, d, dtype, aligned, lengths)
    if algorithm == "fa1":
        split_rows = -(-Tr // query_splits) * tiles.Br
        launches = [(mma.fa1_backward.make_backward(spec), -(-Nq // split_rows), heads_k)]
        if query_splits > 1:
            launches += 2 * [(rounds(keys=True), -(-Nk // WARPS), heads_k)]
        how["query_splits"], count_of = query_splits, io_model.fa1_backward
    else:
        sums = mma.fa2_backward.make_row_sums(d, dtype, aligned, not deterministic, lengths)
        launches = [
            (sums, -(-Nq // WARPS), heads_q),
            (mma.fa2_backward.make_backward(spec, not deterministic), Tc, heads_k),
        ]
        if deterministic:
            # The blocks of a mask are those of the tiles.
            sweep = replace(tiles, threads=None) if problem.sparse else sweep_tiles(d, limit)
            facts["features"] = replace(features, dbias=False)
            over_rows = select_mma_spec(sweep, d, limit, MmaSweepSpec, **facts)
            kernel = mma.fa2_backward.make_query_gradients(over_rows)
            launches.append((kernel, -(-Nq // sweep.Br), heads_q))
            how |= {"deterministic": True, "sweep_tiles": sweep}
        else:
            launches.append((rounds(), -(-Nq // WARPS), heads_q))
    count = functools.partial(count_of, problem, tiles, **how)
    sizes = {"deterministic": deterministic, "query_splits": query_splits}
    workspace = io_model.workspace(algorithm, problem, passes="bwd", **sizes)
    return _run("bwd", algorithm, problem, tiles, launches, count, workspace, split_rows, "mma")


def _lengths_of(features: Features) -> Features:
    """What a kernel needs that only copies and multiplies: which rows and columns there are."""
    return replace(PLAIN, q_lens=features.q_lens, kv_lens=features.kv_lens, packed=features.packed)


def _only_lengths(spec: StandardSpec) -> StandardSpec:
    """The same tiles for a kernel that only copies and multiplies, whatever the mask."""
    return replace(spec, features=_lengths_of(spec.features), positive_scale=False)


def _run(
    passes, algorithm, problem, tiles, launches, count, workspace, split_rows=0, unit="simt"
) -> Run:
    _check_stages(tiles, algorithm, passes, unit)
    kernels = tuple(
        KernelPlan(kernel.name, (blocks, heads, problem.batch), kernel.threads, kernel.shared_bytes)
        for kernel, blocks, heads in launches
    )
    launched = tuple(kernel for kernel, *_ in launches)
    how = {"count": count, "launched": launched}
    return Run(Plan(algorithm, passes, unit, problem, tiles, kernels, workspace, **how), split_rows)


def _row_floats(Nk: int, limit: int, rows: int = 1) -> int:
    """Shared-memory floats for a row of S: a power of two, so that few kernels are compiled.

    0 where ``rows`` of them do not fit.
    """
    return _row_elements(Nk, (limit // 4 - 2 * standard.MAX_WARPS) // rows, 4)


def _row_halves(Nk: int, limit: int, rows: int = 1) -> int:
    """The same in 16-bit elements."""
    return _row_elements(Nk, (limit // 2 - 4 * mma.standard.MAX_WARPS) // rows, 8)


def _row_elements(Nk: int, room: int, width: int) -> int:
    if room < Nk:
        return 0
    return min(room // width * width, max(256, 1 << (Nk - 1).bit_length()))


def _row_warps(Nk: int, width: int = 4) -> int:
    """Warps for a row of S: a thread for every ``width`` columns, as a power of two."""
    columns = 1 << (Nk - 1).bit_length()
    return min(standard.MAX_WARPS, max(1, columns // (32 * width)))
