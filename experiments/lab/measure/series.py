"""The names of series, such as "fa2-mma", and calls of our algorithms by these names.

The name of a series is algorithm-unit or algorithm-unit-variant.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np

import fa_numba
from fa_numba import device
from fa_numba.choices.makespan import makespan
from fa_numba.choices.units import UNITS, Unit
from fa_numba.dtypes import PRECISIONS
from fa_numba.problem import Problem
from fa_numba.typing import Algorithm, UnitName

from ..record import EMULATOR, MODEL
from . import peers
from .of_series import OfSeries

# Units: "simt" is CUDA cores, "mma" is tensor cores, "wgmma" is Hopper's tensor cores.
SERIES = {"standard-simt": "standard", "fa1-simt": "fa1", "fa2-simt": "fa2"}
SPLITS, MMA_SPLITS = "fa1-simt-splits", "fa1-mma-splits"
HOPPER = "fa2-wgmma"
HOPPER_FA1, HOPPER_SPLITS = "fa1-wgmma", "fa1-wgmma-splits"
# The series with 16-bit inputs that the speed experiments measure.
HALF = ("standard-mma", "fa1-mma", MMA_SPLITS, "fa2-mma", HOPPER_FA1, HOPPER_SPLITS, HOPPER)
# FA-2's backward pass with a fixed order of dQ's sums.
DETERMINISTIC = "fa2-simt-deterministic"
# float32 inputs that are split into 16-bit planes: one series per precision.
PLANES = tuple(f"fa2-mma-{name}" for name in PRECISIONS if name != "ieee")
HOPPER_PLANES = ("fa2-wgmma-fp16x3", "fa2-wgmma-bf16x3")
# Costs of a column tile for a thread block of FA-1, as a multiple of the time of a tile of S, as
# measured on an H200: to load K and V, and to add to dK and dV with atomic adds.
LOADING_KV, ADDING_DKV = 0.5, 2.6
# The names of units and series in figures and tables.
UNIT_NAMES = {name: unit.label for name, unit in UNITS.items()}
_LABELS = {
    "standard-simt": "standard attention",
    "fa1-simt": "FA-1 (K/V outer)",
    "fa1-simt-splits": "FA-1, query splits",
    "fa1-simt-keys": "FA-1, keys over the warps",
    "fa2-simt": "FA-2 (Q outer)",
    "fa2-simt-fa1-tiles": "FA-2, FA-1's tiles",
    "fa2-simt-one-block": "FA-2, one block per head",
    "fa2-simt-deterministic": "FA-2, deterministic dQ",
    "fa2-simt-splits": "FA-2, key splits",
    "torch-efficient": "torch's memory-efficient attention",
    "torch-fa2": "torch's FlashAttention-2",
    "torch-cudnn": "cuDNN",
    "torch-math": "torch's math attention",
    "torch-unfused": "torch's unfused attention",
    "torch-unfused-masked": "torch's unfused attention, mask in the softmax",
    "torch-flex": "torch's flex_attention",
    "torch-flex-triton": "torch's flex_attention, Triton",
    "torch-flex-flash": "torch's flex_attention, FlashAttention-4",
    "jax-pallas": "JAX's Pallas attention",
    "fa4": "FlashAttention-4",
    "fa1-auto": 'FA-1, unit="auto"',
    "fa2-auto": 'FA-2, unit="auto"',
    "fa2-auto-splits": 'FA-2, unit="auto", key splits',
}
# In the backward pass both orders have K/V outside. The orders differ in the grid.
_BACKWARD = {"fa1-simt": "FA-1 (one block per head)", "fa2-simt": "FA-2 (grid over K/V)"}


def _label(unit: Unit, rest: str, of_first: str) -> str:
    """Return the label of a series on a unit other than "simt"; see `OfSeries`.

    `rest` is the name of the series without the unit, such as "fa1-splits". `of_first` is the label
    of the same series on "simt", or an empty text.

    | series | result |
    |---|---|
    | has a label on "simt" | this label, with a mark for the unit |
    | has a precision, such as "fa2-fp16x3" | loop order, mark of the unit, and precision |
    | neither | an empty text |
    """
    order, *variant = rest.split("-")
    name, comma, more = of_first.partition(", ")
    if not of_first and variant and variant[0] in PRECISIONS:
        name, comma, more = f"FA-{order[-1]}", ", ", variant[0]
    if unit.mark:
        name = name.partition(" (")[0] + unit.mark
    return f"{name}{comma}{more}" if name and (of_first or more) else ""


LABELS = OfSeries(_LABELS, _label)
BACKWARD_LABELS = OfSeries(_LABELS | _BACKWARD, _label)
for _names in (LABELS, BACKWARD_LABELS):
    for _series in (*_LABELS, *PLANES, *HOPPER_PLANES):
        if _names.of(_series.replace("-simt", "-mma")):
            _names.add(_series.replace("-simt", "-mma"))
    for _series in (HOPPER, HOPPER_FA1, HOPPER_SPLITS, "fa2-wgmma-splits"):
        _names.add(_series)


def algorithm(series: str) -> Algorithm:
    """Return the algorithm of a series: "standard", "fa1" or "fa2".

    Parameters
    ----------
    series : str
        Name of the series.

    Returns
    -------
    str
        The value of the option `algorithm` of `fa_numba`.

    Examples
    --------
    >>> algorithm("fa2-mma-splits"), unit("fa2-mma-splits"), precision("fa2-mma-fp16x3")
    ('fa2', 'mma', 'fp16x3')
    """
    return cast(Algorithm, series.split("-")[0])


def unit(series: str) -> UnitName:
    """Return the unit of a series: "simt", "mma" or "wgmma".

    Parameters
    ----------
    series : str
        Name of the series.

    Returns
    -------
    str
        The value of the option `unit` of `fa_numba`.
    """
    return cast(UnitName, series.split("-")[1])


def precision(series: str) -> str:
    """Return the precision in which a series computes products of float32.

    Parameters
    ----------
    series : str
        Name of the series.

    Returns
    -------
    str
        The last part of the series' name if it is a precision, such as "fp16x3" in
        "fa2-mma-fp16x3". Else "ieee".
    """
    variant = series.split("-")[-1]
    return variant if variant in PRECISIONS else "ieee"


def by_planes(series: str) -> bool:
    """Return whether a series splits float32 inputs into 16-bit planes.

    Parameters
    ----------
    series : str
        Name of the series.

    Returns
    -------
    bool
        Whether its precision is not "ieee".
    """
    return precision(series) != "ieee"


def plan(series: str, problem: Problem, **options: Any) -> fa_numba.Plan:
    """Return the plan of a series' call.

    Parameters
    ----------
    series : str
        Name of the series.
    problem : Problem
        The problem.
    **options
        Further options of `fa_numba.plan`.

    Returns
    -------
    Plan
        The plan.
    """
    options = _whole_columns(series, options) | _common(series, problem)
    return fa_numba.plan(problem.q_shape, problem.k_shape, dtype=problem.dtype, **options)


def call(series: str, problem: Problem, q: Any, k: Any, v: Any, **options: Any) -> Callable:
    """Return a function that runs the forward pass of a series once.

    Parameters
    ----------
    series : str
        Name of the series.
    problem : Problem
        The problem.
    q, k, v : array
        Inputs.
    **options
        Further options of `fa_numba.attention`.

    Returns
    -------
    callable
        Function ``run(out=None)``, which computes and returns the output O. If `out` is given, O is
        written to this array, and the array is returned.
    """
    options = _whole_columns(series, options) | _common(series, problem)

    def run(out: Any = None) -> Any:
        return fa_numba.attention(q, k, v, out=out, **options)

    return run


def _whole_columns(series: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call, with ``kv_splits=1`` for FA-2's forward pass on a GPU.

    One thread block then computes all columns of a row tile, as in the paper, even if some
    multiprocessors have no work. Options that contain `kv_splits` already are not changed. The
    options of other calls are not changed either.
    """
    forward = algorithm(series) == "fa2" and options.get("passes", "fwd") == "fwd"
    return {"kv_splits": 1, **options} if forward and device.planned_for_gpu() else options


def _common(series: str, problem: Problem) -> dict[str, Any]:
    common = {"algorithm": algorithm(series), "unit": unit(series), "causal": problem.causal}
    return common | ({"precision": precision(series)} if by_planes(series) else {})


def backward_options(series: str) -> dict[str, Any]:
    """Return the further options of a series in the backward pass.

    Parameters
    ----------
    series : str
        Name of the series.

    Returns
    -------
    dict
        The option ``deterministic=True`` for the deterministic series; empty for other series.
    """
    return {"deterministic": True} if series == DETERMINISTIC else {}


def gradients(
    series: str, problem: Problem, pass_: str, *arrays: Any, before: Any = None, **given: Any
) -> Callable:
    """Return a function that computes dq, dk and dv once with a series.

    Parameters
    ----------
    series : str
        Name of the series.
    problem : Problem
        The problem.
    pass_ : str
        "bwd" for the backward pass alone; "fwd+bwd" for a forward pass before it.
    *arrays : array
        Arrays q, k, v and dout.
    before : dict, optional
        Options of the forward pass. Default: the options of the backward pass.
    **given
        Options of the backward pass.

    Returns
    -------
    callable
        Function ``run(out=None)``, which computes the gradients and returns the tuple (dq, dk, dv)
        of new arrays. The argument `out` is ignored.
    """
    q, k, v, dout = arrays
    options = _common(series, problem) | given | backward_options(series)
    common = _common(series, problem) | (given if before is None else before)

    def forward() -> Any:
        return fa_numba.attention(q, k, v, return_lse=True, **common)

    kept = forward() if pass_ == "bwd" else None

    def run(out: Any = None) -> Any:
        return fa_numba.attention_backward(dout, q, k, v, *(kept or forward()), **options)

    return run


def row_tiles(series: str, problem: Problem, q: Any, k: Any, v: Any, **options: Any) -> Callable:
    """Return a function that computes the forward pass by one call for each row tile of q.

    With a causal mask, a call gets only the keys that its row tile sees. The causal mask of the
    call is aligned to the bottom right, and so hides the same columns as the complete call.

    Parameters
    ----------
    series : str
        Name of the series.
    problem : Problem
        The problem.
    q, k, v : array
        Inputs.
    **options
        Further options of the call; `tiles` is required.

    Returns
    -------
    callable
        Function ``run(out=None)``, which makes all the calls and returns the complete output O. If
        `out` is given, O is written to this array, and the array is returned. Otherwise a new array
        is returned.
    """
    options = _whole_columns(series, options | _common(series, problem))
    Br, Nq = options["tiles"].Br, problem.seqlen_q
    tiles = []
    for first in range(0, Nq, Br):
        end = min(first + Br, Nq)
        tiles.append((slice(first, end), slice(0, problem.columns_end(end - 1))))

    def run(out: Any = None) -> Any:
        if out is None:  # NaN shows elements that no call writes
            nothing = np.full(problem.q_shape, np.nan, np.float32)
            (out,) = peers.on_device((nothing,), problem.dtype)
        for rows, columns in tiles:
            keys, values = k[:, :, columns], v[:, :, columns]
            fa_numba.attention(q[:, :, rows], keys, values, out=out[:, :, rows], **options)
        return out

    return run


def query_splits(
    problem: Problem, multiprocessors: int, series: str = "fa1-simt", passes: str = "fwd",
    tiles: Any = None,
) -> int:  # fmt: skip
    """Return the number of thread blocks among which FA-1 should divide the rows of Q of a head.

    Parameters
    ----------
    problem : Problem
        The problem.
    multiprocessors : int
        Multiprocessors of the GPU.
    series : str, default "fa1-simt"
        Name of the FA-1 series without query splits.
    passes : str, default "fwd"
        The pass.
    tiles : Tiles, optional
        Tile sizes. Default: the tile sizes of the plan.

    Returns
    -------
    int
        The number of splits with the shortest estimated time until all thread blocks are finished.
        The estimate uses the work that `block_costs` returns. Candidates are the powers of two
        below the number of row tiles, and the number of row tiles. The smallest of equally good
        candidates is returned.
    """
    tiles = tiles or plan(series, problem, passes=passes).tiles
    return _best_splits(problem, tiles.Br, tiles.Bc, multiprocessors, passes != "fwd")


@cache
def _best_splits(problem: Problem, Br: int, Bc: int, multiprocessors: int, adds: bool) -> int:
    """Return the number of query splits with the shortest estimated time of the launch.

    The estimate simulates the launch. The thread blocks of a head start in the order of
    `block_costs`, one head after another. Each thread block starts on the multiprocessor that is
    free first. A multiprocessor runs one thread block at a time. The launch ends when the last
    thread block ends. If `adds` is true, several thread blocks per head add to dK and dV with
    atomic adds, which take additional time.
    """

    def ends(splits: int) -> float:
        costs = block_costs(problem, Br, Bc, splits, adds and splits > 1)
        blocks = [(1, cost) for cost in costs] * (problem.batch * problem.heads_q)
        return makespan(blocks, multiprocessors)

    Tr = -(-problem.seqlen_q // Br)
    tried = [1 << n for n in range(Tr.bit_length()) if 1 << n < Tr] + [Tr]
    return min(tried, key=lambda splits: (ends(splits), splits))


def block_costs(problem: Problem, Br: int, Bc: int, splits: int, adds: bool = False) -> list[float]:
    """Return the work of each thread block of one head, in launch order (the last rows first).

    The unit of work is a tile of S. The work is the number of visited tiles, plus `LOADING_KV` for
    every column tile that the thread block loads.

    Parameters
    ----------
    problem : Problem
        The problem.
    Br, Bc : int
        Tile sizes.
    splits : int
        Thread blocks of a head.
    adds : bool, default False
        Whether thread blocks add to dKj and dVj with atomic adds. This costs `ADDING_DKV` for every
        column tile.

    Returns
    -------
    list of float
        Work of each thread block.
    """
    Nq, Tr = problem.seqlen_q, -(-problem.seqlen_q // Br)
    column_tiles = [
        max(1, -(-problem.columns_end(min((i + 1) * Br, Nq) - 1) // Bc)) for i in range(Tr)
    ]
    run = -(-Tr // splits)
    chunks = [column_tiles[first : first + run] for first in range(0, Tr, run)]
    more = LOADING_KV + (ADDING_DKV if adds else 0)
    return [sum(chunk) + more * chunk[-1] for chunk in reversed(chunks)]


def row_fields(problem: Problem) -> dict[str, Any]:
    """Return the columns of a row that identify its problem.

    Parameters
    ----------
    problem : Problem
        The problem.

    Returns
    -------
    dict
        Keyword arguments of `Row`: dtype, sizes and causal.
    """
    sizes = ("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim")
    return {name: getattr(problem, name) for name in ("dtype", *sizes, "causal")}


def columns(
    experiment: str, series: str, problem: Problem, machine: str | None, tiles: Any = None,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return all columns of a row of data except metric, unit and number.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    series : str
        Name of the series.
    problem : Problem
        The problem.
    machine : str or None
        The machine of the row. It decides the column `source`: "model" for the machine "model",
        "counted" for the machine "emulator", and "measured" for GPUs.
    tiles : object with Br and Bc, optional
        Tile sizes.
    **more
        Further columns. They replace columns of the same name.

    Returns
    -------
    dict
        Keyword arguments of `Row`.
    """
    source = {MODEL: "model", EMULATOR: "counted"}.get(machine or "", "measured")
    found = {"machine": machine, "experiment": experiment, "series": series, "source": source}
    found |= {} if tiles is None else {"Br": tiles.Br, "Bc": tiles.Bc}
    return found | row_fields(problem) | more
