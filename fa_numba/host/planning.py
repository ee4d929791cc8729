"""Planning: makes the plan of a call from its problem and choices, and caches finished plans."""

from __future__ import annotations

import contextlib
import copyreg
import functools
from dataclasses import fields, replace
from typing import Any

from fa_numba import device
from fa_numba.checks import check_grid_size, one_of
from fa_numba.choices.requests import Choices, Request
from fa_numba.choices.splits import check_group_splits
from fa_numba.choices.units import UNITS, Unit, having, pass_of, unit_of
from fa_numba.dtypes import UNSCALED
from fa_numba.host import flash, standard
from fa_numba.host.plans import Plan
from fa_numba.mods.blocks import BlockMask
from fa_numba.options import Features, argument_of
from fa_numba.problem import Problem
from fa_numba.tiling import Tiles


def plan_of_attention(
    problem: Problem, choices: Choices, aligned: bool = True, block_mask: Any = None
) -> Plan:
    """Return the plan of a pass of attention.

    The plan is for the current device, or for the GPU of ``device.planning_for``. ``aligned`` says
    whether kernels may use 16-byte accesses to all rows. Raises ValueError for choices that no
    kernel supports for the problem and the device.

    If ``block_mask`` is a ``BlockMask`` that was made for certain tiles, the call uses these tiles.
    If no backward kernel supports the tiles, the backward pass chooses tiles as if there were no
    block mask.
    """
    if isinstance(block_mask, BlockMask) and block_mask.tiles and choices.tiles is None:
        try:
            own = _with_tiles(choices, block_mask.tiles)
            return planned(Request.here(own, problem, aligned))
        except ValueError:
            if choices.passes == "fwd":
                raise
    return planned(Request.here(choices, problem, aligned))


@functools.lru_cache(maxsize=256)
def _with_tiles(choices: Choices, tiles: Tiles) -> Choices:
    tiles = tiles.for_backward() if choices.passes == "bwd" else tiles
    return replace(choices, tiles=tiles)


def again(request: Request, block_mask: Any = None) -> Plan:
    """Return the plan of a request that was stored with an earlier plan.

    The plan is for the device that the request names. ``block_mask`` becomes the attribute
    ``block_mask`` of the plan. ``pickle`` calls this function when it loads a plan.
    """
    with planning_for(request):
        return replace(planned(request), block_mask=block_mask)


def planning_for(request: Request) -> contextlib.AbstractContextManager:
    """Return a context in which plans are made for the device that a request names."""
    if not request.multiprocessors:
        return device.using("emulator")
    limits = request.capability, request.shared_limit, request.multiprocessors
    return device.planning_for(*limits)


# Kernels cannot be pickled. A plan is pickled as its request, and made again when it is loaded.
copyreg.pickle(Plan, lambda plan: (again, (plan.asked, plan.block_mask)))


@functools.lru_cache(maxsize=1024)
def planned(request: Request) -> Plan:
    """Return the plan of a request. Plans are cached.

    ``request`` contains no unit yet: this function chooses the unit. Raises ValueError for choices
    that no kernel supports for the problem and the device.
    """
    _check_problem(request)
    asked = request
    chosen = unit_of(request)
    unit = chosen.value
    request = replace(request, unit=unit.name)
    if request.choices.passes == "fwd":
        request = request.chosen(ablate=_check_forward(request, unit))
    else:
        _check_backward(request, unit)
    algorithm = standard if request.choices.algorithm == "standard" else flash
    make = algorithm.forward if request.choices.passes == "fwd" else algorithm.backward
    plan = make(request, chosen)
    _check_stages(plan.tiles, request)
    return replace(plan, asked=asked)


# --- checks ------------------------------------------------------------------------------------


def _check_problem(request: Request) -> None:
    """Raise ValueError if no unit supports the problem with the choices of the request."""
    problem, choices = request.problem, request.choices
    for name, size in (("batch", problem.batch), ("heads of q", problem.heads_q)):
        check_grid_size(name, size)
    if problem.precision != "ieee":
        _check_precision(request)
    if request.dtype.scaled:
        _check_scaled(request)
        return
    if problem.pages is None:
        return
    if choices.passes == "bwd":
        raise ValueError(
            "block_table cannot be given to a backward pass; only the forward pass of algorithm "
            "'fa2' takes pages, so pass contiguous k and v"
        )
    if choices.algorithm != "fa2":
        raise ValueError(
            f"block_table needs the forward pass of algorithm 'fa2', got {choices.algorithm!r}"
        )
    if choices.tiles is not None and choices.tiles.Bc % 16:
        raise ValueError(
            "tiles.Bc must be a multiple of 16 with a block_table (pages have multiples of 16 "
            f"rows), got {choices.tiles.Bc}"
        )


# Features of calls with e4m3 arrays, by algorithm.
_WITH_SCALES = {
    "standard": ("scales", "causal", "window", "softcap", "q_lens", "kv_lens"),
    "fa1": ("scales", "causal", "window", "softcap", "q_lens"),
    "fa2": ("scales", "causal", "window", "softcap", "q_lens", "kv_lens", "splits"),
}


def _check_scaled(request: Request) -> None:
    """Raise ValueError if no kernel supports e4m3 arrays for the request."""
    p, (algorithm, passes) = request.problem, request.kernel
    if passes == "bwd":
        raise ValueError(
            f"q, k and v must be {one_of(UNSCALED)} in {pass_of(passes)} of algorithm "
            f"{algorithm!r}, got {p.dtype}, which is for the forward pass"
        )
    on = (f.name for f in fields(Features) if getattr(request.features, f.name))
    found = _WITH_SCALES[algorithm]
    lacking = next((name for name in on if name not in found), "")
    if lacking:
        raise ValueError(
            f"{argument_of(lacking)} cannot be given with {p.dtype} arrays in algorithm "
            f"{algorithm!r}, which then takes the options {one_of(map(argument_of, found[1:]))}; "
            "pass float16 or bfloat16 arrays"
        )
    for name, d in (("q and k", p.head_dim), ("v", p.d_v)):
        if d % request.dtype.chunk:
            raise ValueError(
                f"head_dim of {name} must be a multiple of {request.dtype.chunk} for {p.dtype}, "
                f"got {d}; pad the arrays with zeros"
            )
    if not request.aligned:
        raise ValueError(
            f"q, k and v of {p.dtype} must have rows that start at multiples of 16 bytes, and no "
            "negative strides; pass contiguous copies"
        )


def _check_precision(request: Request) -> None:
    """Raise ValueError if no kernel supports ``precision`` for the request."""
    given = request.problem.precision
    if request.problem.pages is not None:
        raise ValueError(f"precision must be 'ieee' with a block_table, got {given!r}")
    algorithm, passes = request.kernel
    found = [name for u in UNITS.values() for name in u.precisions.get(request.kernel, ())]
    if request.problem.precision not in found:
        allowed = one_of(map(repr, ("ieee", *dict.fromkeys(found))))
        raise ValueError(
            f"precision must be {allowed} in {pass_of(passes)} of algorithm {algorithm!r}, got "
            f"{given!r}; other precisions are for {having(lambda u: u.precisions, passes=True)}"
        )
    if request.choices.deterministic:
        raise ValueError(f"precision must be 'ieee' with deterministic=True, got {given!r}")


def _check_forward(request: Request, unit: Unit) -> tuple[str, ...]:
    """Check the choices of a forward pass, and return the optimisations to switch off.

    The optimisations are the names in ``ablate``, in the order in which ``unit`` lists them. Raise
    ValueError for choices that the unit does not support in a forward pass.
    """
    choices, algorithm = request.choices, request.choices.algorithm
    with_it = f"with algorithm {algorithm!r} on unit {unit.name!r}"
    if choices.kv_splits not in ("auto", 1) and request.kernel not in unit.splits_columns:
        owners = having(lambda u: u.splits_columns)
        raise ValueError(
            f"kv_splits must be 1 or 'auto' {with_it}, got {choices.kv_splits}; splitting the "
            f"keys of a row tile over thread blocks needs {owners}"
        )
    if choices.query_splits != 1 and request.kernel not in unit.splits_queries:
        owners = one_of(sorted({repr(a) for u in UNITS.values() for a, _ in u.splits_queries}))
        raise ValueError(
            f"query_splits must be 1 with algorithm {algorithm!r}, got {choices.query_splits}; "
            f"splitting the queries of a head over thread blocks needs algorithm {owners}"
        )
    if choices.warp_partition == "keys" and request.kernel not in unit.splits_keys:
        raise ValueError(
            f"warp_partition must be 'rows' {with_it}, got 'keys'; splitting the keys over the "
            f"warps of a thread block needs {having(lambda u: u.splits_keys)}"
        )
    ablated, stages = _measures(choices, unit), choices.tiles.stages if choices.tiles else 1
    if stages != 1 and "prefetch" in ablated:
        raise ValueError(
            f"tiles.stages must be 1 with ablate={choices.ablate!r}, because stages "
            f"after the first only hold prefetched tiles, got {stages}"
        )
    return ablated


def _ablating(unit: Unit) -> set[str]:
    """Return the algorithms that have optimisations which ``ablate`` can switch off on a unit."""
    return {algorithm for owners in unit.measures.values() for algorithm in owners}


def _measures(choices: Choices, unit: Unit) -> tuple[str, ...]:
    ablate = choices.ablate
    names = tuple(ablate) if isinstance(ablate, (tuple, list)) else (ablate,)
    found = [name for name, owners in unit.measures.items() if choices.algorithm in owners]
    for name in names:
        if name not in found:
            allowed = f"a tuple of {one_of(map(repr, found))}" if found else "()"
            others = [repr(u.name) for u in UNITS.values() if choices.algorithm in _ablating(u)]
            only = ""
            if others and not found:
                only = f"; only unit {one_of(others)} has optimisations to leave out"
            raise ValueError(
                f"ablate must be {allowed} with algorithm {choices.algorithm!r} on unit "
                f"{unit.name!r}, got {ablate!r}{only}"
            )
    for name, needed, why in (
        ("padding", "swizzle", "only rows that are not swizzled are padded"),
        ("persistent", "counter", "only persistent thread blocks take row tiles from a counter"),
        ("specialisation", "persistent", "without a producer, a thread block has one row tile"),
    ):
        if name in names and needed not in names:
            raise ValueError(
                f"ablate must contain {needed!r} if it contains {name!r}, because {why}, got "
                f"{ablate!r}; pass ablate={(needed, *names)!r}"
            )
    return tuple(name for name in found if name in names)


def _check_backward(request: Request, unit: Unit) -> None:
    """Raise ValueError for choices that the unit does not support in a backward pass."""
    choices, problem = request.choices, request.problem
    if choices.deterministic and choices.algorithm != "fa2":
        raise ValueError(
            f"deterministic must be False with algorithm {choices.algorithm!r}, got True; "
            f"leave it out: {choices.algorithm!r} always sums dq in a fixed order"
        )
    if choices.return_dbias and problem.bias is None:
        raise ValueError("return_dbias must be False without a bias, got True; pass a bias")
    if choices.return_dsinks and not problem.sinks:
        raise ValueError("return_dsinks must be False without sinks, got True; pass sinks")
    if choices.return_dcaptured:
        _check_captured(request)
    whole = problem.bias == problem.score_shape
    if choices.return_dbias and choices.deterministic and not whole:
        raise ValueError(
            "deterministic must be False with return_dbias=True and a broadcast bias, because the "
            "gradient of a broadcast bias is summed in no fixed order, got True with a bias of "
            f"shape {problem.bias}; pass a bias of the full shape {problem.score_shape}"
        )
    if choices.query_splits != 1 and request.kernel not in unit.splits_queries:
        owners = having(lambda u: (pair for pair in u.splits_queries if pair[1] == "bwd"))
        raise ValueError(
            f"query_splits must be 1 in the backward pass of algorithm {choices.algorithm!r} on "
            f"unit {unit.name!r}, got {choices.query_splits}; splitting the queries of a head "
            f"over thread blocks needs {owners}"
        )
    check_group_splits(request)


def _check_captured(request: Request) -> None:
    """Raise ValueError unless kernels can compute the gradients of arrays that ``score_mod``
    captures.
    """
    mod, choices = request.problem.score_mod, request.choices
    if mod is None:
        raise ValueError(
            "return_dcaptured must be False without a score_mod, got True; pass a score_mod that "
            "captures float32 arrays"
        )
    if not mod.differentiated:
        raise ValueError(
            "return_dcaptured must be False, because score_mod captures no float32 array, got True "
            f"with score_mod {mod}"
        )
    if choices.algorithm == "standard":
        raise ValueError(
            "return_dcaptured must be False with algorithm 'standard', got True; algorithms 'fa1' "
            "and 'fa2' compute gradients of captured arrays"
        )
    if choices.deterministic:
        raise ValueError(
            "deterministic must be False with return_dcaptured=True, because the gradients of "
            "captured arrays are summed in no fixed order, got True"
        )


def _check_stages(tiles: Tiles, request: Request) -> None:
    most = UNITS[request.unit].staged.get(request.kernel, 1)
    if tiles.stages <= most:
        return
    others = {n: u.staged.get(request.kernel, 1) for n, u in UNITS.items() if n != request.unit}
    more = "".join(f"; unit {n!r} takes up to {m}" for n, m in others.items() if m > most)
    if most > 1:
        raise ValueError(
            f"tiles.stages must be from 1 to {most} on unit {request.unit!r}, got {tiles.stages}"
            f"{more}"
        )
    algorithm, passes = request.kernel
    raise ValueError(
        f"tiles.stages must be 1 in {pass_of(passes)} of algorithm {algorithm!r} on unit "
        f"{request.unit!r}, got {tiles.stages}; more stages "
        f"need {having(lambda u: u.staged, passes=True)}"
    )
