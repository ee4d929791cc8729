"""Calls of cuDNN's attention for 8-bit inputs, through cuDNN's Python interface.

torch calls cuDNN's attention for 16-bit inputs only. The package nvidia-cudnn-frontend (module
`cudnn`) also calls cuDNN's attention for inputs in float8_e4m3fn. On Hopper this attention writes O
in float8_e4m3fn, too, and takes one scale for each of Q, K and V.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from fa_numba.problem import Problem

try:
    import torch
except ImportError:  # pragma: no cover
    torch = None

SERIES = "cudnn"
PACKAGE = "nvidia-cudnn-frontend"
LARGEST = 448.0  # the largest number of float8_e4m3fn
P_SCALE = 256.0  # P, which is at most 1, is multiplied by this number before it is rounded


@cache
def library() -> Any:
    """Return the module `cudnn`.

    Returns
    -------
    module or None
        None if the module cannot be imported, or if there is no torch with CUDA.
    """
    if torch is None or not torch.cuda.is_available():
        return None
    try:
        import cudnn
    except ImportError:
        return None
    return cudnn


def call(problem: Problem, q: Any, k: Any, v: Any, largest_output: float) -> Callable[..., Any]:
    """Return a function that runs one forward pass of cuDNN's attention in float8_e4m3fn.

    q, k and v are converted once, before any call. Each of q, k and v has one scale.

    Parameters
    ----------
    problem : Problem
        The problem. Only the options `causal` and `scale` are allowed.
    q, k, v : torch.Tensor
        Inputs on the GPU, in a dtype with 16 or 32 bits: (batch, heads, seqlen, head_dim).
    largest_output : float
        Largest absolute value of O. The scale of O follows from it.

    Returns
    -------
    callable
        Takes the argument `out`, ignores it, and returns O as an `Output`.

    Raises
    ------
    ValueError
        If the module `cudnn` is missing. cuDNN's errors are passed on, for instance if this GPU has
        no such attention.
    """
    library_ = library()
    if library_ is None:
        raise ValueError(
            f"cuDNN's attention in 8 bits needs torch with CUDA and the package {PACKAGE}; install "
            f"the package, or leave out the series {SERIES}"
        )
    eight, single = library_.data_type.FP8_E4M3, library_.data_type.FLOAT
    graph = library_.pygraph(
        io_data_type=eight, intermediate_data_type=single, compute_data_type=single
    )
    given: dict[Any, Any] = {}

    def input_(array: Any, dtype: Any) -> Any:
        made = graph.tensor(dim=[*array.shape], stride=[*array.stride()], data_type=dtype)
        given[made] = array
        return made

    def number(value: Any) -> Any:
        return input_(torch.full((1, 1, 1, 1), float(value), device=q.device), single)

    arguments = {}
    for name, array in zip("qkv", (q, k, v), strict=True):
        scale = float(array.abs().max()) / LARGEST
        arguments[name] = input_((array.float() / scale).to(torch.float8_e4m3fn), eight)
        arguments[f"descale_{name}"] = number(scale)
    output_scale = LARGEST / largest_output
    output, _, *largest = graph.sdpa_fp8(
        **arguments, descale_s=number(1 / P_SCALE), scale_s=number(P_SCALE),
        scale_o=number(output_scale), generate_stats=False, attn_scale=problem.scale,
        use_causal_mask=problem.causal,
    )  # fmt: skip
    stored = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    # cuDNN also returns the largest elements of P and of O.
    found = [(output, stored, eight)]
    found += [(each, torch.zeros((1, 1, 1, 1), device=q.device), single) for each in largest]
    for made, array, dtype in found:
        made.set_output(True).set_dim([*array.shape]).set_stride([*array.stride()])
        made.set_data_type(dtype)
        given[made] = array
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([library_.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)

    def run(out: Any = None) -> Any:
        graph.execute(given, workspace)
        return Output(stored, output_scale)

    return run


class Output:
    """An output in float8_e4m3fn with its scale.

    Parameters
    ----------
    stored : torch.Tensor
        O multiplied by `scale`, in float8_e4m3fn.
    scale : float
        Factor by which O was multiplied.
    """

    def __init__(self, stored: Any, scale: float) -> None:
        self.stored, self.scale = stored, scale

    def float(self) -> Any:
        """Return O in float32."""
        return self.stored.float() / self.scale
