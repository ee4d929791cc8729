"""Calls that append keys and values to the pages of a K/V cache: checks, plan and launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa_numba import checks
from fa_numba.checks import LAYOUTS
from fa_numba.dtypes import DTYPES
from fa_numba.host import launch_cache, placement
from fa_numba.host.arrays import (
    INTEGERS,
    all_aligned,
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
from fa_numba.options import UNIFORM
from fa_numba.problem import MAX_SEQLEN

NAMES = ("k_pages", "v_pages", "k_new", "v_new")
_INTEGERS = ("block_table", "kv_lens", "new_lens")


def append(
    pages: tuple[Any, Any], new: tuple[Any, Any], options: dict[str, Any], stream: Any
) -> None:
    """Write new keys and values to the pages of a K/V cache.

    ``pages`` is (k_pages, v_pages) and ``new`` is (k_new, v_new). ``options`` contains the other
    arguments of ``fa_numba.append_kv`` by name.
    """
    call = launch_cache.describe_call("append", (*pages, *new), options)
    if launch_cache.replay(call, None, stream) is None:
        _first_append((*pages, *new), options, stream, call)


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


def check_rows(new: int, most: int) -> None:
    """Raise ValueError if there are too many rows for kernels, which count rows in 32 bits.

    ``new`` is the number of rows of k_new. ``most`` is the number of rows in all pages that the
    block table lists for a sequence.
    """
    pages = "all pages that block_table lists for a sequence together"
    for what, rows in (("each sequence of k_new", new), (pages, most)):
        if rows > MAX_SEQLEN:
            raise ValueError(f"{what} must have at most {MAX_SEQLEN} rows, got {rows}")


def _first_append(given: tuple, options: dict[str, Any], stream: Any, call: Any) -> None:
    inputs = [operand(*x) for x in zip(NAMES, given, strict=True)]
    k_pages, v_pages, k_new, v_new = inputs
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
    check_together(inputs, list(arrays.values()))
    if checked is not None and host_counts is not None:
        begin = checks.table_lengths(checked[1], shape, page_size)
        checks.check_appended(checked[0], begin, host_counts, sizes[0], page_size)

    with placement.placed(k_pages):
        aligned = all(n % DTYPES[k_pages.dtype].chunk == 0 for n in (d, d_v))
        aligned = aligned and all_aligned(inputs, k_pages)
        of_new = (batch, new[heads], N, d, d_v)
        plan = plan_of_append(k_pages.dtype, of_new, page_size, aligned, counts is not None)
        placement.check_grid(plan, "k_new")
        values = dict(zip(_INTEGERS, (paged.table, lens, host_counts), strict=True))

        def run(found: dict[str, Any], stream: Any) -> None:
            found |= {name: heads_first(found[name], heads != 1) for name in NAMES}
            for name, value in values.items():
                if name not in found:
                    found[name] = sent(np.asarray(value, np.int32))
            execute(plan, found, stream)

        launch_cache.run_and_keep(plan, {x.name: x for x in inputs} | arrays, stream, call, run)
