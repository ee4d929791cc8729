"""Both loop orders side by side at one size of the reader's own: python -m experiments compare."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

import fa_numba
from fa_numba import Tiles, bounds, device
from fa_numba.problem import Problem

from ..lab.measure import calls, counts, peers
from ..lab.measure.series import BACKWARD_LABELS, LABELS, columns, plan, query_splits
from ..lab.measure.timing import SECONDS, attempt, time_call, timing_rows
from ..lab.measure.workloads import Inputs
from ..lab.record import EMULATOR, MODEL, Row, provenance

NAME = "compare"
# Arrays of one kind are drawn and added up as one.
GROUPS = {
    "K, V": ("K", "V", "dK", "dV"),
    "Q, O": ("Q", "O", "dO", "dQ"),
    "sums, l, m, L": ("A", "l", "m", "L", "D"),
    "N x N matrices": ("S", "P", "dP", "dS"),
}
# Without a GPU: splits for, and least times on, the machine of the project's recordings.
STAND_IN = "H200"
# Elements of q or k beyond which inputs are not made on the host.
LARGEST = 1 << 30
# With so many blocks for each multiprocessor splitting a head gains nothing.
ENOUGH = 4


@dataclass(frozen=True)
class Setting:
    """What is compared: a problem, "fwd" or "bwd", the tiles of both orders (None for theirs)."""

    problem: Problem
    pass_: str = "fwd"
    tiles: Tiles | None = None


@dataclass(frozen=True)
class Side:
    """One of the calls that are compared: a series and the options of its plan."""

    series: str
    planned: fa_numba.Plan
    options: dict[str, Any] = field(default_factory=dict)


def labels(pass_: str) -> dict[str, str]:
    return BACKWARD_LABELS if pass_ == "bwd" else LABELS


def sides(setting: Setting, gpu: bounds.Device) -> tuple[list[Side], dict[str, str]]:
    """FA-1, with query splits where these fill more of the GPU, FA-2, standard; why one lacks."""
    problem, tiles = setting.problem, setting.tiles
    unit = "simt" if problem.dtype == "float32" else "mma"
    common: dict[str, Any] = {"tiles": tiles} if tiles else {}
    wanted: list[tuple[str, dict[str, Any]]] = [(f"fa1-{unit}", common)]
    splits = 1
    if problem.batch * problem.heads_q < ENOUGH * gpu.multiprocessors:
        of_plan = partial(query_splits, problem, gpu.multiprocessors, f"fa1-{unit}", setting.pass_)
        splits = attempt(of_plan)[0] or 1
    if splits > 1:
        wanted.append((f"fa1-{unit}-splits", {**common, "query_splits": splits}))
    wanted += [(f"fa2-{unit}", common), (f"standard-{unit}", {})]
    found, refused = [], {}
    for series, options in wanted:
        try:
            planned = plan(series, problem, passes=setting.pass_, **options)
        except ValueError as error:
            if "query_splits" not in str(error):  # what has no splits is no side of its own
                refused[series] = str(error)
            continue
        found.append(Side(series, planned, options))
    return found, refused


def measure(
    setting: Setting, found: Sequence[Side], gpu: bounds.Device, machine: str | None,
    busy: Callable[[str], contextlib.AbstractContextManager[Any]],
) -> Iterator[Row]:  # fmt: skip
    """Closed forms, small counts, times with a GPU; `busy(text)` is entered where it takes long."""
    name = labels(setting.pass_)
    for side in found:
        yield from _modelled(setting, side, gpu)
    for side in found:
        with busy(f"counting {name[side.series]} on the emulator"):
            yield from _counted(setting, side)
    if machine is not None:
        inputs = Inputs(gradient=setting.pass_ == "bwd")
        checks = calls.Checks(inputs)
        for side in found:
            with busy(f"timing {name[side.series]}"):
                yield from _timed(setting, side, inputs, checks, machine)


def _columns(setting: Setting, side: Side, machine: str) -> dict[str, Any]:
    own = {"tiles": side.planned.tiles, "pass_": setting.pass_}
    return columns(NAME, side.series, setting.problem, machine, **own)


def _modelled(setting: Setting, side: Side, gpu: bounds.Device) -> Iterator[Row]:
    planned = side.planned
    row = partial(Row, **_columns(setting, side, MODEL))
    yield from _accesses(row, planned.accesses.loads, planned.accesses.stores)
    for name, arrays in GROUPS.items():
        value = _bytes(planned.accesses, arrays)
        yield row(metric="traffic", unit="bytes", value=value, note=name)
    memory = planned.workspace_bytes / 2**20
    yield row(metric="memory", unit="MiB", value=memory, note="workspace")
    for note, flops in (("useful", planned.flops), ("computed", bounds.computed_flops(planned))):
        yield row(metric="work", unit="FLOP", value=flops, note=note)
    expected = bounds.expected(planned, gpu)
    note = f"about, on {gpu.name}: L2 {'holds' if expected.dram.served else 'does not hold'} it"
    yield row(metric="dram", unit="bytes", value=expected.dram.bytes, note=note)
    if expected.floor is not None:
        note = f"at least, on {gpu.name}: {expected.bound}"
        yield row(metric="time", unit="ms", value=1e3 * expected.floor, note=note)


def _bytes(accesses: Any, arrays: Sequence[str]) -> int:
    loads, stores = (
        {name: n for name, n in of.items() if name in arrays}
        for of in (accesses.loads, accesses.stores)
    )
    return replace(accesses, loads=loads, stores=stores).bytes


def _accesses(
    row: Callable[..., Row], loads: dict[str, int], stores: dict[str, int], times: int = 1
) -> Iterator[Row]:
    for metric, of in (("loads", loads), ("stores", stores)):
        for name, n in of.items():
            yield row(metric=metric, unit="elements", value=n * times, note=name)


def gpu_here() -> tuple[bounds.Device, str | None]:
    """The GPU and its name as a file's; without one the stand-in and None."""
    found = bounds.here()
    if found is None:
        return bounds.DEVICES[STAND_IN], None
    return found, provenance.slug(found.driver_name)


def one_head(problem: Problem) -> Problem:
    """One head of the problem: all heads of all batch entries access as much."""
    return replace(problem, batch=1, heads_q=1, heads_k=1)


def why_not_counted(setting: Setting) -> str:
    """Why the emulator does not count one head of this; empty where it does."""
    problem = setting.problem
    work = 4 * problem.seqlen_q * problem.seqlen_k * problem.head_dim
    work = work * 5 // 2 if setting.pass_ == "bwd" else work
    longest = max(problem.seqlen_q, problem.seqlen_k)
    if longest > counts.LONGEST or work > counts.FLOPS:
        return "one head would take the emulator minutes"
    return ""


def _counted(setting: Setting, side: Side) -> Iterator[Row]:
    if why_not_counted(setting):
        return
    head, p = one_head(setting.problem), setting.problem
    options = {**side.options, "tiles": side.planned.tiles}
    with fa_numba.count_accesses() as found:
        _run_once(side, head, options, setting.pass_)
    row = partial(Row, **_columns(setting, side, EMULATOR))
    yield from _accesses(row, found.loads, found.stores, p.batch * p.heads_q)


def _run_once(side: Side, problem: Problem, options: dict[str, Any], pass_: str) -> None:
    """One call on host arrays; which numbers they hold changes no access."""
    # NumPy has no bfloat16: float16 has as many bytes, and its kernels the same accesses.
    dtype = "float32" if problem.dtype == "float32" else "float16"
    q, k = (np.zeros(shape, dtype) for shape in (problem.q_shape, problem.k_shape))
    common = {"algorithm": side.planned.algorithm, "causal": problem.causal, **options}
    if pass_ == "fwd":
        fa_numba.attention(q, k, k, **common)
    else:
        lse = np.zeros(problem.lse_shape, np.float32)
        fa_numba.attention_backward(q, q, k, k, q, lse, **common)


def equal_counts(rows: Sequence[Row]) -> tuple[int, int]:
    return counts.equal([row for row in rows if row.metric in ("loads", "stores")])


def _timed(
    setting: Setting, side: Side, inputs: Inputs, checks: calls.Checks, machine: str
) -> Iterator[Row]:
    problem, pass_ = setting.problem, setting.pass_

    def work() -> Any:
        if max(np.prod(problem.q_shape), np.prod(problem.k_shape)) > LARGEST:
            raise ValueError(f"q or k has more than {LARGEST} elements")
        arrays = peers.on_device(inputs(problem), problem.dtype)
        check = checks(side.series, pass_, problem)
        own = side.options if pass_ == "fwd" else {"before": {}, **side.options}
        run = calls.make(side.series, pass_, problem, arrays, **own)
        return time_call(run, check, seconds=SECONDS)

    timing, failure = attempt(work)
    device.release_memory()
    peers.release()
    common = _columns(setting, side, machine)
    if failure:
        yield Row(metric="time", unit="ms", value=None, note=failure, **common)
        return
    yield from timing_rows(timing, problem, **common)
