"""Faults planted in the kernels' own source: each must be caught, and the kernels as they are pass.

A mutant is one module of the package with one piece of its text replaced, run on the emulator in
place of the original, over tiles enough that every loop repeats and every edge is ragged.
"""

import inspect
import itertools
import linecache
import re
import types
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from backward_helpers import (
    NAMES,
    WAYS,
    differentiate,
    random_gradients,
    saved,
    true_gradients,
)
from helpers import (
    ALGORITHMS,
    assert_close_to_float64,
    assert_within,
    attend,
    random_inputs,
)

from fa_numba import Tiles, emulator, plans
from fa_numba.kernels.simt import (
    fa1_backward,
    fa1_forward,
    fa2_backward,
    fa2_forward,
    standard,
    standard_backward,
)
from fa_numba.parts import gradients, products, rows, softmax, tile_load

BACKWARD = {
    "standard_backward": standard_backward,
    "fa1_backward": fa1_backward,
    "fa2_backward": fa2_backward,
}
KERNELS = {"standard": standard, "fa1": fa1_forward, "fa2": fa2_forward, **BACKWARD}
PARTS = {m.__name__.rpartition(".")[2]: m for m in (gradients, products, rows, softmax, tile_load)}

# --- the machinery ---------------------------------------------------------------------------

_numbers = itertools.count()


def source(name):
    return inspect.getsource({**KERNELS, **PARTS}[name])


def replaced(text, needle, replacement, total, which):
    """`text` with occurrence `which` of `needle` replaced, of which there must be `total`."""
    found = text.count(needle)
    assert found == total, f"{needle!r} stands {found} times in the source, not {total}"
    pieces = text.split(needle)
    return needle.join(pieces[: which + 1]) + replacement + needle.join(pieces[which + 1 :])


def mutated(mutant):
    """The text of the mutant's module, changed in the mutant's function or anywhere."""
    module, _, function = mutant.place.partition(".")
    text = source(module)
    scope = text
    if function:
        scope = inspect.getsource(getattr(PARTS[module], function))
        assert text.count(scope) == 1
    change = (mutant.needle, mutant.replacement, mutant.total, mutant.which)
    return text.replace(scope, replaced(scope, *change))


def built(name, text):
    """A fresh module from `text`, in this package so that the emulator takes it for its own."""
    fresh = types.ModuleType(f"fa_numba.mutant_{name}_{next(_numbers)}")
    file = f"<{fresh.__name__}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), fresh.__dict__)
    return fresh


def kernels_with(**texts):
    """The kernel modules by algorithm, built anew, with the modules named in `texts` from these."""
    fresh = {a: built(a, texts.get(a) or source(a)) for a in KERNELS}
    for name in PARTS.keys() & texts.keys():
        part = built(name, texts[name])
        for module in fresh.values():
            for public, value in vars(part).items():
                if public.startswith("make_") and public in vars(module):
                    setattr(module, public, value)
    return fresh


@dataclass(frozen=True)
class Case:
    """A problem (B, Hq, Hk, Nq, Nk, d) and how to run it."""

    shape: tuple[int, ...]
    tiles: Tiles
    causal: bool
    query_splits: int = 1
    layout: str = "padded"
    low: bool = False  # scores far below 0


# Three tiles each way, two warps or more a block, the last tile of each axis ragged.
CASES = (
    Case((1, 2, 1, 21, 19, 8), Tiles(8, 8, 64), False),
    Case((1, 2, 1, 21, 19, 8), Tiles(8, 8, 64), True),  # rows 0 and 1 see no column
    Case((1, 4, 2, 17, 39, 6), Tiles(8, 16, 64), True, 2),
    Case((2, 2, 2, 10, 41, 5), Tiles(4, 16, 64), False, layout="odd"),
    Case((1, 1, 1, 37, 11, 4), Tiles(8, 8, 32), True),  # whole row tiles that see no column
    Case((1, 1, 1, 24, 24, 4), Tiles(8, 8, 64), True, 3),  # the diagonal meets corners of tiles
    Case((1, 1, 1, 23, 24, 4), Tiles(8, 8, 64), True, 3),  # and passes one column beyond them
    Case((1, 1, 1, 5, 200, 4), Tiles(8, 64, 64), False, low=True),  # two warps for a row of S
)


@cache
def inputs(case):
    q, k, v = random_inputs(*case.shape)
    k[:, :, -3:] *= 3  # the maximum still grows in the last tile
    if case.low:
        q, k = np.abs(q) + 1, k - 60
    return q, k, v


def run(algorithm, case):
    q, k, v = inputs(case)
    splits = {"query_splits": case.query_splits} if algorithm == "fa1" else {}
    layouts = {"layout": case.layout, "out_layout": case.layout}
    result = attend(
        "emulator", algorithm, q, k, v, causal=case.causal, tiles=case.tiles, **splits, **layouts
    )
    assert_close_to_float64(result.O, q, k, v, result.L, causal=case.causal)


# Tiles of columns are 16 or more, so that a group of four belongs to each thread.
BACKWARD_CASES = (
    Case((1, 2, 1, 21, 39, 8), Tiles(8, 16, 64), False),
    Case((1, 2, 1, 43, 41, 8), Tiles(8, 16, 64), True),  # rows 0 and 1 see no column
    Case((2, 4, 2, 10, 41, 5), Tiles(4, 16, 32), False, layout="odd"),
    Case((1, 1, 1, 45, 19, 4), Tiles(8, 16, 64), True),  # whole row tiles that see no column
    Case((1, 1, 1, 40, 40, 4), Tiles(8, 16, 64), True),  # the diagonal meets corners of tiles
    Case((1, 1, 1, 39, 40, 4), Tiles(8, 16, 64), True),  # and passes one column beyond them
    Case((1, 1, 1, 5, 200, 4), Tiles(8, 64, 64), False),  # two warps for a row of P
)


@cache
def gradient_inputs(case):
    given = random_gradients(*case.shape)
    values = saved(*given[1:], causal=case.causal)
    return given, values, true_gradients(*given, causal=case.causal)


def run_backward(algorithm, case):
    given, values, want = gradient_inputs(case)
    for way in WAYS:
        if WAYS[way][0] == algorithm:
            options = {"causal": case.causal, "tiles": case.tiles, "layout": case.layout}
            found = differentiate("emulator", way, *given, saved_values=values, **options)
            for name in NAMES:
                assert_within(name, getattr(found, name), getattr(want, name), want.bounds[name])


def caught_by(algorithm, kernels, monkeypatch):
    """What fails first over all cases: an emulator error's name, "counts", "values" or None."""
    name, _, backward = algorithm.partition("_")
    module = algorithm if backward or name == "standard" else f"{algorithm}_forward"
    runs, cases = (run_backward, BACKWARD_CASES) if backward else (run, CASES)
    planned = "_backward" if backward else "_forward"
    monkeypatch.setattr(plans, module, kernels[algorithm])
    monkeypatch.setattr(plans, planned, getattr(plans, planned).__wrapped__)
    for case in cases:
        try:
            runs(name, case)
        except AssertionError as error:
            return "counts" if str(error).startswith("counts") else "values"
        except (emulator.EmulatorError, ZeroDivisionError, ValueError) as error:
            return type(error).__name__
    return None


HAZARDS = {"SharedHazard", "UninitialisedRead", "BarrierDivergence", "Deadlock"}


@dataclass(frozen=True)
class Mutant:
    """`needle` becomes `replacement` in `place`: occurrence `which` of `total`.

    `place` is a module or "module.function", `algorithms` are those that it must break, `by` is
    what may catch it.
    """

    title: str
    place: str
    needle: str
    replacement: str
    by: frozenset
    algorithms: tuple[str, ...]
    total: int = 1
    which: int = 0


def mutants():
    found = []

    def add(title, place, needle, replacement, by, algorithms=None, total=1):
        by = frozenset({by} if isinstance(by, str) else by)
        algorithms = algorithms or ((place,) if place in KERNELS else ("fa1", "fa2"))
        for n in range(total):
            label = f"{title} {n + 1} of {total}" if total > 1 else title
            found.append(Mutant(label, place, needle, replacement, by, algorithms, total, n))

    every = ALGORITHMS

    # Synchronisation: every barrier, wait and commit of every kernel, one at a time.
    for name, barriers, waits, commits in (
        ("fa1", 3, 1, 2),
        ("fa2", 2, 3, 3),
        ("standard", 5, 3, 3),
    ):
        add("no barrier", name, "cuda.syncthreads()", "pass", HAZARDS, total=barriers)
        add("no wait", name, " wait_async()", " pass", HAZARDS, total=waits)
        add("no commit", name, " commit_async()", " pass", HAZARDS, total=commits)
    for name, barriers, waits, commits in (
        ("fa1_backward", 4, 1, 2),
        ("fa2_backward", 6, 3, 4),
        ("standard_backward", 3, 1, 1),
    ):
        add("no barrier", name, "cuda.syncthreads()", "pass", HAZARDS, total=barriers)
        add("no wait", name, " wait_async()", " pass", HAZARDS, total=waits)
        add("no commit", name, " commit_async()", " pass", HAZARDS, total=commits)

    # Scale and mask
    mask = "softmax.make_scale_and_mask"
    add("scale", mask, "rS[e] *= scale", "rS[e] *= scale * float32(1.001)", "values", every)
    add("scale not applied", mask, "rS[e] *= scale", "pass", "values", every)
    add("unmasked pad", mask, "visible = col < cols_end", "visible = True", "values")
    add("no test for a ragged tile", mask, "inside = last < cols_end", "inside = True", "values")
    for shift in ("+ 1", "- 1"):
        add(
            f"diagonal {shift}",
            mask,
            "_visible_causal(row, int32(col), diagonal)",
            f"_visible_causal(row, int32(col), diagonal {shift})",
            "values",
            every,
        )
    add(
        "no test for the diagonal",
        mask,
        "inside = inside and _visible_causal(int32(row0), int32(last), diagonal)",
        "pass",
        "values",
        every,
    )

    # Online softmax
    online = "softmax.make_online_softmax"
    add(
        "l not rescaled",
        online,
        "rl[i] = rf[i] * rl[i] + rowsum",
        "rl[i] = rl[i] + rowsum",
        "values",
    )
    add(
        "l without the old sum",
        online,
        "rl[i] = rf[i] * rl[i] + rowsum",
        "rl[i] = rowsum",
        "values",
    )
    add("m not updated", online, "rm[i] = m_new", "pass", "values")
    add(
        "m of one thread",
        online,
        "m_new = maximum(m_new, cuda.shfl",
        "maximum(m_new, cuda.shfl",
        "values",
    )
    add(
        "l of one thread",
        online,
        "rowsum += cuda.shfl_xor_sync(FULL_WARP, rowsum, lane)",
        "pass",
        "values",
    )
    add("no shift of a blind row", online, "if m_new == NEG_INF:", "if False:", "values")
    add(
        "L without m",
        "softmax.make_logsumexp",
        "LN2 * (rm[i] + log2(rl[i]))",
        "LN2 * log2(rl[i])",
        "values",
        ("fa1", "fa2"),
    )
    add(
        "L in units of log2",
        "softmax.make_logsumexp",
        "LN2 * (rm[i] + log2(rl[i]))",
        "rm[i] + log2(rl[i])",
        "values",
        ("fa1", "fa2"),
    )
    add(
        "L not written",
        "fa1",
        "write_values(rl, L[b, h], i0, i_end, ty, tx)",
        "pass",
        ("values", "counts"),
    )

    # Rescaling of O
    add(
        "no rescale",
        "rows.make_scale_and_add",
        "rf[i] * rO[e] + rT[e]",
        "rO[e] + rT[e]",
        "values",
        ("fa1", "fa2"),
    )
    add(
        "O of the last tile alone",
        "rows.make_scale_and_add",
        "rf[i] * rO[e] + rT[e]",
        "rT[e]",
        "values",
        every,
    )
    for name in ("fa1", "fa2"):
        add("no sum over tiles", name, "scale_and_add(rO, rf, rT)", "pass", "values")
        add("no normalisation", name, "normalise_rows(rO, rl)", "pass", "values")
    add("no denormalisation", "fa1", "scale_rows(rO, rl)", "pass", "values")
    add(
        "division of a blind row",
        "rows.make_normalise_rows",
        "if rl[i] != float32(0.0):",
        "if True:",
        ("values", "ZeroDivisionError"),
    )

    # Which tiles are visited
    for name in ("fa1", "fa2"):
        add(
            "a tile of columns dropped",
            name,
            "while j0 < j_end:",
            "while j0 + uint32(Bc) < j_end:",
            ("values", "counts", *HAZARDS),
        )
    add(
        "a tile of columns dropped",
        "standard",
        "while j0 < Nk:",
        "while j0 + uint32(Bc) < Nk:",
        ("values", "counts", *HAZARDS),
        total=2,
    )
    add(
        "a row tile too many skipped",
        "fa1",
        "// int32(Br)",
        "// int32(Br) + int32(1)",
        ("values", "counts", *HAZARDS),
    )
    add("no row tile skipped", "fa1", "if causal and j0 > uint32(0):", "if False:", "counts")
    # A column tile that no row of the split sees is loaded and never waited for.
    blind = ("counts", *HAZARDS)
    add("no column tile skipped", "fa1", "        if causal:", "        if False:", blind)
    add("no column tile skipped", "fa2", "        if causal:", "        if False:", "counts")
    add(
        "O of the first pass not read",
        "fa1",
        "if j0 > uint32(0):",
        "if j0 > uint32(Bc):",
        ("values", "counts"),
    )
    for shift in ("+ 1", "- 1"):
        add(
            f"columns end {shift}",
            "fa1",
            "int32(i_end + diagonal)",
            f"int32(i_end + diagonal {shift})",
            ("values", "counts", *HAZARDS),
        )
        add(
            f"columns end {shift}",
            "fa2",
            "int32(i0 + Br + diagonal)",
            f"int32(i0 + Br + diagonal {shift})",
            ("values", "counts"),
        )
    add(
        "rows of another split",
        "fa1",
        "cuda.gridDim.x - 1 - cuda.blockIdx.x",
        "cuda.gridDim.x - cuda.blockIdx.x",
        ("values", "counts", *HAZARDS),
    )

    # Heads
    for name, total in (("fa1", 2), ("fa2", 2), ("standard", 2)):
        add(
            "wrong K/V head",
            name,
            "h // uint32(group)",
            "h % uint32(group)",
            ("values", "OutOfBounds"),
            total=total,
        )

    # Edges of tiles in memory
    for place, algorithms in (("rows.make_read_rows", ("fa1",)), ("rows.make_write_rows", every)):
        add(
            "no row bound",
            place,
            "if row < rows_end and",
            "if",
            ("OutOfBounds", "counts"),
            algorithms,
            2,
        )
        add(
            "no column bound",
            place,
            " and uint32(col + n) < uint32(d)",
            "",
            ("OutOfBounds", "counts"),
            algorithms,
        )
        add(
            "no column bound, 16 bytes",
            place,
            " and col < uint32(d)",
            "",
            ("OutOfBounds", "counts"),
            algorithms,
        )
    for place, algorithms in (
        ("rows.make_read_values", ("fa1",)),
        ("rows.make_write_values", ("fa1", "fa2")),
    ):
        guard = "if tx == uint32(0) and row < rows_end:"
        add(
            "no row bound",
            place,
            guard,
            "if tx == uint32(0):",
            ("OutOfBounds", "counts"),
            algorithms,
        )
        add("values of every lane", place, guard, "if row < rows_end:", "counts", algorithms)
    add(
        "no row bound of a copy",
        "tile_load.make_load_tile",
        "row < uint32(rows_end) and ",
        "",
        ("OutOfBounds", "counts"),
        every,
    )
    add(
        "no column bound of a copy",
        "tile_load.make_load_tile",
        " and col < uint32(cols_end)",
        "",
        ("OutOfBounds", "counts", "ValueError"),
        every,
    )
    add(
        "no count bound of a copy",
        "tile_load.make_load_tile",
        "min(int32(width), int32(cols_end - col))",
        "int32(width)",
        ("OutOfBounds", "counts"),
        ("standard",),
    )
    add(
        "a copy past the tile",
        "tile_load.make_load_tile",
        "if even or copy < uint32(copies):",
        "if True:",
        HAZARDS | {"OutOfBounds", "values", "counts", "EmulatorError"},
        every,
    )

    # Products
    add(
        "a column of P dropped",
        "products.make_product",
        "for k in range(0, Bc, 4):",
        "for k in range(0, Bc - 4, 4):",
        "values",
        every,
    )
    add(
        "a part of the head dropped",
        "products._make_partial_scores",
        "for k in range(first, last, 4):",
        "for k in range(first + 4, last, 4):",
        "values",
        every,
    )
    for place, register in (
        ("products.make_product", "rT[e]"),
        ("products._make_partial_scores", "rS[e]"),
        ("rows.make_start", "rO[e]"),
        ("rows.make_start", "rl[i]"),
    ):
        add(
            f"{register} not begun at 0",
            place,
            f"{register} = float32(0.0)",
            "pass",
            "UninitialisedRead",
        )
    add(
        "m not begun at -inf",
        "rows.make_start",
        "rm[i] = NEG_INF",
        "rm[i] = float32(0.0)",
        "values",
    )

    # Standard attention
    add("S past the matrix", "standard", "if row < Nq and col < Nk:", "if row < Nq:", "OutOfBounds")
    add("P of one warp's sum", "standard", "for w in range(WARPS):", "for w in range(1):", "values")
    add("P without the inverse", "standard", "* inverse", "", "values")
    add("L without l", "standard", "m + LN2 * log2(l)", "m", "values")
    add("no guard of -inf", "standard", "if s != NEG_INF:", "if True:", "values")
    gradient_mutants(add)
    return found


def gradient_mutants(add):
    """Faults of the backward kernels and of the parts that only they have."""
    flash, every = ("fa1_backward", "fa2_backward"), tuple(BACKWARD)
    some = ("values", "counts")
    any_way = (*some, "OutOfBounds", *HAZARDS)

    # D
    parts = "gradients.make_score_gradients"
    add("D added", parts, "- rD[i]", "+ rD[i]", "values", flash)
    add("no D", parts, "- rD[i]", "", "values", flash)
    add("dS without P", parts, "rP[i * TN + j] * (", "(", "values", flash)
    add("D added", "standard_backward", "(g - D)", "(g + D)", "values")
    add(
        "D of one warp",
        "standard_backward",
        "for w in range(WARPS):",
        "for w in range(1):",
        "values",
    )
    add(
        "D of one thread",
        "standard_backward",
        "dot += cuda.shfl_xor_sync(FULL_WARP, dot, lane)",
        "pass",
        "values",
    )
    add(
        "D of one thread",
        "fa2_backward",
        "dot += cuda.shfl_xor_sync(FULL_WARP, dot, step)",
        "pass",
        "values",
    )
    add(
        "D of one thread",
        "gradients.make_row_dots",
        "dot += cuda.shfl_xor_sync(FULL_WARP, dot, lane)",
        "pass",
        "values",
        ("fa1_backward",),
    )
    add(
        "D of the first column group",
        "gradients.make_row_dots",
        "for c in range(DN):",
        "for c in range(DN - 1):",
        some,
        ("fa1_backward",),
    )
    add(
        "D of another row",
        "gradients.make_row_dots",
        "(ty + i * TY) * pitch",
        "(ty + i) * pitch",
        ("values", *HAZARDS),
        ("fa1_backward",),
    )
    add(
        "every lane writes D",
        "fa2_backward",
        "if lane == uint32(0) and row < Nq:",
        "if row < Nq:",
        "counts",
    )
    add(
        "rows past the end",
        "fa2_backward",
        "if lane == uint32(0) and row < Nq:",
        "if lane == uint32(0):",
        ("OutOfBounds", "counts"),
    )
    add(
        "rows past the end of O",
        "fa2_backward",
        "        if row < Nq:",
        "        if True:",
        ("OutOfBounds", "counts"),
    )

    # Scale
    add(
        "dQ without scale",
        "fa1_backward",
        "update_rows(rdQ, dQh, scale,",
        "update_rows(rdQ, dQh, float32(1.0),",
        "values",
    )
    add(
        "dQ without scale",
        "fa2_backward",
        "add_rows(rdQ, dQh, scale,",
        "add_rows(rdQ, dQh, float32(1.0),",
        "values",
    )
    add("dQ of the sweep without scale", "fa2_backward", "+= scale * rT[e]", "+= rT[e]", "values")
    add("dS without scale", "standard_backward", "scale * p * (g", "p * (g", "values")
    for name in flash:
        scales = 1 if name == "fa1_backward" else 2
        add(
            "S in natural units",
            name,
            "scale_and_mask(rS, scale_log2,",
            "scale_and_mask(rS, scale,",
            "values",
            total=scales,
        )
        add("dK without scale", name, "scale_columns(rdK, scale)", "pass", "values")
        add("dV scaled for dK", name, "scale_columns(rdK", "scale_columns(rdV", "values")
    add(
        "scaled by another factor",
        "gradients.make_scale_columns",
        "rT[e] *= factor",
        "rT[e] *= factor * float32(1.0001)",
        "values",
        flash,
    )
    add(
        "added by another factor",
        "rows.make_add_rows",
        "factor * rT",
        "factor * float32(1.0001) * rT",
        "values",
        ("fa2_backward",),
    )

    # P from L
    from_L = "softmax.make_softmax_from_lse"
    add("L in units of log2", from_L, "LOG2E * rL[i]", "rL[i]", "values", flash)
    add("no shift of a blind row", from_L, "if rL[i] == NEG_INF:", "if False:", "values", flash)
    add(
        "the score itself",
        from_L,
        "exp2(rS[i * TN + j] - shift)",
        "rS[i * TN + j] - shift",
        "values",
        flash,
    )

    # Heads of a group
    for name in every:
        add("one head of the group", name, "uint32(h + group)", "uint32(h + 1)", some)
        add(
            "heads of another group",
            name,
            "h = uint32(hk * group)",
            "h = hk",
            (*some, "OutOfBounds"),
        )
    add(
        "wrong K/V head",
        "fa2_backward",
        "h // uint32(group)",
        "h % uint32(group)",
        ("values", "OutOfBounds"),
        total=2,
    )

    # Which tiles are visited
    add(
        "no row tile skipped",
        "fa1_backward",
        "if causal and j0 > uint32(0):",
        "if False:",
        "counts",
    )
    add(
        "blind rows without dQ", "fa1_backward", "if causal and j0 > uint32(0):", "if causal:", some
    )
    add(
        "no row tile skipped",
        "fa2_backward",
        "        if causal:",
        "        if False:",
        "counts",
        total=2,
    )
    for name in flash:
        for shift in ("+ 1", "- 1"):
            add(
                f"first row {shift}",
                name,
                "int32(j0) - diagonal)",
                f"int32(j0) - diagonal {shift})",
                some,
            )
        add(
            "a row tile too many skipped",
            name,
            "// int32(Br) * int32(Br)",
            "// int32(Br) * int32(Br) + int32(Br)",
            any_way,
        )
        add("a row tile dropped", name, "while i0 < Nq:", "while i0 + uint32(Br) < Nq:", any_way)
        add("the next row tile not loaded", name, "if uint32(i0 + Br) < Nq:", "if False:", any_way)
    add(
        "a row tile dropped",
        "standard_backward",
        "while i0 < Nq:",
        "while i0 + uint32(Br) < Nq:",
        any_way,
    )
    add(
        "a column tile dropped",
        "fa1_backward",
        "while j0 < Nk:",
        "while j0 + uint32(Bc) < Nk:",
        any_way,
    )
    add(
        "a column tile dropped",
        "fa2_backward",
        "while j0 < j_end:",
        "while j0 + uint32(Bc) < j_end:",
        any_way,
    )
    for shift in ("+ 1", "- 1"):
        add(
            f"columns end {shift}",
            "fa2_backward",
            "int32(i0 + Br + diagonal)",
            f"int32(i0 + Br + diagonal {shift})",
            some,
        )
    add(
        "a part of the row",
        "standard_backward",
        "while col < Nk:",
        "while col + uint32(threads) < Nk:",
        any_way,
        total=2,
    )

    # dQ through memory
    add(
        "dQ read in the first pass",
        "fa1_backward",
        "scale, j0 > uint32(0), i0",
        "scale, True, i0",
        some,
    )
    add(
        "dQ not read in the second pass",
        "fa1_backward",
        "scale, j0 > uint32(0), i0",
        "scale, j0 > uint32(Bc), i0",
        some,
    )
    add(
        "dQ of the last pass alone",
        "rows.make_update_rows",
        "+ old[e]",
        "",
        "values",
        ("fa1_backward",),
    )
    add("dQ not begun at 0", "fa2_backward", "dQi[col] = float32(0.0)", "pass", some)
    add(
        "dQ begun at 0 for nothing",
        "fa2_backward",
        "                if clear:",
        "                if True:",
        "counts",
    )
    add("dQ twice", "fa2_backward", "                if atomic:", "                if True:", some)
    add(
        "no row bound of an addition",
        "rows.make_add_rows",
        "if row < rows_end and",
        "if",
        ("OutOfBounds", "counts"),
        ("fa2_backward",),
    )
    add(
        "no column bound of an addition",
        "rows.make_add_rows",
        " and col < uint32(d)",
        "",
        ("OutOfBounds", "counts"),
        ("fa2_backward",),
    )

    # The products
    for name in flash:
        add(
            "dV from dS",
            name,
            "add_transposed_product(rdV, sP,",
            "add_transposed_product(rdV, sdS,",
            "values",
        )
        add(
            "dK from P",
            name,
            "add_transposed_product(rdK, sdS,",
            "add_transposed_product(rdK, sP,",
            "values",
        )
    transposed = "gradients.make_add_transposed_product"
    add(
        "four rows dropped",
        transposed,
        "for i in range(0, Br, 4):",
        "for i in range(0, Br - 4, 4):",
        ("values", "UninitialisedRead"),
        every,
    )
    add(
        "one row of four",
        transposed,
        "for n in range(4):",
        "for n in range(1):",
        ("values", "UninitialisedRead"),
        every,
        2,
    )
    add("the sum of one tile", transposed, "rT[e] += p * b[0]", "rT[e] = p * b[0]", "values", every)
    for register in ("rdK[e]", "rdV[e]"):
        add(
            f"{register} not begun at 0",
            "gradients.make_start_columns",
            f"{register} = float32(0.0)",
            "pass",
            "UninitialisedRead",
            flash,
        )
    add(
        "rdV not begun at 0",
        "standard_backward",
        "rdV[e] = float32(0.0)",
        "pass",
        "UninitialisedRead",
    )
    add("rdQ not begun at 0", "fa2_backward", "rdQ[e] = float32(0.0)", "pass", "UninitialisedRead")

    # Edges of tiles in memory
    write = "gradients.make_write_columns"
    add("no row bound", write, "if row < rows_end and", "if", ("OutOfBounds", "counts"), every, 2)
    add(
        "no column bound",
        write,
        " and uint32(col + n) < uint32(d)",
        "",
        ("OutOfBounds", "counts"),
        every,
    )
    add(
        "no column bound, 16 bytes",
        write,
        " and col < uint32(d)",
        "",
        ("OutOfBounds", "counts"),
        every,
    )
    add("rows of one group", write, "(ty + (r // 4) * TY)", "ty", any_way, every)
    values = "rows.make_read_values"
    guard = "if tx == uint32(0) and row < rows_end:"
    add(
        "no row bound, backward",
        values,
        guard,
        "if tx == uint32(0):",
        ("OutOfBounds", "counts"),
        flash,
    )
    add("values of every lane, backward", values, guard, "if row < rows_end:", "counts", flash)
    add(
        "values not shared",
        values,
        "rv[i] = cuda.shfl_sync(FULL_WARP, value, first)",
        "rv[i] = value",
        "values",
        flash,
    )


MUTANTS = mutants()


# --- the tests -------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", KERNELS)
def test_the_source_as_it_is_passes(algorithm, monkeypatch):
    kernels = kernels_with(**{part: source(part) for part in PARTS})
    assert caught_by(algorithm, kernels, monkeypatch) is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.place}: {m.title}")
def test_a_mutant_is_caught(mutant, monkeypatch, record_property):
    kernels = kernels_with(**{mutant.place.partition(".")[0]: mutated(mutant)})
    for algorithm in mutant.algorithms:
        with monkeypatch.context() as patch:
            caught = caught_by(algorithm, kernels, patch)
        record_property(algorithm, caught)
        assert caught in mutant.by, f"{algorithm}: caught by {caught}, not by {set(mutant.by)}"


def test_every_barrier_wait_and_commit_has_its_mutant():
    for name in KERNELS:
        for call in ("cuda.syncthreads()", "wait_async()", "commit_async()"):
            calls = len(re.findall(rf"(?m)^ +{re.escape(call)}", source(name)))
            mutated = [m for m in MUTANTS if m.place == name and m.needle.strip() == call]
            assert len(mutated) == calls > 0
