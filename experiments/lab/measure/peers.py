"""Calls of other libraries' attention kernels, which are timed in the same run as our kernels.

The libraries are torch, flash-attn-4 (FlashAttention-4, module `flash_attn.cute`) and JAX. All of
them may be missing.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np

from fa_numba import device
from fa_numba.problem import Problem

from . import pallas

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:  # pragma: no cover
    torch = None

EFFICIENT = "torch-efficient"
FLASH = "torch-fa2"
CUDNN = "torch-cudnn"
MATH = "torch-math"
UNFUSED = "torch-unfused"
# The same for causal problems, with the mask in the softmax: a kernel that torch.compile makes.
UNFUSED_MASKED = "torch-unfused-masked"
MATMUL = "torch-matmul"
# flash-attn-4's kernels, for Hopper and later GPUs.
FA4 = "fa4"
# The module `flex` makes its calls. It is for options that no other kernel of torch supports.
FLEX = "torch-flex"
# Two backends of flex_attention: torch compiles a Triton kernel, or calls flash-attn-4.
FLEX_TRITON, FLEX_FLASH = "torch-flex-triton", "torch-flex-flash"
FLEX_BACKENDS = {FLEX_TRITON: "TRITON", FLEX_FLASH: "FLASH"}
# JAX's attention in Pallas; see the module `pallas`.
PALLAS = "jax-pallas"
# torch's FlashAttention-2 and cuDNN kernels take half precision only.
FLOAT32 = (EFFICIENT, UNFUSED)
HALF = (FLASH, CUDNN, UNFUSED)
# Series -> torch's name of the kernel family.
_BACKENDS = {
    EFFICIENT: "EFFICIENT_ATTENTION",
    FLASH: "FLASH_ATTENTION",
    CUDNN: "CUDNN_ATTENTION",
    MATH: "MATH",
}


def available() -> bool:
    """Return whether torch is installed and has a CUDA GPU."""
    return torch is not None and torch.cuda.is_available()


@cache
def fa4() -> Callable[..., Any] | None:
    """Return the function of flash-attn-4 that computes attention; None if it cannot run here.

    flash-attn-4 needs torch, and a GPU of compute capability 9.0 or higher.

    Returns
    -------
    callable or None
        Takes q, k and v of shape (batch, seqlen, heads, head_dim), and returns (O, logsumexp).
    """
    if torch is None or not available() or torch.cuda.get_device_capability() < (9, 0):
        return None
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None
    return flash_attn_func


def here(series: Iterable[str]) -> tuple[str, ...]:
    """Return the series of other libraries that can be measured on this machine.

    Parameters
    ----------
    series : iterable of str
        Names of series of other libraries.

    Returns
    -------
    tuple of str
        The names, in the same order. Empty without torch and CUDA.
    """
    if not available():
        return ()
    missing = set() if fa4() is not None else {FA4, FLEX_FLASH}
    shown = tuple(name for name in series if name not in missing)
    if PALLAS in shown and pallas.library() is None:
        return tuple(name for name in shown if name != PALLAS)
    return shown


def in_fa4(problem: Problem) -> bool:
    """Return whether flash-attn-4 has every option of a problem: causal mask, window and softcap.

    Parameters
    ----------
    problem : Problem
        The problem.

    Returns
    -------
    bool
        False for a bias, ALiBi, packed sequences or lengths.
    """
    lengths = problem.q_lens is not None or problem.kv_lens is not None
    return not (problem.alibi or problem.bias is not None or problem.packed or lengths)


def versions() -> dict[str, str | None]:
    """Return the versions of the other libraries, for the JSON file of a recording.

    Returns
    -------
    dict
        Maps "flash-attn-4", "triton", "jax", "nvidia-cudnn-frontend" and "cudnn" to a version. The
        value of a missing library is None.
    """
    found: dict[str, str | None] = {}
    for package in ("flash-attn-4", "triton", "jax", "nvidia-cudnn-frontend"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    cudnn = None if torch is None else torch.backends.cudnn.version()
    return found | {"cudnn": None if cudnn is None else str(cudnn)}


def say_missing(say: Callable[[str], None]) -> None:
    """Print which libraries' kernels are not measured: torch's or flash-attn-4's.

    Parameters
    ----------
    say : callable
        Prints a line.
    """
    if not available():
        say("  torch's kernels are not measured, because torch with CUDA is missing here")
    elif fa4() is None:
        say(
            "  flash-attn-4's kernels are not measured, because the package flash-attn-4 or a GPU "
            "of compute capability 9.0 or higher is missing here"
        )


def version() -> str | None:
    """Return torch's version; None without torch."""
    return torch.__version__ if torch is not None else None


def call(
    series: str, problem: Problem, q: Any, k: Any, v: Any, *, dropout_p: float = 0.0,
    kv_lens: Sequence[int] | None = None, softmax: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return a function that runs the forward pass of another library's series once.

    Parameters
    ----------
    series : str
        Name of the series, such as `FLASH`, `UNFUSED` or `FA4`.
    problem : Problem
        The problem.
    q, k, v : array
        Inputs on the GPU. torch uses their memory without a copy. Only the series `UNFUSED` copies
        k and v, if several query heads share a K/V head. flash-attn-4 has another layout: its
        inputs are copied once, before any call.
    dropout_p : float, default 0.0
        Probability that an element of P is dropped.
    kv_lens : sequence of int, optional
        Number of valid columns of each batch entry. torch gets a mask (batch, 1, 1, seqlen_k).
    softmax : callable, optional
        Softmax that the series `UNFUSED` uses. Default: torch's softmax.

    Returns
    -------
    callable
        Takes the argument `out`, ignores it, and returns O as a new array.

    Raises
    ------
    ValueError
        If the mask is causal and the two lengths differ, or if flash-attn-4 is called with
        dropout or lengths.
    RuntimeError
        If torch copied an input.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    tq, tk, tv = (torch.as_tensor(x, device="cuda") for x in (q, k, v))
    for ours, theirs in zip((q, k, v), (tq, tk, tv), strict=True):
        if ours is not theirs and ours.__cuda_array_interface__["data"][0] != theirs.data_ptr():
            raise RuntimeError("torch copied an input, but must use the memory of the given array")
    scale, causal = problem.scale, problem.causal
    if series == FA4:
        if dropout_p or kv_lens is not None:
            raise ValueError("flash-attn-4 does not support dropout_p or kv_lens; use another peer")
        fused = _call_fa4(problem, *map(_in_fa4_layout, (tq, tk, tv)))
        return lambda out=None: fused().transpose(1, 2)
    if causal and problem.diagonal:
        raise ValueError(
            "seqlen_q and seqlen_k must be equal with a causal mask, because torch aligns the mask "
            "to the top left"
        )
    valid = None
    if kv_lens is not None:
        lengths = torch.as_tensor(kv_lens, device="cuda")[:, None, None, None]
        valid = torch.arange(problem.seqlen_k, device="cuda") < lengths

    if series in (UNFUSED, UNFUSED_MASKED):
        hidden = None if valid is None else ~valid
        if series == UNFUSED_MASKED:
            if not causal or hidden is not None or softmax:
                raise ValueError(
                    f"{UNFUSED_MASKED} must be called with a causal mask, and without kv_lens and "
                    f"softmax; use {UNFUSED}"
                )
            softmax = masked_softmax()
        elif causal:
            shape = (problem.seqlen_q, problem.seqlen_k)
            above = torch.ones(shape, dtype=torch.bool, device="cuda").triu_(1)
            hidden = above if hidden is None else hidden | above
        if problem.group > 1:
            tk, tv = (x.repeat_interleave(problem.group, dim=1) for x in (tk, tv))

        def run(out: Any = None) -> Any:
            return unfused(tq, tk, tv, scale, hidden, dropout_p, softmax)

    else:
        backend = getattr(SDPBackend, _BACKENDS[series])

        options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": causal, "scale": scale}
        options |= {"attn_mask": valid, "enable_gqa": problem.group > 1}

        def run(out: Any = None) -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, **options)

    return run


def unfused(
    q: Any, k: Any, v: Any, scale: float, hidden: Any = None, dropout_p: float = 0.0,
    softmax: Callable[[Any], Any] | None = None,
) -> Any:  # fmt: skip
    """Return attention, computed in separate steps that store S and P in memory.

    The matrix product multiplies by the scale, so that the scale costs no pass over S. A mask costs
    one pass, as in the benchmark of flash-attention.

    Parameters
    ----------
    q, k, v : torch.Tensor
        Inputs of shape (batch, heads, seqlen, head_dim), with equal numbers of heads.
    scale : float
        Factor of the scores.
    hidden : torch.Tensor, optional
        A bool tensor that can be expanded to the shape of S. True hides a score.
    dropout_p : float, default 0.0
        Probability that an element of P is dropped.
    softmax : callable, optional
        The softmax of the last axis of S. Default: torch's softmax.

    Returns
    -------
    torch.Tensor
        O.
    """
    rows, columns = (x.flatten(0, 1) for x in (q, k))
    nothing = torch.empty((), dtype=q.dtype, device=q.device)
    S = torch.baddbmm(nothing, rows, columns.transpose(-2, -1), beta=0, alpha=scale)
    S = S.view(*q.shape[:-1], k.shape[-2])
    if hidden is not None:
        S.masked_fill_(hidden, float("-inf"))
    P = softmax(S) if softmax else torch.softmax(S, dim=-1)
    if dropout_p:
        P = torch.nn.functional.dropout(P, dropout_p)
    return torch.matmul(P, v)


def hide_and_softmax(S: Any) -> Any:
    """Return the softmax of the rows of S with a causal mask.

    Parameters
    ----------
    S : torch.Tensor
        Scores of shape (..., seqlen, seqlen). They are not changed.

    Returns
    -------
    torch.Tensor
        P.
    """
    rows, columns = (torch.arange(n, device=S.device) for n in S.shape[-2:])
    hidden = columns > rows[:, None]
    return torch.softmax(S.masked_fill(hidden, float("-inf")), dim=-1)


@cache
def masked_softmax(compiled: bool = True) -> Callable[[Any], Any]:
    """Return a function that computes a softmax with a causal mask in one pass over S.

    The backward pass needs no mask, because P is 0 where a score is hidden.

    Parameters
    ----------
    compiled : bool, default True
        Whether torch.compile makes one kernel of the mask and the softmax. False is for tests
        without a compiler.

    Returns
    -------
    callable
        Takes S of shape (batch, heads, seqlen, seqlen), and returns P.
    """
    # One kernel for all sizes: N is an argument of the kernel.
    fused = torch.compile(hide_and_softmax, dynamic=True) if compiled else hide_and_softmax

    class MaskedSoftmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, S: Any) -> Any:
            P = fused(S.detach())
            ctx.save_for_backward(P)
            return P

        @staticmethod
        def backward(ctx: Any, dP: Any) -> Any:
            (P,) = ctx.saved_tensors
            return torch._softmax_backward_data(dP, P, -1, P.dtype)

    return lambda S: MaskedSoftmax.apply(S.flatten(0, 1)).view_as(S)


def gradients(
    series: str, problem: Problem, pass_: str, *arrays: Any, **options: Any
) -> Callable[..., Any]:
    """Return a function that computes dq, dk and dv once by torch's autograd.

    Parameters
    ----------
    series : str
        Name of the series.
    problem : Problem
        The problem.
    pass_ : str
        "bwd" for the backward pass alone; "fwd+bwd" for a forward pass before it.
    *arrays : array
        Arrays q, k, v and dout on the GPU.
    **options
        Options of `call`.

    Returns
    -------
    callable
        Takes the argument `out`, ignores it, and returns (dq, dk, dv).
    """
    *inputs, dout = (torch.as_tensor(x, device="cuda").detach() for x in arrays)
    if series == FA4:
        if any(options.values()):
            raise ValueError(
                f"flash-attn-4 does not support {', '.join(options)}; use another peer"
            )
        *inputs, dout = map(_in_fa4_layout, (*inputs, dout))
        leaves = tuple(x.requires_grad_() for x in inputs)
        run = differentiated(_call_fa4(problem, *leaves), pass_, leaves, dout)
        return lambda out=None: tuple(x.transpose(1, 2) for x in run())
    leaves = tuple(x.requires_grad_() for x in inputs)
    return differentiated(call(series, problem, *leaves, **options), pass_, leaves, dout)


def _in_fa4_layout(x: Any) -> Any:
    """Return a copy of a tensor (batch, heads, seqlen, d) as (batch, seqlen, heads, d)."""
    return x.transpose(1, 2).contiguous()


def _call_fa4(problem: Problem, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """Return a function that computes O by flash-attn-4, in the layout of flash-attn-4."""
    attention = fa4()
    if attention is None:
        raise ValueError(
            "flash-attn-4 must be installed, and the GPU must have compute capability 9.0 or higher"
        )

    if not in_fa4(problem):
        raise ValueError(
            "flash-attn-4 must get a problem without bias, ALiBi, packed sequences and lengths; "
            "use another peer"
        )
    options: dict[str, Any] = {"softmax_scale": problem.scale, "causal": problem.causal}
    if problem.window != (-1, -1):
        options["window_size"] = tuple(None if side < 0 else side for side in problem.window)
    if problem.softcap is not None:
        options["softcap"] = problem.softcap

    def run() -> Any:
        result = attention(q, k, v, **options)
        return result[0] if isinstance(result, tuple) else result

    return run


def differentiated(
    forward: Callable[[], Any], pass_: str, leaves: Sequence[Any], dout: Any
) -> Callable[..., Any]:
    """Return a function that computes the gradients of `leaves` from a result's gradient `dout`.

    Parameters
    ----------
    forward : callable
        Computes the result.
    pass_ : str
        "bwd": the forward pass runs once, before the first call. "fwd+bwd": every call runs the
        forward pass and then the backward pass.
    leaves : sequence of torch.Tensor
        Inputs.
    dout : torch.Tensor
        Gradient of the result.

    Returns
    -------
    callable
        Takes the argument `out`, ignores it, and returns the gradients.
    """
    kept = forward() if pass_ == "bwd" else None

    def run(out: Any = None) -> Any:
        if kept is not None:
            return torch.autograd.grad(kept, leaves, dout, retain_graph=True)
        return torch.autograd.grad(forward(), leaves, dout)

    return run


def softmax(x: Any) -> Callable[..., Any]:
    """Return a function that computes torch's softmax of the rows of `x`.

    Parameters
    ----------
    x : array
        On the GPU; viewed, not copied.

    Returns
    -------
    callable
        Takes the argument `out`, ignores it, and returns the softmax.
    """
    viewed = torch.as_tensor(x, device="cuda")
    return lambda out=None: torch.softmax(viewed, dim=-1)


def top_k(x: Any, k: int) -> Callable[..., Any]:
    """Return a function that computes torch's softmax of the rows of `x`, and its largest elements.

    Parameters
    ----------
    x : array
        On the GPU; viewed, not copied.
    k : int
        Number of elements of each row.

    Returns
    -------
    callable
        Takes the argument `out`, ignores it, and returns the `k` largest probabilities of each row
        in falling order, and their indices.
    """
    viewed = torch.as_tensor(x, device="cuda")
    return lambda out=None: tuple(torch.topk(torch.softmax(viewed, dim=-1), k, dim=-1))


def matmul(size: int, dtype: str) -> Callable[[], Any]:
    """Return a function that multiplies two random square matrices with torch.

    Parameters
    ----------
    size : int
        Rows and columns.
    dtype : str
        Dtype of the matrices.

    Returns
    -------
    callable
        Takes no argument, and returns the product. All calls write to the same memory.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator("cuda").manual_seed(0)
    shape, kind = (size, size), getattr(torch, dtype)
    a, b = (torch.randn(shape, device="cuda", generator=generator).to(kind) for _ in range(2))
    out = torch.empty(shape, device="cuda", dtype=kind)
    return lambda: torch.matmul(a, b, out=out)


def on_device(arrays: Sequence[np.ndarray], dtype: str = "float32") -> tuple[Any, ...]:
    """Copy NumPy arrays to the GPU, converted to a dtype.

    Parameters
    ----------
    arrays : sequence of ndarray
        Arrays.
    dtype : str, default "float32"
        Dtype of the results. "bfloat16" needs torch.

    Returns
    -------
    tuple of array
        Tensors of torch if it is installed, else arrays of Numba.
    """
    if available():
        kind = getattr(torch, dtype)
        return tuple(torch.as_tensor(x, device="cuda").to(kind) for x in arrays)
    return tuple(device.to_gpu(x.astype(dtype, copy=False)) for x in arrays)


def repeated(
    arrays: Sequence[np.ndarray], dtype: str, times: int, axis: int = 0
) -> tuple[Any, ...]:
    """Copy NumPy arrays to the GPU, and repeat each along an axis.

    Parameters
    ----------
    arrays : sequence of ndarray
        Arrays with four axes.
    dtype : str
        Dtype.
    times : int
        Number of copies of an array along the axis.
    axis : int, default 0
        The axis along which the array is repeated.

    Returns
    -------
    tuple of array
        Arrays of the type that `on_device` returns.
    """
    if available():
        shape = [times if at == axis else 1 for at in range(4)]
        return tuple(x.repeat(*shape) for x in on_device(arrays, dtype))
    whole = [np.concatenate([x.astype(dtype)] * times, axis) for x in arrays]
    return on_device(whole, dtype)


def allocated_bytes(run: Callable[..., Any]) -> int:
    """Return the peak memory that torch's allocator gives to one call, including its results.

    Parameters
    ----------
    run : callable
        The call.

    Returns
    -------
    int
        Bytes of GPU memory.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = run()
    torch.cuda.synchronize()
    del made  # the results must count in the peak
    return torch.cuda.max_memory_allocated() - before


def peak_bytes(run: Callable[..., Any]) -> int:
    """Return the peak memory that torch's allocator gives to one call, without its result.

    Parameters
    ----------
    run : callable
        The call. It must return one tensor.

    Returns
    -------
    int
        Bytes of GPU memory.
    """
    made: list[Any] = []
    peak = allocated_bytes(lambda: made.append(run()))
    return peak - made[0].numel() * made[0].element_size()


def release() -> None:
    """Give memory that torch's allocator keeps, but does not use, back to the GPU."""
    if available():
        torch.cuda.empty_cache()
