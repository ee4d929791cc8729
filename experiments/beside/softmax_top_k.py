"""The part of the experiment `online_softmax` that finds the K largest probabilities.

Three ways are compared: the safe softmax and then top-k, the online softmax and then top-k, and one
kernel that does both in one pass (arXiv 1805.02867, Algorithm 4). On a GPU with torch, torch's
softmax and top-k are timed too.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device
from fa_numba.problem import Problem

from ..lab.measure import counts, peers, top_k
from ..lab.measure.calls import time_row
from ..lab.measure.series import columns
from ..lab.measure.timing import attempt, shuffled, time_call
from ..lab.record import EMULATOR, MODEL, Bench, Row, select, values
from ..lab.show import style, tables

FUSED, PEER = "fused-top-k", "torch-top-k"
# Our series with two kernels -> the softmax, and accesses per element of the softmax.
UNFUSED = {"safe-top-k": ("safe", 4), "online-top-k": ("online", 3)}
OURS = (*UNFUSED, FUSED)
SERIES = (*OURS, PEER)
LABELS = {
    "safe-top-k": "safe, then top-k",
    "online-top-k": "online, then top-k",
    FUSED: "online and top-k fused",
    PEER: "torch.softmax, then torch.topk",
}
COLOURS = dict(zip(SERIES, ("#E69F00", "#56B4E9", "#009E73", "#8B5A2B"), strict=True))
K, KS = 5, (5, 10, 15, 30)
V_OF_PAPER, BATCH_OF_PAPER = 25000, 4000


def about(
    experiment: str, series: str, batch: int, V: int, machine: str | None, k: int = K
) -> dict[str, Any]:
    """Return the columns of a row, except metric, unit and value.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    series : str
        Name of the series.
    batch, V : int
        Number of vectors, and elements of a vector.
    machine : str or None
        The machine of the row.
    k : int, default 5
        K.

    Returns
    -------
    dict
        Keyword arguments of `Row`.
    """
    problem = Problem(batch, 1, 1, V, V, 1)
    return columns(experiment, series, problem, machine, note=f"K={k}")


def sweep_of(row: Row) -> str:
    """Return the name of a row's sweep: the length of the vectors varies, or K varies.

    Parameters
    ----------
    row : Row
        A row of one of the SERIES.

    Returns
    -------
    str
        The name.
    """
    if k_of(row) == K:
        return f"length of {row.batch} vectors, top-k"
    return f"K, {row.batch} vectors"


def k_of(row: Row) -> int:
    """Return K of a row.

    Parameters
    ----------
    row : Row
        A row of one of the SERIES.

    Returns
    -------
    int
        K.
    """
    return int(row.place.removeprefix("K="))


def model(experiment: str, series: str, batch: int, V: int) -> Iterator[Row]:
    """Yield the loads and stores of a series by closed forms, for K = 5.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    series : str
        One of OURS.
    batch, V : int
        Number of vectors, and elements of a vector.

    Yields
    ------
    Row
        Two rows.
    """
    common = about(experiment, series, batch, V, MODEL)
    _, softmax = UNFUSED.get(series, ("", 0))
    for metric, value in top_k.accesses(batch, V, K, softmax).items():
        yield Row(metric=metric, unit="elements", value=value, **common)


def count(experiment: str, series: str, batch: int, V: int, x: np.ndarray) -> Iterator[Row]:
    """Yield the loads and stores of a series on the emulator, for K = 5.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    series : str
        One of OURS.
    batch, V : int
        Number of vectors, and elements of a vector.
    x : ndarray of float32, shape (batch, V)
        The vectors.

    Yields
    ------
    Row
        Two rows.
    """
    with device.using("emulator"), fa_numba.count_accesses() as counted:
        call(series, x, K, np.empty)()
    yield from counts.totals(counted, **about(experiment, series, batch, V, EMULATOR))


def call(series: str, x: Any, k: int, empty: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that finds the K largest probabilities of the rows of x once.

    Parameters
    ----------
    series : str
        Name of the series.
    x : array of float32, shape (batch, V)
        The vectors.
    k : int
        K.
    empty : callable
        Allocates the results, like `numpy.empty`.

    Returns
    -------
    callable
        Takes the argument `out`, ignores it, and returns the probabilities and their indices, both
        of shape (batch, K).
    """
    if series == PEER:
        return peers.top_k(x, k)
    result = empty((x.shape[0], k), "float32"), empty((x.shape[0], k), "int32")
    if series == FUSED:
        kernel, softmax, P = top_k.make_softmax_top_k(k), None, x
    else:
        kernel, softmax, P = top_k.make_top_k(k), UNFUSED[series][0], empty(x.shape, "float32")

    def run(out: Any = None) -> Any:
        if softmax is not None:
            fa_numba.softmax(x, algorithm=softmax, out=P)
        top_k.launch(kernel, P, *result)
        return result

    return run


def times(
    experiment: str, vectors: Any, lengths: Sequence[int], batches: Sequence[int], bench: Bench
) -> Iterator[Row]:
    """Yield the times of all series: for K = 5 over the length, and for each K at one length.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    vectors : array of float32
        Numbers on the GPU, of which the vectors consist.
    lengths, batches : sequence of int
        Elements of a vector, and numbers of vectors.
    bench : Bench
        Where the experiment runs.

    Yields
    ------
    Row
        One row for each call.
    """
    shown = SERIES if peers.available() else OURS
    cases = [(batch, V, K) for batch in batches for V in lengths if V >= K]
    if max(lengths) >= V_OF_PAPER and BATCH_OF_PAPER in batches:
        cases += [(BATCH_OF_PAPER, V_OF_PAPER, k) for k in KS]
    for batch, V, k in bench.each(cases, "timing softmax with top-k"):
        x = vectors[: batch * V].reshape(batch, V)
        for series in shuffled(shown, (batch, V, k)):
            timing, why = attempt(_time, series, x, k)
            yield time_row(timing, why, **about(experiment, series, batch, V, bench.machine, k))
    peers.release()


def _time(series: str, x: Any, k: int) -> Any:
    return time_call(call(series, x, k, device.empty), lambda result: top_k.check(x, k, result))


Times = dict[tuple[str, int, int, int], float]


def times_of(rows: Sequence[Row]) -> Times:
    """Return times in ms as {(series, number of vectors, length, K): time}.

    Parameters
    ----------
    rows : sequence of Row
        Rows of the experiment.

    Returns
    -------
    dict
        The times.
    """
    mine = [row for row in select(rows, series=SERIES, metric="time") if not row.failed]
    return {(row.series, row.batch, row.seqlen_q, k_of(row)): row.number for row in mine}


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of accesses and times, or None without accesses.

    Parameters
    ----------
    rows : sequence of Row
        Rows of the experiment.

    Returns
    -------
    Table or None
        The table.
    """
    counted = values(rows, "series", "seqlen_q", "metric", series=OURS, source="counted")
    closed = values(rows, "series", "seqlen_q", "metric", series=OURS, source="model")
    if not closed:
        return None
    same = sum(closed.get(at) == value for at, value in counted.items())
    found, lines = times_of(rows), []
    for batch, V, k in sorted({at[1:] for at in found}, key=lambda at: (-at[0], at[2], at[1])):
        of = {name: found[name, batch, V, k] for name in SERIES if (name, batch, V, k) in found}
        ratios = {name: of[name] / of[FUSED] for name in of if FUSED in of}
        cells = [tables.number(of, name, ".3g") for name in SERIES]
        cells += [tables.number(ratios, name, ".2f") for name in ("safe-top-k", PEER)]
        lines.append([str(batch), str(k), str(V), *cells])
    header = ["vectors", "K", "V", *(f"{LABELS[name]}, ms" for name in SERIES)]
    header += ["safe, then top-k / fused", "torch / fused"]
    caption = (
        "The table of softmax with top-k contains the time to find the K largest probabilities of "
        "vectors of V elements in fp32. Safe softmax with a top-k after it makes 5 accesses per "
        "element, online softmax with a top-k after it makes 4, and the fused kernel makes 1. All "
        f"of them store K probabilities and K indices per vector. {same} of {len(counted)} counted "
        "numbers of accesses equal the closed forms."
    )
    return tables.of(caption, header, lines)


def panel(ax: Any, rows: Sequence[Row], batch: int) -> None:
    """Draw the speeds of all series over the length of the vectors, for K = 5.

    Parameters
    ----------
    ax : Axes
        The panel.
    rows : sequence of Row
        Rows of the experiment.
    batch : int
        Number of vectors.
    """
    found = {at: ms for at, ms in times_of(rows).items() if at[1] == batch and at[3] == K}
    for series, label in LABELS.items():
        points = {at[2]: batch * at[2] / ms / 1e6 for at, ms in found.items() if at[0] == series}
        look = {"color": COLOURS[series], "ls": "--" if series == PEER else "-", "label": label}
        style.line(ax, dict(sorted(points.items())), marker="o", ms=4, **look)
    lengths = sorted({at[2] for at in found} - {V_OF_PAPER})
    style.sizes(ax, lengths, "vector length V (elements)", 2 if len(lengths) > 7 else 1)
    ax.set(ylim=(0, None), ylabel="speed (10⁹ elements/s)")
    ax.set_title(f"softmax and top {K} of {batch} vectors, fp32")
