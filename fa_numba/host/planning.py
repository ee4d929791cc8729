"""From the arguments of a call to its plan: the checks, and plans that were made before."""

from __future__ import annotations

import copyreg
import functools
from dataclasses import replace
from typing import Any

import numpy as np

from fa_numba import device
from fa_numba.checks import as_splits
from fa_numba.choices.requests import Request
from fa_numba.choices.splits import check_group_splits
from fa_numba.choices.units import UNITS, having, unit_of
from fa_numba.host import flash, standard
from fa_numba.host.plans import Buffer, Plan
from fa_numba.io_model import ALGORITHMS
from fa_numba.problem import Problem, as_size
from fa_numba.tiling import Tiles

PASSES = ("fwd", "bwd")
PARTITIONS = ("rows", "keys")

_MAX_GRID_YZ = 65535


def forward(
    problem: Problem,
    algorithm: str,
    tiles: Any,
    aligned: bool,
    return_lse: bool,
    query_splits: Any,
    unit: Any = "auto",
    warp_partition: Any = "rows",
    ablate: Any = (),
    kv_splits: Any = "auto",
) -> Plan:
    """The plan of the forward pass of ``algorithm``; raises ValueError or TypeError for arguments
    that are not as the public functions take them.
    """
    _check(problem, algorithm, tiles)
    _check_pages(problem, algorithm, tiles)
    query_splits = as_size("query_splits", query_splits, axis=False)
    kv_splits = as_splits("kv_splits", kv_splits)
    _check_partition(warp_partition)
    names = tuple(ablate) if isinstance(ablate, (tuple, list)) else (ablate,)
    request = Request(
        algorithm,
        "fwd",
        "",
        problem,
        tiles,
        aligned,
        device.shared_bytes_limit(),
        device.compute_capability(),
        query_splits,
        return_lse,
        warp_partition,
        names,
        kv_splits=kv_splits,
        multiprocessors=device.multiprocessors() if device.planned_for_gpu() else 0,
    )
    unit = unit_of(unit, request).name
    _check_splits(kv_splits, algorithm, unit)
    if query_splits != 1 and (algorithm, "fwd") not in UNITS[unit].splits_queries:
        owners = " or ".join(sorted({a for u in UNITS.values() for a, _ in u.splits_queries}))
        raise ValueError(f"query_splits is {query_splits}: only {owners} splits its queries")
    _check_keys(warp_partition, algorithm, unit)
    ablated = _measures(ablate, names, algorithm, unit)
    if tiles and tiles.stages != 1 and "prefetch" in ablated:
        raise ValueError(
            f"tiles: stages={tiles.stages} with ablate={ablate!r}: two stages are there for tiles "
            "that are prefetched, allowed is 1"
        )
    return planned(replace(request, unit=unit, ablated=ablated))


def backward(
    problem: Problem,
    algorithm: str,
    tiles: Any,
    aligned: bool,
    deterministic: bool,
    return_dbias: bool,
    unit: Any = "auto",
    query_splits: Any = 1,
    group_splits: Any = 1,
) -> Plan:
    """The plan of the backward pass of ``algorithm``, as ``forward``."""
    _check(problem, algorithm, tiles)
    if problem.pages is not None:
        raise ValueError(
            "block_table is given for a backward pass: allowed are k and v in one piece, only the "
            "forward pass of fa2 takes pages"
        )
    query_splits = as_size("query_splits", query_splits, axis=False)
    limits = (device.shared_bytes_limit(), device.compute_capability())
    how: dict[str, Any] = {"deterministic": deterministic, "return_dbias": return_dbias}
    how["group_splits"] = as_splits("group_splits", group_splits)
    how["multiprocessors"] = device.multiprocessors() if device.planned_for_gpu() else 0
    request = Request(algorithm, "bwd", "", problem, tiles, aligned, *limits, query_splits, **how)
    unit = unit_of(unit, request).name
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
    if query_splits != 1 and (algorithm, "bwd") not in UNITS[unit].splits_queries:
        owners = having(lambda u: (pair for pair in u.splits_queries if pair[1] == "bwd"))
        raise ValueError(
            f"query_splits is {query_splits} in the backward pass of {algorithm} on {unit}: only "
            f"{owners} splits its queries"
        )
    request = replace(request, unit=unit)
    check_group_splits(request)
    return planned(request)


@functools.lru_cache(maxsize=1024)
def planned(request: Request) -> Plan:
    """The plan of a request; raises ValueError for tiles that cannot be."""
    algorithm = standard if request.algorithm == "standard" else flash
    steps = (algorithm.forward if request.passes == "fwd" else algorithm.backward)(request)
    _check_stages(steps.tiles, request)
    return Plan(
        request.algorithm,
        request.passes,
        request.unit,
        request.problem,
        steps.tiles,
        launches=steps.launches,
        workspace=steps.workspace,
        outputs=_outputs(request),
        warp_partition=request.warp_partition,
        ablated=request.ablated,
        split_rows=steps.split_rows,
        kv_splits=steps.kv_splits,
        group_splits=steps.group_splits,
        score_unit=steps.score_unit,
        count=steps.count,
        request=request,
    )


def _outputs(request: Request) -> tuple[Buffer, ...]:
    """The results of a call in their order, in the caller's shapes."""
    p = request.problem
    if request.passes == "fwd":
        O, L = Buffer("O", p.q_shape, p.dtype), Buffer("L", p.lse_shape)
        return (O, L) if request.return_lse else (O,)
    # What blocks add to in place begins at 0.
    added = request.query_splits > 1 and request.dtype.sums_in_place
    gradients: tuple[Buffer, ...] = (Buffer("dQ", p.q_shape, p.dtype),)
    gradients += tuple(Buffer(name, p.k_shape, p.dtype, zeroed=added) for name in ("dK", "dV"))
    if p.bias is None or not request.return_dbias:
        return gradients
    return (*gradients, Buffer("dbias", p.bias, zeroed=True))  # a sum of atomic adds


# --- pickle ------------------------------------------------------------------------------------


def _restored(request: Request, block_mask: np.ndarray | None) -> Plan:
    return replace(planned(request), block_mask=block_mask)


def _reduced(plan: Plan) -> tuple:
    return _restored, (plan.request, plan.block_mask)


# Kernels are functions made at run time, which pickle cannot find: a plan is made again of what it
# was asked for.
copyreg.pickle(Plan, _reduced)


# --- checks ------------------------------------------------------------------------------------


def check_algorithm(algorithm: Any) -> None:
    """Raise ValueError for what is no algorithm."""
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}: allowed is one of {', '.join(ALGORITHMS)}")


def _check(problem: Problem, algorithm: Any, tiles: Any) -> None:
    check_algorithm(algorithm)
    if tiles is not None and not isinstance(tiles, Tiles):
        raise TypeError(f"tiles is {tiles!r}: allowed is a Tiles(Br=..., Bc=...) or None")
    for name, size in (("batch", problem.batch), ("heads of q", problem.heads_q)):
        if size > _MAX_GRID_YZ:
            raise ValueError(f"{name} is {size}: allowed is at most {_MAX_GRID_YZ}, a grid's limit")


def _check_pages(problem: Problem, algorithm: str, tiles: Tiles | None) -> None:
    if problem.pages is None:
        return
    if algorithm != "fa2":
        raise ValueError(
            f"block_table is given with algorithm {algorithm!r}: allowed is 'fa2', forward"
        )
    if tiles is not None and tiles.Bc % 16:
        raise ValueError(
            f"tiles: Bc={tiles.Bc} with a block_table: allowed are multiples of 16, rows that lie "
            "in one page"
        )


def _check_stages(tiles: Tiles, request: Request) -> None:
    pair = (request.algorithm, request.passes)
    most = UNITS[request.unit].staged.get(pair, 1)
    if 1 < most < tiles.stages:
        others = {n: u.staged.get(pair, 1) for n, u in UNITS.items() if n != request.unit}
        more = "".join(f", up to {m} on unit {n!r}" for n, m in others.items() if m > most)
        raise ValueError(
            f"tiles: stages={tiles.stages} on unit {request.unit!r}: allowed is 1 to {most}{more}"
        )
    if tiles.stages > most:
        raise ValueError(
            f"tiles: stages={tiles.stages} with algorithm {pair[0]!r}, pass {pair[1]!r} on unit "
            f"{request.unit!r}: only {having(lambda u: u.staged, passes=True)} has a choice, "
            "allowed is 1"
        )


def _check_partition(warp_partition: Any) -> None:
    if not isinstance(warp_partition, str) or warp_partition not in PARTITIONS:
        raise ValueError(
            f"warp_partition is {warp_partition!r}: allowed is one of {', '.join(PARTITIONS)}"
        )


def _check_splits(kv_splits: int | str, algorithm: str, unit: str) -> None:
    if kv_splits in ("auto", 1) or (algorithm, "fwd") in UNITS[unit].splits_columns:
        return
    owners = having(lambda u: u.splits_columns) or "nobody"
    raise ValueError(
        f"kv_splits is {kv_splits} with algorithm {algorithm!r} on unit {unit!r}: only {owners} "
        "splits the columns of a row tile over blocks, allowed is 1 or 'auto'"
    )


def _check_keys(warp_partition: str, algorithm: str, unit: str) -> None:
    if warp_partition == "keys" and (algorithm, "fwd") not in UNITS[unit].splits_keys:
        raise ValueError(
            f"warp_partition is 'keys' with algorithm {algorithm!r} on unit {unit!r}: only "
            f"{having(lambda u: u.splits_keys)} splits the keys over the warps of a block, allowed "
            "is 'rows'"
        )


def _measures(ablate: Any, names: tuple, algorithm: str, unit: str) -> tuple[str, ...]:
    """The measures to leave out, each once, in one order."""
    found = [name for name, owners in UNITS[unit].measures.items() if algorithm in owners]
    for name in names:
        if not isinstance(name, str) or name not in found:
            allowed = f"a tuple of {', '.join(found)}" if found else "(), as it has no such measure"
            raise ValueError(
                f"ablate is {ablate!r} with {algorithm} on unit {unit!r}: allowed is {allowed}"
            )
    if "padding" in names and "swizzle" not in names:
        raise ValueError(
            f"ablate is {ablate!r}: rows that are swizzled have no padding, allowed together with "
            "'swizzle'"
        )
    if "persistent" in names and "counter" not in names:
        raise ValueError(
            f"ablate is {ablate!r}: blocks of one row tile each take none from a counter, allowed "
            "together with 'counter'"
        )
    return tuple(name for name in found if name in names)
