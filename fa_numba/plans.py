"""What a call runs: kernels, grids, tiles, accesses and workspace."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from fa_numba import device, io_model
from fa_numba.device import Kernel
from fa_numba.io_model import ALGORITHMS
from fa_numba.kernels.simt import (
    fa1_backward,
    fa1_forward,
    fa2_backward,
    fa2_forward,
    standard,
    standard_backward,
)
from fa_numba.problem import Problem, as_size
from fa_numba.tiles import (
    BackwardSpec,
    Tiles,
    default_backward_tiles,
    default_tiles,
    specialise,
)

PASSES = ("fwd", "bwd")

_MAX_GRID_YZ = 65535
_MAX_SEQLEN = 2**31 - 1024  # rows and columns are 32-bit in the kernels, with room for a tile


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

    ``accesses`` are exact loads and stores of global memory in elements by array, ``flops`` follows
    FlashAttention-2's convention, ``workspace_bytes`` is memory beside inputs and outputs.
    """

    algorithm: str
    passes: str
    unit: str
    problem: Problem
    tiles: Tiles
    kernels: tuple[KernelPlan, ...]
    accesses: io_model.Accesses
    flops: int
    workspace_bytes: int


@dataclass(frozen=True)
class Run:
    """A plan with its kernels, in the order of their launches."""

    plan: Plan
    kernels: tuple[Kernel, ...]
    split_rows: int = 0

    def launch(self, n: int, args: tuple, stream: int) -> None:
        """Launch kernel ``n`` over its grid."""
        device.launch(self.kernels[n], self.plan.kernels[n].grid, args, stream)


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
    for name, size in (("q", problem.seqlen_q), ("k", problem.seqlen_k)):
        if size > _MAX_SEQLEN:
            raise ValueError(f"{name} has seqlen {size}: allowed is at most {_MAX_SEQLEN}")


def forward(
    problem: Problem, algorithm: str, tiles: Any, aligned: bool, return_lse: Any, query_splits: Any
) -> Run:
    """The forward pass of ``algorithm``, checked."""
    _check(problem, algorithm, tiles)
    _check_flag("return_lse", return_lse)
    query_splits = as_size("query_splits", query_splits, axis=False)
    if query_splits != 1 and algorithm != "fa1":
        raise ValueError(f"query_splits is {query_splits}: only fa1 splits its queries")
    limit = device.shared_bytes_limit()
    return _forward(problem, algorithm, tiles, aligned, return_lse, query_splits, limit)


@functools.lru_cache(maxsize=1024)
def _forward(problem, algorithm, tiles, aligned, return_lse, query_splits, limit) -> Run:
    d, Nq, Nk = problem.head_dim, problem.seqlen_q, problem.seqlen_k
    if tiles is None:
        tiles = default_tiles(algorithm, Nq, Nk, d, limit)
    spec = specialise(
        tiles,
        d,
        limit,
        causal=problem.causal,
        aligned=aligned,
        return_lse=return_lse and algorithm == "fa1",
    )
    tiles = Tiles(tiles.Br, tiles.Bc, spec.threads)
    Tr = -(-Nq // tiles.Br)
    heads, split_rows = problem.heads_q, 0
    if algorithm == "fa2":
        launches = [(fa2_forward.make_forward(spec), Tr, heads)]
        accesses = io_model.fa2(problem, tiles)
    elif algorithm == "fa1":
        split_rows = -(-Tr // query_splits) * tiles.Br
        launches = [(fa1_forward.make_forward(spec), -(-Nq // split_rows), heads)]
        accesses = io_model.fa1(problem, tiles, query_splits=query_splits, return_lse=return_lse)
    else:
        row = _row_floats(Nk, limit)
        launches = [
            (standard.make_standard_scores(spec), Tr, heads),
            (standard.make_standard_softmax(row, _row_warps(Nk), return_lse), Nq, heads),
            (standard.make_standard_output(spec), Tr, heads),
        ]
        accesses = io_model.standard(problem, tiles, return_lse=return_lse, row_resident=row > 0)
    workspace = io_model.workspace(algorithm, problem, return_lse=return_lse)
    return _run("fwd", algorithm, problem, tiles, launches, accesses, workspace, split_rows)


def backward(
    problem: Problem, algorithm: str, tiles: Any, aligned: bool, deterministic: Any
) -> Run:
    """The backward pass of ``algorithm``, checked."""
    _check(problem, algorithm, tiles)
    _check_flag("deterministic", deterministic)
    if deterministic and algorithm != "fa2":
        raise ValueError(
            "deterministic is True: only fa2 has a choice, the others' sums always have one order"
        )
    limit = device.shared_bytes_limit()
    return _backward(problem, algorithm, tiles, aligned, deterministic, limit)


@functools.lru_cache(maxsize=1024)
def _backward(problem, algorithm, tiles, aligned, deterministic, limit) -> Run:
    d, Nq, Nk = problem.head_dim, problem.seqlen_q, problem.seqlen_k
    if tiles is None:
        tiles = default_backward_tiles(Nq, Nk, d, limit)
    facts = {"causal": problem.causal, "aligned": aligned}
    spec = specialise(tiles, d, limit, BackwardSpec, **facts)
    tiles = Tiles(tiles.Br, tiles.Bc, spec.threads)
    Tr, Tc = -(-Nq // tiles.Br), -(-Nk // tiles.Bc)
    heads_q, heads_k = problem.heads_q, problem.heads_k
    if algorithm == "fa2":
        sums = fa2_backward.make_row_sums(d, not deterministic)
        launches = [
            (sums, -(-Nq // fa2_backward.WARPS), heads_q),
            (fa2_backward.make_backward(spec, not deterministic), Tc, heads_k),
        ]
        if deterministic:
            launches.append((fa2_backward.make_query_gradients(spec), Tr, heads_q))
        accesses = io_model.fa2_backward(problem, tiles, deterministic=deterministic)
    elif algorithm == "fa1":
        launches = [(fa1_backward.make_backward(spec), 1, heads_k)]
        accesses = io_model.fa1_backward(problem, tiles)
    else:
        # The forward kernels' tiles, at the same block sizes, with and without the mask.
        masked = specialise(Tiles(tiles.Br, tiles.Bc), d, limit, **facts)
        plain = specialise(Tiles(tiles.Br, tiles.Bc), d, limit, aligned=aligned)
        row, pair = _row_floats(Nk, limit), _row_floats(Nk, limit, rows=2)
        transposed = standard_backward.make_standard_transposed_output(spec)
        gradients = standard_backward.make_standard_score_gradients(pair, _row_warps(Nk))
        launches = [
            (standard.make_standard_scores(masked), Tr, heads_q),
            (standard.make_standard_softmax(row, _row_warps(Nk), False), Nq, heads_q),
            (transposed, Tc, heads_k),
            (standard.make_standard_scores(plain), Tr, heads_q),
            (gradients, Nq, heads_q),
            (standard.make_standard_output(plain), Tr, heads_q),
            (transposed, Tc, heads_k),
        ]
        accesses = io_model.standard_backward(
            problem, tiles, row_resident=pair > 0, forward_resident=row > 0
        )
    workspace = io_model.workspace(algorithm, problem, passes="bwd")
    return _run("bwd", algorithm, problem, tiles, launches, accesses, workspace)


def _run(passes, algorithm, problem, tiles, launches, accesses, workspace, split_rows=0) -> Run:
    kernels = tuple(
        KernelPlan(kernel.name, (blocks, heads, problem.batch), kernel.threads, kernel.shared_bytes)
        for kernel, blocks, heads in launches
    )
    flops = io_model.flops(problem, passes)
    plan = Plan(algorithm, passes, "simt", problem, tiles, kernels, accesses, flops, workspace)
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
