"""Measures time and peak memory over the sequence length (FlashAttention-1 paper, Fig. 3).

The sizes are those of Fig. 3 and of Tables 9 to 21 in the paper: batch size 16, 8 heads, d=64, fp16
and N=128 to 65536, with and without dropout and padding mask. The series are both loop orders,
torch's kernels, and standard attention at all N for which the memory suffices. Above N=32768, only
torch's FlashAttention-2 is measured of torch's kernels. Block-sparse FA-1 is measured without
dropout and padding mask, and with both. Block-sparse FA-2 is measured without both. The figure
contains the published curves too. A training step on one sequence of N=1048576 is measured too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device, reference
from fa_numba.problem import Problem

from .lab.measure import calls, check, peers
from .lab.measure.series import LABELS, columns
from .lab.measure.timing import FEWEST, Timing, attempt, time_call
from .lab.measure.workloads import Inputs, padded_lengths
from .lab.record import Bench, Options, Row, published_numbers, select
from .lab.show import style, tables

NAME = "runtime_memory"
NEEDS = ("GPU",)
TAKES = ()
BATCH, HEADS, HEAD_DIM, DTYPE = 16, 8, 64, "float16"
SEQLENS = tuple(128 << n for n in range(10))
QUICK_SEQLENS = (128, 512)
DROPOUT, PADDING = 0.1, 20
PLAIN, DROPPED, MASKED = "plain", "dropout", "padding mask"
BOTH = f"{DROPPED}, {MASKED}"
# Setting -> (the columns that identify the setting in published.csv, the measured lengths).
# Settings with dropout or mask have fewer lengths, so that a run takes less time.
SETTINGS = {
    PLAIN: ({"dropout": "0", "mask": "none"}, SEQLENS),
    BOTH: ({"dropout": "0.1", "mask": "padding"}, SEQLENS[:8]),
    DROPPED: ({"dropout": "0.1", "mask": "none"}, SEQLENS[2:6]),
    MASKED: ({"dropout": "0", "mask": "padding"}, SEQLENS[2:6]),
}
OURS = ("standard-mma", "fa1-mma", "fa2-mma")
THEIRS = (peers.UNFUSED, peers.FLASH, peers.CUDNN, peers.EFFICIENT, peers.MATH)
PASSES = ("fwd", "bwd", "fwd+bwd")
# Block-sparse series -> the settings in which a series is measured. Each setting needs kernels that
# take seconds to compile, so only the settings of the paper's Tables 9 to 11 and 18 to 21 are
# measured. As in the dense series, FA-1 has one thread block per batch entry and head.
SPARSE = {"fa1-mma-sparse": (PLAIN, BOTH), "fa2-mma-sparse": (PLAIN,)}
# The block masks. Appendix E.6 of the paper says of its sparse methods that a row sees an eighth of
# the columns, and at most 256 columns. Section 3.3 says that the paper's models with block-sparse
# FlashAttention use a butterfly pattern. The size of a block is ours.
COMPRESSION, COLUMNS, BLOCK = 8, 256, 64
# Above this length, torch's FlashAttention-2 is the only measured kernel of torch, because a call
# takes seconds.
ALL_TO = 32768
# Above the length REPEATED, a call is timed once or a few times, because it takes long.
REPEATED, REPEATS, SECONDS = 8192, 10, 0.1
# A claim says that a training step at this length is possible. It has one batch entry, and the
# fastest unit is used.
LONGEST, LONGEST_SERIES = 2**20, "fa2-auto"
# Standard attention with one batch entry, until it does not fit, to compare with LONGEST_SERIES.
ALONE = "plain, batch 1"
ALONE_SERIES, ALONE_SEQLENS = ("standard-mma", peers.UNFUSED), (16384, 32768, 65536)
CHECKED = Problem(2, 2, 2, 256, 256, HEAD_DIM, dtype=DTYPE)
# The small problem of the block-sparse series: 8 rows of blocks, with 4 of 8 blocks in each row.
SPARSE_CHECKED = replace(CHECKED, seqlen_q=8 * BLOCK, seqlen_k=8 * BLOCK)
PROTOCOL = (
    f"batch entries are copies of one, and of N={LONGEST}, batch 1, so are its parts, so that O "
    f"is again that of N={SEQLENS[-1]}; {REPEATS} repeats to N={REPEATED}, cut to {SECONDS:g} s, "
    f"{FEWEST} at least; beyond, 3 at N=16384 and 1 from there on without warm-up but the check's "
    "call, and backward alone is not measured; with dropout or lengths: "
    f"all of O, dq, dk and dv at N={CHECKED.seqlen_q} with the same options, and 32 rows, "
    "with dropout 128, in the middle and at the end of two heads at every N, where what is dropped "
    "is to deviate as its chance says; memory: what one call takes at its peak, with results; "
    f"block-sparse series: repeated at every N; O, dq, dk and dv at N={SPARSE_CHECKED.seqlen_q} "
    f"with {COLUMNS // BLOCK} of {SPARSE_CHECKED.seqlen_q // BLOCK} blocks in each row and the "
    f"same options; without dropout, {BLOCK} rows of O in the middle of the last head at every N"
)


def setting(seqlen: int) -> Problem:
    """Return the problem with the paper's sizes at a sequence length."""
    return Problem(BATCH, HEADS, HEADS, seqlen, seqlen, HEAD_DIM, dtype=DTYPE)


def given(name: str, problem: Problem) -> dict[str, Any]:
    """Return the options of our calls in the setting `name`, one of SETTINGS.

    A setting has dropout, or valid lengths of the sequences from N - 20 to N, or both, or neither.
    """
    options: dict[str, Any] = {}
    if name in (DROPPED, BOTH):
        options |= {"dropout_p": DROPOUT, "seed": 7}
    if name in (MASKED, BOTH):
        lengths = padded_lengths(problem, PADDING)
        options |= {"q_lens": lengths, "kv_lens": lengths}
    return options


def blocks_of(seqlen: int) -> tuple[int, int]:
    """Return how many blocks a row of blocks has, as (computed blocks, all blocks).

    A row of N columns has N / 8 computed columns, at most 256 columns, and at least one block.
    """
    every = -(-seqlen // BLOCK)
    return max(1, min(every // COMPRESSION, COLUMNS // BLOCK)), every


def butterfly(seqlen: int, computed: int) -> Any:
    """Return a block mask with a butterfly pattern, for all batch entries and heads.

    Row i of blocks has `computed` computed blocks (fewer at the end of a mask whose number of
    blocks is no power of two). Their columns are i, i XOR 1, i XOR 2, i XOR 4 and so on.
    """
    size, widest = BLOCK, (1 << computed - 1) >> 1

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        distance = (i // size) ^ (j // size)
        return distance <= widest and (distance & (distance - 1)) == 0

    tiles = fa_numba.Tiles(size, size)
    return fa_numba.create_block_mask(visible, 1, 1, seqlen, seqlen, tiles=tiles)


def place_of(series: str, name: str, seqlen: int) -> str:
    """Return the note of a series' rows in the setting `name`, one of SETTINGS.

    For the block-sparse series, it ends with the number of computed blocks in each row of blocks,
    such as "plain, 4 of 64 blocks".
    """
    if series not in SPARSE:
        return name
    computed, every = blocks_of(seqlen)
    return f"{name}, {computed} of {every} blocks"


def places_of(series: str, name: str) -> tuple[str, ...]:
    """Return the notes of a series' rows in the setting `name`, for all sequence lengths."""
    return tuple(dict.fromkeys(place_of(series, name, N) for N in SEQLENS))


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Yield the time and the peak memory of each series over the sequence length."""
    problems = [setting(N) for N in (QUICK_SEQLENS if options.quick else SEQLENS)]
    peers.say_missing(bench.say)
    # A quick run measures the first two settings, because only these have all of its lengths.
    names = list(SETTINGS)[: 2 if options.quick else None]
    work = [(p, name) for p in problems for name in names if p.seqlen_q in SETTINGS[name][1]]
    session = _Session(bench.machine, problems[-1])
    for problem, name in bench.each(work, "timing"):
        yield from session.rows(problem, name)
    if not options.quick:
        yield from session.longest()
        yield from session.alone()


def _results_bytes(problem: Problem, pass_: str) -> int:
    """Return the bytes of a call's results.

    The result of the forward pass is O. The results of passes with gradients are dq, dk, dv, O and
    the logsumexp.
    """
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    array = 2 * rows * problem.head_dim
    return array if pass_ == "fwd" else 4 * array + 4 * rows


def input_bytes(problem: Problem, pass_: str) -> int:
    """Return the bytes of a call's inputs: q, k, v and, for passes with gradients, dout."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    return (3 if pass_ == "fwd" else 4) * 2 * rows * problem.head_dim


def _small_call(series: str, name: str) -> tuple[Problem, dict[str, Any]]:
    """Return a small problem and the options of its call, to check a series in a setting."""
    if series not in SPARSE:
        return CHECKED, given(name, CHECKED)
    mask = butterfly(SPARSE_CHECKED.seqlen_q, COLUMNS // BLOCK)
    return SPARSE_CHECKED, {**given(name, SPARSE_CHECKED), "block_mask": mask}


def sparse_gate(problem: Problem, q: Any, k: Any, v: Any, **options: Any) -> calls.Check:
    """Return the function that checks O of a call with a block mask.

    It compares one row of blocks with float64, in the middle of the last head, and returns the
    relative error. The float64 reference gets only the columns that these rows see. With dropout,
    the function checks nothing and returns NaN.
    """
    if options.get("dropout_p"):
        return lambda out: float("nan")
    visited = options["block_mask"].visited[0, 0]
    N = options["q_lens"][-1] if "q_lens" in options else problem.seqlen_q
    i = (len(visited) - 1) // 2
    head = slice(problem.batch - 1, problem.batch), slice(problem.heads_q - 1, problem.heads_q)
    rows = (*head, slice(i * BLOCK, min((i + 1) * BLOCK, N)))
    columns = np.flatnonzero(np.repeat(visited[i], BLOCK)[:N])
    block = q[rows], k[head][:, :, columns], v[head][:, :, columns]
    unfused = reference.unfused(*block, **check.rounds(problem))
    part = "O", reference.attention(*block), unfused
    return check.Gate(problem.dtype, lambda out: [out[rows]], [part], f" at N={problem.seqlen_q}")


class _Session:
    """The measurement of all problems, shorter problems first.

    A series that fails, for example for lack of memory, is not tried on longer problems of the same
    setting and pass. A series with a wrong result stays in the measurement.
    """

    def __init__(self, machine: str, longest: Problem) -> None:
        self._machine = machine
        self._inputs = Inputs(gradient=True)
        self._inputs(replace(longest, batch=1))  # draws the numbers that shorter problems use too
        self._checked: dict[tuple[str, str], str] = {}
        self._ended: set[tuple[str, str, str]] = set()

    def rows(self, problem: Problem, name: str) -> Iterator[Row]:
        """Yield the rows of all series for a problem, in the setting `name` (one of SETTINGS)."""
        one = self._inputs(replace(problem, batch=1))
        host = tuple(np.broadcast_to(x, (problem.batch, *x.shape[1:])) for x in one)
        arrays = peers.repeated(one, problem.dtype, problem.batch)
        options = given(name, problem)
        gate = check.gate(problem, "fwd", *host, **options)
        theirs = THEIRS if problem.seqlen_q <= ALL_TO else (peers.FLASH,)
        for series in (*OURS, *(theirs if peers.available() else ())):
            held = gate.peer if calls.theirs(series) else gate
            yield from self._series(problem, name, series, arrays, options, held)
        if sparse := [series for series, names in SPARSE.items() if name in names]:
            options |= {"block_mask": butterfly(problem.seqlen_q, blocks_of(problem.seqlen_q)[0])}
            rows_gate = sparse_gate(problem, *host[:3], **options)
            for series in sparse:
                yield from self._series(problem, name, series, arrays, options, rows_gate)

    def longest(self) -> Iterator[Row]:
        """Yield the measured times and memory of calls with one sequence of length LONGEST.

        Each measurement is yielded as a `Row`. The inputs of the long sequence are copies of a
        shorter sequence, one after the other. The output is therefore the output of the shorter
        sequence, repeated. The first and the last copy of the output are compared with the correct
        output of the shorter sequence.
        """
        problem = replace(setting(SEQLENS[-1]), batch=1)
        one, N = self._inputs(problem), problem.seqlen_q
        gate = check.gate(problem, "fwd", *one)
        arrays = peers.repeated(one, DTYPE, LONGEST // N, axis=2)
        longest = replace(problem, seqlen_q=LONGEST, seqlen_k=LONGEST)

        def ends(out: Any) -> float:
            return max(gate(out[:, :, :N]), gate(out[:, :, -N:]))

        yield from self._series(longest, PLAIN, LONGEST_SERIES, arrays, {}, ends)

    def alone(self) -> Iterator[Row]:
        """Yield the rows of standard attention with one batch entry, for ALONE_SEQLENS."""
        for N in ALONE_SEQLENS:
            problem = replace(setting(N), batch=1)
            one = self._inputs(problem)
            gate = check.gate(problem, "fwd", *one)
            arrays = peers.on_device(one, problem.dtype)
            for series in ALONE_SERIES:
                if not calls.theirs(series):
                    yield from self._series(problem, ALONE, series, arrays, {}, gate)
                elif peers.available():
                    yield from self._series(problem, ALONE, series, arrays, {}, gate.peer)

    def _series(
        self, problem: Problem, name: str, series: str, arrays: Sequence[Any],
        options: dict[str, Any], check: calls.Check,
    ) -> Iterator[Row]:  # fmt: skip
        if (series, name) not in self._checked:  # check a small problem with the same options
            small, own = _small_call(series, name)
            of = (series, small, self._inputs(small), own)
            _, self._checked[series, name] = attempt(calls.check_once, *of)
        failure = self._checked[series, name]
        place = place_of(series, name, problem.seqlen_q)
        repeated = problem.seqlen_q <= REPEATED or series in SPARSE
        for pass_ in PASSES if repeated else ("fwd", "fwd+bwd"):
            if (series, name, pass_) in self._ended:
                continue
            found, why = None, failure
            if not why:
                checked = check if pass_ == "fwd" else None
                call = (series, pass_, problem, arrays, options, checked, repeated)
                found, why = attempt(self._measured, *call)
            if why and "float64" not in why:  # no wrong result, but no memory or no kernel
                self._ended.add((series, name, pass_))
            timing, taken = found or (None, None)
            common = columns(NAME, series, problem, self._machine, pass_=pass_)
            yield calls.time_row(timing, why, place, **common)
            if taken is not None:
                value = taken / 2**20
                yield Row(metric="memory", unit="MiB", value=value, note=place, **common)
            device.release_memory()
            peers.release()

    def _measured(
        self, series: str, pass_: str, problem: Problem, arrays: Sequence[Any],
        options: dict[str, Any], check: calls.Check | None, repeated: bool,
    ) -> tuple[Timing, int | None]:  # fmt: skip
        run = calls.make(series, pass_, problem, arrays, **options)
        results = _results_bytes(problem, pass_)
        if repeated:
            held = check or (lambda result: float("nan"))
            timing = time_call(run, held, REPEATS, seconds=SECONDS)
            return timing, None if pass_ == "bwd" else _peak(series, run, results)
        samples: list[float] = []
        repeats = max(1, 3 * 16384 // problem.seqlen_q)

        def timed(out: Any = None) -> None:
            samples.extend(device.time_ms(lambda: run(out=out), repeats=repeats, warmup=0))

        if check is None:  # the peak memory of several calls equals the peak of one call
            taken = _peak(series, timed, results)
        else:
            kept: list[Any] = []
            taken = _peak(series, lambda: kept.append(run()), results)
            check(kept[0])
            timed(kept[0])
        return Timing.of(samples), taken


def _peak(series: str, run: Callable[[], Any], results: int) -> int:
    if calls.theirs(series):
        return peers.allocated_bytes(run)
    return calls.own_peak_bytes(run, results)


# The panels of the figure: title, metric, pass, setting, table of the paper.
PANELS = (
    ("forward + backward", "time", "fwd+bwd", PLAIN, "Table 20"),
    ("forward + backward, dropout, mask", "time", "fwd+bwd", BOTH, "Table 11"),
    ("forward", "time", "fwd", PLAIN, "Table 18"),
    ("peak memory, forward + backward", "memory", "fwd+bwd", PLAIN, "Table 21"),
)
METHODS = {"PyTorch Attention": peers.UNFUSED, "FlashAttention": "fa1-mma"}
SPARSE_METHOD = "Block-Sparse FlashAttention"
# Our metric -> the metric's name in published.csv.
PAPER_METRICS = {"time": "runtime", "memory": "memory"}


def paper(metric: str, pass_: str, name: str, method: str) -> dict[int, float]:
    """Return the numbers that the paper published, as {sequence length: number}.

    `metric` is "time" (ms) or "memory" (MiB), and `name` is one of SETTINGS. `method` is one of
    METHODS, or SPARSE_METHOD.
    """
    wanted = {"metric": PAPER_METRICS[metric], "pass": pass_, "method": method, **SETTINGS[name][0]}
    found = published_numbers.lookup(paper="fa1", **wanted)
    return {int(line["seqlen"]): float(line["value"]) for line in found}


def shown(row: Row) -> float:
    """Return the value of a row as the figure shows it.

    Memory includes the inputs, as in the paper.
    """
    if row.metric != "memory":
        return row.number
    return row.number + input_bytes(setting(row.seqlen_q), row.pass_) / 2**20


def curve(rows: Sequence[Row], series: str, metric: str, pass_: str, name: str) -> dict[int, float]:
    """Return the values of a series over the sequence length, as {sequence length: value}.

    `metric` is "time" or "memory". `name` is the setting, one of SETTINGS. The values are those
    that the figure shows (see `shown`).
    """
    places = places_of(series, name)
    mine = select(rows, series=series, metric=metric, pass_=pass_, place=places)
    return {r.seqlen_q: shown(r) for r in sorted(mine, key=lambda r: r.seqlen_q)}


# The series that are drawn: the two series that the paper compares, and FA-2.
_DRAWN = (peers.UNFUSED, "fa1-mma", "fa2-mma")


def draw(rows: Sequence[Row]) -> Any:
    """Draw time and memory over the sequence length. Return None without rows."""
    rows = [r for r in rows if r.series != LONGEST_SERIES]
    if not rows:
        return None
    figure, axes = style.new(2, 2, 8.2)
    for (title, metric, pass_, name, item), ax in zip(PANELS, axes.flat, strict=True):
        for method, like in METHODS.items():
            points, look = paper(metric, pass_, name, method), {"ls": ":", "lw": 1.1}
            whose = "PyTorch's attention" if "PyTorch" in method else "FlashAttention (FA-1)"
            label = f"{whose}, published (A100)"
            style.line(ax, points, like, label=label, mfc="white", **look)
        for series in _DRAWN:
            points = curve(rows, series, metric, pass_, name)
            style.line(ax, points, series, lw=1.4, ms=4.5, label=LABELS[series])
        ax.set_title(f"{title} ({item})", fontsize=11)
        style.sizes(ax, SEQLENS, "sequence length N (tokens)")
        style.log(ax.yaxis)
        ax.set_ylabel("time (ms)" if metric == "time" else "memory with inputs (MiB)")
        if metric == "memory" and _alike(rows, metric, pass_, name):
            look = {"transform": ax.transAxes, "ha": "right", "fontsize": 9.5}
            ax.text(0.98, 0.06, "FA-1 and FA-2 lie on each other", **look)
    ends = max(curve(rows, peers.UNFUSED, "memory", "fwd+bwd", PLAIN), default=None)
    message = "Time grows with N², the fused kernels' memory with N"
    if ends is not None and ends < max(SEQLENS):
        message = f"torch's unfused attention trains only up to N={style.short(ends)}"
    what = f"FlashAttention's Fig. 3: fp16, batch {BATCH}, {HEADS} heads, d={HEAD_DIM}"
    title = f"{message}\n{what}; compare an A100's times by their slopes"
    style.legend(figure, list(style.handles(axes).values()), title)
    return figure


def _alike(rows: Sequence[Row], metric: str, pass_: str, name: str) -> bool:
    """Return whether FA-1's and FA-2's values differ by less than 3 % at each length.

    Such lines look like one line in the figure.
    """
    one, two = (curve(rows, series, metric, pass_, name) for series in ("fa1-mma", "fa2-mma"))
    return bool(one) and all(N in two and abs(one[N] / two[N] - 1) < 0.03 for N in one)


# Ratios of the tables: torch's unfused attention or our standard attention over a fused kernel.
_PAIRS = ((peers.UNFUSED, "fa1-mma"), ("standard-mma", "fa1-mma"), (peers.UNFUSED, "fa2-mma"))


def _ratio(over: dict[int, float], under: dict[int, float], N: int) -> str:
    return f"{over[N] / under[N]:.2f}" if N in over and N in under else tables.MISSING


def _curves(rows: Sequence[Row], metric: str, pass_: str, name: str) -> dict[str, dict[int, float]]:
    """Return our curves and the published curves, as {series or method: {sequence length: value}}.

    A series is ours or torch's (see `curve`). A method is a method of the paper (see `paper`).
    """
    here = {s: curve(rows, s, metric, pass_, name) for s in (*OURS, *THEIRS)}
    return here | {m: paper(metric, pass_, name, m) for m in METHODS}


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of a training step's time and memory, without dropout and padding."""
    time, memory = (_curves(rows, metric, "fwd+bwd", PLAIN) for metric in PAPER_METRICS)
    lengths = sorted({N for s in OURS for N in (*time[s], *memory[s])})
    if not lengths:
        return None
    lines = []
    for N in lengths[-10:]:
        cells = [str(N)]
        cells += [tables.number(time[s], N, ".3g") for s in ("FlashAttention", *OURS[1:])]
        cells += [_ratio(time[a], time[b], N) for a, b in (tuple(METHODS), *_PAIRS)]
        names = ("PyTorch Attention", peers.UNFUSED, "FlashAttention", *OURS[1:])
        cells += [tables.number(memory[s], N, ".0f") for s in names]
        lines.append(cells)
    header = ["N", "published FA-1, ms", "FA-1, ms", "FA-2, ms"]
    header += ["time, published standard / FA-1", "time, torch's unfused / FA-1"]
    header += ["time, our standard / FA-1", "time, torch's unfused / FA-2"]
    header += ["published standard, MiB", "torch's unfused, MiB"]
    header += ["published FA-1, MiB", "FA-1, MiB", "FA-2, MiB"]
    caption = (
        "The table of time and memory is for forward plus backward in fp16, with batch 16, 8 "
        "heads and d=64, without dropout or mask. The published times and memory sizes are from "
        "Tables 20 and 21 of FlashAttention's paper (A100). The columns in MiB include the inputs "
        "q, k, v and dout, as in FlashAttention's paper. A column *time, A / B* contains the time "
        "of kernel A / the time of kernel B."
    )
    longest = {r.metric: r for r in rows if (r.series, r.pass_) == (LONGEST_SERIES, "fwd+bwd")}
    if {"time", "memory"} <= longest.keys() and not any(r.failed for r in longest.values()):
        seconds, beside = longest["time"].number / 1e3, longest["memory"].number
        caption += (
            f" With batch 1 and N={LONGEST}, FA-2 on the fastest unit takes {seconds:.1f} s "
            f"and uses {beside:.0f} MiB in addition to q, k, v and dout."
        )
    return tables.of(caption, header, lines)


def settings_table(rows: Sequence[Row], seqlen: int = 4096) -> tables.Table | None:
    """Return the table of the ratios of times in all settings, at one sequence length."""
    lines = []
    for name in SETTINGS:
        for pass_ in ("fwd", "fwd+bwd"):
            time = _curves(rows, "time", pass_, name)
            cells = [_ratio(time[a], time[b], seqlen) for a, b in (tuple(METHODS), *_PAIRS)]
            if set(cells[1:]) != {tables.MISSING}:
                lines.append([name, pass_, *cells])
    header = ["setting", "pass", "published standard / FA-1", "torch's unfused / FA-1"]
    header += ["our standard / FA-1", "torch's unfused / FA-2"]
    caption = (
        f"The table of settings compares the times of two kernels at N={seqlen}, in fp16 with "
        "batch 16, 8 heads and d=64. In the table of settings, a column *A / B* contains the time "
        "of kernel A divided by the time of kernel B. The setting *plain* has neither dropout nor "
        "a mask."
    )
    return tables.of(caption, header, lines)


def dropout_table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of torch's time / our time with dropout."""
    lines = []
    for name, peer in ((DROPPED, peers.FLASH), (BOTH, peers.UNFUSED)):
        for pass_ in PASSES:
            ours, theirs = (curve(rows, s, "time", pass_, name) for s in ("fa2-mma", peer))
            cells = [_ratio(theirs, ours, N) for N in SEQLENS[:6]]
            if set(cells) != {tables.MISSING}:
                lines.append([name, pass_, LABELS[peer], *cells])
    header = ["setting", "pass", "compared with", *(f"N={N}" for N in SEQLENS[:6])]
    caption = (
        "Each ratio in the table of dropout is the time of the torch kernel in the column "
        "*compared with* / the time of our FA-2 on mma. The calls in the table of dropout are in "
        "fp16 with batch 16, 8 heads and d=64. If a ratio in the table of dropout is above 1, our "
        "kernel is faster than the torch kernel."
    )
    return tables.of(caption, header, lines)


def sparse_table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of a block-sparse kernel's time / the dense kernel's time."""

    def ratio(sparse: dict[int, float], dense: dict[int, float], N: int) -> str:
        return f"{sparse[N] / dense[N]:.3f}" if N in sparse and N in dense else tables.MISSING

    named = ((PLAIN, "without dropout and mask"), (BOTH, "with dropout and padding mask"))
    header, measured = ["N", "computed blocks, %"], False
    pairs: list[tuple[dict[int, float], dict[int, float]]] = []
    for name, words in named:
        header.append(f"{words}: published, A100")
        sparse = paper("time", "fwd+bwd", name, SPARSE_METHOD)
        pairs.append((sparse, paper("time", "fwd+bwd", name, "FlashAttention")))
        for series in (series for series, names in SPARSE.items() if name in names):
            dense = series.removesuffix("-sparse")
            header.append(f"{words}: {LABELS[dense]}")
            sparse = curve(rows, series, "time", "fwd+bwd", name)
            pairs.append((sparse, curve(rows, dense, "time", "fwd+bwd", name)))
            measured |= bool(sparse)
    if not measured:
        return None
    lines = []
    for N in SEQLENS:
        computed, every = blocks_of(N)
        shares = [ratio(*pair, N) for pair in pairs]
        lines.append([str(N), f"{100 * computed / every:.3g}", *shares])
    caption = (
        "The table of block-sparse attention contains the time of a block-sparse kernel / the time "
        "of the dense kernel, for forward plus backward in fp16 with batch 16, 8 heads and d=64. "
        "The published numbers are made from Tables 11 and 20 of FlashAttention's paper. The "
        f"column *computed blocks* is about our kernels, whose blocks have {BLOCK} x {BLOCK} "
        "elements of S."
    )
    return tables.of(caption, header, lines)


TABLES = {
    "runtime_settings": settings_table,
    "runtime_dropout": dropout_table,
    "runtime_sparse": sparse_table,
}
