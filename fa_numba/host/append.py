"""Calls that append keys and values to the pages of a K/V cache: checks, plan and launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa_numba import checks, device
from fa_numba.checks import LAYOUTS
from fa_numba.dtypes import DTYPES, E4M3, E4M3_CAPABILITY, UNSCALED
from fa_numba.host import launch_cache, placement
from fa_numba.host.arrays import (
    INTEGERS,
    SUMS,
    Operand,
    all_aligned,
    check_device,
    check_shape,
    check_together,
    check_written,
    lies_on_gpu,
    on_host,
    operand,
)
from fa_numba.host.binding import paging, sent
from fa_numba.host.execution import execute, heads_first
from fa_numba.host.plans import Launch, LaunchPlan
from fa_numba.kernels.simt.append import blocks, make_append
from fa_numba.kernels.simt.append_e4m3 import COLUMNS, make_append_e4m3, pages_touched
from fa_numba.options import UNIFORM
from fa_numba.problem import MAX_SEQLEN

NAMES = ("k_pages", "v_pages", "k_new", "v_new")
SCALES = ("k_scale", "v_scale")
_INTEGERS = ("block_table", "kv_lens", "new_lens")


def append(
    pages: tuple[Any, Any],
    new: tuple[Any, Any],
    scales: tuple[Any, Any],
    options: dict[str, object],
    stream: Any,
) -> None:
    """Write new keys and values to the pages of a K/V cache.

    ``pages`` is (k_pages, v_pages), ``new`` is (k_new, v_new), and ``scales`` is (k_scale,
    v_scale). ``options`` contains the other arguments of ``fa_numba.append_kv`` by name.
    """
    call = launch_cache.describe_call("append", (*pages, *new, *scales), options)
    if launch_cache.replay(call, None, stream) is None:
        _first_append((*pages, *new), scales, options, stream, call)


def plan_of_append(dtype: str, sizes: tuple[int, ...], page_size: int, aligned: bool, ragged: bool):
    """Return the plan that appends up to N rows to each of B sequences.

    ``sizes`` is (B, Hk, N, head dimension of K, head dimension of V). ``aligned`` says whether rows
    start at 16-byte addresses. ``ragged`` says whether each sequence has its own number of new
    rows, given by ``new_lens``. If not, each sequence gets N rows.
    """
    batch, heads, N, *columns = sizes
    kernel = make_append(*columns, dtype, page_size, aligned, ragged)
    bound = dict(zip(("K", "V", "newK", "newV"), NAMES, strict=True))
    if not ragged:  # the kernel does not read ``new_lens``, so any array of integers will do
        bound["new_lens"] = "kv_lens"
    launch = Launch.of(kernel, (blocks(N, max(columns), dtype, aligned), heads, batch), **bound)
    uncounted = (*UNIFORM, "new_lens", "block_table")
    return LaunchPlan(launches=(launch,), updated=NAMES[:2], uncounted=uncounted)


def plan_of_append_e4m3(
    dtype: str, sizes: tuple[int, ...], page_size: int, aligned: bool, ragged: bool
):
    """Return the plan that appends up to N rows of ``dtype`` to e4m3 pages of each of B sequences.

    ``plan_of_append`` explains the arguments.
    """
    batch, heads, N, *columns = sizes
    grid = (pages_touched(N, page_size), heads, batch)
    launches = []
    for d, pages, scales, new in zip(columns, NAMES[:2], SCALES, NAMES[2:], strict=True):
        kernel = make_append_e4m3(d, dtype, page_size, aligned, ragged)
        bound = {"pages": pages, "scales": scales, "new": new}
        if not ragged:
            bound["new_lens"] = "kv_lens"
        launches.append(Launch.of(kernel, grid, **bound))
    uncounted = (*UNIFORM, "new_lens", "block_table")
    updated = (*NAMES[:2], *SCALES)
    return LaunchPlan(launches=tuple(launches), updated=updated, uncounted=uncounted)


def check_rows(new: int, most: int) -> None:
    """Raise ValueError if there are too many rows for kernels, which count rows in 32 bits.

    ``new`` is the number of rows of k_new. ``most`` is the number of rows in all pages that the
    block table lists for a sequence.
    """
    pages = "all pages that block_table lists for a sequence together"
    for what, rows in (("each sequence of k_new", new), (pages, most)):
        if rows > MAX_SEQLEN:
            raise ValueError(f"{what} must have at most {MAX_SEQLEN} rows, got {rows}")


def _first_append(
    given: tuple, scales: tuple[Any, Any], options: dict[str, object], stream: Any, call: Any
) -> None:
    stored = (*UNSCALED, E4M3.name)
    kinds = stored, stored, UNSCALED, UNSCALED
    inputs = [operand(*x) for x in zip(NAMES, given, kinds, strict=True)]
    k_pages, v_pages, k_new, v_new = inputs
    quantises = k_pages.dtype == E4M3.name
    axes = LAYOUTS[checks.as_layout(options["layout"])]
    heads, rows = axes.index("heads"), axes.index("seqlen")
    sizes, new = (checks.as_sizes(x.name, x.shape, axes) for x in (k_pages, k_new))
    d_v = checks.as_sizes("v_pages", v_pages.shape, axes)[-1]
    for axis in ("heads", "head_dim"):
        checks.check_same(axis, "k_new", new, "k_pages", sizes, axes)
    check_shape(v_pages, (*k_pages.shape[:-1], d_v))
    check_shape(v_new, (*k_new.shape[:-1], d_v))
    check_written(k_pages, [k_new, v_new])
    check_written(v_pages, [k_new, v_new, k_pages])
    page_size = checks.as_page_size(sizes[rows], sizes, "k_pages")
    batch, N, d = new[0], new[rows], new[-1]

    block_table, kv_lens, counts = (options[name] for name in _INTEGERS)
    if block_table is None:
        raise TypeError(
            "block_table must be an array of integers of shape (batch, pages per sequence), got "
            "None"
        )
    check_table = False if options["check_table"] is None else options["check_table"]
    paged = paging(block_table, kv_lens, check_table)
    arrays, checked = dict(paged.arrays), paged.checked
    shape = checks.as_table_shape(paged.shape, batch)
    check_rows(N, shape[1] * page_size)
    host_counts: Any = (N,) * batch
    if counts is not None:
        on_gpu = lies_on_gpu(counts)
        if on_gpu:
            arrays["new_lens"] = operand("new_lens", counts, INTEGERS)
        read = not on_gpu or options["check_table"]
        host_counts = on_host("new_lens", counts) if read else None
    if host_counts is not None:
        host_counts = checks.as_lengths("new_lens", host_counts, batch, N, "the rows of k_new")
    lens = None
    if "kv_lens" not in arrays:
        lens = checks.table_lengths(on_host("kv_lens", kv_lens), shape, page_size)
    for name in ("kv_lens", "new_lens"):
        if name in arrays:
            checks.check_shape(name, arrays[name].shape, (batch,), of=checks.PER_ENTRY)
    if quantises:
        check_together([k_pages, v_pages], [k_new, v_new, *arrays.values()])
        check_together([k_new, v_new])
    else:
        check_together(inputs, list(arrays.values()))
    scaled = _scales(scales, inputs, heads)
    if checked is not None and host_counts is not None:
        begin = checks.table_lengths(checked[1], shape, page_size)
        checks.check_appended(checked[0], begin, host_counts, sizes[0], page_size)

    with placement.placed(k_pages):
        aligned = all(n % DTYPES[k_new.dtype].chunk == 0 for n in (d, d_v))
        aligned = aligned and all_aligned(inputs[2:] if quantises else inputs, k_pages)
        of_new = (batch, new[heads], N, d, d_v)
        make = plan_of_append_e4m3 if quantises else plan_of_append
        plan = make(k_new.dtype, of_new, page_size, aligned, counts is not None)
        placement.check_grid(plan, "k_new")
        values = dict(zip(_INTEGERS, (paged.table, lens, host_counts), strict=True))

        def run(found: dict[str, object], stream: Any) -> None:
            found |= {name: heads_first(found[name], heads != 1) for name in NAMES}
            for name, value in values.items():
                if name not in found:
                    found[name] = sent(np.asarray(value, np.int32))
            execute(plan, found, stream)

        named = {x.name: x for x in (*inputs, *scaled)} | arrays
        launch_cache.run_and_keep(plan, named, stream, call, run)


def _scales(given: tuple[Any, Any], inputs: list[Operand], heads: int) -> list[Operand]:
    """Return the operands of ``k_scale`` and ``v_scale``, or [] if the pages are not e4m3.

    argument   meaning
    given      the caller's (k_scale, v_scale); the values are None for pages that are not e4m3
    inputs     operands of the pages of K and V, and of the new rows
    heads      number of the axis of heads of the pages

    Raises TypeError or ValueError in these cases:

    - Scales are given, but the pages are not e4m3.
    - The pages are e4m3, and a scale is missing, or its shape, dtype or device does not fit.
    - The pages are e4m3, and a scale is not writable, or shares memory with another array.
    - The pages are e4m3, and their rows do not start at multiples of 16 bytes.
    - The pages are e4m3, and the GPU does not support e4m3.
    """
    pages = inputs[:2]
    if pages[0].dtype != E4M3.name:
        for name, scale in zip(SCALES, given, strict=True):
            if scale is not None:
                raise ValueError(
                    f"{name} must be None unless the pages are {E4M3.name}, got scales with pages "
                    f"of {pages[0].dtype}"
                )
        return []
    found: list[Operand] = []
    for name, scale, x in zip(SCALES, given, pages, strict=True):
        shape = x.shape[0], x.shape[heads]
        if scale is None:
            raise TypeError(
                f"{name} must be a float32 array of shape {shape}, (pages, heads), for pages of "
                f"{E4M3.name}, got None"
            )
        found.append(operand(name, scale, SUMS))
        check_shape(found[-1], shape)
        check_device(pages[0], found[-1])
        check_written(found[-1], [*inputs, *found[:-1]])
        if x.shape[-1] % COLUMNS or not all_aligned([x], x):
            raise ValueError(
                f"{x.name} must have rows that start at multiples of 16 bytes (head_dim a multiple "
                f"of {COLUMNS}), got shape {x.shape} and strides {x.strides} bytes"
            )
    if device.compute_capability() < E4M3_CAPABILITY:
        raise ValueError(
            f"pages of {E4M3.name} need a GPU of compute capability 8.9 or newer, got "
            f"{'.'.join(map(str, device.compute_capability()))}"
        )
    return found
