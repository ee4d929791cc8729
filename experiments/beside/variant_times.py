"""Times of attention variants on a GPU, in both loop orders, compared with flex_attention.

The time to compile each variant is measured too.
"""

import contextlib
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from types import CellType, FunctionType
from typing import Any
from unittest import mock

import numpy as np

import fa_numba
from fa_numba import device
from fa_numba.device import kernel_cache
from fa_numba.problem import Problem

from ..lab.measure import calls, check, flex, peers
from ..lab.measure.series import HOPPER, HOPPER_FA1, LABELS, algorithm, columns, unit
from ..lab.measure.timing import attempt, time_call
from ..lab.measure.workloads import Inputs
from ..lab.record import Bench, Row, values
from ..lab.show import tables

try:
    import torch
except ImportError:  # pragma: no cover
    torch = None

Variant = Callable[[int, int], dict[str, Any]]

NAME = "variants"
TIMED = Problem(4, 16, 16, 4096, 4096, 64, dtype="float16")
# The problem for the comparison with float64. N is a square (for images) and a multiple of 8, but
# no multiple of the tile sizes.
CHECKED = Problem(1, 2, 2, 144, 144, 64, dtype="float16")
SERIES = ("fa1-mma", "fa2-mma", HOPPER_FA1, HOPPER)
PASSES = ("fwd", "bwd")
JOBS = 16  # processes that compile, at most
SECONDS = 0.1  # for the repeats of a long call
PROTOCOL = (
    "on a GPU tiles are those of the plan of a call with the function, and blocks of a mask are "
    f"made before; O and all gradients are held to float64 at N={CHECKED.seqlen_q}, with the same "
    f"tiles, and at N={TIMED.seqlen_q} all results, flex_attention's too, to the first one; "
    f"repeats are cut to {SECONDS:g} s; flex_attention has its own block mask; compiling is timed "
    "in processes side by side, from an empty cache to what can be launched, flex_attention's to "
    "its first result"
)


def flex_given(make: Variant, N: int, H: int, place: str = "cuda") -> dict[str, Any]:
    """Return the option with which flex_attention computes one of our variants.

    The result is {"mask_mod": function} or {"score_mod": function}. The function computes with
    torch's tensors. It uses the values that our own function captures, with arrays as tensors on
    the device `place`. `make` is the variant. Raise KeyError if the table _MADE contains no
    function for the variant.
    """
    ((option, function),) = make(N, H).items()
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = {name: cell.cell_contents for name, cell in cells}
    arrays = {name: x for name, x in values.items() if isinstance(x, np.ndarray)}
    moved = {name: torch.as_tensor(x, device=place) for name, x in arrays.items()}
    return {option: _MADE[make.__name__](**values | moved)}


# Variant -> function that takes the captured values of our function and returns torch's function.
_MADE: Mapping[str, Callable[..., Callable]] = {
    "causal": lambda: lambda b, h, i, j: j <= i,
    "sliding_window": lambda width: lambda b, h, i, j: (i >= j) & (i - j < width),
    "dilated": lambda step, width: (
        lambda b, h, i, j: (i >= j) & (i - j < width) & ((i - j) % step == 0)
    ),
    "prefix_lm": lambda prefix: lambda b, h, i, j: (j <= i) | (j < prefix),
    "documents": lambda of: lambda b, h, i, j: (of[i] == of[j]) & (j <= i),
    "alibi": lambda slopes: lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
    "relative_positions": lambda table, N: lambda s, b, h, i, j: s + table[h, i - j + N],
    "softcap": lambda cap: lambda s, b, h, i, j: cap * torch.tanh(s / cap),
    "sink_tokens": lambda first, width: (
        lambda b, h, i, j: (j <= i) & ((j < first) | (i - j < width))
    ),
    "speculated_tree": lambda sees: lambda b, h, i, j: sees[i, j],
    "block_diagonal": lambda size: lambda b, h, i, j: i // size == j // size,
    "t5_buckets": lambda table, bucket: lambda s, b, h, i, j: s + table[h, bucket[(i - j).abs()]],
    "two_cosines": lambda short, far: (
        lambda s, b, h, i, j: s + torch.cos(short * (i - j)) + torch.cos(far * (j - i))
    ),
    "neighbourhood": lambda side, reach: (
        lambda b, h, i, j: (
            ((i // side - j // side).abs() <= reach) & ((i % side - j % side).abs() <= reach)
        )
    ),
    "random_blocks": lambda kept, size: lambda b, h, i, j: kept[i // size, j // size] | (i == j),
}


def _warm() -> None:
    """Compile and run a trivial function with torch, which loads torch's compiler."""
    double = torch.compile(lambda x: x * 2, dynamic=False)
    double(torch.zeros(64, device="cuda"))
    torch.cuda.synchronize()


def on_device(function: FunctionType) -> FunctionType:
    """Return the same function with its captured NumPy arrays on the GPU."""
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    moved = (
        peers.on_device((x,), x.dtype.name)[0] if isinstance(x, np.ndarray) else x for x in values
    )
    closure = tuple(map(CellType, moved))
    return FunctionType(function.__code__, function.__globals__, closure=closure)


def _how(series: str) -> dict[str, Any]:
    return {"algorithm": algorithm(series), "unit": unit(series)}


def planned(series: str, pass_: str, problem: Problem, **options: Any) -> fa_numba.Plan:
    """Return the plan of a series' call in a pass."""
    how = {"dtype": problem.dtype, "passes": pass_, **_how(series)}
    return fa_numba.plan(problem.q_shape, problem.k_shape, **how, **options)


def options_of(make: Variant, series: str, pass_: str, problem: Problem) -> dict[str, Any]:
    """Return the options with which our kernels compute a variant.

    They are the tiles and the variant's `score_mod`, or a block mask made from its `mask_mod`.
    `make` is the variant: it returns the function. Arrays that the function captures are on the
    GPU.
    """
    tiles = planned(series, pass_, TIMED, **make(TIMED.seqlen_q, TIMED.heads_q)).tiles
    ((option, function),) = make(problem.seqlen_q, problem.heads_q).items()
    moved = on_device(function)
    if option != "mask_mod":
        return {option: moved, "tiles": tiles}
    sizes = (1, 1, problem.seqlen_q, problem.seqlen_k)
    return {"block_mask": fa_numba.create_block_mask(moved, *sizes, tiles=tiles)}


def call(
    series: str, pass_: str, arrays: Sequence[Any], saved: Sequence[Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """Return a function that runs a series once in a pass.

    `arrays` are q, k, v and dout. `saved` are O and L, which the backward pass needs.
    """
    q, k, v, dout = arrays
    own = _how(series) | options
    if pass_ == "fwd":
        return lambda out=None: fa_numba.attention(q, k, v, out=out, **own)
    return lambda out=None: fa_numba.attention_backward(dout, q, k, v, *saved, **own)


def _saved(make: Variant, problem: Problem, arrays: Sequence[Any]) -> Any:
    """Return O and L of a variant, computed by FA-2.

    The backward passes of both loop orders take these arrays.
    """
    options = options_of(make, "fa2-mma", "fwd", problem)
    q, k, v = arrays[:3]
    return fa_numba.attention(q, k, v, return_lse=True, **_how("fa2-mma"), **options)


def compile_ours(make: Variant, series: str, pass_: str) -> float:
    """Plan and compile all kernels of a variant for a series and a pass, and return the seconds.

    `make` is the variant. Return NaN if all of these kernels were cached on disk before.
    """
    device.synchronize()
    start = time.perf_counter()
    plan = planned(series, pass_, TIMED, **options_of(make, series, pass_, TIMED))
    capability = device.compute_capability()
    cold = any(kernel_cache.read(kernel, capability) is None for kernel in plan.launched)
    plan.compile()
    return time.perf_counter() - start if cold else math.nan


def compile_flex(make: Variant, pass_: str) -> float:
    """Compile flex_attention for a variant (`make`), run it once, and return the seconds."""
    shapes = (TIMED.q_shape, TIMED.k_shape, TIMED.k_shape, TIMED.q_shape)
    arrays = peers.on_device([np.zeros(shape, np.float32) for shape in shapes], TIMED.dtype)
    device.synchronize()
    start = time.perf_counter()
    flex_call(make, pass_, arrays)()
    device.synchronize()
    return time.perf_counter() - start


def flex_call(make: Variant, pass_: str, arrays: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that runs flex_attention once in a pass for a variant."""
    given = flex_given(make, TIMED.seqlen_q, TIMED.heads_q)
    if pass_ == "fwd":
        return flex.call(TIMED, *arrays[:3], **given)
    return flex.gradients(TIMED, pass_, *arrays, **given)


def _begin() -> None:
    """Prepare a process that compiles: load in advance what every compilation needs.

    This time is not measured.
    """
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # torch starts no processes of its own
    if peers.available():
        attempt(_warm)
    attempt(device.synchronize)


def _compiled(
    variants: Mapping[str, Variant], timed: Sequence[str], bench: Bench, machine: str
) -> list[Row]:
    """Return the rows with the time to compile each variant, for each series and pass.

    Several processes compile at the same time. No kernel is timed meanwhile.
    """
    jobs = min(JOBS, os.cpu_count() or 1)
    found: list[tuple[tuple[str, str, str], Future]] = []
    rows = []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin) as pool:
        # Compilations that take longest are started first.
        for name, make in variants.items():
            for pass_ in PASSES[::-1] if peers.available() else ():
                work = pool.submit(compile_flex, make, pass_)
                found.append(((name, peers.FLEX, pass_), work))
        for pass_ in PASSES[::-1]:
            for name, make in variants.items():
                for series in timed:
                    work = pool.submit(compile_ours, make, series, pass_)
                    found.append(((name, series, pass_), work))
        try:
            for (name, series, pass_), work in bench.track(found, f"compiling, {jobs} processes"):
                seconds, failure = attempt(work.result)
                if failure or not math.isnan(seconds):
                    own = {"pass_": pass_, "note": f"{name}; {failure}" if failure else name}
                    common = columns(NAME, series, TIMED, machine, **own)
                    rows.append(Row(metric="compile", unit="s", value=seconds, **common))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return rows


@contextlib.contextmanager
def _empty_caches() -> Iterator[None]:
    """Make torch use new, empty folders for compiled code inside the context."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {name: os.path.join(folder, name) for name in names}
        with mock.patch.dict(os.environ, caches):
            yield


class Alike:
    """A check that compares a result with the first result of the same pass.

    Call the object with a pass and a result. Results of different series can be compared in this
    way. The call raises WrongResult if the result differs too much from the first result.
    """

    def __init__(self) -> None:
        self._first: dict[str, Any] = {}

    def __call__(self, pass_: str, result: Any) -> float:
        found = [_real(x) for x in (result if isinstance(result, tuple) else (result,))]
        first = self._first.setdefault(pass_, found)
        off = [
            float(((a - b) ** 2).sum() / (b**2).sum()) ** 0.5
            for a, b in zip(found, first, strict=True)
        ]
        bound = check.PEER_BOUND[TIMED.dtype]
        if not all(x <= bound for x in off):
            raise check.WrongResult(
                f"the result at N={TIMED.seqlen_q} must differ by at most {bound:.2e} from that of "
                f"the first series, got {max(off):.2e}"
            )
        return math.nan


def _real(x: Any) -> Any:
    return x.detach().float() if hasattr(x, "detach") else check.to_host(x).astype(np.float32)


def measure(variants: Mapping[str, Variant], bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield the times to compile all variants, and then the times of all variants."""
    timed = [s for s in SERIES if unit(s) != "wgmma" or device.compute_capability() == (9, 0)]
    if not peers.available():
        bench.say("  no torch with CUDA here: flex_attention is not measured")
    with _empty_caches():
        for chosen in bench.each([tuple(variants)], "compiling"):
            yield _compiled({name: variants[name] for name in chosen}, timed, bench, bench.machine)
        inputs = Inputs(gradient=True)
        arrays = peers.on_device(inputs(TIMED), TIMED.dtype)
        for name in bench.each(list(variants), "timing"):
            yield from _times(name, variants[name], timed, inputs, arrays, bench.machine)
            device.release_memory()
            peers.release()


def _times(
    name: str, make: Variant, timed: Sequence[str], inputs: Inputs, arrays: Sequence[Any],
    machine: str,
) -> Iterator[Row]:  # fmt: skip
    host, alike = inputs(CHECKED), Alike()
    small = peers.on_device(host, CHECKED.dtype)
    saved, failed = attempt(
        lambda: [_saved(make, p, x) for p, x in ((CHECKED, small), (TIMED, arrays))]
    )
    for pass_ in PASSES:
        options = make(CHECKED.seqlen_q, CHECKED.heads_q)
        gate, lacks = attempt(check.Gate.of_whole, CHECKED, pass_, *host, **options)
        for series in timed:
            own = columns(NAME, series, TIMED, machine, pass_=pass_)

            def work(series: str = series, pass_: str = pass_, gate: Any = gate) -> Any:
                found = options_of(make, series, pass_, CHECKED)
                result = call(series, pass_, small, saved[0], found)()
                gate(result if pass_ == "bwd" else (result,))
                found = options_of(make, series, pass_, TIMED)
                run = call(series, pass_, arrays, saved[1], found)
                return found, time_call(run, lambda result: alike(pass_, result), seconds=SECONDS)

            done, failure = (None, failed or lacks) if failed or lacks else attempt(work)
            if done is None:
                yield calls.time_row(None, failure, name, **own)
                continue
            found, timing = done
            mask = found.get("block_mask")
            tiles = mask.tiles if mask is not None else found["tiles"]
            own |= {"Br": tiles.Br, "Bc": tiles.Bc}
            yield calls.time_row(timing, "", name, **own)
            visited = 1.0 if mask is None else float(mask.visited.mean())
            yield Row(metric="visited", unit="1", value=visited, note=name, **own)
        if peers.available():
            own = columns(NAME, peers.FLEX, TIMED, machine, pass_=pass_)
            timing, failure = attempt(
                lambda pass_=pass_: time_call(
                    flex_call(make, pass_, arrays),
                    lambda result: alike(pass_, result),
                    seconds=SECONDS,
                )
            )
            yield calls.time_row(timing, failure, name, **own)
        like = of_fa4(name)
        if like is not None and peers.here((peers.FA4,)):
            own = columns(NAME, peers.FA4, TIMED, machine, pass_=pass_)
            timing, failure = attempt(
                lambda pass_=pass_, like=like: time_call(
                    calls.make(peers.FA4, pass_, like, arrays),
                    lambda result: alike(pass_, result),
                    seconds=SECONDS,
                )
            )
            yield calls.time_row(timing, failure, name, **own)


def of_fa4(name: str) -> Problem | None:
    """Return the problem with which flash-attn-4 computes the variant `name`.

    Return None if flash-attn-4 has no option for this variant.
    """
    options: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "sliding window": {"window": (TIMED.seqlen_q // 8 - 1, 0)},
        "softcap": {"softcap": 2.0},
    }
    return replace(TIMED, **options[name]) if name in options else None


def times(rows: Sequence[Row], metric: str = "time") -> dict[tuple[str, str, str], float]:
    """Return the values of a metric by (variant, series, pass)."""
    return values(rows, "place", "series", "pass_", source="measured", metric=metric)


def over_flex(rows: Sequence[Row], name: str, pass_: str) -> float | None:
    """Return flex_attention's time / FA-2's time for a variant and a pass.

    FA-2's time is on wgmma if it was recorded, else on mma. Return None without both times.
    """
    found = times(rows)
    ours = [found[name, s, pass_] for s in (HOPPER, "fa2-mma") if (name, s, pass_) in found]
    theirs = found.get((name, peers.FLEX, pass_))
    return theirs / ours[0] if ours and theirs is not None else None


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the times of all variants, or None without times."""
    compiled, visited = times(rows, "compile"), times(rows, "visited")
    measured = [row for row in rows if row.source == "measured" and row.metric == "time"]
    names = list(dict.fromkeys(row.place for row in measured))
    if not names:
        return None
    every = [s for s in (*SERIES, peers.FLEX) if any(row.series == s for row in measured)]
    more = [peers.FA4] if any(row.series == peers.FA4 for row in measured) else []
    by = {(row.place, row.series, row.pass_): row for row in measured}
    lines = []
    for name in names:
        share = visited.get((name, every[-2], "fwd"))
        line = [name, tables.MISSING if share is None else f"{1 - share:.0%}"]
        for pass_ in PASSES:
            shown = (*every, *more)
            line += [tables.cell(by.get((name, s, pass_)), "{:.2f}".format) for s in shown]
            ratio = over_flex(rows, name, pass_)
            line.append(tables.MISSING if ratio is None else f"{ratio:.2f}")
        for series in every[-2:]:
            took = [compiled[name, series, p] for p in PASSES if (name, series, p) in compiled]
            line.append(f"{sum(took):.1f}" if len(took) == len(PASSES) else tables.MISSING)
        lines.append(line)
    header = ["variant", "tiles skipped"]
    for what in ("forward", "backward"):
        header += [f"{what}, {LABELS[series]}" for series in (*every, *more)]
        header.append(f"{what}, flex_attention / FA-2")
    header += [f"compiling, s, {LABELS[series]}" for series in every[-2:]]
    p = TIMED
    caption = (
        f"The table of variant times contains times in ms ({tables.runs(measured)}), in fp16 with "
        f"batch {p.batch}, {p.heads_q} heads, N={p.seqlen_q} and d={p.head_dim}. The columns "
        "*flex_attention / FA-2* contain the time of torch's flex_attention / the time of "
        f"{LABELS[every[-2]]}. The column *tiles skipped* contains the share of tiles that "
        f"{LABELS[every[-2]]} skips in the forward pass. The columns *compiling* contain the time "
        "to compile the forward and the backward pass of a variant."
    )
    return tables.of(caption, header, lines)
