"""Calls of JAX's attention for Hopper GPUs, which is written in Pallas (Mosaic GPU).

The module is `jax.experimental.pallas.ops.gpu.attention_mgpu`. JAX launches kernels on a stream of
its own, while our clock records events on the default stream. Each call therefore hands its inputs
from torch to JAX and its result from JAX to torch by DLPack. DLPack lets JAX's stream wait for the
default stream first, and the default stream for JAX's stream at last.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

from fa_numba.problem import Problem

try:
    import torch
except ImportError:  # pragma: no cover
    torch = None

# Head dimension -> rows of Q of a warpgroup, columns of a tile, and pipeline slots.
TILES = {64: (64, 128, 4), 128: (64, 128, 2)}


@cache
def library() -> Any:
    """Return JAX and its attention module.

    Returns
    -------
    (module, module) or None
        The modules `jax` and `attention_mgpu`. None if they cannot be imported, or if the GPU has
        another compute capability than 9.0.
    """
    if torch is None or not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability() != (9, 0):
        return None
    # JAX would otherwise reserve most of the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax
        from jax.experimental.pallas.ops.gpu import attention_mgpu
    except ImportError:
        return None
    return jax, attention_mgpu


def takes(problem: Problem) -> bool:
    """Return whether JAX's attention can compute a problem.

    Parameters
    ----------
    problem : Problem
        The problem.

    Returns
    -------
    bool
        True for 16-bit inputs with a head dimension in TILES, and with lengths that are multiples
        of the tiles. The only option is a causal mask with equal lengths.
    """
    if problem.head_dim not in TILES or problem.dtype == "float32":
        return False
    rows, columns, _ = TILES[problem.head_dim]
    plain = Problem(problem.batch, problem.heads_q, problem.heads_k, problem.seqlen_q,
                    problem.seqlen_k, problem.head_dim, dtype=problem.dtype,
                    causal=problem.causal, scale=problem.scale)  # fmt: skip
    fits = problem.seqlen_q % (2 * rows) == 0 and problem.seqlen_k % columns == 0
    return problem == plain and fits and not (problem.causal and problem.diagonal)


def call(problem: Problem, q: Any, k: Any, v: Any) -> Callable[..., Any]:
    """Return a function that runs JAX's attention once forward.

    The function of JAX has no argument for the scale, and another layout. q is therefore multiplied
    by the scale, and the inputs are copied to (batch, seqlen, heads, d), once before any call.

    Parameters
    ----------
    problem : Problem
        The problem.
    q, k, v : torch.Tensor
        Inputs on the GPU.

    Returns
    -------
    callable
        Takes the argument `out`, ignores it, and returns O as a torch tensor.

    Raises
    ------
    ValueError
        If JAX's attention is missing, or cannot compute the problem.
    """
    found = library()
    if found is None or not takes(problem):
        raise ValueError(
            "JAX's attention needs JAX, a GPU of compute capability 9.0, 16-bit inputs, and a "
            f"problem without options but causal; head_dim must be one of {[*TILES]}, and the "
            "lengths must be multiples of 128; use another peer"
        )
    jax, module = found
    rows, columns, slots = TILES[problem.head_dim]
    config = module.TuningConfig(
        block_q=rows, block_kv=columns, max_concurrent_steps=slots, causal=problem.causal
    )
    arrays = [x.transpose(1, 2).contiguous() for x in (q * problem.scale, k, v)]

    def run(out: Any = None) -> Any:
        given = (jax.dlpack.from_dlpack(x) for x in arrays)
        return torch.from_dlpack(module.attention(*given, config)).transpose(1, 2)

    return run
