"""Checks of the values that callers pass.

A function ``as_...`` returns the value in the form that later steps use, such as a Python number or
a tuple. A function ``check_...`` returns nothing. Both raise TypeError or ValueError for a wrong
value. The message names the argument, its value and the allowed values.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

# A side of a window that hides nothing, and the longest sequence with a window.
UNBOUNDED = 2**29

# Axes of q, k, v and the results by the layout that a call names.
LAYOUTS = {
    "bhnd": ("batch", "heads", "seqlen", "head_dim"),
    "bnhd": ("batch", "seqlen", "heads", "head_dim"),
}
PACKED_AXES = ("seqlen", "heads", "head_dim")


def kind_of(value: Any) -> str:
    """Return the type of a value in words, such as "a list" or "an int", for error messages."""
    name = type(value).__name__
    if value is None:
        return "None"
    return f"{'an' if name[0] in 'aeiou' or name == 'ndarray' else 'a'} {name}"


def one_of(values: Iterable[Any]) -> str:
    """Return the values as words: ``one_of("abc")`` is "a, b or c"."""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


def is_number(value: Any) -> bool:
    """Return whether a value is a number and no array: an int, a float or a scalar of NumPy."""
    return isinstance(value, numbers.Real)


def nearest(text: str, names: Iterable[str]) -> str:
    """Return the name that is most similar to ``text``, or "" if no name is similar."""
    return next(iter(difflib.get_close_matches(text, list(names), 1)), "")


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """Return a suggestion such as "; did you mean 'causal'?", or "" if no name is similar."""
    near = nearest(text, names)
    return f"; did you mean {near!r}?" if near else ""


def check_unmasked(name: str, value: Any, instead: str = "") -> None:
    """Raise TypeError for a NumPy masked array, or for a sequence that contains a masked array.

    NumPy would drop the mask. ``name`` is the name of the argument, for the message. ``instead`` is
    the advice at the end of the message.
    """
    parts = value if isinstance(value, (list, tuple)) else ()
    if any(isinstance(x, np.ma.MaskedArray) for x in (value, *parts)):
        instead = instead or ", or .filled(value) to replace what is masked"
        raise TypeError(
            f"{name} must be an array without a mask, got a NumPy masked array; pass "
            f"{name.split()[0]}.data{instead}"
        )


def as_real(name: str, value: Any, dtype: Any = np.float64) -> np.ndarray:
    """Return `value` as an array of `dtype`.

    Raise TypeError unless the elements are real numbers. `name` is the name of the argument, for
    the message.
    """
    check_unmasked(name, value)
    array = np.asarray(value)
    if array.dtype.kind in "cmMSU":
        raise TypeError(f"{name} must be an array of real numbers, got dtype {array.dtype}")
    return np.asarray(array, dtype)


def _integer(value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError
    return operator.index(value)


def as_size(name: str, value: Any, axis: bool = True, where: str = "") -> int:
    """Return `value` as an int of at least 1.

    Raise TypeError if `value` is not an integer, and ValueError if it is below 1. The error message
    begins with `name` and ends with `where`. If `axis` is True, the message for the value 0 says
    that the axis is empty.
    """
    wanted = f"{name} must be an integer of at least 1, got"
    try:
        size = _integer(value)
    except TypeError:
        raise TypeError(f"{wanted} {value!r}{where}") from None
    if size < 1:
        empty = " (an empty axis)" if axis and size == 0 else ""
        raise ValueError(f"{wanted} {size}{empty}{where}")
    return size


def check_name(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of the strings in ``allowed``.

    ``name`` is the name of the argument, for the message.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be {one_of(map(repr, allowed))}, got {value!r}")


def check_alone(mask_shape: Sequence[int], bias: Any) -> None:
    """Raise ValueError if the caller passed a ``bias`` in addition to an ``attn_mask``.

    ``mask_shape`` is the shape of ``attn_mask``, for the message. ``bias`` is None if there is no
    bias.
    """
    if bias is not None:
        raise ValueError(
            "attn_mask and bias cannot both be given; pass their sum as bias (for a bool mask, add "
            f"-inf where it is False), got attn_mask of shape {tuple(mask_shape)}"
        )


MOST_BLOCKS = 2**31 - 1, 65535, 65535  # thread blocks along the axes of a grid


def check_grid_size(name: str, size: int, axis: int = 1) -> None:
    """Raise ValueError if ``size`` exceeds the number of thread blocks along an axis of a grid.

    The limit for ``axis`` 0 is 2**31 - 1, and the limit for ``axis`` 1 and 2 is 65535. ``name`` is
    what ``size`` counts, for the message.
    """
    most = MOST_BLOCKS[axis]
    if size > most:
        raise ValueError(f"{name} must be at most {most} (the limit of a CUDA grid), got {size}")


MAX_KV_SPLITS = 256  # warps of eight read l and m of all splits of a row at once
_MOST_SPLITS = {"kv_splits": MAX_KV_SPLITS}


def as_splits(name: str, value: Any) -> int | str:
    """Return a number of splits as an int of at least 1, or "auto".

    ``name`` is the argument, such as "kv_splits". Raise TypeError or ValueError for other values.
    """
    if isinstance(value, str) and value == "auto":
        return value
    most = _MOST_SPLITS.get(name)
    within = f"from 1 to {most}" if most else "of at least 1"
    wanted = f"{name} must be an integer {within}, or 'auto', got"
    try:
        splits = _integer(value)
    except TypeError:
        wrong = ValueError if isinstance(value, str) else TypeError
        raise wrong(f"{wanted} {value!r}") from None
    if splits < 1 or (most and splits > most):
        raise ValueError(f"{wanted} {splits}")
    return splits


def as_precision(value: Any, allowed: Sequence[str], dtype: str) -> str:
    """Return `value` if it is the name of a precision that is allowed for `dtype`.

    Raise ValueError for other values. Only "ieee" is allowed for dtypes other than float32.
    """
    check_name("precision", value, allowed)
    if value != "ieee" and dtype != "float32":
        raise ValueError(
            f"precision must be 'ieee' with dtype {dtype} (the other values are for float32 "
            f"arrays), got {value!r}"
        )
    return value


def as_flag(name: str, value: Any) -> bool:
    """Return a bool of Python or NumPy as a Python bool. Raise TypeError for other values."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def as_shape(name: str, value: Any) -> tuple[int, ...]:
    """Return `value`, the shape of the array `name`, as a tuple of int.

    Raise TypeError unless `value` is a sequence of integers.
    """
    try:
        if isinstance(value, str):
            raise TypeError
        return tuple(operator.index(n) for n in value)
    except TypeError:
        raise TypeError(
            f"{name} must be an array, or a shape (a sequence of integers), got {value!r}"
        ) from None


def _real(name: str, value: Any, allowed: str) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {allowed}, got {value!r}")
    try:
        return float(value)
    except OverflowError:  # an integer beyond float64
        return math.inf


def as_scale(value: Any, head_dim: int) -> float:
    if value is None:
        return 1.0 / math.sqrt(head_dim)
    scale = _real("scale", value, "a finite real number or None")
    # The kernels multiply by scale * log2(e) in float32.
    largest = float(np.finfo(np.float32).max) / math.log2(math.e)
    if not abs(scale) <= largest:  # True for NaN too
        raise ValueError(
            f"scale must be a finite number of magnitude at most {largest:.3g} (the kernels "
            f"compute in float32) or None, got {value!r}"
        )
    if scale and not np.float32(scale):
        raise ValueError(
            "scale must not round to 0 in float32 (the kernels compute in float32), got "
            f"{value!r}; pass 0.0 for a scale of 0"
        )
    return scale


OUT_DTYPES = ("float16", "bfloat16", "float32")


def as_out_dtype(value: Any, dtype: str, scaled: bool) -> str | None:
    """Return the option ``out_dtype``, or None for the default.

    ``dtype`` is the dtype of q, and ``scaled`` says whether it is float8_e4m3fn. Raise ValueError
    for a value that is not allowed.
    """
    if value is None:
        return None
    if not scaled:
        raise ValueError(
            f"out_dtype must be None for inputs of {dtype}, because the output has their dtype, "
            f"got {value!r}; only float8_e4m3fn inputs have other outputs"
        )
    if value not in OUT_DTYPES:
        raise ValueError(f"out_dtype must be {one_of(map(repr, OUT_DTYPES))}, got {value!r}")
    return None if value == OUT_DTYPES[0] else str(value)


def as_array_scale(name: str, value: Any) -> float:
    """Return a scale of an array: a positive float that is not 0 or inf in float32.

    Raise TypeError or ValueError for other values. The message calls the value ``name``.
    """
    wanted = f"{name} must be a positive finite number, or an array of float32"
    scale = _real(name, value, wanted.partition(" must be ")[2])
    with np.errstate(over="ignore"):
        if not 0.0 < float(np.float32(scale)) < math.inf:
            raise ValueError(f"{wanted}, got {value!r}")
    return scale


def check_scales(name: str, shape: tuple[int, ...], sizes: tuple[int, int, int], rows: int) -> None:
    """Raise ValueError unless ``shape`` is the shape of scales of heads or of blocks of rows.

    ``sizes`` are the numbers of batch entries, of heads, and of blocks with ``rows`` rows. Axes of
    ``shape`` can have length 1.
    """
    wanted = f"{sizes[:2]} or {sizes} (batch entries, heads, blocks of {rows} rows)"
    if len(shape) not in (2, 3) or any(n not in (1, m) for n, m in zip(shape, sizes, strict=False)):
        raise ValueError(f"{name} must have shape {wanted}, or 1 in place of a size, got {shape}")


def as_sizes(name: str, shape: Any, axes: Sequence[str]) -> tuple[int, ...]:
    """Return `shape` as a tuple of sizes, one size for each of `axes`.

    Raise TypeError or ValueError unless each size is an integer of at least 1. The message calls
    the array `name`.
    """
    if getattr(shape, "ndim", 1) != 1:  # an array
        raise TypeError(
            f"{name} must be a shape of {len(axes)} integers, ({', '.join(axes)}), got an array of "
            f"shape {tuple(shape.shape)}; pass {name}.shape"
        )
    try:
        shape = tuple(shape)
    except TypeError:
        raise TypeError(
            f"{name} must have a shape of {len(axes)} integers, ({', '.join(axes)}), got {shape!r}"
        ) from None
    if len(shape) != len(axes):
        # A prefix of layout "bnhd" has equal axes, but is not packed.
        packed = " for packed sequences" if axes is PACKED_AXES else ""
        raise ValueError(
            f"{name} must have {len(axes)} axes{packed}, ({', '.join(axes)}), got {len(shape)} "
            f"axes: shape {shape}"
        )
    where = f"; {name} has shape {shape}"
    return tuple(
        as_size(f"{axis} of {name}", n, where=where) for axis, n in zip(axes, shape, strict=True)
    )


def other_layout(axes: Sequence[str]) -> str:
    """Return advice to pass another ``layout``, for the end of a message about a wrong shape.

    ``axes`` are the names of the axes in the layout of the call. The result is "" if they are not
    the axes of layout "bhnd" or "bnhd".
    """
    for name, other in (("bhnd", "bnhd"), ("bnhd", "bhnd")):
        if axes == LAYOUTS[name]:
            return f"; if the axes are ({', '.join(LAYOUTS[other])}), pass layout={other!r}"
    return ""


def check_same(
    axis: str,
    name: str,
    shape: tuple[int, ...],
    of: str,
    of_shape: tuple[int, ...],
    axes: Sequence[str],
) -> None:
    got, wanted = shape[axes.index(axis)], of_shape[axes.index(axis)]
    if got != wanted:
        raise ValueError(
            f"{name} must have {axis}={wanted} like {of} (shape {of_shape}), got {axis}={got} "
            f"(shape {shape}){other_layout(axes) if axis in ('heads', 'seqlen') else ''}"
        )


def as_window(value: Any) -> tuple[int, int]:
    if value is None:
        return -1, -1
    wanted = (
        "window must be (left, right), two integers of at least 0; -1 or None instead of an "
        f"integer means no limit, got {value!r}"
    )
    try:
        if isinstance(value, (str, set, frozenset, dict)):
            raise TypeError
        sides = tuple(-1 if n is None else _integer(n) for n in value)
    except TypeError:
        raise TypeError(wanted) from None
    if len(sides) != 2 or min(sides) < -1:
        raise ValueError(wanted)
    left, right = (-1 if n >= UNBOUNDED else n for n in sides)
    return left, right


def as_layout(value: Any) -> str:
    if value is None:
        return "bhnd"
    if not isinstance(value, str) or value not in LAYOUTS:
        names = (f"{name!r} for ({', '.join(axes)})" for name, axes in LAYOUTS.items())
        raise ValueError(f"layout must be {one_of(names)}, got {value!r}")
    return value


def as_softcap(value: Any) -> float | None:
    if value is None:
        return None
    softcap = _real("softcap", value, "a positive number, or None or 0 for no cap")
    if softcap == 0:
        return None
    # Within these limits, scale / softcap and softcap * log2(e) are finite in float32.
    if not 1e-30 <= softcap <= 1e30:
        raise ValueError(
            f"softcap must be a number from 1e-30 to 1e30, or None or 0 for no cap, got {value!r}"
        )
    return softcap


def as_dropout(value: Any) -> float:
    if value is None:
        return 0.0
    allowed = "a number of at least 0 and less than 1"
    probability = _real("dropout_p", value, allowed)
    if not 0.0 <= probability < 1.0:
        raise ValueError(f"dropout_p must be {allowed}, got {value!r}")
    return min(round(probability * 2**16), 2**16 - 1) / 2**16  # dropout compares 16 bits


def check_shape(name: str, shape: Sequence[int], *allowed: tuple[int, ...], of: str = "") -> None:
    """Raise ValueError unless ``shape``, the shape of the array ``name``, is among ``allowed``.

    ``of`` explains the allowed shapes in the message, such as " (the shape of O)".
    """
    if tuple(shape) not in allowed:
        raise ValueError(f"{name} must have shape {one_of(allowed)}{of}, got {tuple(shape)}")


def check_heads(batch: int, heads: int, slopes: Any = None, sinks: Any = None) -> None:
    """Raise ValueError unless the shapes of ``alibi_slopes`` and ``sinks`` fit the query heads.

    ``slopes`` and ``sinks`` are the shapes, or None.
    """
    if slopes is not None:
        check_shape("alibi_slopes", slopes, (heads,), (batch, heads))
    if sinks is not None:
        check_shape("sinks", sinks, (heads,), of=" (one value per query head)")


def as_lengths(
    name: str, value: Any, batch: int, longest: int, of: str = "the sequence length"
) -> tuple[int, ...]:
    """Return the lengths in the argument ``name`` as a tuple of int, one for each batch entry.

    Raise TypeError or ValueError unless all lengths are integers from 0 to ``longest``. ``of`` says
    in the message what the number ``longest`` is.
    """
    lengths = _integers(name, value)
    check_shape(name, lengths.shape, (batch,), of=PER_ENTRY)
    outside = lengths[(lengths < 0) | (lengths > longest)]
    if outside.size:
        raise ValueError(
            f"{name} must contain integers from 0 to {longest} ({of}), got {outside[0]}"
        )
    return tuple(lengths.tolist())


PER_ENTRY = " (one value per batch entry)"  # after a shape in a message
# Allowed numbers of rows per page. Kernels load 16 rows at a time, which are in one page.
PAGE_SIZES = range(16, 257, 16)


def as_page_size(value: int, shape: tuple[int, ...], name: str = "k") -> int:
    """Return ``value``, the number of rows of a page of a K/V cache.

    Raise ValueError unless the number is a multiple of 16 from 16 to 256. The message contains
    ``name`` and ``shape``: the argument with the pages of k, and the shape of this array.
    """
    if value not in PAGE_SIZES:
        raise ValueError(
            f"{name} must have a number of rows per page that is a multiple of 16 from 16 to 256, "
            f"got {value} rows (shape {shape})"
        )
    return value


def as_table_shape(value: Any, batch: int) -> tuple[int, int]:
    """Return the shape of a block table, (batch, pages per sequence).

    Raise TypeError or ValueError for other shapes.
    """
    shape = as_shape("block_table", value)
    if len(shape) != 2 or shape[0] != batch or shape[1] < 1:
        raise ValueError(
            f"block_table must have shape ({batch}, pages per sequence), one row per batch entry, "
            f"got {shape}"
        )
    return shape[0], shape[1]


def check_table(table: np.ndarray, kv_lens: Any, pages: int, page_size: int) -> None:
    """Raise ValueError unless the table has a valid page for every key of every sequence.

    ``kv_lens`` are the numbers of keys. A valid page number is from 0 to ``pages`` - 1. Entries of
    the table after the last key of a sequence are not checked.
    """
    lengths = np.array(table_lengths(kv_lens, table.shape, page_size))
    used = np.arange(table.shape[1]) * page_size < lengths[:, None]
    wrong = used & ((table < 0) | (table >= pages))
    if wrong.any():
        b, n = (int(i) for i in np.argwhere(wrong)[0])
        why = f"the {lengths[b]} keys of sequence {b} are in {-(-lengths[b] // page_size)} pages"
        raise ValueError(_no_page(table, b, n, pages, "k", why))


def _no_page(table: np.ndarray, b: int, n: int, pages: int, name: str, why: str) -> str:
    return (
        f"block_table[{b}, {n}] must be the number of a page of {name}, from 0 to {pages - 1}, "
        f"because {why}, got {table[b, n]}"
    )


def check_appended(
    table: np.ndarray, kv_lens: Sequence[int], new_lens: Sequence[int], pages: int, page_size: int
) -> None:
    """Raise ValueError unless the table has pages for the new rows of each sequence.

    Sequence b gets ``new_lens[b]`` new rows after its first ``kv_lens[b]`` rows. A page that gets
    new rows must be in the table only once.
    """
    begin, end = np.array(kv_lens), np.add(kv_lens, new_lens)
    most = table.shape[1] * page_size
    if (end > most).any():
        b = int((end > most).argmax())
        raise ValueError(
            f"kv_lens plus the number of new rows must be at most {most} ({table.shape[1]} pages "
            f"of {page_size} rows in block_table), got {begin[b]} + {new_lens[b]} for batch entry "
            f"{b}"
        )
    owners: dict[int, tuple[int, int]] = {}  # position of each page in the table
    for b in np.flatnonzero(end > begin).tolist():
        for n in range(begin[b] // page_size, -(-end[b] // page_size)):
            page = int(table[b, n])
            if not 0 <= page < pages:
                why = f"new rows of sequence {b} are written to this page"
                raise ValueError(_no_page(table, b, n, pages, "k_pages", why))
            if page in owners or page in table[b, :n]:
                first = owners.get(page) or (b, table[b, :n].tolist().index(page))
                raise ValueError(
                    "a page into which new rows are written must be in block_table only once, but "
                    f"page {page} is at block_table{list(first)} and at block_table[{b}, {n}]"
                )
            owners[page] = b, n


def table_lengths(value: Any, shape: tuple[int, ...], page_size: int) -> tuple[int, ...]:
    """Return ``kv_lens`` as a tuple of int, one for each sequence.

    ``shape`` is the shape of the block table, (batch, pages per sequence). Raise ValueError if a
    sequence has more keys than (pages per sequence) x ``page_size``.
    """
    batch, each = shape
    rows = f"{each} pages of {page_size} rows in block_table"
    return as_lengths("kv_lens", value, batch, each * page_size, rows)


def as_table(value: Any) -> np.ndarray:
    """Return a block table on the host as an int32 array.

    Raise TypeError or ValueError unless the values are integers that fit into 32 bits.
    """
    table = _integers("block_table", value)
    limits = np.iinfo(np.int32)
    wrong = table[(table < limits.min) | (table > limits.max)]
    if wrong.size:
        raise ValueError(
            f"block_table must contain page numbers from 0 to 2**31 - 1, got {wrong[0]}"
        )
    return np.ascontiguousarray(table, np.int32)


def _integers(name: str, value: Any) -> np.ndarray:
    check_unmasked(name, value)
    found = np.asarray(value)
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"{name} must contain integers, got dtype {found.dtype}")
    if found.dtype == np.uint64 and (found >= 2**63).any():
        raise ValueError(f"{name} must contain integers below 2**63, got {found.max()}")
    return found.astype(np.int64)


def packed_lengths(name: str, value: Any, of: str, total: int) -> tuple[int, ...]:
    """Return the lengths of packed sequences from their cumulative lengths.

    Raise TypeError or ValueError unless the cumulative lengths begin with 0, never decrease and end
    with ``total``. ``name`` is the argument, and ``of`` is the array that has ``total`` rows.
    """
    starts = _integers(name, value)
    if starts.ndim != 1 or len(starts) < 2:
        raise ValueError(
            f"{name} must have shape (batch + 1,) with at least one sequence, got {starts.shape}"
        )
    lengths = np.diff(starts)
    if starts[0] != 0 or starts[-1] != total or (lengths < 0).any():
        first, last = starts[0], starts[-1]
        if first != 0:
            got = f"{first} as the first value"
        elif last != total:
            got = f"{last} as the last value"
        else:
            n = int((lengths < 0).argmax())
            got = f"{starts[n]} followed by {starts[n + 1]}"
        raise ValueError(
            f"{name} must be cumulative lengths that begin with 0, never decrease and end with "
            f"{total} (the length of the first axis of {of}), got {got}"
        )
    return tuple(lengths.tolist())


def added_shape(name: str, value: Any, whole: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an array that is added to the scores, extended to four axes.

    Raise TypeError or ValueError unless it broadcasts to `whole`, the shape of the scores.
    """
    shape = as_shape(name, value)
    full = (1,) * (4 - len(shape)) + shape
    if len(shape) > 4 or any(n not in (1, m) for n, m in zip(full, whole, strict=True)):
        axes = "(batch, heads_q, seqlen_q, seqlen_k)"
        raise ValueError(f"{name} must broadcast to {axes} = {whole}, got shape {shape}")
    return full
