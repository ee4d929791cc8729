"""The processes of the experiment `ring`, one per GPU, and the function that starts them."""

import contextlib
import datetime
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..lab.measure.check import PEER_BOUND, ROUNDING, WrongResult
from ..lab.measure.timing import attempt
from ..lab.record import ran
from . import ring_spans

# Series: one GPU that computes the complete problem, our two loop orders, and other methods.
ONE, KV, Q, ULYSSES = "one-gpu", "ring-kv", "ring-q", "ulysses"
CP_FLASH, CP_CUDNN = "torch-cp-fa2", "torch-cp-cudnn"
OURS = (KV, Q)
SERIES = (ONE, *OURS, ULYSSES, CP_FLASH, CP_CUDNN)
HEADS, HEAD_DIM = 16, 128
CHECKED = 512  # rows of each rank in the call that is checked against float64
LINK, MERGE = "link", "merge"
LINK_BYTES = 2**29
_BACKENDS = {CP_FLASH: "FLASH_ATTENTION", CP_CUDNN: "CUDNN_ATTENTION"}
# Seconds between two checks for new results.
POLL = 0.5
# If a collective operation waits this long, a rank has failed, and torch ends the waiting ranks.
TIMEOUT = datetime.timedelta(seconds=90)
# If no rank makes progress for this many seconds, all ranks are ended.
HUNG = 110.0
# A rank is slow if it needs this many times as long as the median rank.
SLOW, NOTED = 1.2, 2.0  # seconds below NOTED are not compared


@dataclass(frozen=True)
class Task:
    """One call to time: a series, and a problem of `seqlen` rows in total over all ranks.

    `causal` says whether the mask is causal, and `pass_` is "fwd" or "fwd+bwd". The call is timed
    `repeats` times on `ranks` GPUs. If the series is LINK, the link between the GPUs is timed
    instead of a call. If the series is MERGE, the kernel that merges results is timed. If
    `profiled` is true, nothing is timed: a profiler records the kernels and copies of the call.
    """

    series: str
    seqlen: int
    causal: bool
    pass_: str
    repeats: int
    ranks: int = 2
    profiled: bool = False


@dataclass
class Found:
    """The result of one task, on which all ranks agree.

    Parameters
    ----------
    index : int
        Number of the task.
    samples : list of float
        Milliseconds of each repeat, on the slowest rank. Empty if the task failed.
    sent : int, default 0
        Bytes sent by the rank that sends most.
    memory : float, default 0.0
        Peak memory in MiB of the rank that needs most.
    failure : str, default ""
        Why the task failed.
    busy : list of float
        For a profiled task: milliseconds in which each rank's GPU computed.
    hidden : list of float
        For a profiled task: share of each rank's copying time in which its GPU computed.
    slow : str, default ""
        Names a rank that is much slower than the others, if there is one.
    ran : dict
        Kernels that the first rank has launched so far, as `ran.Collected.of` returns them.
    """

    index: int
    samples: list[float]
    sent: int = 0
    memory: float = 0.0
    failure: str = ""
    busy: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)
    slow: str = ""
    ran: dict[str, Any] = field(default_factory=dict)


def run(tasks: Sequence[Task], ranks: int) -> Generator[Found]:
    """Time tasks in `ranks` processes of this host, one process per GPU.

    Yield the result of each task as soon as it is known. If the processes fail, the task at which
    they failed gets a result with the reason. New processes then continue with the next task. If
    the processes fail twice in a row before they have a result, all remaining tasks get results
    with the reason. The processes end when the caller stops the iteration.
    """
    done, useless = 0, 0
    while done < len(tasks):
        begin, failure = done, ""
        for found in _started(tasks[begin:], ranks):
            if found.failure.startswith(ENDED):
                failure = found.failure.removeprefix(ENDED)
                break
            yield replace(found, index=done)
            done += 1
        if not failure:
            continue
        useless = useless + 1 if done == begin else 0
        last = len(tasks) if useless == 2 else done + 1
        for n in range(done, last):
            yield Found(n, [], failure=failure)
        done = last


# Beginning of the failure with which `_started` says that the processes have ended.
ENDED = "ended: "


def _started(tasks: Sequence[Task], ranks: int) -> Iterator[Found]:
    """Start the processes, and yield the results of the tasks.

    If the processes end too early, the last result has a failure that begins with ENDED.
    """
    from torch import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "found"
        arguments = ranks, f"{folder}/store", list(tasks), str(results)
        begun, failure = attempt(
            multiprocessing.spawn, _rank, arguments, nprocs=ranks, join=False, daemon=True
        )
        seen, watch = 0, Watch(results, ranks)
        try:
            ended = begun is None
            while not ended:
                ended, failure = attempt(begun.join, POLL)
                for found in _lines(results)[seen:]:
                    seen += 1
                    ran.tell(found.ran)
                    yield found
                if failure or watch.hung():
                    failure = failure or f"failed: no rank has made progress for {HUNG:.0f} s"
                    failure += watch.late()
                    ended = True
        finally:
            for process in begun.processes if begun is not None else ():
                process.kill()
    if seen < len(tasks):
        yield Found(seen, [], failure=ENDED + (failure or "failed: no rank has said why"))


class Watch:
    """Reads how far each rank has come, from a file that the rank writes.

    The ranks synchronise at certain points of a task. At each such synchronisation point, a rank
    appends one byte to its file. The size of the file is therefore the number of points that the
    rank has reached.

    Parameters
    ----------
    results : Path
        File of the results. The ranks' files have the same name and the number of the rank.
    ranks : int
        Number of ranks.
    """

    def __init__(self, results: Path, ranks: int) -> None:
        self.files = [own_file(results, rank) for rank in range(ranks)]
        self.before: list[int] = []
        self.since = time.monotonic()

    def steps(self) -> list[int]:
        """Return how many synchronisation points each rank has reached so far."""
        return [path.stat().st_size if path.exists() else 0 for path in self.files]

    def hung(self) -> bool:
        """Return whether no rank has made progress for HUNG seconds."""
        now = self.steps()
        if now != self.before:
            self.before, self.since = now, time.monotonic()
        return time.monotonic() - self.since > HUNG

    def late(self) -> str:
        """Return text that names the ranks which are behind the others; empty if none is."""
        steps = self.steps()
        behind = [str(rank) for rank, n in enumerate(steps) if n < max(steps)]
        if not behind:
            return ""
        which = f"rank {behind[0]} was" if len(behind) == 1 else f"ranks {', '.join(behind)} were"
        return f"; {which} behind the other ranks"


def own_file(results: Path | str, rank: int) -> Path:
    """Return the path of the file to which a rank appends a byte at each synchronisation point.

    `results` is the path of the file with the results of the tasks.
    """
    return Path(f"{results}.{rank}")


def slow_rank(values: Sequence[float], what: str) -> str:
    """Return text that names the slowest rank, if it is slower than SLOW times the median rank.

    `values` are the times of the ranks. `what` contains the unit and what was timed.

    >>> slow_rank([2.0, 2.1, 3.0, 2.0], "ms for a call on one GPU")
    'rank 2 is slow: 3 ms for a call on one GPU, the median rank 2.05'
    >>> slow_rank([2.0, 2.1, 2.2, 2.0], "ms for a call on one GPU")
    ''
    """
    most, median = max(values, default=0.0), statistics.median_low(values) if values else 0.0
    if len(values) > 2:
        median = statistics.median(values)
    if most <= SLOW * median:
        return ""
    named = f"rank {list(values).index(most)} is slow: {most:.4g} {what}"
    return f"{named}, the median rank {median:.4g}"


def _lines(results: Path) -> list[Found]:
    """Return the results that the first rank has written so far.

    An incomplete last line is left out.
    """
    if not results.exists():
        return []
    whole = results.read_text("utf-8").rpartition("\n")[0]
    return [Found(**json.loads(line)) for line in whole.splitlines()]


def _rank(rank: int, ranks: int, store: str, tasks: Sequence[Task], results: str) -> None:
    """Run all tasks in one process, together with the other ranks.

    `store` is a file by which the ranks find each other. Rank 0 appends each result to the file
    `results`.
    """
    import torch
    from torch import distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=TIMEOUT,
        device_id=device,
    )  # fmt: skip
    bench = _Bench(rank, ranks, device, own_file(results, rank))
    with ran.collecting() as collected:
        for index, task in enumerate(tasks):
            found = bench.found(index, task)
            if rank == 0:
                found.ran = collected.of("gpu")
                with open(results, "a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
    dist.destroy_process_group()


class _Failed(Exception):
    """Raised on every rank if a task fails on one of them. The message is the reason."""


class _Bench:
    """The calls, checks and timings of tasks on one rank, which has one GPU."""

    def __init__(self, rank: int, ranks: int, device: Any, progress: Path) -> None:
        import torch

        self.torch, self.dist = torch, torch.distributed
        self.rank, self.ranks, self.device = rank, ranks, device
        self.flushed = torch.empty(2**28, device=device)
        self.passed: set[tuple[str, bool, str]] = set()
        self.mesh = None
        self.progress, self.slow = progress, ""

    def found(self, index: int, task: Task) -> Found:
        """Check the result of a task's call on a short problem, and then time the call itself.

        A call with a series, mask and pass that was checked before is not checked again. For a
        profiled task, the call is profiled instead of timed. All ranks return equal results.
        """
        self.slow = ""
        try:
            with self._all(self._within, task.series, task.causal):
                if task.series in SERIES:
                    self._check(task)
                self.torch.cuda.empty_cache()
                call = self._all(self._call, task)
                if task.profiled:
                    busy, hidden = self._profiled(call)
                    slow = slow_rank(busy, "ms of computing in a call") or self.slow
                    return Found(index, [], busy=busy, hidden=hidden, slow=slow)
                times, sent, memory = self._timed(call, task)
                return Found(index, times, sent, memory, slow=self.slow)
        except _Failed as error:
            return Found(index, [], failure=str(error), slow=self.slow)

    def _all(self, work: Callable[..., Any], *given: Any) -> Any:
        """Call the function `work` on this rank, and return the result.

        Every rank must call this method at the same point. If `work` fails on one rank, all ranks
        raise _Failed. If the slowest rank keeps the other ranks waiting, text that names the rank
        is stored in `slow`.
        """
        begin = time.monotonic()
        result, failure = attempt(work, *given)
        every: list[Any] = [None] * self.ranks
        own = failure, time.monotonic() - begin
        with open(self.progress, "ab") as file:
            file.write(b".")
        self.dist.all_gather_object(every, own)
        seconds = [each for _, each in every]
        if max(seconds) > NOTED:
            self.slow = self.slow or slow_rank(seconds, "s to prepare a call")
        if why := next((f"{each} (rank {n})" for n, (each, _) in enumerate(every) if each), ""):
            raise _Failed(why)
        return result

    def _call(self, task: Task) -> Callable[[], Any]:
        torch = self.torch
        if task.series == LINK:
            return self._exchange()
        rows = task.seqlen if task.series == ONE else task.seqlen // self.ranks
        generator = torch.Generator(self.device).manual_seed(self.rank)
        shape = (1, HEADS, rows, HEAD_DIM)
        arrays = [
            torch.randn(shape, device=self.device, generator=generator, dtype=torch.float16)
            for _ in range(3 if task.pass_ == "fwd" else 4)
        ]
        if task.series == MERGE:
            return self._merge(arrays)
        return self._attention(task.series, task.causal, task.pass_, arrays)

    def _exchange(self) -> Callable[[], Any]:
        from fa_numba.ring.link import Link

        torch, link = self.torch, Link(None)
        sent, received = (
            torch.zeros(LINK_BYTES, dtype=torch.uint8, device=self.device) for _ in range(2)
        )
        return lambda: link.exchange((sent,), (received,)).wait()

    def _merge(self, arrays: Sequence[Any]) -> Callable[[], Any]:
        from fa_numba.ring.parts import Kind, Part, Sum

        rows = 0, arrays[0].shape[2]
        lse = self.torch.zeros(arrays[0].shape[:3], device=self.device)
        x, y = (Part([z], lse.clone()) for z in arrays[:2])
        into = Sum(Kind("bhnd", x.tensors, lse=True), rows, wide=False)
        into.take(x, rows)
        return lambda: into.take(y, rows)

    def _attention(
        self, series: str, causal: bool, pass_: str, arrays: Sequence[Any]
    ) -> Callable[[], Any]:
        torch = self.torch
        forward = self._forward(series, causal)

        def run() -> Any:
            if pass_ == "fwd":
                with torch.no_grad():
                    return (forward(*arrays[:3]),)
            leaves = [x.detach().requires_grad_() for x in arrays[:3]]
            forward(*leaves).backward(arrays[3])
            return tuple(x.grad for x in leaves)

        return run

    def _forward(self, series: str, causal: bool) -> Callable[..., Any]:
        torch = self.torch
        import fa_numba.torch as ours

        if series == ONE:
            return lambda q, k, v: ours.attention(q, k, v, causal=causal)
        if series in OURS:
            travels = series.removeprefix("ring-")
            return lambda q, k, v: ours.ring_attention(q, k, v, travels=travels, causal=causal)
        if series == ULYSSES:
            exchange = _all_to_all(torch)

            def run(q: Any, k: Any, v: Any) -> Any:
                whole = (exchange(x, True) for x in (q, k, v))
                return exchange(ours.attention(*whole, causal=causal), False)

            return run
        return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal
        )

    def _within(self, series: str, causal: bool) -> Any:
        """Return the context manager in which the calls of a series run.

        For torch's series, it switches on torch's context parallelism. With a causal mask, torch
        then divides the sequence in a zigzag. For other series, the context manager does nothing.
        """
        if series not in _BACKENDS:
            return contextlib.nullcontext()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import _attention as theirs
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if self.mesh is None:
            self.mesh = init_device_mesh(self.device.type, (self.ranks,))
        theirs._cp_options.enable_load_balance = causal
        # The parts are split already, but torch requires a tensor to split.
        some = self.torch.zeros(1, 1, 256 * self.ranks, 1, device=self.device)
        stack = contextlib.ExitStack()
        stack.enter_context(
            theirs.context_parallel(
                self.mesh, buffers=[some], buffer_seq_dims=[2], no_restore_buffers={some}
            )
        )
        stack.enter_context(sdpa_kernel(getattr(SDPBackend, _BACKENDS[series])))
        return stack

    def _timed(self, call: Callable[[], Any], task: Task) -> tuple[list[float], int, float]:
        from fa_numba import device as own
        from fa_numba.ring import count_link

        torch, dist = self.torch, self.dist

        def once() -> tuple[int, float]:
            torch.cuda.reset_peak_memory_stats()
            with own.track_memory() as workspace, count_link() as moved:
                call()
                torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - self.flushed.nbytes
            return moved.sent, (peak + workspace.peak_bytes) / 2**20

        first = self._all(once)
        if task.repeats > 2:
            call()
        times = []
        for _ in range(task.repeats):
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # Flush the L2 cache. The host prepares the call while the GPU flushes.
            self.flushed.zero_()
            self.flushed.zero_()
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        by_rank = self._gathered([*times, *first])
        if task.series == ONE:  # the ranks do not wait for each other
            medians = [statistics.median(each[:-2]) for each in by_rank]
            self.slow = slow_rank(medians, "ms for a call on one GPU") or self.slow
        *times, sent, memory = map(max, zip(*by_rank, strict=True))
        return times, int(sent), memory

    def _gathered(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return a list with the `numbers` of each rank, after every rank has called the method."""
        own = self.torch.tensor(numbers, dtype=self.torch.float64, device=self.device)
        every = [self.torch.empty_like(own) for _ in range(self.ranks)]
        self.dist.all_gather(every, own)
        return [each.tolist() for each in every]

    def _profiled(self, call: Callable[[], Any]) -> tuple[list[float], list[float]]:
        """Profile a call. Return two lists with one number for each rank.

        The first list contains the milliseconds in which the rank's GPU computes. The second list
        contains the share of the copying time in which the GPU computes too.
        """
        self._all(self._twice, call)
        spans = self._all(ring_spans.recorded, self.torch, call)
        by_rank = self._gathered([ring_spans.busy(spans), ring_spans.hidden(spans)])
        return [busy for busy, _ in by_rank], [hidden for _, hidden in by_rank]

    def _twice(self, call: Callable[[], Any]) -> None:
        for _ in range(2):
            call()
        self.torch.cuda.synchronize()

    def _check(self, task: Task) -> None:
        """Compare the result of a call on a short problem with a float64 result.

        The call has the task's series, mask and pass. Each combination of series, mask and pass is
        checked once.
        """
        key = (task.series, task.causal, task.pass_)
        if key not in self.passed:
            self._all(self._compare, *key)
            self.passed.add(key)

    def _compare(self, series: str, causal: bool, pass_: str) -> None:
        torch = self.torch
        from fa_numba.torch import ring_split

        generator = torch.Generator(self.device).manual_seed(7)
        shape = (1, HEADS, CHECKED * self.ranks, HEAD_DIM)
        whole = [
            torch.randn(shape, device=self.device, generator=generator, dtype=torch.float16)
            for _ in range(4)
        ]
        zigzag = causal and series in (*OURS, *_BACKENDS)

        def part(x: Any) -> Any:
            return x if series == ONE else ring_split(x, self.rank, self.ranks, causal=zigzag)

        found = self._attention(series, causal, pass_, [part(x).contiguous() for x in whole])()
        one = self._attention(ONE, causal, pass_, whole)()
        exact = _float64(torch, whole, causal, pass_)
        for got, single, right in zip(found, one, exact, strict=True):
            error = _relative(got, part(right))
            bound = 2 * _relative(single, right) + 2 * ROUNDING["float16"]
            bound = PEER_BOUND["float16"] if series in _BACKENDS else bound
            if not error <= bound:
                raise WrongResult(
                    f"the error against float64 must be at most {bound:.2e}, got {error:.2e}"
                )


def _relative(found: Any, right: Any) -> float:
    return float((found.double() - right).norm() / right.norm())


def _float64(torch: Any, whole: Sequence[Any], causal: bool, pass_: str) -> tuple[Any, ...]:
    q, k, v = (x.double().requires_grad_() for x in whole[:3])
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    out = scores.softmax(-1) @ v
    if pass_ == "fwd":
        return (out.detach(),)
    return torch.autograd.grad(out, (q, k, v), whole[3].double())


def _all_to_all(torch: Any) -> Any:
    """Return the function ``exchange(x, to_heads)`` of DeepSpeed-Ulysses (arXiv 2309.14509).

    The function sends parts of a tensor between all ranks, and torch can differentiate it.

    | `to_heads` | x on each rank | result on each rank |
    |---|---|---|
    | True | some rows of all heads | all rows of some heads |
    | False | all rows of some heads | some rows of all heads |

    The gradient of one direction is the exchange in the other direction.
    """
    dist = torch.distributed

    def exchange(x: Any, to_heads: bool) -> Any:
        """Exchange parts of x with the other ranks, and return the result.

        x has the shape (1, H, n, d), and P is the number of ranks. The result has the shape (1, H /
        P, P n, d) if `to_heads` is true, else (1, P H, n / P, d).
        """
        P = dist.get_world_size()
        _, H, n, d = x.shape
        parts = (
            x.reshape(P, H // P, n, d) if to_heads else x.reshape(H, P, n // P, d).swapaxes(0, 1)
        )
        sent = parts.contiguous()
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        if to_heads:
            return got.swapaxes(0, 1).reshape(1, H // P, P * n, d)
        return got.reshape(1, P * H, n // P, d)

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, to_heads):
            ctx.to_heads = to_heads
            return exchange(x, to_heads)

        @staticmethod
        def backward(ctx, gradient):
            return exchange(gradient, not ctx.to_heads), None

    return Exchange.apply
