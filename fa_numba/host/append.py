"""Keys and values appended to the pages of a cache: checks, launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa_numba import device
from fa_numba.checks import (
    LAYOUTS,
    as_layout,
    as_lengths,
    as_page_size,
    as_sizes,
    as_table_shape,
    check_appended,
    check_same,
    table_lengths,
)
from fa_numba.dtypes import DTYPES
from fa_numba.host import launch_cache, placement
from fa_numba.host.arrays import (
    HOST,
    INTEGERS,
    Operand,
    check_shape,
    check_together,
    check_written,
    lies_on_gpu,
    on_host,
    operand,
)
from fa_numba.host.binding import PAGING, paging, sent
from fa_numba.kernels.simt.append import THREADS, blocks, make_append
from fa_numba.options import UNIFORM

NAMES = ("k_pages", "v_pages", "k_new", "v_new")


def append(
    pages: tuple[Any, Any], new: tuple[Any, Any], options: dict[str, Any], stream: Any
) -> None:
    """Write ``new`` rows to ``pages``, with the arguments of the public function."""
    call = launch_cache.describe_call(("append",), (*pages, *new), options)
    if launch_cache.replay(call, None, stream) is None:
        _first_append((*pages, *new), options, stream, call)


def _first_append(given: tuple, options: dict[str, Any], stream: Any, call: Any) -> None:
    inputs = [operand(*x) for x in zip(NAMES, given, strict=True)]
    k_pages, v_pages, k_new, v_new = inputs
    axes = LAYOUTS[as_layout(options["layout"])]
    heads, rows = axes.index("heads"), axes.index("seqlen")
    sizes, new = (as_sizes(x.name, x.shape, axes) for x in (k_pages, k_new))
    for axis in ("heads", "head_dim"):
        check_same(axis, "k_new", new, "k_pages", sizes, axes)
    check_shape(v_pages, k_pages.shape)
    check_shape(v_new, k_new.shape)
    for x in (k_pages, v_pages):
        check_written(x, [k_new, v_new])
    page_size = as_page_size(sizes[rows], sizes)
    batch, N, d = new[0], new[rows], new[-1]

    facts: dict[str, Any] = {}
    arrays: dict[str, Operand] = {}
    asked = {n: options[n] for n in (*PAGING, "check_table") if options[n] is not None}
    if "block_table" not in asked:
        raise TypeError("block_table is None: allowed are integers (batch, pages of a sequence)")
    table, checked = paging(asked, facts, arrays, False)
    shape = as_table_shape(facts["block_table"], batch)
    counts = options["new_lens"]
    host_counts: Any = (N,) * batch
    if counts is not None and lies_on_gpu(counts):
        arrays["new_lens"] = operand("new_lens", counts, INTEGERS)
        host_counts = on_host("new_lens", counts) if options["check_table"] else None
    elif counts is not None:
        host_counts = on_host("new_lens", counts)
    if host_counts is not None:
        host_counts = as_lengths("new_lens", host_counts, batch, N, "the rows of k_new")
    lens = None
    if "kv_lens" not in arrays:
        lens = table_lengths(on_host("kv_lens", options["kv_lens"]), shape, page_size)
    for name in ("kv_lens", "new_lens"):
        if name in arrays and arrays[name].shape != (batch,):
            raise ValueError(
                f"{name} has shape {arrays[name].shape}: allowed is ({batch},), one a batch"
            )
    check_together(inputs, list(arrays.values()))
    if checked is not None and host_counts is not None:
        begin = table_lengths(checked[1], shape, page_size)
        check_appended(checked[0], begin, host_counts, sizes[0], page_size)

    with placement.placed(k_pages):
        copied = device.on_gpu() and k_pages.place == HOST
        aligned = d % DTYPES[k_pages.dtype].chunk == 0
        aligned = aligned and (copied or all(x.aligned for x in inputs))
        kernel = make_append(d, k_pages.dtype, page_size, aligned, counts is not None)
        grid = (blocks(N, d, k_pages.dtype, aligned), new[heads], batch)
        check_grid("k_new", grid, THREADS)
        handle = placement.stream_handle(stream, k_pages)
        values: dict[str, Any] = {
            "block_table": table,
            "kv_lens": None if lens is None else np.array(lens, np.int32),
            "new_lens": None if host_counts is None else np.array(host_counts, np.int32),
        }

        def run(found: list, made: list, stream: Any) -> None:
            matrices = [x if heads == 1 else heads_first(x) for x in found[: len(inputs)]]
            named = dict(zip(arrays, found[len(inputs) :], strict=True))
            for name, value in values.items():
                if name not in named and (name != "new_lens" or counts is not None):
                    named[name] = sent(value)
            # Where all have all rows nobody reads how many.
            named.setdefault("new_lens", named["kv_lens"])
            device.launch(
                kernel, grid, (*matrices, *(named[n] for n in values)), stream, _UNCOUNTED
            )

        if copied:
            _through_gpu(inputs, run, handle)
        else:
            launch_cache.run_and_keep(run, [*inputs, *arrays.values()], (), [], handle, call)


_UNCOUNTED = (*UNIFORM, "new_lens", "block_table")


def heads_first(array: Any) -> Any:
    """A launch argument (B, N, H, d) as (B, H, N, d)."""
    return device.permuted(array, (0, 2, 1, 3))


def check_grid(of: str, grid: tuple[int, int, int], threads: int) -> None:
    """Raise ValueError for more blocks than a grid takes, or the emulator, over ``of``'s rows, and
    for more threads a head than 32 bits count.
    """
    if grid[0] * threads > 2**32:
        raise ValueError(
            f"{of} has {grid[0] * threads} pieces of rows a head: allowed are at most 2^32; take "
            "fewer rows, or rows that start at 16-byte addresses, whose pieces are larger"
        )
    for name, size in ((f"heads of {of}", grid[1]), ("batch", grid[2])):
        if size > 65535:
            raise ValueError(f"{name} is {size}: allowed is at most 65535, a grid's limit")
    steps = placement.STEPS_PER_THREAD * grid[0] * grid[1] * grid[2] * threads
    if not device.on_gpu() and steps > placement.EMULATOR_STEPS:
        raise ValueError(
            f"{of} takes {grid} blocks of {threads} threads, about {steps:.2g} steps: the "
            f"emulator takes at most {placement.EMULATOR_STEPS:.2g}, and it runs here because "
            f"{device.why_no_gpu() or 'it was asked for'}"
        )


def _through_gpu(inputs: list[Operand], run: Any, handle: int) -> None:
    """Arrays of the host go to the GPU, and the pages back."""
    copies = [device.to_gpu(x.argument(), handle) for x in inputs]
    run([device.argument(x) for x in copies], [], handle)
    for copy, pages in zip(copies[:2], inputs[:2], strict=True):
        device.to_host(copy, pages.argument(), handle)
