"""From the choices of a call to its plan: the checks, and plans that were made before."""

from __future__ import annotations

import functools
from dataclasses import replace

from fa_numba.checks import check_grid_size
from fa_numba.choices.requests import Choices, Request
from fa_numba.choices.splits import check_group_splits
from fa_numba.choices.units import UNITS, Unit, having, unit_of
from fa_numba.host import flash, standard
from fa_numba.host.plans import Plan
from fa_numba.problem import Problem
from fa_numba.tiling import Tiles


def plan_of(problem: Problem, choices: Choices, aligned: bool = True) -> Plan:
    """The plan of a pass on the current device, or the one that plans are made for; ``aligned`` as
    ``Request`` says. Raises ValueError for choices that the problem, the device or a unit has not.
    """
    return planned(Request.here(choices, problem, aligned))


@functools.lru_cache(maxsize=1024)
def planned(request: Request) -> Plan:
    """The plan of a request whose unit is not yet decided; raises as ``plan_of``."""
    _check_problem(request)
    asked = request
    unit, _ = unit_of(request)
    request = replace(request, unit=unit.name)
    if request.choices.passes == "fwd":
        request = request.chosen(ablate=_check_forward(request, unit))
    else:
        _check_backward(request, unit)
    algorithm = standard if request.choices.algorithm == "standard" else flash
    plan = (algorithm.forward if request.choices.passes == "fwd" else algorithm.backward)(request)
    _check_stages(plan.tiles, request)
    return replace(plan, asked=asked)


# --- checks ------------------------------------------------------------------------------------


def _check_problem(request: Request) -> None:
    """Raise ValueError for what no unit can compute."""
    problem, choices = request.problem, request.choices
    for name, size in (("batch", problem.batch), ("heads of q", problem.heads_q)):
        check_grid_size(name, size)
    if problem.precision != "ieee":
        _check_precision(request)
    if problem.pages is None:
        return
    if choices.passes == "bwd":
        raise ValueError(
            "block_table is given for a backward pass: allowed are k and v in one piece, only the "
            "forward pass of fa2 takes pages"
        )
    if choices.algorithm != "fa2":
        raise ValueError(
            f"block_table is given with algorithm {choices.algorithm!r}: allowed is 'fa2', forward"
        )
    if choices.tiles is not None and choices.tiles.Bc % 16:
        raise ValueError(
            f"tiles: Bc={choices.tiles.Bc} with a block_table: allowed are multiples of 16, rows "
            "that lie in one page"
        )


def _check_precision(request: Request) -> None:
    """Raise ValueError where no kernel takes float32 matrices as planes."""
    given = f"precision is {request.problem.precision!r}"
    if request.problem.pages is not None:
        raise ValueError(f"{given} with a block_table: allowed is 'ieee'")
    algorithm, passes = request.kernel
    found = [name for u in UNITS.values() for name in u.precisions.get(request.kernel, ())]
    if request.problem.precision not in found:
        allowed = " or ".join(map(repr, ("ieee", *dict.fromkeys(found))))
        raise ValueError(
            f"{given} with algorithm {algorithm!r}, pass {passes!r}: allowed is {allowed}; more "
            f"have {having(lambda u: u.precisions, passes=True)}"
        )
    if request.choices.deterministic:
        raise ValueError(f"{given} with deterministic=True: allowed is 'ieee'")


def _check_forward(request: Request, unit: Unit) -> tuple[str, ...]:
    """The measures to leave out, in the unit's order; ValueError for what it does not have."""
    choices, algorithm = request.choices, request.choices.algorithm
    with_it = f"with algorithm {algorithm!r} on unit {unit.name!r}"
    if choices.kv_splits not in ("auto", 1) and request.kernel not in unit.splits_columns:
        owners = having(lambda u: u.splits_columns)
        raise ValueError(
            f"kv_splits is {choices.kv_splits} {with_it}: only {owners} splits the columns of a "
            "row tile over blocks, allowed is 1 or 'auto'"
        )
    if choices.query_splits != 1 and request.kernel not in unit.splits_queries:
        owners = " or ".join(sorted({a for u in UNITS.values() for a, _ in u.splits_queries}))
        raise ValueError(
            f"query_splits is {choices.query_splits}: only {owners} splits its queries"
        )
    if choices.warp_partition == "keys" and request.kernel not in unit.splits_keys:
        raise ValueError(
            f"warp_partition is 'keys' {with_it}: only {having(lambda u: u.splits_keys)} splits "
            "the keys over the warps of a block, allowed is 'rows'"
        )
    ablated, stages = _measures(choices, unit), choices.tiles.stages if choices.tiles else 1
    if stages != 1 and "prefetch" in ablated:
        raise ValueError(
            f"tiles: stages={stages} with ablate={choices.ablate!r}: two stages are there for "
            "tiles that are prefetched, allowed is 1"
        )
    return ablated


def _measures(choices: Choices, unit: Unit) -> tuple[str, ...]:
    ablate = choices.ablate
    names = tuple(ablate) if isinstance(ablate, (tuple, list)) else (ablate,)
    found = [name for name, owners in unit.measures.items() if choices.algorithm in owners]
    for name in names:
        if name not in found:
            allowed = f"a tuple of {', '.join(found)}" if found else "(), as it has no such measure"
            raise ValueError(
                f"ablate is {ablate!r} with {choices.algorithm} on unit {unit.name!r}: allowed is "
                f"{allowed}"
            )
    for name, needed, why in (
        ("padding", "swizzle", "rows that are swizzled have no padding"),
        ("persistent", "counter", "blocks of one row tile each take none from a counter"),
    ):
        if name in names and needed not in names:
            raise ValueError(f"ablate is {ablate!r}: {why}, allowed together with {needed!r}")
    return tuple(name for name in found if name in names)


def _check_backward(request: Request, unit: Unit) -> None:
    """Raise ValueError for choices that the unit does not have backward."""
    choices, problem = request.choices, request.problem
    if choices.deterministic and choices.algorithm != "fa2":
        raise ValueError(
            "deterministic is True: only fa2 has a choice, the others' sums always have one order"
        )
    if choices.return_dbias and problem.bias is None:
        raise ValueError("return_dbias is True without a bias: allowed is False")
    if choices.return_dsinks and not problem.sinks:
        raise ValueError("return_dsinks is True without sinks: allowed is False")
    if choices.return_dcaptured:
        _check_captured(request)
    whole = problem.bias == problem.score_shape
    if choices.return_dbias and choices.deterministic and not whole:
        raise ValueError(
            f"deterministic is True with return_dbias and a bias of shape {problem.bias}: its "
            f"gradient is summed in no fixed order, allowed is a bias of {problem.score_shape}"
        )
    if choices.query_splits != 1 and request.kernel not in unit.splits_queries:
        owners = having(lambda u: (pair for pair in u.splits_queries if pair[1] == "bwd"))
        raise ValueError(
            f"query_splits is {choices.query_splits} in the backward pass of {choices.algorithm} "
            f"on {unit.name}: only {owners} splits its queries"
        )
    check_group_splits(request)


def _check_captured(request: Request) -> None:
    """Raise ValueError where there are no gradients of what a score_mod captures."""
    mod, choices = request.problem.score_mod, request.choices
    if mod is None:
        raise ValueError("return_dcaptured is True without a score_mod: allowed is False")
    if not mod.differentiated:
        raise ValueError(
            f"return_dcaptured is True and score_mod {mod} takes no float32 array from outside: "
            "allowed is False"
        )
    if choices.algorithm == "standard":
        raise ValueError(
            "return_dcaptured is True with algorithm 'standard': allowed is 'fa1' or 'fa2'"
        )
    if choices.deterministic:
        raise ValueError(
            "deterministic is True with return_dcaptured: the gradients of captured arrays are "
            "summed in no fixed order, allowed is one of the two"
        )


def _check_stages(tiles: Tiles, request: Request) -> None:
    most = UNITS[request.unit].staged.get(request.kernel, 1)
    if tiles.stages <= most:
        return
    others = {n: u.staged.get(request.kernel, 1) for n, u in UNITS.items() if n != request.unit}
    more = "".join(f", up to {m} on unit {n!r}" for n, m in others.items() if m > most)
    if most > 1:
        raise ValueError(
            f"tiles: stages={tiles.stages} on unit {request.unit!r}: allowed is 1 to {most}{more}"
        )
    algorithm, passes = request.kernel
    raise ValueError(
        f"tiles: stages={tiles.stages} with algorithm {algorithm!r}, pass {passes!r} on unit "
        f"{request.unit!r}: only {having(lambda u: u.staged, passes=True)} has a choice, allowed "
        "is 1"
    )
