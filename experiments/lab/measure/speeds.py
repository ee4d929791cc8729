"""Measures speed over sequence length for the problems of the FA-2 paper's benchmark.

A `Study` says what an experiment measures, and the function `measure` measures it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from fa_numba.problem import Problem

from ..record import Bench, Options, Row
from . import bandwidth, peers, variants
from .series import (
    DETERMINISTIC,
    HOPPER_FA1,
    HOPPER_SPLITS,
    MMA_SPLITS,
    SPLITS,
    by_planes,
    query_splits,
)
from .timing import SECONDS, attempt
from .variants import Variant
from .workloads import HEAD_DIMS, SEQLENS, fa2_setting

PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}
RARE_SEQLENS = (1024, 16384)  # for series that take seconds to compile
DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# Series that are measured in one pass only. UNSPLIT: series with splits -> series without splits.
_ONLY_IN = {SPLITS: "fwd", DETERMINISTIC: "bwd"}
UNSPLIT = {SPLITS: "fa1-simt", MMA_SPLITS: "fa1-mma", HOPPER_SPLITS: HOPPER_FA1}


@dataclass(frozen=True)
class Study:
    """The dtype, passes, series and sequence lengths that one speed experiment measures.

    Parameters
    ----------
    name : str
        Name of the experiment.
    dtype : str
        Dtype of the problems.
    passes : tuple of str
        Passes: "fwd", "bwd" or "fwd+bwd".
    ours, theirs : tuple of str
        Our series, and torch's series.
    fa1_longest : int, optional
        Longest sequence at which passes of FA-1 with gradients are measured. None: no limit.
    forward_dims : tuple of int, default ()
        Further head dimensions, at which only the forward pass is measured.
    figures : tuple of str, default ()
        Figures of the FA-2 paper that show the same quantities, such as "Fig. 5".
    seqlens : tuple of int
        Sequence lengths.
    rarely : tuple of str, default ()
        Further series of other libraries, which are measured forward, at the lengths RARE_SEQLENS
        and at the head dimensions of all passes. They are not in the figure.
    """

    name: str
    dtype: str
    passes: tuple[str, ...]
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    fa1_longest: int | None = None
    forward_dims: tuple[int, ...] = ()
    figures: tuple[str, ...] = ()
    seqlens: tuple[int, ...] = SEQLENS
    rarely: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """Return all series, ours first."""
        return (*self.ours, *self.theirs)

    @property
    def drawn(self) -> tuple[str, ...]:
        """Return the series of the figure: all except those that split float32 into planes.

        A table shows the series with planes.
        """
        return tuple(series for series in self.series if not by_planes(series))

    def passes_of(self, series: str) -> tuple[str, ...]:
        """Return the passes in which a series is measured.

        Parameters
        ----------
        series : str
            Name of the series. Some series are measured in one pass only. Series with 16-bit planes
            are not measured in "fwd+bwd".

        Returns
        -------
        tuple of str
            Passes of the study.
        """
        only = _ONLY_IN.get(series)
        passes = (p for p in self.passes if only in (None, p))
        return tuple(p for p in passes if not by_planes(series) or p != "fwd+bwd")

    def at(self, problem: Problem, pass_: str) -> list[str]:
        """Return the series that are measured for a problem in a pass.

        Parameters
        ----------
        problem : Problem
            The problem.
        pass_ : str
            The pass.

        Returns
        -------
        list of str
            Names of series. Series of other libraries are left out if they cannot run here.
            `peers.UNFUSED_MASKED` is measured with a causal mask only.
        """
        if pass_ != "fwd" and problem.head_dim in self.forward_dims:
            return []
        shown = (*self.ours, *peers.here(self.theirs))
        plain = problem.head_dim not in self.forward_dims
        if pass_ == "fwd" and plain and problem.seqlen_q in RARE_SEQLENS:
            shown += peers.here(self.rarely)
        long = self.fa1_longest is not None and problem.seqlen_q > self.fa1_longest
        return [
            series
            for series in shown
            if pass_ in self.passes_of(series)
            and (problem.causal or series != peers.UNFUSED_MASKED)
            and not (long and pass_ != "fwd" and series.startswith("fa1"))
        ]


def measure(study: Study, options: Options, bench: Bench) -> Iterator[Row]:
    """Measure a study: time, speed and error of each call, and peak memory of forward calls.

    Results are checked before they are timed.

    Parameters
    ----------
    study : Study
        What to measure.
    options : Options
        The user's choices.
    bench : Bench
        Where the experiment runs.

    Yields
    ------
    Row
        Rows of time, speed, error and memory. If torch is installed, also the speed of torch's
        matrix product.
    """
    beyond = [
        N
        for N in _lengths(study, options)
        if study.fa1_longest is not None and N > study.fa1_longest
    ]
    if beyond:
        bench.say(
            f"  FA-1 is not measured at N={', '.join(map(str, beyond))}, because one thread block "
            f"per head is too slow in its backward pass beyond N={study.fa1_longest}"
        )
    peers.say_missing(bench.say)
    if peers.available():
        yield from bandwidth.matmul_peak(study.name, study.dtype, bench.machine)
    multiprocessors = bench.describe["multiprocessors"]
    work = [
        (problem, list(_calls(study, problem, multiprocessors)))
        for problem in _cases(study, options)
    ]
    yield from variants.times(study.name, work, bench, SECONDS, memory=True)


def peer_calls(study: Study, options: Options) -> Iterator[list[tuple[str, str, Problem]]]:
    """Yield groups of calls that compile for seconds, as the runner's module peers_ahead runs them.

    A call is a series, a pass and a problem. A kernel of flash-attn-4 serves all sequence lengths.
    flex_attention compiles for each length.
    """
    for problem in _cases(study, options):
        slow = [peers.FLEX_TRITON, peers.FLEX_FLASH]
        if problem.seqlen_q == _lengths(study, options)[0]:
            slow.append(peers.FA4)
        for series in slow:
            group = [(series, p, problem) for p in study.passes if series in study.at(problem, p)]
            if group:
                yield group


def _lengths(study: Study, options: Options) -> tuple[int, ...]:
    """Return the sequence lengths that are measured."""
    return options.seqlens or (study.seqlens[:2] if options.quick else study.seqlens)


def _cases(study: Study, options: Options) -> list[Problem]:
    """Return the problems that are measured."""
    make, few = partial(fa2_setting, dtype=study.dtype), options.quick
    dims = (*HEAD_DIMS, *study.forward_dims)[: 1 if few else None]
    return options.grid(make, _lengths(study, options), dims, (False, True)[: 2 - few])


def _calls(study: Study, problem: Problem, multiprocessors: int) -> Iterator[Variant]:
    """Yield the calls of a problem that a study measures, for each pass and series.

    The calls of FA-1 with query splits need a number of splits, which this function chooses. For
    the pass "fwd+bwd", it is the best number for the backward pass alone. If planning fails, the
    call is yielded without the option `query_splits`.
    """
    for pass_ in study.passes:
        for series in study.at(problem, pass_):
            own = Variant(series, passes=pass_)
            if fa1 := UNSPLIT.get(series):
                of = "fwd" if pass_ == "fwd" else "bwd"
                splits, failure = attempt(query_splits, problem, multiprocessors, fa1, of)
                own = own if failure else variants.splits_of(fa1, splits, pass_)
            yield own
