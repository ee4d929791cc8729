"""Two parts of one result made one, in the first one's place: checks, launch."""

from __future__ import annotations

from typing import Any

from fa_numba import device
from fa_numba.checks import LAYOUTS, as_layout
from fa_numba.host import launch_cache, placement
from fa_numba.host.append import check_grid, heads_first
from fa_numba.host.arrays import HOST, SUMS, Operand, check_shape, check_written, operand
from fa_numba.kernels.merge_parts import THREADS, blocks, make_add, make_merge


def merge(x: Any, x_lse: Any, y: Any, y_lse: Any, lse: Any, layout: str = "bhnd") -> None:
    """x = the rows' output over the columns of x and of y, ``lse`` their logsumexp.

    x and y are (B, H, N, d), or (B, N, H, d) with ``layout="bnhd"``, float32 or of 16 bits, any
    strides; the others float32 (B, H, N), ``lse`` of memory of its own. Raises ValueError or
    TypeError before anything is written.
    """
    _run(("x", "x_lse", "y", "y_lse", "lse"), (x, x_lse, y, y_lse, lse), layout)


def add(x: Any, y: Any, layout: str = "bhnd") -> None:
    """x += y, shapes and dtypes as for ``merge``."""
    _run(("x", "y"), (x, y), layout)


def _run(names: tuple[str, ...], arrays: tuple, layout: str) -> None:
    call = launch_cache.describe_call(("merge", layout), arrays, {})
    if launch_cache.replay(call, None, None) is None:
        _first_run(names, arrays, layout, call)


def _first_run(names: tuple[str, ...], arrays: tuple, layout: str, call: Any) -> None:
    axes = LAYOUTS[as_layout(layout)]
    dtypes: dict[str, Any] = {n: {"allowed": SUMS} for n in names if n.endswith("lse")}
    inputs = [operand(n, x, **dtypes.get(n, {})) for n, x in zip(names, arrays, strict=True)]
    named = dict(zip(names, inputs, strict=True))
    x, y = named["x"], named["y"]
    check_shape(y, x.shape)
    sizes = dict(zip(axes, x.shape, strict=True))
    batch, heads, rows, d = (sizes[n] for n in LAYOUTS["bhnd"])
    for name in names:
        if name.endswith("lse"):
            check_shape(named[name], (batch, heads, rows))
    for other in inputs[1:]:
        if other.place != x.place:
            raise ValueError(f"{other.name} is in {other.where}: allowed is {x.where}, where x is")
    check_written(x, [y])
    if "lse" in named:
        check_written(named["lse"], inputs[:-1])

    with placement.placed(x):
        copied = device.on_gpu() and x.place == HOST
        aligned = copied or (x.aligned and y.aligned)
        make = make_merge if "lse" in named else make_add
        kernel = make(d, x.dtype, y.dtype, aligned)
        grid = (blocks(rows, d, aligned), heads, batch)
        check_grid("x", grid, THREADS)
        handle = placement.stream_handle(None, x)
        swapped = axes.index("heads") != 1

        def run(found: list, made: list, stream: Any) -> None:
            matrices = {"x", "y"} if swapped else set()
            given = [
                heads_first(a) if n in matrices else a for n, a in zip(names, found, strict=True)
            ]
            device.launch(kernel, grid, tuple(given), stream)

        if copied:
            _through_gpu(inputs, run, handle)
        else:
            launch_cache.run_and_keep(run, inputs, (), [], handle, call)


def _through_gpu(inputs: list[Operand], run: Any, handle: int) -> None:
    """Arrays of the host go to the GPU, x and the last one back."""
    copies = [device.to_gpu(x.argument(), handle) for x in inputs]
    run([device.argument(x) for x in copies], [], handle)
    written = (0,) if len(inputs) == 2 else (0, len(inputs) - 1)
    for n in written:
        device.to_host(copies[n], inputs[n].argument(), handle)
