"""torch's flex_attention, compiled for a problem: the peer for options that other kernels lack."""

from collections.abc import Callable, Mapping
from typing import Any

from fa_numba.problem import Problem

from . import peers

try:
    import torch
except ImportError:  # pragma: no cover
    torch = None

# Tiles that flex_attention's kernel has on their way where a bias is read.
BIAS_STAGES = 2


def call(problem: Problem, q: Any, k: Any, v: Any, **given: Any) -> Callable[..., Any]:
    """Return a function that runs flex_attention once forward.

    It is compiled for the problem in its first run. Packed sequences are copied into one long
    sequence before any run; a mask separates them.

    Parameters
    ----------
    problem : Problem
        The problem.
    q, k, v : torch.Tensor
        Inputs on the GPU.
    **given
        Options of our call, with arrays on the GPU. `mask_mod` and `score_mod` are functions for
        torch.

    Returns
    -------
    callable
        Takes the argument `out`, ignores it, and returns O.
    """
    run = _compiled(problem, *_laid_out(problem, q, k, v), **given)
    return lambda out=None: _as_given(problem, run())


def _laid_out(problem: Problem, *arrays: Any) -> tuple[Any, ...]:
    """Return the arrays in flex_attention's layout.

    Packed arrays are copied to (1, heads, total, d).
    """
    if not problem.packed:
        return arrays
    return tuple(x.transpose(0, 1)[None].contiguous() for x in arrays)


def _as_given(problem: Problem, x: Any) -> Any:
    """Return an array of flex_attention's layout in the layout of the problem."""
    return x[0].transpose(0, 1) if problem.packed else x


def _compiled(problem: Problem, q: Any, k: Any, v: Any, **given: Any) -> Callable[[], Any]:
    """Return a function that runs the compiled flex_attention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Else a new mask would be one of many of one compiled function, of which torch keeps a few.
    torch._dynamo.reset()
    options: dict[str, Any] = {"scale": problem.scale, "enable_gqa": problem.group > 1}
    visible = given.get("mask_mod") or _mask_mod(problem, **given)
    if visible is not None:
        sizes = q.shape[2], k.shape[2]
        options["block_mask"] = create_block_mask(visible, None, None, *sizes, device="cuda")
    options["score_mod"] = given.get("score_mod") or _score_mod(problem, **given)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    if problem.bias is not None:
        # As many tiles of a bias as torch prefetches by default take more memory than a block has.
        options["kernel_options"] = {"num_stages": BIAS_STAGES}

    return lambda: compiled(q, k, v, **options)


def gradients(problem: Problem, pass_: str, *arrays: Any, **given: Any) -> Callable[..., Any]:
    """Return a function that computes dq, dk and dv once with flex_attention.

    Parameters
    ----------
    problem : Problem
        The problem.
    pass_ : str
        "bwd" for the backward pass alone; "fwd+bwd" for a forward pass before it.
    *arrays : torch.Tensor
        Arrays q, k, v and dout on the GPU.
    **given
        As for `call`.

    Returns
    -------
    callable
        Takes the argument `out`, ignores it, and returns (dq, dk, dv).
    """
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # a backward pass runs more than once here
    *inputs, dout = _laid_out(problem, *(x.detach() for x in arrays))
    leaves = tuple(x.requires_grad_() for x in inputs)
    run = peers.differentiated(_compiled(problem, *leaves, **given), pass_, leaves, dout)
    return lambda out=None: tuple(_as_given(problem, x) for x in run())


def _mask_mod(problem: Problem, cu_seqlens_q: Any = None, **_: Any) -> Callable | None:
    """Return the function that says whether row i sees column j; None if every row sees all."""
    left, right, diagonal = problem.left, problem.right, problem.diagonal
    if cu_seqlens_q is not None:
        ends = torch.as_tensor(cu_seqlens_q, device="cuda")[1:].long()
        rows = torch.arange(int(ends[-1]), device="cuda")
        entry = torch.searchsorted(ends, rows, right=True)
        if right is None:
            return lambda b, h, i, j: entry[i] == entry[j]
        return lambda b, h, i, j: (entry[i] == entry[j]) & (j <= i + right)
    if left is not None and right is not None:
        return lambda b, h, i, j: (j <= i + diagonal + right) & (j >= i + diagonal - left)
    if right is not None:
        return lambda b, h, i, j: j <= i + diagonal + right
    return None


def _score_mod(
    problem: Problem, alibi_slopes: Any = None, bias: Any = None, **_: Any
) -> Callable | None:
    """Return the function that changes a score of row i and column j; None if scores do not change.

    At most one option is supported.
    """
    cap, diagonal = problem.softcap, problem.diagonal
    if cap is not None:
        return lambda s, b, h, i, j: cap * torch.tanh(s / cap)
    if alibi_slopes is not None:  # with a causal mask, so that j is never ahead
        return lambda s, b, h, i, j: s + alibi_slopes[h] * (j - i - diagonal)
    if bias is not None:
        added = bias.expand(problem.score_shape)
        return lambda s, b, h, i, j: s + added[b, h, i, j]
    return None


def options_on_gpu(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call with their float32 arrays on the GPU.

    Parameters
    ----------
    given : mapping
        Options.

    Returns
    -------
    dict
        The options; other values are unchanged.
    """
    arrays = {name: x for name, x in given.items() if getattr(x, "dtype", None) == "float32"}
    return {**given, **{name: peers.on_device((x,))[0] for name, x in arrays.items()}}
