"""The processes of the experiment `ring`, one per GPU, and the function that starts them."""

import contextlib
import datetime
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..lab.measure.check import PEER_BOUND, ROUNDING, WrongResult
from ..lab.measure.timing import attempt
from ..lab.record import ran

# Series: one GPU that computes the complete problem, our two loop orders, and other methods.
ONE, KV, Q, ULYSSES = "one-gpu", "ring-kv", "ring-q", "ulysses"
CP_FLASH, CP_CUDNN = "torch-cp-fa2", "torch-cp-cudnn"
OURS = (KV, Q)
SERIES = (ONE, *OURS, ULYSSES, CP_FLASH, CP_CUDNN)
HEADS, HEAD_DIM, CHECKED = 16, 128, 1024
LINK, MERGE = "link", "merge"
LINK_BYTES = 2**29
_BACKENDS = {CP_FLASH: "FLASH_ATTENTION", CP_CUDNN: "CUDNN_ATTENTION"}
# Seconds between two checks for new results.
POLL = 0.5
# If a collective operation waits this long, a rank has failed.
TIMEOUT = datetime.timedelta(seconds=120)


@dataclass(frozen=True)
class Task:
    """One call to time: a series, and a problem of `seqlen` rows in total over all ranks.

    If the series is LINK or MERGE, the link or the kernel that merges results is timed instead.
    """

    series: str
    seqlen: int
    causal: bool
    pass_: str
    repeats: int


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
    ran : dict
        Kernels that the first rank has launched so far, as `ran.Collected.of` returns them.
    """

    index: int
    samples: list[float]
    sent: int = 0
    memory: float = 0.0
    failure: str = ""
    ran: dict[str, Any] = field(default_factory=dict)


def run(tasks: Sequence[Task], ranks: int) -> Iterator[Found]:
    """Time tasks in `ranks` processes of this host, one process per GPU.

    Yield the result of each task as soon as it is known. If the processes fail, the remaining tasks
    get results that contain the reason. The processes end when the caller stops.
    """
    from torch import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "found"
        arguments = ranks, f"{folder}/store", list(tasks), str(results)
        begun, failure = attempt(
            multiprocessing.spawn, _rank, arguments, nprocs=ranks, join=False, daemon=True
        )
        seen = 0
        try:
            ended = begun is None
            while not ended:
                ended, failure = attempt(begun.join, POLL)
                for found in _lines(results)[seen:]:
                    seen += 1
                    ran.tell(found.ran)
                    yield found
                ended = ended or bool(failure)
        finally:
            for process in begun.processes if begun is not None else ():
                process.kill()
    for n in range(seen, len(tasks)):
        yield Found(n, [], failure=failure or "failed: no rank has said why")


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
    bench = _Bench(rank, ranks, device)
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

    def __init__(self, rank: int, ranks: int, device: Any) -> None:
        import torch

        self.torch, self.dist = torch, torch.distributed
        self.rank, self.ranks, self.device = rank, ranks, device
        self.flushed = torch.empty(2**28, device=device)
        self.passed: set[tuple[str, bool, str]] = set()
        self.mesh = None

    def found(self, index: int, task: Task) -> Found:
        """Check the task's kind of call, unless it was checked before, and then time the call.

        The result is equal on all ranks.
        """
        try:
            with self._all(self._within, task.series, task.causal):
                if task.series in SERIES:
                    self._check(task)
                self.torch.cuda.empty_cache()
                call = self._all(self._call, task)
                return Found(index, *self._timed(call, task))
        except _Failed as error:
            return Found(index, [], failure=str(error))

    def _all(self, work: Callable[..., Any], *given: Any) -> Any:
        """Return this rank's result of `work`, which every rank calls.

        Raise _Failed on all ranks if `work` fails on one of them.
        """
        result, failure = attempt(work, *given)
        every: list[Any] = [None] * self.ranks
        self.dist.all_gather_object(every, failure)
        if why := next((each for each in every if each), ""):
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
        """Return the context in which a series runs.

        For torch's series, it is torch's context parallelism. With a causal mask, torch divides the
        sequence in a zigzag. For other series, the context does nothing.
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
        every = torch.tensor([*times, *first], dtype=torch.float64, device=self.device)
        dist.all_reduce(every, op=dist.ReduceOp.MAX)
        *times, sent, memory = every.tolist()
        return times, int(sent), memory

    def _check(self, task: Task) -> None:
        """Compare a call of a short problem with float64, once for each kind of call."""
        key = (task.series, task.causal, task.pass_)
        if key not in self.passed:
            self._all(self._compare, *key)
            self.passed.add(key)

    def _compare(self, series: str, causal: bool, pass_: str) -> None:
        torch = self.torch
        from fa_numba.torch import ring_split

        generator = torch.Generator(self.device).manual_seed(7)
        shape = (1, HEADS, CHECKED, HEAD_DIM)
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
    """Return DeepSpeed-Ulysses' exchange (arXiv 2309.14509) as an autograd function (x, to_heads).

    If `to_heads` is true, ranks that have some rows of all heads get all rows of some heads. If it
    is false, the exchange goes the other way. Each direction is the gradient of the other
    direction.
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
