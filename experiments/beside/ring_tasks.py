"""The calls that the experiment `ring` times, in the order of their importance.

A run may be cut short. The calls that the page's conclusions need are therefore timed first:

===== =========================================================================================
level calls
===== =========================================================================================
0     the link between GPUs and the kernel that merges results, on all GPUs
1     N=128k, forward, not causal, on all GPUs: both loop orders, one GPU, torch's ring with cuDNN
2     the series of level 1 in the other passes and masks at N=128k
3     the series of level 1 at the other lengths from 32k to 256k. One GPU alone also at shorter
      lengths, because the model needs these times
4     the calls of levels 0 to 3 on fewer GPUs. The series that runs on one GPU is left out,
      because its time does not depend on the number of other GPUs
5     profiles of both loop orders on all GPUs: each rank's busy time, hidden copies
6     all remaining calls on all GPUs: other series, longer and shorter sequences
7     all remaining calls on fewer GPUs
===== =========================================================================================
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ..lab.record import Options, Row
from .ring_ranks import CP_CUDNN, KV, LINK, MERGE, ONE, OURS, SERIES, Q, Task

SEQLENS = tuple(2**n for n in range(13, 21))  # 8k to 1M
SHORTEST = 4096  # shortest sequence of one GPU alone
PASSES = ("fwd", "fwd+bwd")
# The longest sequence at which all series are timed. Longer ones take minutes or too much memory.
LONGEST = 2**18
ALONE = 2**20  # longest sequence of the forward pass in which K and V travel
FILLS = 2**15  # From this number of rows on, the part of one rank fills a GPU.
GOAL = 2**17  # length of the main comparison
PROFILED = (FILLS, GOAL)
MAIN = (KV, Q, ONE, CP_CUDNN)
GOAL_REPEATS = 5  # least number of timed calls of these series at the length GOAL
SIZES = (2, 4, 8)  # numbers of GPUs, besides all GPUs of the host


def sizes(gpus: int) -> list[int]:
    """Return the numbers of GPUs to measure on a host, the largest number first.

    >>> sizes(4), sizes(3), sizes(1)
    ([4, 2], [3, 2], [])
    """
    return sorted({n for n in (*SIZES, gpus) if 2 <= n <= gpus}, reverse=True)


def tasks(options: Options, gpus: int) -> list[Task]:
    """Return the calls to time, the most important call first.

    Lengths that cannot be divided evenly among the GPUs are left out. Calls that would take minutes
    or too much memory are left out too. A call on one GPU alone occurs once, as a task with `ranks`
    equal to `gpus`.
    """
    lengths = SEQLENS[:1] if options.quick else SEQLENS
    halves = () if options.quick else (SHORTEST, *(N // 2 for N in lengths))
    found = []
    for ranks in sizes(gpus):
        found.append(Task(LINK, 0, False, "fwd", 20, ranks))
        found.append(Task(MERGE, 2**17, False, "fwd", 20, ranks))
        kinds = itertools.product((False, True), PASSES, SERIES, sorted({*lengths, *halves}))
        for causal, pass_, series, N in kinds:
            alone = series == ONE
            last = series == KV and pass_ == "fwd" and N <= ALONE
            if (
                (ranks == gpus if alone else N in lengths)
                and (N <= LONGEST or last)
                and N % (2 * ranks) == 0
            ):
                found.append(Task(series, N, causal, pass_, repeats(N, series), ranks))
        if ranks == gpus:
            kinds = itertools.product((False, True), PASSES, OURS, PROFILED)
            found += [
                Task(series, N, causal, pass_, 1, ranks, profiled=True)
                for causal, pass_, series, N in kinds
                if N in lengths and N % (2 * ranks) == 0
            ]
    return sorted(found, key=lambda task: importance(task, gpus))


def repeats(N: int, series: str = "") -> int:
    """Return how many times a call of a series with N rows is timed."""
    if N >= 2**20:
        return 1
    fewest = GOAL_REPEATS if N == GOAL and series in MAIN else 2
    return max(fewest, min(20, 2**18 // N))


def importance(task: Task, gpus: int) -> tuple[int, ...]:
    """Return the sort key of a task. More important tasks have smaller keys.

    The first number is the level, from the table in the docstring of this module. `gpus` is the
    number of GPUs of the host.
    """
    N, order = task.seqlen, (LINK, MERGE, *MAIN, *SERIES)
    goal = N == GOAL and task.pass_ == "fwd" and not task.causal
    main = task.series in MAIN and FILLS <= N <= LONGEST
    level = 6
    if task.profiled:
        level = 5
    elif task.series in (LINK, MERGE):
        level = 0
    elif main:
        level = 1 if goal else 2 if N == GOAL else 3
    elif task.series == ONE:
        level = 3
    if task.ranks < gpus:
        level = 4 if level < 5 else 7
    kind = task.pass_ != "fwd", task.causal
    far = abs(N.bit_length() - GOAL.bit_length()) if N else 0
    return level, -task.ranks, far, *map(int, kind), order.index(task.series)


def missing(tasks: Iterable[Task], stored: Collection[Row]) -> list[Task]:
    """Return the tasks without a stored number. Tasks whose measurement failed come last."""
    wanted = [row for row in stored if row.metric in ("time", "hidden_copies")]
    known = {_named(row) for row in wanted if not row.failed}
    failed = {_named(row) for row in wanted if row.failed}
    found = [(task, _names(task)) for task in tasks]
    left = [(task, names) for task, names in found if not names & known]
    return [task for task, _ in sorted(left, key=lambda each: bool(each[1] & failed))]


def _named(row: Row) -> tuple[object, ...]:
    return row.metric, row.series, row.seqlen_q, row.causal, row.pass_, row.place


def _names(task: Task) -> set[tuple[object, ...]]:
    """Return the identifiers of the rows that a task would give.

    An identifier is a tuple that `_named` returns for a row. If a stored row has one of the
    returned identifiers, the task has been measured. Usually there is one identifier. For a call on
    one GPU alone there are several, one for each number of ranks that a run may have. The time of
    such a call does not depend on the number of ranks, so a row of any run is enough.
    """
    metric = "hidden_copies" if task.profiled else "time"
    ranks = {*SIZES, task.ranks} if task.series == ONE else {task.ranks}
    problem = task.series, max(1, task.seqlen), task.causal, task.pass_
    return {(metric, *problem, place(n)) for n in ranks}


def place(ranks: int) -> str:
    """Return the beginning of a row's note, which names the number of ranks."""
    return f"{ranks} ranks"


class Group(NamedTuple):
    """Neighbouring tasks that run in the same processes, on `ranks` GPUs.

    Profiled tasks have processes of their own, because a profiler can slow down later calls.
    """

    ranks: int
    tasks: Sequence[Task]


def groups(tasks: Sequence[Task]) -> list[Group]:
    """Return the tasks in their order, as groups of neighbouring tasks.

    All tasks of a group have the same number of GPUs. They are either all profiled or all timed.
    """
    neighbours = itertools.groupby(tasks, lambda task: (task.ranks, task.profiled))
    return [Group(ranks, list(each)) for (ranks, _), each in neighbours]
