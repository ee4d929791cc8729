"""The parts of the kernels on Hopper's tensor cores (``wgmma``), one topic per module."""

from fa_numba.parts import scores, values, visits
from fa_numba.parts.namespace import bind
from fa_numba.parts.wgmma import (
    dq_kernel,
    drawing,
    epilogue,
    fa1_gradients,
    fa1_state,
    gradients,
    grid,
    key_tiles,
    load,
    pingpong,
    pipeline,
    plane_gradients,
    products,
    scheduler,
    softmax,
    wide_gradients,
)

__all__ = [
    "dq_kernel",
    "drawing",
    "epilogue",
    "fa1_gradients",
    "fa1_state",
    "gradients",
    "grid",
    "key_tiles",
    "load",
    "pingpong",
    "pipeline",
    "pipelines",
    "plane_gradients",
    "products",
    "scheduler",
    "scores",
    "softmax",
    "values",
    "visits",
    "wide_gradients",
]


def pipelines(spec):
    """Return the device functions of each pipeline of a kernel, in the order of ``spec.pipelines``.

    The result is a tuple with one ``Parts`` object of the module ``pipeline`` for each pipeline.
    """
    return tuple(bind(facts, pipeline)[0] for facts in spec.pipelines)
