"""Counters of a kernel: our names, Nsight Compute's names, and the emulator's numbers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..lab.measure import counters
from ..lab.measure.counters import Case, CountersError

Counts = Any  # emulator.Counts


@dataclass(frozen=True)
class Counter:
    """A number that both the hardware and the emulator count.

    Parameters
    ----------
    counted : callable
        Takes the emulator's counts and returns the number.
    names : tuple of str, default ()
        Names of the counter in Nsight Compute. The first name that exists on the GPU is used.
    opcodes : str, default ""
        Regular expression of opcodes. If given, Nsight Compute's number is the number of executed
        instructions with these opcodes.
    """

    counted: Callable[[Counts], int]
    names: tuple[str, ...] = ()
    opcodes: str = ""


def _traffic(space: str, kind: str, field: str) -> Callable[[Counts], int]:
    return lambda counts: getattr(counts.total(space=space, kind=kind), field)


def _memory(space: str, kind: str, field: str, *names: str) -> Counter:
    return Counter(_traffic(space, kind, field), tuple(f"{name}.sum" for name in names))


def _instructions(kind: str, opcodes: str) -> Counter:
    return Counter(lambda counts: counts.instructions[kind], opcodes=opcodes)


_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"
_REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op"
_SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op"


def _sass(name: str) -> str:
    """Return the middle part of the name of a counter that Nsight Compute counts in software.

    For such a counter, Nsight Compute adds counting instructions to the machine code (SASS).
    `name` is the name of the corresponding hardware counter, without a suffix such as ".sum". The
    complete name also has a prefix such as "smsp__".

    >>> _sass("l1tex__t_requests")
    'sass_l1tex_t_requests'
    """
    return f"sass_{name.replace('__', '_')}"


def _of_copies(name: str) -> tuple[str, ...]:
    """Return the possible names of a counter for cp.async, which differ between versions.

    In SASS, the instruction cp.async is called LDGSTS.
    """
    return f"smsp__{_sass(name)}_ldgsts", f"sm__{_sass(name)}_ldgsts", f"{name}_ldgsts"


def _shared_wavefronts(counts: Counts) -> int:
    """Return the wavefronts of loads and stores of shared memory, plus the number of shuffles.

    The hardware's counter includes shuffles, because they use the path of shared memory.
    """
    both = [counts.total(space="shared", kind=kind).wavefronts for kind in ("load", "store")]
    return sum(both) + counts.instructions["shuffle"]


def _sum(space: str, field: str, *kinds: str) -> Callable[[Counts], int]:
    by_kind = [_traffic(space, kind, field) for kind in kinds]
    return lambda counts: sum(number(counts) for number in by_kind)


# The emulator's kinds of access that the profiler counts as loads from L2 and as stores to L2.
READ, WRITTEN = ("load", "copy"), ("store", "atomic")


# A request is one instruction of a warp. ldmatrix counts as a load. Wavefronts are the steps of a
# shared-memory access, and conflicts are the wavefronts in addition to those that the bytes need.
# Global loads include copies. Sectors from L2 are counted as if L1 cached nothing.
COUNTERS = {
    "shared wavefronts": Counter(_shared_wavefronts, (f"{_WAVEFRONTS}.sum",)),
    "shared conflicts": Counter(
        _sum("shared", "conflicts", "load", "store"), (f"{_CONFLICTS}.sum",)
    ),
    "shared load wavefronts": _memory("shared", "load", "wavefronts", f"{_WAVEFRONTS}_op_ld"),
    "shared load conflicts": _memory("shared", "load", "conflicts", f"{_CONFLICTS}_op_ld"),
    "shared store wavefronts": _memory("shared", "store", "wavefronts", f"{_WAVEFRONTS}_op_st"),
    "shared store conflicts": _memory("shared", "store", "conflicts", f"{_CONFLICTS}_op_st"),
    "copy wavefronts": _memory("shared", "copy", "wavefronts", *_of_copies(f"{_WAVEFRONTS}_op")),
    "copy conflicts": _memory("shared", "copy", "conflicts", *_of_copies(f"{_CONFLICTS}_op")),
    "global load requests": Counter(_sum("global", "requests", *READ), (f"{_REQUESTS}_ld.sum",)),
    "global load sectors": Counter(_sum("global", "sectors", *READ), (f"{_SECTORS}_ld.sum",)),
    "global store requests": _memory("global", "store", "requests", f"{_REQUESTS}_st"),
    "global store sectors": _memory("global", "store", "sectors", f"{_SECTORS}_st"),
    "copy requests": _memory("global", "copy", "requests", *_of_copies(_REQUESTS)),
    "copy sectors": _memory("global", "copy", "sectors", *_of_copies(_SECTORS)),
    "atomic requests": _memory("global", "atomic", "requests", f"{_REQUESTS}_red"),
    "atomic sectors": _memory("global", "atomic", "sectors", f"{_SECTORS}_red"),
    "sectors from L2": Counter(_sum("global", "sectors", *READ), (counters.L2_READ,)),
    "sectors to L2": Counter(_sum("global", "sectors", *WRITTEN), (counters.L2_WRITE,)),
    "load instructions": _instructions("load", r"LDS|LDSM|LDG|LD"),
    "store instructions": _instructions("store", r"STS|STG|ST"),
    "copy instructions": _instructions("copy", r"LDGSTS"),
    "atomic instructions": _instructions("atomic", r"RED|REDG|ATOM|ATOMG"),
    "mma instructions": _instructions("mma", r"HMMA"),
    "fma instructions": _instructions("fma", r"FFMA"),
    "exp instructions": _instructions("exp", r"MUFU\.EX2"),
    "shuffle instructions": _instructions("shuffle", r"SHFL"),
    "barrier instructions": _instructions("barrier", r"BAR"),
}
# Counters that every GPU has. If these fail, counting fails.
CERTAIN = (*counters.TRAFFIC, f"{_WAVEFRONTS}.sum", f"{_CONFLICTS}.sum")


def counted(counts: Counts) -> dict[str, int]:
    """Return the emulator's numbers as {name of a counter in COUNTERS: number}."""
    return {name: counter.counted(counts) for name, counter in COUNTERS.items()}


def chosen(known: set[str] | None) -> dict[str, str]:
    """Return the counters that exist on the GPU, as {our name: Nsight Compute's name}.

    `known` contains the names that Nsight Compute lists for the GPU, without suffixes such as
    ".sum". A counter exists if its name is in `known`. In two cases, all counters are assumed to
    exist:

    - `known` is None: Nsight Compute gave no list.
    - `known` contains no name with "sass". The list is then incomplete, because some versions of
      Nsight Compute do not list these counters (see `_sass`).
    """
    if known is not None and not any("__sass_" in name for name in known):
        known = None

    def have(metric: str) -> bool:
        return known is None or metric.partition(".")[0] in known

    first = {name: next(filter(have, counter.names), None) for name, counter in COUNTERS.items()}
    return {name: metric for name, metric in first.items() if metric is not None}


def usable(case: Case, say: Callable[[str], None]) -> dict[str, str]:
    """Return the counters that Nsight Compute can count here, as {our name: Nsight Compute's name}.

    The call `case` is counted to find out. Counters that fail are left out, and `say` prints their
    names. Raise CountersError if even the counters in CERTAIN fail.
    """
    names = chosen(counters.available_metrics())
    result: dict[str, float] | str | None = None
    while result is None:
        metrics = list(dict.fromkeys((*counters.TRAFFIC, *names.values())))
        try:
            (result,) = counters.count([case], metrics)
        except CountersError as error:
            refused = {name for name, metric in names.items() if _named(metric, str(error))}
            if not refused:
                refused = {name for name, metric in names.items() if metric not in CERTAIN}
                say(f"  {error}")
            if not refused:
                raise
            names = {name: metric for name, metric in names.items() if name not in refused}
    if isinstance(result, str):
        raise CountersError(result)
    if dropped := {name for name, counter in COUNTERS.items() if counter.names} - set(names):
        say(f"  Nsight Compute has no counter here of: {', '.join(sorted(dropped))}")
    return names


def _named(metric: str, text: str) -> bool:
    base = re.escape(metric.removesuffix(".sum"))
    return re.search(rf"\b{base}(\.|\b)", text) is not None


def executed(opcodes: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of executed warp instructions as {name of a counter: number}.

    The counters are those in COUNTERS that count instructions, such as "mma instructions".
    `opcodes` maps an opcode to its number of executions.
    """
    return {
        name: sum(
            n for op, n in opcodes.items() if re.fullmatch(rf"({counter.opcodes})(\..*)?", op)
        )
        for name, counter in COUNTERS.items()
        if counter.opcodes
    }


Numbers = list[dict[str, float] | str]


def profiled(
    cases: Sequence[Case], names: Mapping[str, str], say: Callable[[str], None]
) -> tuple[Numbers, Numbers]:
    """Profile the cases with Nsight Compute, and return two lists with one entry for each case.

    An entry of the first list maps Nsight Compute's names of counters to values. An entry of the
    second list maps our names to numbers of executed instructions. For a case that failed, the
    entry is text with the reason instead. `names` maps our names of counters to Nsight Compute's
    names. `say` prints a line.
    """
    say(f"  Nsight Compute: {len(cases)} calls, {len(names)} counters")
    metrics = list(dict.fromkeys((*counters.TRAFFIC, *names.values())))
    numbers = _tried(counters.count, cases, metrics, say=say)
    found = _tried(counters.count_opcodes, cases, say=say)
    classes = [each if isinstance(each, str) else executed(each) for each in found]
    return numbers, classes


def _tried(
    count: Callable[..., Numbers], cases: Sequence[Case], *given: Any, say: Callable[[str], None]
) -> Numbers:
    try:
        return count(cases, *given)
    except CountersError as error:
        say(f"  {error}")
        return [f"failed: {error}"] * len(cases)


def ratio(measured: float | None, count: float | None) -> float | None:
    """Return the measured number divided by the counted number.

    | case | result |
    |---|---|
    | a number is missing | None |
    | both numbers are 0 | 1 |
    | only the counted number is 0 | infinity |
    """
    if measured is None or count is None:
        return None
    if measured == count:
        return 1.0
    return measured / count if count else float("inf")
