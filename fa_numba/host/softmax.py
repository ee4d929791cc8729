"""A softmax of vectors from its arguments to its result: checks, launch, result."""

from __future__ import annotations

from typing import Any

from fa_numba import device, io_model
from fa_numba.checks import as_size
from fa_numba.host import placement
from fa_numba.host.arrays import Operand, check_out, check_together, operand
from fa_numba.host.launch_cache import run_and_keep
from fa_numba.kernels.simt.softmax import MAKERS, THREADS
from fa_numba.problem import MAX_SEQLEN

# Of a multiply-add of a tile, in time on the emulator: what an element costs in one pass.
STEPS_PER_ACCESS = 8


def softmax(x: Any, algorithm: str, out: Any, stream: Any) -> Any:
    """softmax(x) by rows, with the arguments of the public function."""
    io_model.check_softmax(algorithm)
    given = operand("x", x, ("float32",))
    batch, elements = _sizes(given)
    target = None
    if out is not None:
        target = operand("out", out, ("float32",))
        check_together([given, target])
        check_out(target, given.shape, [given])
    kernel = MAKERS[algorithm]()
    with placement.placed(given):
        if not device.on_gpu():
            _check_size(batch, elements, algorithm)
        handle = placement.stream_handle(stream, given)

        def run(arrays: list, made: list, stream: Any) -> None:
            device.launch(kernel, (batch, 1, 1), (arrays[0], made[0]), stream)

        outputs = [(given.shape, "float32", target)]
        return run_and_keep(run, [given], (), outputs, handle, None)[0]


def _sizes(x: Operand) -> tuple[int, int]:
    if len(x.shape) != 2:
        raise ValueError(f"x has shape {x.shape}: allowed is (batch, elements)")
    batch, elements = (as_size(n, s) for n, s in zip(("batch", "elements"), x.shape, strict=True))
    if elements > MAX_SEQLEN:
        raise ValueError(f"x has {elements} elements a vector: allowed is at most {MAX_SEQLEN}")
    return batch, elements


def _check_size(batch: int, elements: int, algorithm: str) -> None:
    """Raise ValueError for what would take the emulator minutes."""
    steps = STEPS_PER_ACCESS * io_model.softmax(batch, elements, algorithm).total
    steps += placement.STEPS_PER_THREAD * batch * THREADS
    if steps > placement.EMULATOR_STEPS:
        raise ValueError(
            f"x has shape {(batch, elements)}, about {steps:.2g} steps: the emulator takes at most "
            f"{placement.EMULATOR_STEPS:.2g}, and it runs here because "
            f"{device.why_no_gpu() or 'it was asked for'}"
        )
