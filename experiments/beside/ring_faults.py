"""Plants faults in a ring of processes, and checks that every rank ends with a clear error in time.

The command is `python -m experiments faults`. There is one process per GPU. Without several GPUs,
the processes use the emulator on the CPU, and gloo instead of NCCL. The faults are:

=========== =======================================================================================
fault       what happens
=========== =======================================================================================
dies        the last rank is killed before a call
dies-inside the last rank is killed in a call, when it would send its first message
hangs       the last rank never makes the call
lengths     the last rank has twice as many rows as the others
interrupted all ranks get the signal of Ctrl-C while they make calls
slow        the last rank makes its call seconds later; all ranks finish, and the rank is named
=========== =======================================================================================

With NCCL, ranks can wait for a dead rank on their GPUs, where Python cannot raise an error. torch
then ends the process with a message, after the timeout of the process group. Such a rank counts as
ended by a signal.
"""

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from .ring_ranks import slow_rank

FAULTS = ("dies", "dies-inside", "hangs", "lengths", "interrupted", "slow")
VICTIM_DIES = ("dies", "dies-inside", "hangs")  # the last rank has no outcome of its own
LIMIT = 120.0  # seconds in which every rank must end
TIMEOUT = 40.0  # seconds of the process group
LATE = 3.0  # seconds by which the slow rank is late
POLL = 0.1


@dataclass
class Outcome:
    """How one rank ended.

    Parameters
    ----------
    rank : int
        Number of the rank.
    seconds : float
        Seconds from the fault to the end of the call, or to the end of the process.
    error : str, default ""
        The error that the call raised, or the signal that ended the process. Empty if the call
        returned.
    named : str, default ""
        Text that names a slow rank.
    """

    rank: int
    seconds: float
    error: str = ""
    named: str = ""

    def __str__(self) -> str:
        said = self.error or self.named or "the call returned"
        return f"rank {self.rank}, after {self.seconds:.1f} s: {said[:200]}"


def run(fault: str, ranks: int, device: str, timeout: float = TIMEOUT) -> list[Outcome]:
    """Run `ranks` processes, plant a fault, and return how each rank ended.

    `device` is "cuda" or "cpu". `timeout` is the timeout of the process group, in seconds. A
    process that still runs after LIMIT seconds is killed, and the error of its outcome says so. For
    the faults in VICTIM_DIES, the outcome of the last rank is left out, because the fault itself
    kills or stops this rank.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (fault, ranks, device, timeout, folder)
        processes = [
            context.Process(target=_rank, args=(rank, *arguments), daemon=True)
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            _wait(lambda: len(list(Path(folder).glob("ready.*"))) == ranks, LIMIT, processes)
            begin = time.monotonic()
            if fault == "interrupted":
                for process in processes:
                    assert process.pid is not None  # the process has started
                    os.kill(process.pid, signal.SIGINT)
            watched = processes[:-1] if fault in VICTIM_DIES else processes
            ended: dict[int, float] = {}

            def all_ended() -> bool:
                for rank, process in enumerate(watched):
                    if process.exitcode is not None:
                        ended.setdefault(rank, time.monotonic() - begin)
                return len(ended) == len(watched)

            _wait(all_ended, LIMIT, ())
            return [
                _outcome(Path(folder), rank, process.exitcode, ended.get(rank))
                for rank, process in enumerate(watched)
            ]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _wait(done: Callable[[], bool], limit: float, processes: Sequence[Any]) -> None:
    """Wait until `done()` is true, one of `processes` has ended, or `limit` seconds have passed."""
    end = time.monotonic() + limit
    while not done() and time.monotonic() < end:
        if any(process.exitcode is not None for process in processes):
            return
        time.sleep(POLL)


def _outcome(folder: Path, rank: int, code: int | None, seconds: float | None) -> Outcome:
    """Return how a rank ended.

    Normally the rank has written its outcome to a file in `folder`. The content of this file is
    returned. Otherwise the outcome is made from the exit status of the process (`code`) and the
    time from the fault to the end of the process (`seconds`). Both are None if the process did not
    end.
    """
    written = folder / f"outcome.{rank}"
    if code is None or seconds is None:
        return Outcome(rank, LIMIT, f"did not end within {LIMIT:.0f} s")
    if written.exists():
        return Outcome(**json.loads(written.read_text("utf-8")))
    how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return Outcome(rank, seconds, how)


def problems(fault: str, outcomes: Sequence[Outcome]) -> list[str]:
    """Return what is wrong with the outcomes; an empty list if all ranks ended as they should.

    >>> problems("dies", [Outcome(0, 0.5, "RuntimeError: rank 0 of 2: not all ranks ...")])
    []
    >>> problems("lengths", [Outcome(0, 120.0, "did not end within 120 s"), Outcome(1, 0.1)])
    ['rank 0 did not end within 120 s', 'rank 1 returned in spite of the fault']
    """
    found = []
    for each in outcomes:
        if each.seconds >= LIMIT:
            found.append(f"rank {each.rank} {each.error}")
        elif fault == "slow" and each.error:
            found.append(f"rank {each.rank} failed: {each.error}")
        elif fault == "slow" and f"rank {len(outcomes) - 1} is slow" not in each.named:
            found.append(f"rank {each.rank} does not name the slow rank")
        elif fault == "lengths" and not (each.error == "" or "q must be equal" in each.error):
            found.append(f"rank {each.rank} does not say what differs: {each.error}")
        elif fault != "slow" and not each.error:
            found.append(f"rank {each.rank} returned in spite of the fault")
    return found


def _rank(
    rank: int, fault: str, ranks: int, device: str, timeout: float, folder: str
) -> None:  # fmt: skip
    """Run one rank, in a process of its own.

    The rank joins the process group, makes a correct call, and then the call with the fault. It
    writes its outcome to a file in `folder`. `timeout` is the timeout of the process group, in
    seconds.
    """
    import torch

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank,
        world_size=ranks, timeout=timedelta(seconds=timeout),
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )  # fmt: skip
    call = partial(_call, torch, device)
    call()
    torch.distributed.barrier()
    Path(folder, f"ready.{rank}").touch()
    begin, error, named = time.monotonic(), "", ""
    try:
        named = _with_fault(fault, call, rank, ranks) or ""
    except (Exception, KeyboardInterrupt) as raised:
        error = f"{type(raised).__name__}: {raised}"
    found = Outcome(rank, time.monotonic() - begin, error, named)
    writing = Path(folder, f"writing.{rank}")
    writing.write_text(json.dumps(asdict(found)), "utf-8")
    writing.replace(Path(folder, f"outcome.{rank}"))
    os._exit(0)  # torch's shutdown would wait for ranks that have ended


def _call(torch: Any, device: str, longer: int = 1) -> None:
    """Make a call of ring attention, and wait for the result.

    `longer` is a factor on the number of rows of this rank. All ranks must have equally many rows,
    so a factor other than 1 on a single rank is a fault.
    """
    from fa_numba.torch import ring_attention

    shape, dtype = (1, 1, 4 * longer, 8), torch.float32
    if device == "cuda":
        shape, dtype = (1, 16, 4096 * longer, 128), torch.float16
    x = torch.ones(shape, device=device, dtype=dtype)
    ring_attention(x, x, x, causal=True)
    if device == "cuda":
        torch.cuda.synchronize()


def _with_fault(fault: str, call: Callable[..., None], rank: int, ranks: int) -> str | None:
    """Do what this rank does under a fault: make the call, or fail in the way of the fault.

    The last rank fails. The other ranks make the call. For the fault "slow", return text that names
    the slow rank. Otherwise return None.
    """
    victim = rank == ranks - 1
    if fault == "interrupted":
        while True:
            call()
    if not victim:
        begin = time.monotonic()
        if fault == "slow":
            return _named(call, begin, ranks)
        call()
    elif fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "dies-inside":
        with _killing():
            call()
    elif fault == "hangs":
        time.sleep(2 * LIMIT)
    elif fault == "lengths":
        call(longer=2)
    elif fault == "slow":
        begin = time.monotonic()
        time.sleep(LATE)
        return _named(call, begin, ranks)
    return None


def _named(call: Callable[[], None], begin: float, ranks: int) -> str:
    """Make a call of ring attention on this rank, and return text that names a slow rank.

    `begin` is the time at which this rank began to prepare the call, in seconds of
    `time.monotonic`. The preparation ends when this function is called. After the call, the ranks
    exchange their preparation times. The text names the rank with the longest preparation. It is
    empty if this rank was not much slower than the median rank; see `slow_rank`. `ranks` is the
    number of ranks.
    """
    import torch

    every: list[Any] = [None] * ranks
    prepared = time.monotonic() - begin
    call()
    torch.distributed.all_gather_object(every, prepared)
    return slow_rank(every, "s to prepare a call")


@contextmanager
def _killing() -> Iterator[None]:
    """A context manager that kills this process when a call inside it sends its first message."""
    from fa_numba.ring.link import Link

    def exchange(*arguments: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    before = Link.exchange
    Link.exchange = exchange  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Link.exchange = before  # type: ignore[method-assign]


def check(faults: Sequence[str], ranks: int | None, say: Callable[[str], None]) -> int:
    """Plant faults, print how each rank ended, and return the exit status: 0 if all is well.

    `ranks` is the number of processes. None: one process per GPU, or 3 without several GPUs. Faults
    on GPUs are planted at the same time, each in processes of its own. ImportError is raised
    without torch.
    """
    import torch

    gpus = torch.cuda.device_count()
    ranks = ranks or (gpus if gpus > 1 else 3)
    device = "cuda" if gpus >= ranks else "cpu"
    say(f"{ranks} ranks, {'GPUs and NCCL' if device == 'cuda' else 'emulator and gloo'}")
    wrong = 0
    with ThreadPoolExecutor(len(faults) if device == "cuda" else 1) as pool:
        for fault, outcomes in zip(
            faults, pool.map(lambda fault: run(fault, ranks, device), faults), strict=True
        ):
            found = problems(fault, outcomes)
            wrong += bool(found)
            say(f"{fault}: {'; '.join(found) or 'as it should be'}")
            for each in outcomes:
                say(f"  {each}")
    return int(wrong > 0)
