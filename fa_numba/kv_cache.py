"""The cache of keys and values of a model that generates text.

``append_kv`` writes to the cache. ``flash_attention_2`` with a ``block_table`` reads from it.
"""

from collections.abc import Sequence
from typing import Any

from fa_numba.host.append import append
from fa_numba.typing import Array, Layout, Lengths, Stream


def append_kv(
    k_pages: Array, v_pages: Array, k_new: Array, v_new: Array,
    block_table: Sequence[Sequence[int]] | Array, kv_lens: Lengths, *,
    new_lens: Lengths | None = None, k_scale: Array | None = None, v_scale: Array | None = None,
    layout: Layout | None = None, check_table: bool = False, stream: Stream = None,
) -> None:  # fmt: skip
    """Write new keys and values into the pages of a cache.

    Pages of float8_e4m3fn take half of the memory of float16. The new rows are then quantised, with
    a scale for each page and head.

    Row i of ``k_new[b]`` becomes row ``kv_lens[b] + i`` of sequence b. That row is in page
    ``block_table[b, (kv_lens[b] + i) // page_size]``. The pages are changed in place. ``kv_lens``
    is not changed: the caller must add the number of new rows to it afterwards.

    Parameters
    ----------
    k_pages : array
        Pages of keys, shape (pages, heads_k, page_size, head_dim), dtype float32, float16, bfloat16
        or float8_e4m3fn, any strides. page_size must be a multiple of 16, at most 256. The array
        must be writable. With float8_e4m3fn, head_dim must be a multiple of 16, and rows must start
        at multiples of 16 bytes.
    v_pages : array
        Pages of values, shape (pages, heads_k, page_size, head_dim_v), with the dtype, library and
        device of ``k_pages``. head_dim_v may differ from head_dim.
    k_new : array
        New keys, shape (batch, heads_k, seqlen_new, head_dim), with the library, device and dtype
        of ``k_pages``. With pages of float8_e4m3fn, the dtype is float32, float16 or bfloat16.
    v_new : array
        New values, shape (batch, heads_k, seqlen_new, head_dim_v), with the dtype, library and
        device of ``k_new``.
    block_table : sequence or array of int
        Numbers of the pages of each sequence in their order, shape (batch, pages per sequence).
        Several sequences may share a page, but a page that takes new rows must belong to only one
        sequence.
    kv_lens : sequence or array of int
        Number of keys that each sequence has before the call, shape (batch,).
    new_lens : sequence or array of int, optional
        Number of new rows that each sequence takes, shape (batch,). Sequence b takes the first
        ``new_lens[b]`` rows of ``k_new[b]`` and ``v_new[b]``. None means that each sequence takes
        all rows.
    k_scale : array, optional
        Scales of ``k_pages``, float32, shape (pages, heads_k), only with pages of float8_e4m3fn. A
        key is about ``stored * k_scale[page, head]``. The array is changed in place, together with
        the pages. The values of pages without rows are not read.
    v_scale : array, optional
        Scales of ``v_pages``, as ``k_scale``.
    layout : {"bhnd", "bnhd"}, default "bhnd"
        "bnhd" if pages are (pages, page_size, heads_k, head_dim) and new rows are (batch,
        seqlen_new, heads_k, head_dim).
    check_table : bool, default False
        Whether ``block_table``, ``kv_lens`` and ``new_lens`` on a GPU are copied to the host and
        checked. The call then waits for the copy. If all three are on the host, they are always
        checked.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernel runs. None takes the
        current stream of the library of ``k_pages``. On the emulator, only None is allowed.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype, for instance None for ``block_table``.
    ValueError
        If shapes, devices or libraries do not match, if arrays share memory, or if a length or a
        page number is out of range. Also if a page would take new rows of two sequences, or if the
        emulator would run for more than about 30 seconds. All errors are raised before anything is
        written.

    See Also
    --------
    flash_attention_2 : Attention over the pages.

    Notes
    -----
    A scale of a page and head is a power of two, the smallest for which no row of the page is above
    448 in e4m3. If new rows need a larger scale, the earlier rows of the page are stored again.
    They lose no digits, except for numbers below 2^-6 times the scale.

    ``block_table``, ``kv_lens`` and ``new_lens`` on a GPU must be int32. They are used in place. A
    CUDA graph of the call can be replayed after their values have changed.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> k_pages, v_pages = np.zeros((2, 4, 1, 16, 8), np.float32)  # four pages of 16 rows each
    >>> table = [[2, 0]]  # rows 0 to 15 of the sequence are in page 2, rows 16 to 31 in page 0
    >>> k, v = np.random.default_rng(0).standard_normal((2, 1, 1, 20, 8), np.float32)
    >>> fa_numba.append_kv(k_pages, v_pages, k, v, table, kv_lens=[0])
    >>> q = k[:, :, -1:]
    >>> paged = {"block_table": table, "kv_lens": [20]}
    >>> o = fa_numba.flash_attention_2(q, k_pages, v_pages, **paged)
    >>> bool((o == fa_numba.flash_attention_2(q, k, v)).all())
    True
    """
    options: dict[str, Any] = {"block_table": block_table, "kv_lens": kv_lens}
    options |= {"new_lens": new_lens}
    options |= {"layout": layout, "check_table": check_table}
    append((k_pages, v_pages), (k_new, v_new), (k_scale, v_scale), options, stream)
