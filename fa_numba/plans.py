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
from fa_numba.tiles import (
    BackwardSpec,
    Tiles,
    default_backward_tiles,
    default_mma_tiles,
    default_tiles,
    specialise,
    specialise_mma,
)

PASSES = ("fwd", "bwd")
UNITS = ("auto", "simt", "mma")
PARTITIONS = ("rows", "keys")
# What each unit has kernels for: dtypes and (algorithm, pass).
_UNIT_DTYPES = {"simt": ("float32",), "mma": ("float16", "bfloat16")}
_MMA_KERNELS = (("fa1", "fwd"), ("fa2", "fwd"))

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

    ``warp_partition`` is what the warps of a block share of a tile: its "rows" or the "keys".
    ``accesses`` are exact loads and stores of global memory in elements by array, ``flops`` follows
    FlashAttention-2's convention, ``workspace_bytes`` is memory beside inputs and outputs. With a
    block mask both need it as ``block_mask``.
    """

    algorithm: str
    passes: str
    unit: str
    problem: Problem
    tiles: Tiles
    kernels: tuple[KernelPlan, ...]
    workspace_bytes: int
    warp_partition: str = "rows"
    block_mask: np.ndarray | None = field(default=None, compare=False, repr=False)
    count: Callable[..., io_model.Accesses] = field(default=None, compare=False, repr=False)  # type: ignore[assignment]

    @functools.cached_property
    def accesses(self) -> io_model.Accesses:
        return self.count(block_mask=self.block_mask)

    @functools.cached_property
    def flops(self) -> int:
        return io_model.flops(self.problem, self.passes, block_mask=self.block_mask)


@dataclass(frozen=True)
class Run:
    """A plan with its kernels, in the order of their launches."""

    plan: Plan
    kernels: tuple[Kernel, ...]
    split_rows: int = 0


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


def _unit(unit: Any, problem: Problem, algorithm: str, passes: str) -> str:
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
    if found == "mma" and (algorithm, passes) not in _MMA_KERNELS:
        there = ", ".join(f"{a} {p}" for a, p in _MMA_KERNELS)
        raise ValueError(
            f"algorithm is {algorithm!r}, pass {passes!r} in {problem.dtype}: on tensor cores "
            f"there is {there} so far"
        )
    return found


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


def forward(
    problem: Problem,
    algorithm: str,
    tiles: Any,
    aligned: bool,
    return_lse: Any,
    query_splits: Any,
    unit: Any = "auto",
    warp_partition: Any = "rows",
) -> Run:
    """The forward pass of ``algorithm``, checked."""
    _check(problem, algorithm, tiles)
    unit = _unit(unit, problem, algorithm, "fwd")
    _check_flag("return_lse", return_lse)
    query_splits = as_size("query_splits", query_splits, axis=False)
    if query_splits != 1 and algorithm != "fa1":
        raise ValueError(f"query_splits is {query_splits}: only fa1 splits its queries")
    _check_partition(warp_partition, algorithm, unit)
    limit = device.shared_bytes_limit()
    if unit == "mma":
        how = (return_lse, query_splits, limit, warp_partition)
        return _mma_forward(problem, algorithm, tiles, aligned, *how)
    return _forward(problem, algorithm, tiles, aligned, return_lse, query_splits, limit)


@functools.lru_cache(maxsize=1024)
def _forward(problem, algorithm, tiles, aligned, return_lse, query_splits, limit) -> Run:
    d, Nq, Nk = problem.head_dim, problem.seqlen_q, problem.seqlen_k
    if tiles is None:
        tiles = default_tiles(algorithm, Nq, Nk, d, limit)
    features = Features.of(problem)
    facts = {"features": features, "aligned": aligned}
    spec = specialise(tiles, d, limit, return_lse=return_lse and algorithm == "fa1", **facts)
    tiles = Tiles(tiles.Br, tiles.Bc, spec.threads)
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
    problem, algorithm, tiles, aligned, return_lse, query_splits, limit, warp_partition
) -> Run:
    d, Nq, Nk = problem.head_dim, problem.seqlen_q, problem.seqlen_k
    features, splits_keys = Features.of(problem), warp_partition == "keys"
    if tiles is None:
        tiles = default_mma_tiles(algorithm, Nq, Nk, d, limit, features, splits_keys)
    facts: dict[str, Any] = {"features": features, "aligned": aligned, "splits_keys": splits_keys}
    facts |= {"dtype": problem.dtype, "positive_scale": problem.scale > 0.0}
    spec = specialise_mma(tiles, d, limit, return_lse=return_lse and algorithm == "fa1", **facts)
    tiles = Tiles(tiles.Br, tiles.Bc, spec.threads)
    Tr, heads, split_rows = -(-Nq // tiles.Br), problem.heads_q, 0
    if algorithm == "fa2":
        launches = [(mma.fa2_forward.make_forward(spec), Tr, heads)]
        count = functools.partial(io_model.fa2, problem, tiles)
    else:
        split_rows = -(-Tr // query_splits) * tiles.Br
        launches = [(mma.fa1_forward.make_forward(spec), -(-Nq // split_rows), heads)]
        how = {"query_splits": query_splits, "return_lse": return_lse}
        count = functools.partial(io_model.fa1, problem, tiles, **how)
    workspace = io_model.workspace(algorithm, problem, return_lse=return_lse)
    run = _run("fwd", algorithm, problem, tiles, launches, count, workspace, split_rows, "mma")
    return replace(run, plan=replace(run.plan, warp_partition=warp_partition))


def backward(
    problem: Problem,
    algorithm: str,
    tiles: Any,
    aligned: bool,
    deterministic: Any,
    return_dbias: Any,
    unit: Any = "auto",
) -> Run:
    """The backward pass of ``algorithm``, checked."""
    _check(problem, algorithm, tiles)
    _unit(unit, problem, algorithm, "bwd")
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
    limit = device.shared_bytes_limit()
    return _backward(problem, algorithm, tiles, aligned, deterministic, return_dbias, limit)


@functools.lru_cache(maxsize=1024)
def _backward(problem, algorithm, tiles, aligned, deterministic, return_dbias, limit) -> Run:
    d, Nq, Nk = problem.head_dim, problem.seqlen_q, problem.seqlen_k
    if tiles is None:
        tiles = default_backward_tiles(Nq, Nk, d, limit)
    features = Features.of(problem, dbias=return_dbias)
    spec = specialise(tiles, d, limit, BackwardSpec, features=features, aligned=aligned)
    tiles = Tiles(tiles.Br, tiles.Bc, spec.threads)
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
        masked = specialise(size, d, limit, features=marks, aligned=aligned)
        plain = specialise(size, d, limit, features=lengths, aligned=aligned)
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
    model = {
        "standard": io_model.standard_backward,
        "fa1": io_model.fa1_backward,
        "fa2": io_model.fa2_backward,
    }[algorithm]
    count = functools.partial(model, problem, tiles, **how)
    workspace = io_model.workspace(algorithm, problem, passes="bwd")
    return _run("bwd", algorithm, problem, tiles, launches, count, workspace)


def _lengths_of(features: Features) -> Features:
    """What a kernel needs that only copies and multiplies: which rows and columns there are."""
    return replace(PLAIN, q_lens=features.q_lens, kv_lens=features.kv_lens, packed=features.packed)


def _run(
    passes, algorithm, problem, tiles, launches, count, workspace, split_rows=0, unit="simt"
) -> Run:
    kernels = tuple(
        KernelPlan(kernel.name, (blocks, heads, problem.batch), kernel.threads, kernel.shared_bytes)
        for kernel, blocks, heads in launches
    )
    plan = Plan(algorithm, passes, unit, problem, tiles, kernels, workspace, count=count)
    return Run(plan, tuple(kernel for kernel, *_ in launches), split_rows)


def _row_floats(Nk: int, limit: int, rows: int = 1) -> int:
    """Shared-memory floats for a row of S: a power of two, so that few kernels are compiled.

    0 where ``rows`` of them do not fit.
    """
    room = (limit // 4 - 2 * standard.MAX_WARPS) // rows
    if room < Nk:
        return 0
    return min(room // 4 * 4, max(256, 1 << (Nk - 1).bit_length()))


def _row_warps(Nk: int) -> int:
    """Warps for a row of S: a thread for every four columns, as a power of two."""
    return min(standard.MAX_WARPS, max(1, (1 << (Nk - 1).bit_length()) // 128))
