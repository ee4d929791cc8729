"""The public functions: check, plan, launch, return."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fa_numba import device, io_model
from fa_numba.arrays import HOST, Operand, check_out, check_together, operand
from fa_numba.device import DeviceArray, Kernel
from fa_numba.kernels.simt import fa1_forward, fa2_forward, standard
from fa_numba.problem import Problem, as_size
from fa_numba.tiles import Tiles, default_tiles, specialise

ALGORITHMS = ("standard", "fa1", "fa2")

# The emulator's limit for one call, in FLOPs: about 3.5e6 a second, so half a minute.
EMULATOR_FLOPS = 2**27
_MAX_GRID_YZ = 65535
_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class KernelPlan:
    """One launch: ``grid`` in blocks, ``threads`` and ``shared_bytes`` a block."""

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Plan:
    """What a call runs.

    ``accesses`` are exact loads and stores of global memory in elements by array, ``flops`` follows
    FlashAttention-2's convention, ``workspace_bytes`` is memory beside inputs and outputs.
    """

    algorithm: str
    unit: str
    problem: Problem
    tiles: Tiles
    kernels: tuple[KernelPlan, ...]
    accesses: io_model.Accesses
    flops: int
    workspace_bytes: int


@dataclass(frozen=True)
class _Run:
    """A plan with its compiled-in kernels."""

    plan: Plan
    kernels: tuple[Kernel, ...]
    split_rows: int


def plan(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    *,
    algorithm: str = "fa2",
    dtype: str = "float32",
    scale: float | None = None,
    causal: bool = False,
    tiles: Tiles | None = None,
    return_lse: bool = False,
    query_splits: int = 1,
) -> Plan:
    """What a call with these arguments runs on the current device, without running it.

    Shapes are (B, Hq, Nq, d) and (B, Hk, Nk, d). Raises as the call itself would.

    >>> import fa_numba
    >>> p = fa_numba.plan((1, 2, 1024, 64), (1, 2, 1024, 64), algorithm="fa2")
    >>> p.kernels[0].name, p.kernels[0].grid
    ('fa2_forward', (8, 2, 1))
    """
    problem = Problem.from_shapes(q_shape, k_shape, dtype=dtype, scale=scale, causal=causal)
    return _run(problem, algorithm, tiles, True, return_lse, query_splits).plan


def _check_algorithm(algorithm: Any) -> None:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}: allowed is one of {', '.join(ALGORITHMS)}")


def _run(problem, algorithm, tiles, aligned, return_lse, query_splits) -> _Run:
    _check_algorithm(algorithm)
    if tiles is not None and not isinstance(tiles, Tiles):
        raise TypeError(f"tiles is {tiles!r}: allowed is a Tiles(Br=..., Bc=...) or None")
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse is {return_lse!r}: allowed is True or False")
    query_splits = as_size("query_splits", query_splits, axis=False)
    if query_splits != 1 and algorithm != "fa1":
        raise ValueError(f"query_splits is {query_splits}: only fa1 splits its queries")
    for name, size in (("batch", problem.batch), ("heads of q", problem.heads_q)):
        if size > _MAX_GRID_YZ:
            raise ValueError(f"{name} is {size}: allowed is at most {_MAX_GRID_YZ}, a grid's limit")
    limit = device.shared_bytes_limit()
    return _specialised(problem, algorithm, tiles, aligned, return_lse, query_splits, limit)


@functools.lru_cache(maxsize=1024)
def _specialised(problem, algorithm, tiles, aligned, return_lse, query_splits, limit) -> _Run:
    d, Nq, Nk = problem.head_dim, problem.seqlen_q, problem.seqlen_k
    if tiles is None:
        tiles = default_tiles(algorithm, Nq, Nk, d, limit)
    flash_lse = return_lse and algorithm == "fa1"
    spec = specialise(tiles, d, limit, causal=problem.causal, aligned=aligned, return_lse=flash_lse)
    tiles = Tiles(tiles.Br, tiles.Bc, spec.threads)
    Tr = -(-Nq // tiles.Br)
    per_head = (problem.heads_q, problem.batch)
    split_rows = 0
    if algorithm == "fa2":
        launches = [(fa2_forward.make_forward(spec), Tr)]
        accesses = io_model.fa2(problem, tiles)
    elif algorithm == "fa1":
        split_rows = -(-Tr // query_splits) * tiles.Br
        launches = [(fa1_forward.make_forward(spec), -(-Nq // split_rows))]
        accesses = io_model.fa1(problem, tiles, query_splits=query_splits, return_lse=return_lse)
    else:
        row_floats = _row_floats(Nk, limit)
        launches = [
            (standard.make_standard_scores(spec), Tr),
            (standard.make_standard_softmax(row_floats, _row_warps(Nk), return_lse), Nq),
            (standard.make_standard_output(spec), Tr),
        ]
        accesses = io_model.standard(
            problem, tiles, return_lse=return_lse, row_resident=row_floats > 0
        )
    kernels = tuple(
        KernelPlan(kernel.name, (blocks, *per_head), kernel.threads, kernel.shared_bytes)
        for kernel, blocks in launches
    )
    return _Run(
        Plan(
            algorithm,
            "simt",
            problem,
            tiles,
            kernels,
            accesses,
            io_model.flops(problem),
            io_model.workspace(algorithm, problem, return_lse=return_lse),
        ),
        tuple(kernel for kernel, _ in launches),
        split_rows,
    )


def _row_floats(Nk: int, limit: int) -> int:
    """Shared-memory floats for a row of S: a power of two, so that few kernels are compiled."""
    room = limit // 4 - 2 * standard.MAX_WARPS
    if room < Nk:
        return 0
    return min(room // 4 * 4, max(256, 1 << (Nk - 1).bit_length()))


def _row_warps(Nk: int) -> int:
    """Warps for a row of S: a thread for every four columns, as a power of two."""
    return min(standard.MAX_WARPS, max(1, (1 << (Nk - 1).bit_length()) // 128))


def standard_attention(
    q, k, v, *, scale=None, causal=False, tiles=None, return_lse=False, out=None, stream=None
):
    """softmax(scale q kT) v with the N x N matrices in global memory (the papers' Algorithm 0).

    Arguments, result and errors as ``flash_attention_2``; the workspace is Nq x Nk floats a head.

    >>> import numpy as np, fa_numba
    >>> q = k = v = np.eye(2, dtype=np.float32).reshape(1, 1, 2, 2)
    >>> fa_numba.standard_attention(q, k, v, scale=0.0)[0, 0].round(3).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    return _attend("standard", q, k, v, scale, causal, tiles, return_lse, out, stream, 1)


def flash_attention_1(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    tiles=None,
    return_lse=False,
    out=None,
    stream=None,
    query_splits=1,
):
    """Attention in FlashAttention-1's loop order, K/V outer (arXiv 2205.14135, Algorithm 1).

    Arguments, result and errors as ``flash_attention_2``. ``query_splits`` thread blocks share a
    head, each with its own rows of q; 1 is the paper's grid of one block per (batch, head).

    >>> import numpy as np, fa_numba
    >>> q = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 1, 16, 4)
    >>> a, b = fa_numba.flash_attention_1(q, q, q), fa_numba.flash_attention_2(q, q, q)
    >>> bool(abs(a - b).max() < 1e-6)
    True
    """
    return _attend("fa1", q, k, v, scale, causal, tiles, return_lse, out, stream, query_splits)


def flash_attention_2(
    q, k, v, *, scale=None, causal=False, tiles=None, return_lse=False, out=None, stream=None
):
    """Attention in FlashAttention-2's loop order, Q outer (arXiv 2307.08691, Algorithm 1).

    q is (B, Hq, Nq, d), k and v (B, Hk, Nk, d), float32, any strides; Hk divides Hq and query head
    h reads K/V head h // (Hq / Hk); 1 <= d <= 256. NumPy arrays, torch tensors and arrays with
    ``__cuda_array_interface__`` or DLPack are taken as they are; all on one device. Host arrays are
    copied to the GPU and back, and run on the emulator where there is no GPU.

    ``scale`` multiplies the scores, 1/sqrt(d) unless given. ``causal`` lets row i see the columns
    j <= i + Nk - Nq; a row that sees none gives output 0 and logsumexp -inf. ``tiles`` sets the
    block sizes. ``out`` takes the result, (B, Hq, Nq, d). ``stream`` is a CUDA stream (torch,
    CuPy, Numba or an address); None takes the current stream of q's library.

    Returns O, float32 (B, Hq, Nq, d), in q's library and place; with ``return_lse`` (O, L), L the
    natural logarithm of the rows' sums of exponentials, float32 (B, Hq, Nq).

    Raises ValueError or TypeError, before anything runs, for an argument that is not as above:
    the message names it, its value and what is allowed. Also a ValueError for tiles that do not
    fit the device's shared memory, and for a problem too large for the emulator.

    >>> import numpy as np, fa_numba
    >>> q = np.zeros((1, 1, 3, 4), np.float32)
    >>> v = np.arange(12, dtype=np.float32).reshape(1, 1, 3, 4)
    >>> fa_numba.flash_attention_2(q, q, v, causal=True)[0, 0, :, 0].tolist()
    [0.0, 2.0, 4.0]
    """
    return _attend("fa2", q, k, v, scale, causal, tiles, return_lse, out, stream, 1)


def attention(q, k, v, *, algorithm="fa2", **options):
    """Attention by ``algorithm``: "standard", "fa1" or "fa2"; the rest as that function takes it.

    Raises ValueError for another algorithm, TypeError for an option that it does not have.
    """
    functions: dict[str, Callable] = {
        "standard": standard_attention,
        "fa1": flash_attention_1,
        "fa2": flash_attention_2,
    }
    _check_algorithm(algorithm)
    return functions[algorithm](q, k, v, **options)


def _attend(algorithm, q, k, v, scale, causal, tiles, return_lse, out, stream, query_splits) -> Any:
    inputs = [operand("q", q), operand("k", k), operand("v", v)]
    check_together(inputs)
    problem = Problem.from_shapes(
        *(x.shape for x in inputs), dtype=inputs[0].dtype, scale=scale, causal=causal
    )
    target = None
    if out is not None:
        target = operand("out", out)
        check_together([inputs[0], target])
        check_out(target, problem.q_shape, inputs)
    with _placed(inputs[0]):
        copies = device.on_gpu() and inputs[0].place == HOST
        aligned = problem.head_dim % 4 == 0 and (
            copies or all(x.aligned for x in (*inputs, *([target] if target else [])))
        )
        run = _run(problem, algorithm, tiles, aligned, return_lse, query_splits)
        handle = _stream_handle(stream, inputs[0])
        if not device.on_gpu():
            _check_size(problem)
        return _launch(run, inputs, target, return_lse, handle)


def _placed(q: Operand):
    """Make the inputs' device the current one, or refuse."""
    if q.place == HOST:
        return contextlib.nullcontext()
    if not device.on_gpu():
        raise ValueError(f"q is in {q.where}: the emulator takes arrays in host memory")
    return device.on_device(q.place)


def _check_size(problem: Problem) -> None:
    p = problem
    flops = 4 * p.batch * p.heads_q * p.seqlen_q * p.seqlen_k * p.head_dim
    if flops > EMULATOR_FLOPS:
        raise ValueError(
            f"q has shape {p.q_shape} and k {p.k_shape}, {flops:.3g} FLOPs: without a CUDA GPU the "
            f"emulator takes at most {EMULATOR_FLOPS:.3g}. Take a smaller problem, a machine with "
            "a GPU, fa_numba.reference for the values or fa_numba.plan for the accesses"
        )


def _stream_handle(stream: Any, q: Operand) -> int:
    """The address of ``stream``, or of the current stream of q's library."""
    if stream is None:
        if not device.on_gpu() or q.place == HOST:
            return 0
        if q.library == "torch":
            return int(sys.modules["torch"].cuda.current_stream(q.place).cuda_stream)
        if q.library == "cupy":
            return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
        return 0
    if not device.on_gpu():
        raise ValueError(f"stream is {stream!r}: the emulator has no streams, allowed is None")
    for attribute in ("cuda_stream", "ptr", "handle"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    if isinstance(stream, bool):
        raise TypeError(f"stream is {stream!r}: allowed is a CUDA stream, its address, or None")
    try:
        return operator.index(stream)
    except TypeError:
        raise TypeError(
            f"stream is {stream!r}: allowed is a CUDA stream, its address, or None"
        ) from None


def _launch(run: _Run, inputs, target: Operand | None, return_lse: bool, stream: int) -> Any:
    problem = run.plan.problem
    library = inputs[0]
    gpu = device.on_gpu()
    staged = gpu and library.place == HOST

    if not staged:
        arguments = [x.argument() for x in inputs]
        result = target if target is not None else operand("out", library.empty(problem.q_shape))
        lse = operand("lse", library.empty(problem.lse_shape)) if return_lse else None
        _execute(run, arguments, result.argument(), lse and lse.argument(), stream)
        return (result.owner, lse.owner) if lse is not None else result.owner

    buffers = [device.to_gpu(x.host, stream) for x in inputs]
    o_gpu = device.empty(problem.q_shape)
    l_gpu = device.empty(problem.lse_shape) if return_lse else None
    _execute(
        run,
        [_whole(b) for b in buffers],
        _whole(o_gpu),
        None if l_gpu is None else _whole(l_gpu),
        stream,
    )
    result = target if target is not None else operand("out", library.empty(problem.q_shape))
    assert result.host is not None
    device.to_host(o_gpu, result.host, stream)
    if l_gpu is None:
        return result.owner
    lse = operand("lse", library.empty(problem.lse_shape))
    assert lse.host is not None
    device.to_host(l_gpu, lse.host, stream)
    return result.owner, lse.owner


def _whole(array) -> DeviceArray:
    found = operand("array", array)
    return found.argument()


def _execute(run: _Run, arguments, O: Any, L: Any, stream: int) -> None:
    problem, kernels = run.plan.problem, run.kernels
    Q, K, V = arguments
    grids = [k.grid for k in run.plan.kernels]
    diagonal, group = problem.diagonal, problem.group
    args: tuple
    with device.scratch(stream) as allocate:
        if run.plan.algorithm == "fa2":
            L = allocate(problem.lse_shape) if L is None else L
            args = (Q, K, V, O, L, problem.scale * _LOG2E, diagonal, group)
            device.launch(kernels[0], grids[0], args, stream)
        elif run.plan.algorithm == "fa1":
            l, m = allocate(problem.lse_shape), allocate(problem.lse_shape)
            L = l if L is None else L
            args = (Q, K, V, O, L, l, m, problem.scale * _LOG2E, diagonal, group, run.split_rows)
            device.launch(kernels[0], grids[0], args, stream)
        else:
            S = _score_matrix(problem, allocate)
            L = _first_column(S) if L is None else L  # not written
            device.launch(kernels[0], grids[0], (Q, K, S, problem.scale, diagonal, group), stream)
            device.launch(kernels[1], grids[1], (S, S, L), stream)
            device.launch(kernels[2], grids[2], (S, V, O, group), stream)


def _first_column(S: Any) -> Any:
    """A 3-D array for the place of L where the kernel has none to write."""
    if isinstance(S, DeviceArray):
        return replace(S, shape=S.shape[:3], strides=S.strides[:3])
    return S[..., 0]


def _score_matrix(problem: Problem, allocate: Callable) -> Any:
    """S of shape (B, Hq, Nq, Nk), its rows padded to 16 bytes."""
    pitch = -(-problem.seqlen_k // 4) * 4
    whole = allocate((problem.batch, problem.heads_q, problem.seqlen_q, pitch))
    if isinstance(whole, DeviceArray):
        return replace(whole, shape=(*whole.shape[:3], problem.seqlen_k))
    return whole[..., : problem.seqlen_k]
