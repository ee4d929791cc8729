"""The cache of keys and values that a model generates text with: its public function.

Attention over it is ``flash_attention_2`` with a ``block_table``.
"""

from fa_numba.host.append import append


def append_kv(
    k_pages, v_pages, k_new, v_new, block_table, kv_lens, *, new_lens=None, layout=None,
    check_table=False, stream=None,
):  # fmt: skip
    """Write new keys and values to the pages of a cache that ``flash_attention_2`` reads.

    Row i of ``k_new`` becomes row ``kv_lens[b] + i`` of sequence b, in the page that
    ``block_table[b, row // page_size]`` names. Nothing is returned: ``k_pages`` and ``v_pages`` are
    written in place, and the lengths are the caller's, who adds the new rows to ``kv_lens``.

    ``k_pages``, ``v_pages``: (pages, Hk, page_size, d), any strides, 16 to 256 rows a page, a
        multiple of 16; with ``layout="bnhd"`` (pages, page_size, Hk, d); d of ``v_pages`` and
        ``v_new`` may be another.
    ``k_new``, ``v_new``: (B, Hk, N, d) or (B, N, Hk, d), of the pages' dtype, library and device.
    ``block_table``: integers (B, pages of a sequence). ``kv_lens``: integers (B,), the keys that
        each sequence has before the call. Sequences may share pages that they only read; a page
        that takes new rows belongs to one of them.
    ``new_lens``: integers (B,), how many rows of ``k_new`` each sequence takes, the first ones; all
        unless given.
    ``check_table``: bool, whether integers on a GPU are read back to be checked as those on the
        host always are; the call waits for that.
    ``stream``: as for ``flash_attention_2``.

    Raises ValueError or TypeError, before anything is written, for arguments that are not as above:
    the message names the argument, its value and what is allowed.

    >>> import numpy as np, fa_numba
    >>> k_pages, v_pages = np.zeros((2, 4, 1, 16, 8), np.float32)  # four pages of 16 rows each
    >>> table = [[2, 0]]  # the sequence has its rows 0 to 15 in page 2, 16 to 31 in page 0
    >>> k, v = np.random.default_rng(0).standard_normal((2, 1, 1, 20, 8), np.float32)
    >>> fa_numba.append_kv(k_pages, v_pages, k, v, table, kv_lens=[0])
    >>> q = k[:, :, -1:]
    >>> paged = {"block_table": table, "kv_lens": [20]}
    >>> o = fa_numba.flash_attention_2(q, k_pages, v_pages, **paged)
    >>> bool((o == fa_numba.flash_attention_2(q, k, v)).all())
    True
    """
    options = {"block_table": block_table, "kv_lens": kv_lens, "new_lens": new_lens}
    options |= {"layout": layout, "check_table": check_table}
    append((k_pages, v_pages), (k_new, v_new), options, stream)
