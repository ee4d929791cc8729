"""Calls that merge attention results over parts of the keys: checks, plans and launches.

``merge_all`` returns a new result. ``merge`` and ``add`` overwrite the first operand with the
result. Attention over a ring of GPUs uses ``merge`` and ``add``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fa_numba.checks import LAYOUTS, PACKED_AXES, as_layout, kind_of
from fa_numba.choices.arguments import Buffer
from fa_numba.dtypes import UNSCALED
from fa_numba.host import launch_cache, placement
from fa_numba.host.arrays import (
    SUMS,
    Operand,
    all_aligned,
    check_device,
    check_shape,
    check_together,
    check_written,
    operand,
)
from fa_numba.host.execution import execute, heads_first
from fa_numba.host.plans import Launch, LaunchPlan
from fa_numba.kernels.merge_parts import (
    blocks,
    make_add,
    make_merge,
    make_merge_backward,
    row_blocks,
)
from fa_numba.options import PLAIN, Features


def merge_all(outputs: Any, lses: Any, layout: Any, stream: Any) -> tuple[Any, Any]:
    """Return (O, L) over all columns. The arguments are the arguments of ``fa_numba.merge``."""
    return tuple(_whole("merge", {}, outputs, lses, layout, stream))


def merge_backward(
    dout: Any, outputs: Any, lses: Any, out: Any, lse: Any, dlse: Any, layout: Any, stream: Any
) -> tuple[tuple, tuple]:
    """Return the gradients of ``outputs`` and of ``lses``, as two tuples of arrays.

    The arguments are the arguments of ``fa_numba.merge_backward``.
    """
    given = {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    found = _whole("merge_backward", given, outputs, lses, layout, stream)
    return tuple(found[: len(outputs)]), tuple(found[len(outputs) :])


def _whole(
    name: str, beside: Mapping[str, Any], outputs: Any, lses: Any, layout: Any, stream: Any
) -> list:
    """Check ``outputs`` and ``lses``, and return the results of ``merge_all`` or
    ``merge_backward``.

    ``name`` is "merge" or "merge_backward". ``beside`` maps names to the other arrays of the call,
    such as "dout". It is empty for "merge".
    """
    for said, parts in (("outputs", outputs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise TypeError(f"{said} must be a list or tuple of arrays, got {kind_of(parts)}")
    if len(outputs) < 2 or len(lses) != len(outputs):
        raise ValueError(
            "outputs and lses must contain the same number of arrays, two or more, got "
            f"{len(outputs)} and {len(lses)}"
        )
    arrays = _numbered("outputs", outputs) | _numbered("lses", lses) | dict(beside)
    parts, dlse = len(outputs), "dlse" in beside
    make = plan_of_merge if name == "merge" else plan_of_merge_backward

    def planned(sizes: Any, shapes: Any, dtypes: Any, aligned: bool) -> LaunchPlan:
        return make(sizes, shapes, dtypes[0], parts, aligned, dlse)

    return _merged((name, layout), arrays, layout, stream, planned)


def _numbered(name: str, parts: Sequence[Any]) -> dict[str, object]:
    return {f"{name}[{n}]": x for n, x in enumerate(parts)}


def _merged(
    key: tuple,
    arrays: dict[str, object],
    layout: Any,
    stream: Any,
    planned: Callable[..., LaunchPlan],
    updated: Sequence[str] = (),
) -> list:
    """Check the arrays and execute a merge, or replay an earlier call from the launch cache.

    Return the outputs of the plan. ``key`` contains the arguments of the call that are not arrays,
    for the launch cache. ``arrays`` maps names to the arrays. ``updated`` are the names of the
    arrays to which the kernels write. ``planned`` is a function that returns the plan and takes

    - the sizes (B, H, N, d),
    - a pair with the shape of an output and the shape of its logsumexps,
    - the dtypes of the outputs,
    - whether all rows are aligned.
    """
    call = launch_cache.describe_call(key, tuple(arrays.values()), {})
    found = launch_cache.replay(call, None, stream)
    if found is not None:
        return found
    rows = [n for n in arrays if "lse" in n]
    inputs = {n: operand(n, x, SUMS if n in rows else UNSCALED) for n, x in arrays.items()}
    matrices = [x for n, x in inputs.items() if n not in rows]
    first = matrices[0]
    axes = _axes(first, layout)
    for x in inputs.values():
        check_device(first, x)
    if not updated:
        check_together(matrices)
    named = {"batch": 1} | dict(zip(axes, first.shape, strict=True))
    sizes = tuple(named[n] for n in LAYOUTS["bhnd"])
    of_rows = sizes[1:3] if axes == PACKED_AXES else sizes[:3]
    for n, x in inputs.items():
        check_shape(x, of_rows if n in rows else first.shape)
    for n in updated:
        check_written(inputs[n], [x for other, x in inputs.items() if other != n])

    with placement.placed(first):
        aligned = all_aligned(matrices, first)
        plan = planned(sizes, (first.shape, of_rows), [x.dtype for x in matrices], aligned)
        placement.check_grid(plan, first.name)

        def run(found: dict[str, object], stream: Any) -> None:
            how = axes == LAYOUTS["bnhd"], axes == PACKED_AXES
            execute(plan, {n: heads_first(x, *how) for n, x in found.items()}, stream)

        return launch_cache.run_and_keep(plan, inputs, stream, call, run)


def _axes(x: Operand, layout: Any) -> tuple[str, ...]:
    """Return the names of the axes of an output. Arrays with three axes are packed sequences."""
    axes = LAYOUTS["bhnd" if layout is None else as_layout(layout)]
    if len(x.shape) == 3 and layout is None:
        return PACKED_AXES
    if len(x.shape) != 4:
        raise ValueError(
            f"{x.name} must have the 4 axes ({', '.join(axes)}), got shape {x.shape}; for packed "
            f"sequences with the axes ({', '.join(PACKED_AXES)}), leave layout out"
        )
    return axes


def plan_of_merge(
    sizes: tuple[int, ...],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: str,
    parts: int,
    aligned: bool,
    _dlse: bool = False,
) -> LaunchPlan:
    """Return the plan that merges ``parts`` results into O and L.

    The first launch merges two parts, and each further launch merges one more part. The results
    between the launches are float32. ``sizes`` is (B, H, N, d) of a part. ``shapes`` are the shapes
    of O and L in the caller's layout. ``dtype`` is the dtype of the parts and of O. ``aligned``
    says whether all rows start at 16-byte addresses. ``_dlse`` is ignored. It exists because
    ``plan_of_merge_backward`` is called with the same arguments.
    """
    batch, heads, rows, d = sizes
    grid = (blocks(rows, d, aligned), heads, batch)
    launches, before = [], {"X": "outputs[0]", "LX": "lses[0]"}
    for n in range(1, parts):
        last = n == parts - 1
        # All threads of a row read L of the row. The new L therefore goes to another array.
        to = {"O": "out", "L": "lse"} if last else {"O": "A", "L": f"M{n % 2}"}
        x_dtype, out_dtype = "float32" if n > 1 else dtype, dtype if last else "float32"
        kernel = make_merge(d, x_dtype, dtype, out_dtype, aligned)
        bound = before | {"Y": f"outputs[{n}]", "LY": f"lses[{n}]"} | to
        launches.append(Launch.of(kernel, grid, **bound))
        before = {"X": "A", "LX": f"M{n % 2}"}
    made = Buffer("out", shapes[0], dtype), Buffer("lse", shapes[1])
    workspace = [Buffer("A", sizes)] if parts > 2 else []
    workspace += [Buffer(f"M{n}", sizes[:3]) for n in (1, 0)[: parts - 2]]
    return LaunchPlan(launches=tuple(launches), outputs=made, workspace=tuple(workspace))


def plan_of_merge_backward(
    sizes: tuple[int, ...],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: str,
    parts: int,
    aligned: bool,
    dlse: bool,
) -> LaunchPlan:
    """Return the plan that computes the gradients of ``parts`` merged results.

    The plan has one launch for each part. ``sizes`` is (B, H, N, d) of a part. ``shapes`` are the
    shapes of O and L in the caller's layout. ``dtype`` is the dtype of the parts and of O.
    ``aligned`` says whether all rows start at 16-byte addresses. ``dlse`` says whether the call
    passes a gradient with respect to the merged L.
    """
    batch, heads, rows, d = sizes
    kernel = make_merge_backward(d, dtype, dlse, aligned)
    bound = {"dO": "dout", "O": "out", "L": "lse", "dL": "dlse" if dlse else "lse"}
    launches, grid = [], (row_blocks(rows, d, aligned), heads, batch)
    for n in range(parts):
        own = {"Y": f"outputs[{n}]", "LY": f"lses[{n}]", "dY": f"douts[{n}]", "dLY": f"dlses[{n}]"}
        launches.append(Launch.of(kernel, grid, **bound, **own))
    made = [Buffer(f"douts[{n}]", shapes[0], dtype) for n in range(parts)]
    made += [Buffer(f"dlses[{n}]", shapes[1]) for n in range(parts)]
    return LaunchPlan(launches=tuple(launches), outputs=tuple(made))


def merge(x: Any, x_lse: Any, y: Any, y_lse: Any, lse: Any, layout: str = "bhnd") -> None:
    """Merge two attention results over different columns, and write the merged result.

    x and y are the two outputs, and ``x_lse`` and ``y_lse`` are their logsumexps. The merged output
    replaces x. The merged logsumexp is written to ``lse``.

    x and y are (B, H, N, d), or (B, N, H, d) with ``layout="bnhd"``. They may be float32, float16
    or bfloat16, with any strides. ``x_lse``, ``y_lse`` and ``lse`` are float32 (B, H, N). ``lse``
    must not share memory with another array. Raises ValueError or TypeError before anything is
    written.
    """
    _run({"x": x, "x_lse": x_lse, "y": y, "y_lse": y_lse, "lse": lse}, layout)


def add(x: Any, y: Any, layout: str = "bhnd") -> None:
    """Compute x += y.

    x and y are (B, H, N, d), or (B, N, H, d) with ``layout="bnhd"``. They may be float32, float16
    or bfloat16, with any strides.
    """
    _run({"x": x, "y": y}, layout)


def plan_of_merge_in_place(
    sizes: tuple[int, ...],
    dtypes: tuple[str, str],
    aligned: bool,
    lse: bool,
    features: Features = PLAIN,
):
    """Return the plan that merges y into x, or adds y to x. The result replaces x.

    ``sizes`` is (B, H, N, d), and ``dtypes`` are the dtypes of x and y. If ``lse`` is True, x and y
    are attention results, which are merged by their logsumexps. If ``lse`` is False, x and y are
    added. ``aligned`` says whether the rows of x and of y start at 16-byte addresses. If
    ``features`` contains ``q_lens``, a merge ignores y in rows past the valid length of a batch
    entry.
    """
    batch, heads, rows, d = sizes
    how = (d, *dtypes, dtypes[0], aligned, features)
    kernel = make_merge(*how) if lse else make_add(d, *dtypes, aligned)
    bound = {"X": "x", "Y": "y"}
    bound |= {"LX": "x_lse", "LY": "y_lse", "O": "x", "L": "lse"} if lse else {}
    launch = Launch.of(kernel, (blocks(rows, d, aligned), heads, batch), **bound)
    return LaunchPlan(launches=(launch,), updated=("x", "lse"))


def _run(arrays: dict[str, object], layout: str) -> None:
    def planned(sizes: Any, _: Any, dtypes: Any, aligned: bool) -> LaunchPlan:
        return plan_of_merge_in_place(sizes, dtypes, aligned, "lse" in arrays)

    updated = [n for n in ("x", "lse") if n in arrays]
    _merged(("merge into", as_layout(layout)), arrays, layout, None, planned, updated)
