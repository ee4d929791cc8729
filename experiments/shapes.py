"""Compares our kernels with torch's at shapes and options outside the papers' settings.

All calls are in fp16, forward and backward. The library chooses unit, tiles and splits. The calls
have shared K/V heads, head dimensions of 32 to 256, lengths that no tile size divides, or few
heads. Other calls have short N, windows, softcaps, slopes, a bias, packed sequences, or dropout.
"""

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from fa_numba import device
from fa_numba.problem import Problem

from .lab.measure import calls, flex, peers
from .lab.measure.series import LABELS, backward_options, columns, plan
from .lab.measure.speeds import PASSES
from .lab.measure.timing import FEWEST, attempt, shuffled, time_call
from .lab.measure.workloads import HIDDEN, SEED, TOKENS, Inputs, padded_lengths
from .lab.record import Bench, Options, Row, nested
from .lab.show import style, tables

NAME = "shapes"
NEEDS = ("GPU",)
TAKES = ()
AUTO = "fa2-auto"
DROPOUT, PADDING = 0.1, 20
# Length and window of the largest problem whose gradients are compared with float64.
LONGEST, WIDEST = 512, 100
REPEATS, SECONDS = 12, 0.06
PROTOCOL = (
    f"{REPEATS} repeats, cut to {SECONDS:g} s, {FEWEST} at least; auto is the call without a unit, "
    "tiles or splits named; flex_attention is compiled for each problem, before it is timed; "
    f"gradients are checked on a problem of at most N={LONGEST} that leaves the same "
    f"remainder of {LONGEST // 2}, with one K/V head and windows of at most "
    f"{WIDEST}; a result with dropout is to deviate as its chance says; padded are up to "
    f"{PADDING} rows and columns a sequence"
)
MMA = "fa2-mma"
SERIES = (AUTO, MMA, peers.FLASH, peers.CUDNN, peers.FLEX, peers.UNFUSED, peers.FA4)


@dataclass(frozen=True)
class Kind:
    """A class of shapes: a title, and the kernel of torch with which we compare (`peer`)."""

    title: str
    peer: str = peers.FLASH


KINDS = {
    "shared": Kind("shared K/V heads"),
    "dims": Kind("head dimensions"),
    "lengths": Kind("lengths"),
    "options": Kind("options", peer=peers.FLEX),
    "few": Kind("few heads, long N"),
    "short": Kind("N=64 to 512"),
    "dropout": Kind("dropout"),
    "padded": Kind("dropout and padding", peer=peers.UNFUSED),
}


@dataclass(frozen=True)
class Point:
    """One problem that is measured, and the class of shapes to which it belongs.

    Parameters
    ----------
    kind : str
        The class, a key of KINDS.
    what : str
        Name of the problem in the class.
    problem : Problem
        The problem.
    passes : tuple of str
        The passes that are timed.
    beside_mma : bool, default True
        Whether the call is timed a second time on "mma" if unit="auto" chooses another unit.
    """

    kind: str
    what: str
    problem: Problem
    passes: tuple[str, ...] = ("fwd", "bwd")
    beside_mma: bool = True

    def given(self, problem: Problem) -> dict[str, Any]:
        """Return the options of our calls that a `Problem` does not contain: dropout and padding.

        `problem` is the point's problem, or a shorter problem for a check.
        """
        if self.kind not in ("dropout", "padded"):
            return {}
        options: dict[str, Any] = {"dropout_p": DROPOUT, "seed": SEED}
        if self.kind == "padded":
            lengths = padded_lengths(problem, PADDING)
            options |= {"q_lens": lengths, "kv_lens": lengths}
        return options

    @property
    def place(self) -> str:
        """Return the beginning of a row's note, which names the class and the problem."""
        return f"{self.kind}: {self.what}"


def _of(
    batch: int, heads: int, Nq: int, d: int, *, Nk: int = 0, group: int = 1, **more: Any
) -> Problem:
    sizes = (batch, heads, heads // group, Nq, Nk or Nq, d)
    return Problem(*sizes, dtype="float16", **more)


def _wide(N: int, d: int, **more: Any) -> Problem:
    """Return a problem with 16k tokens (batch x N) and hidden dimension (heads x d) 2048."""
    return _of(TOKENS // N, max(1, HIDDEN // d), N, d, **more)


# Lengths of the sequences of a packed batch with 16k tokens: few long and many short sequences.
SKEWED = (8192, 3071, 1500, 1024, 777, 512, 399, 300, 250, 129, 128, 64, 33, 5)
# Lengths of the classes in which the mask and the head dimension alternate.
IN_TURN = {
    "short": (64, 128, 256, 512),
    "dropout": (512, 1024, 4096, 16384),
    "padded": (128, 256, 512, 1024),
}


def _points() -> Iterator[Point]:
    for d, group, N, causal in (
        (128, 2, 4096, True), (128, 4, 4096, True), (128, 8, 4096, True), (128, 8, 2048, False),
        (64, 4, 2048, True), (64, 8, 4096, False),
    ):  # fmt: skip
        what = f"{group} query heads a K/V head"
        yield Point("shared", what, _wide(N, d, group=group, causal=causal))
    for d in (32, 40, 80, 96, 112, 160, 192, 256):
        yield Point("dims", f"d={d}", _wide(4096, d))
        yield Point("dims", f"d={d}", _wide(2048, d, causal=True), beside_mma=False)
    for batch, heads, Nq, Nk, d, causal in (
        (8, 16, 1000, 1000, 64, True), (4, 16, 3333, 3333, 128, True),
        (4, 16, 5001, 5001, 64, False), (4, 16, 1000, 4001, 128, False),
        (4, 16, 4001, 1000, 64, False), (4, 16, 300, 8193, 128, False),
        (8, 16, 4096, 77, 64, False), (8, 8, 4096, 77, 40, False), (8, 16, 1024, 77, 128, False),
    ):  # fmt: skip
        what = f"N={Nq}" if Nq == Nk else f"{Nq} x {Nk}"
        yield Point("lengths", what, _of(batch, heads, Nq, d, Nk=Nk, causal=causal))
    for d, left in ((128, 128), (128, 1024), (128, 4096), (64, 128), (64, 512)):
        problem = _of(1, HIDDEN // d, 16384, d, window=(left, 0))
        yield Point("options", f"window {left}", problem)
    yield Point("options", "softcap", _of(2, 16, 4096, 128, causal=True, softcap=20.0))
    yield Point("options", "ALiBi", _of(2, 32, 4096, 64, causal=True, alibi=True))
    for d in (64, 128):
        added = _of(2, HIDDEN // d, 2048, d, bias=(1, HIDDEN // d, 2048, 2048))
        yield Point("options", "bias", added)
    for d, causal in ((128, True), (64, False)):
        lens: dict[str, Any] = {"q_lens": SKEWED, "kv_lens": SKEWED, "packed": True}
        packed = _of(len(SKEWED), HIDDEN // d, max(SKEWED), d, causal=causal, **lens)
        yield Point("options", "packed, skewed lengths", packed)
    for heads, N, d, causal in (
        (1, 8192, 128, False), (2, 16384, 64, True), (4, 4096, 64, False), (8, 16384, 128, True),
        (1, 32768, 64, False),
    ):  # fmt: skip
        what = f"{heads} heads" if heads > 1 else "one head"
        yield Point("few", what, _of(1, heads, N, d, causal=causal))
    for heads, Nq, Nk in ((4, 1024, 32768), (8, 256, 65536)):
        yield Point("few", f"{heads} heads", _of(1, heads, Nq, 128, Nk=Nk), ("fwd",))
    for kind, lengths in IN_TURN.items():
        for n, (N, d) in enumerate(itertools.product(lengths, (64, 128))):
            what = f"N={N}" if kind == "short" else f"p={DROPOUT}"
            yield Point(kind, what, _wide(N, d, causal=n % 4 in (0, 3)))


def points(options: Options) -> list[Point]:
    """Return the problems to measure; for a quick run the first problem of every class."""
    every = list(_points())
    if options.quick:
        every = list({point.kind: point for point in reversed(every)}.values())[::-1]
    return every


def at(point: Point, pass_: str) -> list[str]:
    """Return the series that are measured for a point in a pass.

    They are our call with unit="auto" and other libraries' kernels. Our call on mma is included if
    "auto" chooses another unit. flash-attn-4 has no dropout.
    """
    found = [AUTO]
    planned, _ = attempt(plan, AUTO, point.problem, **plan_options(pass_, point))
    if point.beside_mma and planned is not None and planned.unit != "mma":
        found.append(MMA)
    peer = KINDS[point.kind].peer
    compared = [peers.FLASH, peers.CUDNN] if peer == peers.FLASH else [peer]
    if peers.in_fa4(point.problem) and not point.given(point.problem):
        compared.append(peers.FA4)
    return [*found, *peers.here(compared)]


def peer_calls(options: Options) -> Iterator[list[tuple[str, str, Problem]]]:
    """Yield groups of calls that compile for seconds, as the runner's module peers_ahead runs them.

    A call is a series, a pass and a problem. A group contains the calls of one series at one point.
    The gradients of flex_attention are also checked on a shorter problem, which compiles again.
    """
    for point in points(options):
        for series in (peers.FLEX, peers.FA4):
            passes = [pass_ for pass_ in point.passes if series in at(point, pass_)]
            group = [(series, pass_, point.problem) for pass_ in passes]
            if series == peers.FLEX and "bwd" in passes and not point.given(point.problem):
                group.append((series, "bwd", shorter(point.problem)))
            if group:
                yield group


def call_options(problem: Problem, shapes: bool = False) -> dict[str, Any]:
    """Return the options of our call for a problem, as the public functions take them.

    Slopes, a bias and the ends of packed sequences are NumPy arrays. If `shapes` is true, slopes
    and a bias are shapes, as `fa_numba.plan` takes them.
    """
    found: dict[str, Any] = {}
    if problem.window != (-1, -1):
        found["window"] = problem.window
    if problem.softcap is not None:
        found["softcap"] = problem.softcap
    if problem.alibi:
        heads = problem.heads_q
        slopes = 2.0 ** (-8 * np.arange(1, heads + 1, dtype=np.float32) / heads)
        found["alibi_slopes"] = (heads,) if shapes else slopes
    if problem.bias is not None:
        found["bias"] = problem.bias if shapes else _bias(problem.bias)
    if problem.packed:
        for name, lens in (("q", problem.q_lens), ("k", problem.kv_lens)):
            found[f"cu_seqlens_{name}"] = np.cumsum([0, *(lens or ())]).astype(np.int32)
    return found


@functools.lru_cache(1)
def _bias(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(SEED).standard_normal(shape, dtype=np.float32)


def make(series: str, pass_: str, problem: Problem, arrays: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that runs a series once in a pass. The function takes the argument `out`.

    `arrays` are q, k, v and dout.
    """
    options = flex.options_on_gpu(call_options(problem))
    if series == peers.FLEX:
        if pass_ == "fwd":
            return flex.call(problem, *arrays[:3], **options)
        return flex.gradients(problem, pass_, *arrays, **options)
    if series == peers.FA4:
        options = {}  # `peers` takes the window and the softcap from the problem
    elif calls.theirs(series):
        if options:
            raise ValueError(f"series {series} does not support {', '.join(options)}")
    elif pass_ == "fwd":
        options["kv_splits"] = "auto"
    return calls.make(series, pass_, problem, arrays, **options)


def plan_options(pass_: str, point: Point) -> dict[str, Any]:
    """Return the arguments with which `series.plan` plans the call of a point.

    They are the arguments in addition to the series and the problem.
    """
    own = {"kv_splits": "auto"} if pass_ == "fwd" else {"passes": "bwd", **backward_options(AUTO)}
    return own | call_options(point.problem, shapes=True) | point.given(point.problem)


def shorter(problem: Problem) -> Problem:
    """Return a shorter problem whose result is checked in place of a long problem's result.

    The shorter problem has one K/V head. Its other sizes are:

    | problem | sizes of the shorter problem |
    |---|---|
    | packed sequences | only the sequences with at most LONGEST / 2 rows |
    | not packed | one batch entry, and at most WIDEST columns of a window to the left |
    | not packed, length N above LONGEST | length LONGEST / 2 + N modulo (LONGEST / 2) |

    The remainder of N stays, because lengths that no tile size divides are a case to check.
    """
    half = LONGEST // 2
    if problem.packed:
        return _shorter_packed(problem, half)
    Nq, Nk = (N if N <= LONGEST else half + N % half for N in (problem.seqlen_q, problem.seqlen_k))
    left, right = problem.window
    sizes: dict[str, Any] = {"batch": 1, "heads_q": problem.group, "heads_k": 1}
    if problem.bias is not None:
        whole = (1, problem.group, Nq, Nk)
        sizes["bias"] = tuple(min(pair) for pair in zip(problem.bias, whole, strict=True))
    return replace(problem, **sizes, seqlen_q=Nq, seqlen_k=Nk, window=(min(left, WIDEST), right))


def _shorter_packed(problem: Problem, longest: int) -> Problem:
    pairs = zip(problem.q_lens or (), problem.kv_lens or (), strict=True)
    q_lens, kv_lens = zip(*(pair for pair in pairs if max(pair) <= longest), strict=True)
    lens: dict[str, Any] = {"q_lens": q_lens, "kv_lens": kv_lens, "batch": len(q_lens)}
    lens |= {"heads_q": problem.group, "heads_k": 1}
    return replace(problem, **lens, seqlen_q=max(q_lens), seqlen_k=max(kv_lens))


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Yield the times of our calls and torch's kernels for every problem."""
    peers.say_missing(bench.say)
    inputs = Inputs(gradient=True)
    checks = calls.Checks(inputs, shorter, call_options)
    for point in bench.each(points(options), "timing"):
        arrays = peers.on_device(inputs(point.problem), point.problem.dtype)
        every = [(pass_, series) for pass_ in point.passes for series in at(point, pass_)]
        for pass_, series in shuffled(every, point):
            yield _timed(series, pass_, point, arrays, checks, bench.machine)
            device.release_memory()
            peers.release()


def _check(checks: calls.Checks, series: str, pass_: str, point: Point) -> calls.Check:
    """Return the function that checks the result of a timed call.

    `point` contains the problem and the options of the call. The output of a forward pass is
    checked by the returned function. Gradients of a long problem are too slow to check.
    Instead, `_check` itself computes and checks the gradients of a shorter problem. The returned
    function then accepts every result. Gradients with dropout or padding are handled in this way at
    any length. Each of the two checks raises WrongResult if a result is wrong.
    """
    problem = point.problem
    given = point.given(problem)
    if not given:
        return checks(series, pass_, problem, functools.partial(make, series, pass_))
    if pass_ == "fwd":
        gate = checks.gate(pass_, problem, **given)
        return gate.peer if calls.theirs(series) else gate
    small = shorter(problem)
    key = (series, point.kind, small)
    host, own = checks.inputs(small), point.given(small)
    return checks.once(key, lambda: calls.check_once(series, small, host, own))


def _timed(
    series: str, pass_: str, point: Point, arrays: Sequence[Any], checks: calls.Checks, machine: str
) -> Row:
    problem = point.problem
    common, said = columns(NAME, series, problem, machine, pass_=pass_), point.place
    if not calls.theirs(series):
        planned, _ = attempt(plan, series, problem, **plan_options(pass_, point))
        if planned is not None:
            common |= {"Br": planned.tiles.Br, "Bc": planned.tiles.Bc}
            said += f"; {planned.unit}"
            splits = planned.kv_splits * planned.group_splits  # one of the two factors is 1
            said += f", {splits} splits" if splits > 1 else ""

    def work() -> Any:
        check = _check(checks, series, pass_, point)
        own = point.given(problem)
        if own and pass_ == "fwd":
            own |= {"kv_splits": "auto"}
        run = (calls.make if own else make)(series, pass_, problem, arrays, **own)
        return time_call(run, check, REPEATS, SECONDS)

    timing, failure = attempt(work)
    return calls.time_row(timing, failure, said, **common)


Place = tuple[Any, ...]  # (class and name of a point, sizes)
Over = dict[str, dict[Place, float]]  # series -> place -> time / time of our call with "auto"


def kind_of(row: Row) -> str:
    """Return the class of shapes that the note of a row names."""
    return row.place.partition(":")[0]


def ratios(rows: Sequence[Row]) -> dict[tuple[str, str], Over]:
    """Return ratios of times as {(class, pass): {series: {problem: ratio}}}.

    A ratio is the time of the series / the time of our call with unit="auto". The class is a class
    of shapes. The innermost key is a tuple with the name and the sizes of the problem.
    """
    sizes = ("place", "batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim", "causal")
    times = nested(rows, kind_of, "pass_", attrgetter(*sizes), "series", metric="time")
    found: dict[tuple[str, str], Over] = {}
    for kind, pass_ in itertools.product(KINDS, ("fwd", "bwd")):
        for place, by in times.get(kind, {}).get(pass_, {}).items():
            for series in by.keys() - {AUTO} if AUTO in by else ():
                over = found.setdefault((kind, pass_), {}).setdefault(series, {})
                over[place] = by[series] / by[AUTO]
    return found


def draw(rows: Sequence[Row]) -> Any:
    """Draw the ratios of other kernels' times to our times by class. Return None without ratios."""
    found = ratios(rows)
    shown = (peers.FLASH, peers.FLEX, peers.UNFUSED, peers.CUDNN, peers.FA4)
    whose = "another kernel's" if any(peers.FA4 in over for over in found.values()) else "torch's"
    every = [x for over in found.values() for s in shown for x in over.get(s, {}).values()]
    if not every:
        return None
    figure, ((ax,),) = style.new(1, 1, 0.8 + 0.55 * len(found))
    ax.set_xscale("log")
    ax.axvline(1.0, color="#555555", lw=1.0)
    for line, over in enumerate(found.values()):
        for series in (s for s in shown if s in over):
            values, y = over[series].values(), line + _HEIGHTS.get(series, -0.2)
            look: dict[str, Any] = {"ls": "", "alpha": 0.6, "label": LABELS[series]}
            style.line(ax, [(x, y) for x in sorted(values)], series, **look)
            middle = statistics.median(values)
            ax.plot([middle] * 2, [y - 0.17, y + 0.17], lw=3.0, color=style.COLOURS[series])
    labels = [f"{KINDS[name].title}, {PASSES[pass_]}" for name, pass_ in found]
    ax.set_yticks(range(len(found)), labels)
    ax.set_ylim(len(found) - 0.5, -0.5)
    low, high = min(0.7, *every), max(1.4, *every)
    ax.set(
        xlim=(low / 1.05, high * 1.05),
        xticks=[x for x in (0.5, 0.7, 0.9, 1, 1.2, 1.5, 2, 3, 4, 6) if low <= x <= high],
    )
    style.plain_ticks(ax.xaxis)
    ax.set_xlabel(f"{whose} time / our time (ratio; to the right of 1 ours is faster)")
    median = style.key("median", marker="|", ls="", ms=12, mew=3.0)
    what = 'fp16; a mark: one problem, ours with unit="auto"'
    handles = [*style.handles(ax).values(), median]
    style.legend(figure, handles, f"{_message(found)}\n{what}")
    return figure


_HEIGHTS = {peers.CUDNN: 0.2, peers.FA4: 0.0}  # where a series is drawn in the line of a class


def _message(found: Mapping[tuple[str, str], Over]) -> str:
    medians = [
        statistics.median(values.values())
        for over in found.values()
        if (values := over.get(peers.FLASH))
    ]
    if not medians:
        return "torch's time over ours"
    return f"{LABELS[peers.FLASH]} takes at least {min(medians):.1f} times our time (medians)"


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the ratios of times by class of shapes."""
    lines, found = [], ratios(rows)
    others = [peers.CUDNN, MMA]
    if any(peers.FA4 in over for over in found.values()):
        others.insert(1, peers.FA4)
    for (name, pass_), over in found.items():
        kind = KINDS[name]
        ours = [r for r in rows if (r.series, r.pass_, kind_of(r)) == (AUTO, pass_, name)]
        failed = sum(row.failed for row in ours)
        points = f"{len(ours)}, {failed} failed" if failed else str(len(ours))
        beside = over.get(kind.peer, {})
        cells = [kind.title, PASSES[pass_], points, LABELS[kind.peer], _pair(beside)]
        cells.append(_where(min(beside, key=lambda at: beside[at])) if beside else tables.MISSING)
        lines.append([*cells, *(_pair(over.get(series, {})) for series in others)])
    header = ["class", "pass", "problems", "compared with"]
    header += ["time of the compared kernel / our time: median; worst"]
    header.append("worst at")
    header += [f"{LABELS[s]}'s time / our time: median; worst" for s in others[:-1]]
    header.append("our time on mma / our time: median; worst")
    caption = (
        "Each ratio in the table is *time of another kernel / time of our call*, in fp16. A ratio "
        "above 1 means that our call is faster. The *worst* ratio of a class of shapes is the "
        'smallest ratio. Our calls use `unit="auto"`, which picks wgmma on Hopper if the kernels '
        "support the options of the call. The class *options* contains calls with windows, "
        "softcap, ALiBi, bias, and packed sequences of unequal lengths. We compile torch's "
        "flex_attention for each problem. The times of flex_attention exclude compiling. In the "
        f"classes with dropout, the dropout probability is {DROPOUT:g}. In the class *dropout and "
        f"padding*, up to {PADDING} rows of each sequence are padding, which torch's unfused "
        "attention hides by a mask."
    )
    return tables.of(caption, header, lines)


def _pair(over: Mapping[Place, float]) -> str:
    if not over:
        return tables.MISSING
    return f"{statistics.median(over.values()):.2f}; {min(over.values()):.2f}"


def _where(place: Place) -> str:
    text, _, _, _, Nq, Nk, d, causal = place
    what = text.partition(": ")[2].replace(" a K/V head", " per K/V head")
    sizes = f"N={Nq}" if Nq == Nk else f"{Nq} x {Nk}"
    named = [x for x in (sizes, f"d={d}") if x != what]
    return ", ".join([what, *named, *(["causal"] if causal else [])])
