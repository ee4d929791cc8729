"""Checks of the values that callers give, each with its message.

A function gives the value as it is computed with, a Python number or tuple, or raises a TypeError
or ValueError that names the argument, its value and what is allowed.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

UNBOUNDED = 2**29  # a side of a window that hides nothing, and the longest sequence with a window

# Axes of q, k, v and the results by the layout that a call names.
LAYOUTS = {
    "bhnd": ("batch", "heads", "seqlen", "head_dim"),
    "bnhd": ("batch", "seqlen", "heads", "head_dim"),
}
PACKED_AXES = ("seqlen", "heads", "head_dim")


def kind_of(value: Any) -> str:
    """The type of a value that is none of those allowed, in words: "a list", "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def as_real(name: str, value: Any, dtype: Any = np.float64) -> np.ndarray:
    """`value` as an array of `dtype`; a TypeError that calls it `name` unless numbers are real."""
    array = np.asarray(value)
    if array.dtype.kind in "cmMSU":
        raise TypeError(f"{name} has dtype {array.dtype}: allowed are real numbers")
    return np.asarray(array, dtype)


def _integer(value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError
    return operator.index(value)


def as_size(name: str, value: Any, axis: bool = True) -> int:
    """`value` as an int >= 1; else a TypeError or ValueError that calls it `name`."""
    try:
        size = _integer(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}: allowed is an integer >= 1") from None
    if size < 1:
        empty = ", an empty axis" if axis and size == 0 else ""
        raise ValueError(f"{name} is {size}{empty}: allowed is an integer >= 1")
    return size


def check_name(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of the names ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {value!r}: allowed is one of {', '.join(allowed)}")


def check_alone(mask_shape: Sequence[int], bias: Any) -> None:
    """Raise ValueError for an ``attn_mask`` beside a ``bias``."""
    if bias is not None:
        raise ValueError(
            f"attn_mask is given, of shape {tuple(mask_shape)}, with a bias: allowed is one of the "
            "two, and numbers in attn_mask are added as a bias is"
        )


def check_grid_size(name: str, size: int) -> None:
    """Raise ValueError for more than a grid has places for along its second or third axis."""
    if size > 65535:
        raise ValueError(f"{name} is {size}: allowed is at most 65535, a grid's limit")


MAX_KV_SPLITS = 256  # warps of eight read l and m of all splits of a row at once
_MOST_SPLITS = {"kv_splits": MAX_KV_SPLITS}


def as_splits(name: str, value: Any) -> int | str:
    """`value` as an int from 1 to its most, or "auto"; else an error that calls it `name`."""
    if isinstance(value, str) and value == "auto":
        return value
    most = _MOST_SPLITS.get(name)
    within = f"from 1 to {most}" if most else ">= 1"
    allowed = f"allowed is an integer {within}, or 'auto'"
    try:
        splits = _integer(value)
    except TypeError:
        wrong = ValueError if isinstance(value, str) else TypeError
        raise wrong(f"{name} is {value!r}: {allowed}") from None
    if splits < 1 or (most and splits > most):
        raise ValueError(f"{name} is {splits}: {allowed}")
    return splits


def as_precision(value: Any, allowed: Sequence[str], dtype: str) -> str:
    """`value` as the name of a precision, "ieee" alone for what is not float32."""
    check_name("precision", value, allowed)
    if value != "ieee" and dtype != "float32":
        raise ValueError(
            f"precision is {value!r} with dtype {dtype}: allowed is 'ieee', the others are of "
            "float32 matrices"
        )
    return value


def as_flag(name: str, value: Any) -> bool:
    """`value` as a bool, of Python or NumPy; else a TypeError that calls it `name`."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}: allowed is True or False")
    return bool(value)


def as_shape(name: str, value: Any) -> tuple[int, ...]:
    """`value` as the shape of an array that is called `name`, or a TypeError."""
    try:
        if isinstance(value, str):
            raise TypeError
        return tuple(operator.index(n) for n in value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}: allowed is an array, or its shape") from None


def _real(name: str, value: Any, allowed: str) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}: allowed is {allowed}")
    try:
        return float(value)
    except OverflowError:  # an integer beyond float64
        return math.inf


def as_scale(value: Any, head_dim: int) -> float:
    if value is None:
        return 1.0 / math.sqrt(head_dim)
    scale = _real("scale", value, "a finite real number, or None")
    # The kernels multiply by scale log2(e), in float32.
    largest = float(np.finfo(np.float32).max) / math.log2(math.e)
    if not abs(scale) <= largest:  # negated, so that NaN is refused
        raise ValueError(
            f"scale is {value!r}: allowed is a finite number, at most {largest:.3g} in magnitude "
            "(float32), or None"
        )
    if scale and not np.float32(scale):
        raise ValueError(f"scale is {value!r}: it rounds to 0 in float32, allowed is 0.0 itself")
    return scale


def as_sizes(name: str, shape: Any, axes: Sequence[str]) -> tuple[int, ...]:
    try:
        shape = tuple(shape)
    except TypeError:
        raise TypeError(
            f"{name} has shape {shape!r}: allowed is a sequence of {len(axes)} sizes"
        ) from None
    if len(shape) != len(axes):
        raise ValueError(
            f"{name} has shape {shape} of rank {len(shape)}: allowed is rank {len(axes)}, "
            f"({', '.join(axes)}){other_layout(axes)}"
        )
    return tuple(
        as_size(f"{axis} of {name}, shape {shape},", n) for axis, n in zip(axes, shape, strict=True)
    )


def other_layout(axes: Sequence[str]) -> str:
    """What a message about shapes says of the layout: which it is, and that there is another."""
    for name, other in (("bhnd", "bnhd"), ("bnhd", "bhnd")):
        if axes == LAYOUTS[name]:
            return f"; layout is {name!r}, layout={other!r} is ({', '.join(LAYOUTS[other])})"
    return ""


def check_same(
    axis: str,
    name: str,
    shape: tuple[int, ...],
    of: str,
    of_shape: tuple[int, ...],
    axes: Sequence[str],
) -> None:
    got, allowed = shape[axes.index(axis)], of_shape[axes.index(axis)]
    if got != allowed:
        raise ValueError(
            f"{name} has {axis} {got} (shape {shape}): "
            f"allowed is {allowed}, as {of} has it (shape {of_shape}){other_layout(axes)}"
        )


def as_window(value: Any) -> tuple[int, int]:
    if value is None:
        return -1, -1
    allowed = "allowed is (left, right), each a number of keys, -1 or None for no bound"
    try:
        if isinstance(value, (str, set, frozenset, dict)):
            raise TypeError
        sides = tuple(-1 if n is None else _integer(n) for n in value)
    except TypeError:
        raise TypeError(f"window is {value!r}: {allowed}") from None
    if len(sides) != 2 or min(sides) < -1:
        raise ValueError(f"window is {value!r}: {allowed}")
    left, right = (-1 if n >= UNBOUNDED else n for n in sides)
    return left, right


def as_layout(value: Any) -> str:
    if value is None:
        return "bhnd"
    if not isinstance(value, str) or value not in LAYOUTS:
        names = (f"{name!r} for ({', '.join(axes)})" for name, axes in LAYOUTS.items())
        raise ValueError(f"layout is {value!r}: allowed is {' or '.join(names)}")
    return value


def as_softcap(value: Any) -> float | None:
    if value is None:
        return None
    softcap = _real("softcap", value, "a positive number, or None or 0 for none")
    if softcap == 0:
        return None
    # Within these bounds scale / softcap and softcap log2(e) are float32.
    if not 1e-30 <= softcap <= 1e30:
        raise ValueError(f"softcap is {value!r}: allowed is 1e-30 to 1e30, or None or 0 for none")
    return softcap


def as_dropout(value: Any) -> float:
    if value is None:
        return 0.0
    allowed = "a number from 0 to below 1"
    probability = _real("dropout_p", value, allowed)
    if not 0.0 <= probability < 1.0:
        raise ValueError(f"dropout_p is {value!r}: allowed is {allowed}")
    return min(round(probability * 2**16), 2**16 - 1) / 2**16  # what 16 random bits can be below


def check_shape(name: str, shape: Sequence[int], *allowed: tuple[int, ...], of: str = "") -> None:
    """Raise ValueError for an array ``name`` of no shape ``allowed``, which is ``of`` what."""
    if tuple(shape) not in allowed:
        known = " or ".join(map(str, allowed))
        raise ValueError(f"{name} has shape {tuple(shape)}: allowed is {known}{of}")


def check_heads(batch: int, heads: int, slopes: Any = None, sinks: Any = None) -> None:
    """Raise ValueError for shapes of ``alibi_slopes`` and ``sinks`` that do not fit the heads."""
    if slopes is not None:
        check_shape("alibi_slopes", slopes, (heads,), (batch, heads))
    if sinks is not None:
        check_shape("sinks", sinks, (heads,), of=", one a query head")


def as_lengths(
    name: str, value: Any, batch: int, longest: int, of: str = "the seqlen"
) -> tuple[int, ...]:
    """One length for each batch entry, 0 to ``longest``, which is called ``of``."""
    lengths = _integers(name, value)
    check_shape(name, lengths.shape, (batch,), of=", one a batch")
    outside = lengths[(lengths < 0) | (lengths > longest)]
    if outside.size:
        raise ValueError(f"{name} holds {outside[0]}: allowed is 0 to {longest}, {of}")
    return tuple(lengths.tolist())


PAGE_SIZES = range(16, 257, 16)  # rows a page: those of a load of 16 rows lie in one


def as_page_size(value: int, shape: tuple[int, ...]) -> int:
    """The rows of a page, from the shape of the pages of k."""
    if value not in PAGE_SIZES:
        raise ValueError(
            f"k has pages of {value} rows (shape {shape}): allowed are multiples of 16 up to 256"
        )
    return value


def as_table_shape(value: Any, batch: int) -> tuple[int, int]:
    """The shape of a block table: a row of page numbers for each of ``batch`` sequences."""
    shape = as_shape("block_table", value)
    if len(shape) != 2 or shape[0] != batch or shape[1] < 1:
        raise ValueError(
            f"block_table has shape {shape}: allowed is ({batch}, pages of a sequence), a row a "
            "batch entry"
        )
    return shape[0], shape[1]


def check_table(table: np.ndarray, kv_lens: Any, pages: int, page_size: int) -> None:
    """Raise ValueError unless the first ``kv_lens`` rows of each sequence lie in pages there are.

    What the table holds after them is not looked at.
    """
    lengths = np.array(table_lengths(kv_lens, table.shape, page_size))
    used = np.arange(table.shape[1]) * page_size < lengths[:, None]
    wrong = used & ((table < 0) | (table >= pages))
    if wrong.any():
        b, n = (int(i) for i in np.argwhere(wrong)[0])
        where = f"k, where a sequence of {lengths[b]} keys has its rows"
        raise ValueError(_no_page(table, b, n, pages, where))


def _no_page(table: np.ndarray, b: int, n: int, pages: int, where: str) -> str:
    return (
        f"block_table holds {table[b, n]} at [{b}, {n}]: allowed is 0 to {pages - 1}, the pages of "
        f"{where}"
    )


def check_appended(
    table: np.ndarray, kv_lens: Sequence[int], new_lens: Sequence[int], pages: int, page_size: int
) -> None:
    """Raise ValueError unless ``new_lens`` rows after the first ``kv_lens`` have pages, and no page
    takes rows of two sequences, or of two places of one.
    """
    begin, end = np.array(kv_lens), np.add(kv_lens, new_lens)
    most = table.shape[1] * page_size
    if (end > most).any():
        b = int((end > most).argmax())
        raise ValueError(
            f"kv_lens holds {begin[b]} with {new_lens[b]} new rows: allowed are {most} in all, the "
            f"{table.shape[1]} pages of {page_size} rows that block_table has for each"
        )
    owners: dict[int, int] = {}
    for b in np.flatnonzero(end > begin).tolist():
        for n in range(begin[b] // page_size, -(-end[b] // page_size)):
            page = int(table[b, n])
            if not 0 <= page < pages:
                where = "k_pages, where rows are appended"
                raise ValueError(_no_page(table, b, n, pages, where))
            if page in owners or page in table[b, :n]:
                raise ValueError(
                    f"block_table holds {page} at [{b}, {n}], a page that batch entry "
                    f"{owners.get(page, b)} has rows in: allowed are pages of its own for the new "
                    "rows of each"
                )
            owners[page] = b


def table_lengths(value: Any, shape: tuple[int, ...], page_size: int) -> tuple[int, ...]:
    """The keys of each sequence, which its row of a block table of this shape has pages for."""
    batch, each = shape
    rows = f"the {each} pages of {page_size} rows that block_table has for each"
    return as_lengths("kv_lens", value, batch, each * page_size, rows)


def as_table(value: Any) -> np.ndarray:
    """A block table on the host, in the integers of the kernels; its values are not looked at."""
    table = _integers("block_table", value)
    limits = np.iinfo(np.int32)
    wrong = table[(table < limits.min) | (table > limits.max)]
    if wrong.size:
        raise ValueError(f"block_table holds {wrong[0]}: allowed are page numbers below 2**31")
    return np.ascontiguousarray(table, np.int32)


def _integers(name: str, value: Any) -> np.ndarray:
    found = np.asarray(value)
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {found.dtype}: allowed are integers")
    if found.dtype == np.uint64 and (found >= 2**63).any():
        raise ValueError(f"{name} holds {found.max()}: allowed is below 2**63")
    return found.astype(np.int64)


def packed_lengths(name: str, value: Any, of: str, total: int) -> tuple[int, ...]:
    """The lengths between the cumulative ones, which lead from 0 to ``total``."""
    starts = _integers(name, value)
    if starts.ndim != 1 or len(starts) < 2:
        raise ValueError(f"{name} has shape {starts.shape}: allowed is (batch + 1,)")
    lengths = np.diff(starts)
    if starts[0] != 0 or starts[-1] != total or (lengths < 0).any():
        raise ValueError(
            f"{name} is {starts.tolist()}: allowed are cumulative lengths from 0 to {total}, "
            f"the first axis of {of}, that never fall"
        )
    return tuple(lengths.tolist())


def added_shape(name: str, value: Any, whole: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array that is added to the scores, of shape `whole`, with four axes."""
    shape = as_shape(name, value)
    full = (1,) * (4 - len(shape)) + shape
    if len(shape) > 4 or any(n not in (1, m) for n, m in zip(full, whole, strict=True)):
        raise ValueError(f"{name} has shape {shape}: allowed is what broadcasts to {whole}")
    return full
