"""Calls of torch's flex_attention, which is the peer for options that torch's other kernels lack.

flex_attention is compiled for each problem.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fa_numba.problem import Problem

from . import peers

try:
    import torch
except ImportError:  # pragma: no cover
    torch = None

# Pipeline stages of flex_attention's kernel if it reads a bias.
BIAS_STAGES = 2


def call(problem: Problem, q: Any, k: Any, v: Any, **given: Any) -> Callable[..., Any]:
    """Return a function that runs flex_attention once forward.

    flex_attention is compiled for the problem in the first run. Packed sequences are copied into
    one long sequence before the first run, and a mask separates the sequences.

    Parameters
    ----------
    problem : Problem
        The problem.
    q, k, v : torch.Tensor
        Inputs on the GPU.
    **given
        Options of our call, with arrays on the GPU. `mask_mod` and `score_mod` are functions for
        torch. `backend` is torch's name of the kernel, "TRITON" or "FLASH"; torch chooses by
        default.

    Returns
    -------
    callable
        Takes the argument `out`, ignores it, and returns O.
    """
    run = _compiled(problem, *_laid_out(problem, q, k, v), **given)
    return lambda out=None: _as_given(problem, run())


def _laid_out(problem: Problem, *arrays: Any) -> tuple[Any, ...]:
    """Return the arrays of a problem in flex_attention's layout, (batch, heads, seqlen, d).

    Arrays that are packed, (total, heads, d), are copied to (1, heads, total, d).
    """
    if not problem.packed:
        return arrays
    return tuple(x.transpose(0, 1)[None].contiguous() for x in arrays)


def _as_given(problem: Problem, x: Any) -> Any:
    """Convert an array from flex_attention's layout to the layout of the problem, and return it."""
    return x[0].transpose(0, 1) if problem.packed else x


def _compiled(problem: Problem, q: Any, k: Any, v: Any, **given: Any) -> Callable[[], Any]:
    """Return a function that runs flex_attention, compiled for the problem and its options.

    The arrays are in flex_attention's layout; see `_laid_out`. `given` are the options of the call,
    as for `call`.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # torch keeps only a few compiled versions of a function, and each new mask makes a version.
    torch._dynamo.reset()
    options: dict[str, Any] = {"scale": problem.scale, "enable_gqa": problem.group > 1}
    visible = given.get("mask_mod") or _mask_mod(problem, **given)
    if visible is not None:
        sizes = q.shape[2], k.shape[2]
        options["block_mask"] = create_block_mask(visible, None, None, *sizes, device="cuda")
    options["score_mod"] = given.get("score_mod") or _score_mod(problem, **given)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    if problem.bias is not None:
        # With torch's default number of stages, the tiles of a bias do not fit into shared memory.
        options["kernel_options"] = {"num_stages": BIAS_STAGES}
    if "backend" in given:
        options["kernel_options"] = options.get("kernel_options", {}) | {
            "BACKEND": given["backend"]
        }

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
        Options of our call, as for `call`.

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
    """Return the `mask_mod`, which says whether row i sees column j; None if there is no mask.

    If `cu_seqlens_q` is given, all sequences are one long sequence, and a row sees only columns of
    its own sequence.
    """
    left, right, diagonal = problem.left, problem.right, problem.diagonal
    conditions: list[Callable] = []
    if right is not None:
        conditions.append(lambda i, j: j <= i + diagonal + right)
    if left is not None:
        conditions.append(lambda i, j: j >= i + diagonal - left)
    if cu_seqlens_q is not None:
        ends = torch.as_tensor(cu_seqlens_q, device="cuda")[1:].long()
        rows = torch.arange(int(ends[-1]), device="cuda")
        entry = torch.searchsorted(ends, rows, right=True)
        conditions.append(lambda i, j: entry[i] == entry[j])
    if not conditions:
        return None

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = conditions[0](i, j)
        for condition in conditions[1:]:
            seen = seen & condition(i, j)
        return seen

    return visible


def _score_mod(
    problem: Problem, alibi_slopes: Any = None, bias: Any = None, **_: Any
) -> Callable | None:
    """Return the function that changes the score of row i and column j; None if no score changes.

    At most one of the options softcap, `alibi_slopes` and `bias` is supported.
    """
    cap, diagonal = problem.softcap, problem.diagonal
    if cap is not None:
        return lambda s, b, h, i, j: cap * torch.tanh(s / cap)
    if alibi_slopes is not None:  # with a causal mask: j - i - diagonal is never positive
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
        The options, with the other values unchanged.
    """
    arrays = {name: x for name, x in given.items() if getattr(x, "dtype", None) == "float32"}
    return {**given, **{name: peers.on_device((x,))[0] for name, x in arrays.items()}}
