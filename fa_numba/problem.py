"""The problem of a call: its sizes, dtype, scale, masks and other options, without arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypedDict, Unpack

import numpy as np

from fa_numba import checks
from fa_numba.checks import LAYOUTS, PACKED_AXES, UNBOUNDED
from fa_numba.dtypes import DTYPES, E4M3, PRECISIONS
from fa_numba.integers import ceil_div
from fa_numba.mods import PARAMETERS as MODS
from fa_numba.mods import Mod, as_mod, slope_of

MAX_HEAD_DIM = 256
MAX_WIDENED_DIM = 128  # with pages of K and V in e4m3
MAX_SEQLEN = 2**31 - 1024  # rows and columns are 32-bit in the kernels, with room for a tile
# Rows and columns with a block mask: a word of 28 bits for a row and two flags lists visits
# (parts/visits.py). There is room for a block of 1,024 rows.
MAX_LISTED = 2**28 - 1024

_SIZES = ("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim")


class BlockSizes(Protocol):
    """Any object with the block sizes Br (rows of Q) and Bc (rows of K and V), such as Tiles."""

    @property
    def Br(self) -> int: ...
    @property
    def Bc(self) -> int: ...


def check_blocks(tiles: BlockSizes) -> None:
    """Raise TypeError or ValueError unless both block sizes are integers of at least 1."""
    if not (hasattr(tiles, "Br") and hasattr(tiles, "Bc")):
        raise TypeError(
            f"tiles must have the attributes Br and Bc, like Tiles(Br=64, Bc=64), got {tiles!r}"
        )
    checks.as_size("tiles.Br", tiles.Br, axis=False)
    checks.as_size("tiles.Bc", tiles.Bc, axis=False)


class OptionFields(TypedDict, total=False):
    """The fields of a ``Problem`` that are options of attention, with the same names and values."""

    scale: float | None
    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None
    score_mod: Callable[..., Any] | Mod | None
    score_mod_grad: Callable[..., Any] | Mod | None
    mask_mod: Callable[..., Any] | Mod | None
    q_lens: Sequence[int] | np.ndarray | None
    kv_lens: Sequence[int] | np.ndarray | None
    dropout_p: float | None
    layout: str | None
    precision: str | None
    out_dtype: str | None


class ProblemFields(OptionFields, total=False):
    """The fields of a ``Problem`` that ``Problem.from_shapes`` takes besides the shapes."""

    dtype: str
    kv_dtype: str | None
    bias: Sequence[int] | None
    alibi: bool
    sinks: bool
    sparse: bool
    block_scales: bool
    value_block_scales: bool


@dataclass(frozen=True)
class Problem:
    """The sizes, dtype and options of an attention call, without the arrays.

    The call computes O = softmax(scale Q K^T, masked) V for each query head. Query head h reads K/V
    head ``h // group``. The closed forms in ``fa_numba.io_model`` take a problem, and a plan
    contains a problem. The values are checked when a problem is made.

    Parameters
    ----------
    batch : int
        Number of batch entries, or of packed sequences.
    heads_q : int
        Number of query heads.
    heads_k : int
        Number of heads of K and V. It must divide ``heads_q``.
    seqlen_q : int
        Number of rows of Q. For packed sequences, it is the number of rows of the longest sequence.
    seqlen_k : int
        Number of rows of K and V. For packed sequences, it is the number of rows of the longest
        sequence. If K and V are pages, it is the number of rows in all pages that the block table
        lists for one sequence.
    head_dim : int
        Head dimension of Q and K, 1 to 256.
    dtype : {"float32", "float16", "bfloat16", "float8_e4m3fn"}, default "float32"
        Dtype of Q, K and V, and of O except for float8_e4m3fn.
    scale : float, default 1 / sqrt(head_dim)
        Factor of the scores.
    causal : bool, default False
        Whether row i sees only the columns j <= i + seqlen_k - seqlen_q.
    window : tuple of int, default (-1, -1)
        (left, right): row i sees the columns from i + seqlen_k - seqlen_q - left to i + seqlen_k -
        seqlen_q + right, both included. -1 means no bound on that side.
    softcap : float, optional
        Cap c of the scores: a score s becomes c tanh(s / c).
    score_mod : function or Mod, optional
        Function that changes the scores, as the option ``score_mod`` of ``attention``.
    score_mod_grad : function or Mod, optional
        Derivative of ``score_mod``.
    mask_mod : function or Mod, optional
        Function that returns whether row i sees column j.
    bias : tuple of int, optional
        Shape of the array that is added to the scores. If the shape has fewer than four axes, axes
        of length 1 are added at the front.
    alibi : bool, default False
        Whether ALiBi slopes are given.
    sinks : bool, default False
        Whether attention sinks are given.
    q_lens : sequence of int, optional
        Number of valid rows of Q in each batch entry. Masks are aligned to the valid lengths.
    kv_lens : sequence of int, optional
        Number of valid rows of K and V in each batch entry.
    packed : bool, default False
        Whether the sequences are packed one after the other, with the lengths ``q_lens`` and
        ``kv_lens``. Q is then (total_q, heads_q, head_dim).
    sparse : bool, default False
        Whether a block mask is given.
    dropout_p : float, default 0.0
        Probability that an element of P is dropped. It is rounded to a multiple of 2**-16.
    layout : {"bhnd", "bnhd"}, default "bhnd"
        Order of the axes in ``q_shape`` and the other shapes.
    pages : int, optional
        Number of pages, if K and V are pages of a cache.
    page_size : int, optional
        Number of rows of a page.
    precision : {"ieee", "fp16x3", "bf16x6", "bf16x3"}, default "ieee"
        How the products of float32 matrices are computed.
    out_dtype : {"float16", "bfloat16", "float32"}, optional
        Dtype of O if Q, K and V are float8_e4m3fn. The attribute is None for the default, float16,
        and for other dtypes of Q, K and V. ``o_dtype`` is the dtype of O in all cases.
    kv_dtype : {"float8_e4m3fn"}, optional
        Dtype of the pages of K and V if it is not ``dtype``. The attribute is None if it is.
    block_scales : bool, default False
        Whether Q or K in float8_e4m3fn has a scale for each 128 rows, instead of a scale for each
        head.
    value_block_scales : bool, default False
        Whether V in float8_e4m3fn has a scale for each 128 rows, instead of a scale for each head.
    head_dim_v : int, optional
        Head dimension of V and O, if it differs from ``head_dim``. The attribute is None if both
        are equal.

    Raises
    ------
    TypeError
        If a value has a wrong type.
    ValueError
        If a value is not allowed. The message names the argument, its value and what is allowed.

    See Also
    --------
    fa_numba.plan : Make a plan from shapes and options.

    Examples
    --------
    >>> problem = Problem(batch=1, heads_q=4, heads_k=2, seqlen_q=8, seqlen_k=16, head_dim=64)
    >>> problem.scale, problem.group, problem.q_shape
    (0.125, 2, (1, 4, 8, 64))
    """

    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str = "float32"
    scale: float = None  # type: ignore[assignment]  # None goes in, a float is read
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float | None = None
    score_mod: Mod | None = None
    score_mod_grad: Mod | None = None
    mask_mod: Mod | None = None
    bias: tuple[int, ...] | None = None
    alibi: bool = False
    sinks: bool = False
    q_lens: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None
    packed: bool = False
    sparse: bool = False
    dropout_p: float = 0.0
    layout: str = "bhnd"
    pages: int | None = None
    page_size: int | None = None
    precision: str = "ieee"
    out_dtype: str | None = None
    kv_dtype: str | None = None
    block_scales: bool = False
    value_block_scales: bool = False
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        own = vars(self)  # what a frozen class sets its fields by
        own.update({name: checks.as_size(name, own[name]) for name in _SIZES})
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be from 1 to {MAX_HEAD_DIM}, got {self.head_dim}")
        if self.head_dim_v is not None:
            size = checks.as_size("head_dim_v", self.head_dim_v)
            if size > MAX_HEAD_DIM:
                raise ValueError(
                    f"head_dim_v must be from 1 to {MAX_HEAD_DIM}, or None for head_dim, got {size}"
                )
            own["head_dim_v"] = None if size == self.head_dim else size
        if self.heads_q % self.heads_k:
            raise ValueError(
                f"heads_k must be a divisor of heads_q, which is {self.heads_q}, got {self.heads_k}"
            )
        if not isinstance(self.dtype, str):
            names = checks.one_of(map(repr, DTYPES))
            raise TypeError(f"dtype must be a string, {names}, got {self.dtype!r}")
        if self.dtype not in DTYPES:
            names = checks.one_of(map(repr, DTYPES))
            raise ValueError(f"dtype must be {names}, got {self.dtype!r}")
        own["out_dtype"] = checks.as_out_dtype(
            self.out_dtype, self.dtype, DTYPES[self.dtype].scaled
        )
        own["kv_dtype"] = self._checked_kv_dtype()
        own["precision"] = checks.as_precision(self.precision, tuple(PRECISIONS), self.dtype)
        flags = ("causal", "alibi", "sinks", "packed", "sparse")
        for name in (*flags, "block_scales", "value_block_scales"):
            own[name] = checks.as_flag(name, own[name])
        own["layout"] = checks.as_layout(self.layout)
        own["scale"] = checks.as_scale(self.scale, self.head_dim)
        own["window"] = checks.as_window(self.window)
        own["softcap"] = checks.as_softcap(self.softcap)
        own["dropout_p"] = checks.as_dropout(self.dropout_p)
        own.update({name: as_mod(name, own[name]) for name in MODS})
        if self.score_mod_grad is not None and self.score_mod is None:
            raise ValueError(
                "score_mod_grad must be None without a score_mod (it is the derivative of "
                f"score_mod), got {self.score_mod_grad}"
            )
        if self.softcap is not None and self.scale:
            inner = abs(self.scale) / self.softcap
            single = np.finfo(np.float32)
            if not float(single.tiny) <= inner <= float(single.max):
                raise ValueError(
                    "softcap must be such that scale / softcap is within the range of float32, "
                    f"got softcap {self.softcap!r} with scale {self.scale!r}; pass a "
                    f"{'larger' if inner > 1 else 'smaller'} softcap"
                )
        longest, given = MAX_SEQLEN, ""
        if self.window != (-1, -1):
            longest, given = UNBOUNDED, " with a window"
        if self.sparse:
            longest, given = MAX_LISTED, " with a block mask"
        for name, size in (("q", self.seqlen_q), ("k", self.seqlen_k)):
            if size > longest:
                raise ValueError(f"seqlen of {name} must be at most {longest}{given}, got {size}")
        for name, longest in (("q_lens", self.seqlen_q), ("kv_lens", self.seqlen_k)):
            if own[name] is not None:
                own[name] = checks.as_lengths(name, own[name], self.batch, longest)
        if self.packed:
            of_pages = self.pages is not None
            for name, lens in (("q", self.q_lens), ("k", None if of_pages else self.kv_lens)):
                total = sum(lens or ())
                if total > MAX_SEQLEN:
                    raise ValueError(
                        f"{name} must have at most {MAX_SEQLEN} rows in all packed sequences "
                        f"together, got {total}; pass fewer sequences in a call"
                    )
        if self.bias is not None:
            own["bias"] = checks.added_shape("bias", self.bias, self.score_shape)

    @classmethod
    def from_shapes(
        cls, q_shape: Sequence[int], k_shape: Sequence[int], v_shape: Sequence[int] | None = None,
        *, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, attn_mask: Any = None,
        block_table: Any = None, **options: Unpack[ProblemFields],
    ) -> Problem:  # fmt: skip
        """Return the problem of q, k and v with these shapes.

        Parameters
        ----------
        q_shape : sequence of int
            Shape of q: (batch, heads_q, seqlen_q, head_dim), in the order of ``layout``, or
            (total_q, heads_q, head_dim) for packed sequences.
        k_shape : sequence of int
            Shape of k, or of its pages.
        v_shape : sequence of int, optional
            Shape of v. None means the shape of k.
        cu_seqlens_q : sequence of int, optional
            Cumulative lengths of packed queries, batch + 1 numbers.
        cu_seqlens_k : sequence of int, optional
            Cumulative lengths of packed k and v, batch + 1 numbers.
        attn_mask : sequence of int, optional
            Shape of a mask. It becomes the field ``bias``, so both cannot be given.
        block_table : sequence of int, optional
            Shape of a block table, (batch, pages per sequence). k and v are then pages.
        **options : ProblemFields
            Other fields of ``Problem``, such as ``causal``. None stands for the default.

        Returns
        -------
        Problem
            The problem.

        Raises
        ------
        TypeError
            If a value has a wrong type.
        ValueError
            If shapes do not match, or a value is not allowed.

        Examples
        --------
        >>> Problem.from_shapes((1, 4, 8, 64), (1, 2, 16, 64), causal=True).score_shape
        (1, 4, 8, 16)
        """
        if attn_mask is not None:
            checks.check_alone(attn_mask, options.get("bias"))
            found = cls.from_shapes(
                q_shape, k_shape, v_shape, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                block_table=block_table, **options,
            )  # fmt: skip
            bias = checks.added_shape("attn_mask", attn_mask, found.score_shape)
            return replace(found, bias=bias)
        packed = cu_seqlens_q is not None or cu_seqlens_k is not None
        own: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        layout = checks.as_layout(own.get("layout"))
        if packed and layout != "bhnd":
            pages = (
                ". The pages of k and v must have the axes (pages, heads, rows, head_dim): pass "
                "k.transpose(0, 2, 1, 3)"
            )
            raise ValueError(
                "layout cannot be given with cu_seqlens_q or cu_seqlens_k, because packed arrays "
                f"have the axes (seqlen, heads, head_dim), got layout={layout!r}; leave layout out"
                f"{pages if block_table is not None else ''}"
            )
        if packed and block_table is not None:
            if cu_seqlens_k is not None:
                raise ValueError(
                    "cu_seqlens_k cannot be given with block_table; pass kv_lens instead, the "
                    "number of keys that each sequence has in its pages"
                )
            shapes = q_shape, k_shape, v_shape
            return cls._of_packed_on_pages(shapes, block_table, cu_seqlens_q, options)
        axes = PACKED_AXES if packed else LAYOUTS[layout]
        q, k = checks.as_sizes("q", q_shape, axes), checks.as_sizes("k", k_shape, axes)
        heads, seqlen = axes.index("heads"), axes.index("seqlen")
        if not packed and block_table is None:
            checks.check_same("batch", "k", k, "q", q, axes)
        checks.check_same("head_dim", "k", k, "q", q, axes)
        if q[-1] > MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim of q must be from 1 to {MAX_HEAD_DIM}, got {q[-1]}; q has shape {q}"
            )
        if q[heads] % k[heads]:
            raise ValueError(
                f"k must have a number of heads that divides the {q[heads]} heads of q (shape "
                f"{q}), got {k[heads]} (shape {k}){checks.other_layout(axes)}"
            )
        if v_shape is not None:
            v = checks.as_sizes("v", v_shape, axes)
            for axis in axes[:-1]:
                checks.check_same(axis, "v", v, "k", k, axes)
            if v[-1] > MAX_HEAD_DIM:
                raise ValueError(
                    f"head_dim of v must be from 1 to {MAX_HEAD_DIM}, got {v[-1]}; v has shape {v}"
                )
        sizes: dict[str, Any] = {"heads_q": q[heads], "heads_k": k[heads], "head_dim": q[-1]}
        if v_shape is not None:
            sizes["head_dim_v"] = v[-1]
        if block_table is not None:
            table = checks.as_table_shape(block_table, q[0])
            page_size = checks.as_page_size(k[seqlen], k)
            if own.get("kv_lens") is not None:
                own["kv_lens"] = checks.table_lengths(own["kv_lens"], table, page_size)
            sizes |= {"pages": k[0], "page_size": page_size, "seqlen_k": table[1] * page_size}
            return cls(batch=q[0], seqlen_q=q[seqlen], **sizes, **own)
        if not packed:
            return cls(batch=q[0], seqlen_q=q[seqlen], seqlen_k=k[seqlen], **sizes, **own)
        if cu_seqlens_q is None or cu_seqlens_k is None:
            given, other = ("q", "k") if cu_seqlens_k is None else ("k", "q")
            raise ValueError(
                f"cu_seqlens_{given} must be given together with cu_seqlens_{other}, got "
                f"cu_seqlens_{given} alone"
            )
        for name in ("q_lens", "kv_lens"):
            if own.get(name) is not None:
                raise ValueError(
                    f"{name} cannot be given with cu_seqlens_q and cu_seqlens_k, which already say "
                    f"how long each sequence is; leave {name} out"
                )
        q_lens = checks.packed_lengths("cu_seqlens_q", cu_seqlens_q, "q", q[seqlen])
        kv_lens = checks.packed_lengths("cu_seqlens_k", cu_seqlens_k, "k", k[seqlen])
        if len(q_lens) != len(kv_lens):
            raise ValueError(
                "cu_seqlens_k must describe the same number of sequences as cu_seqlens_q "
                f"({len(q_lens)}), got {len(kv_lens)}"
            )
        own |= {"q_lens": q_lens, "kv_lens": kv_lens, "packed": True}
        longest: dict[str, Any] = {"seqlen_q": max(q_lens), "seqlen_k": max(kv_lens)}
        return cls(batch=len(q_lens), **longest, **sizes, **own)

    @classmethod
    def _of_packed_on_pages(
        cls, shapes: tuple[Sequence[int], Sequence[int], Sequence[int] | None], block_table: Any,
        cu_seqlens_q: Any, options: ProblemFields,
    ) -> Problem:  # fmt: skip
        """Return the problem of packed queries over K and V in pages."""
        q_shape, k_shape, v_shape = shapes
        if options.get("q_lens") is not None:
            raise ValueError(
                "q_lens cannot be given with cu_seqlens_q, which already says how long each "
                "sequence is; leave q_lens out"
            )
        total, heads, head_dim = checks.as_sizes("q", q_shape, PACKED_AXES)
        q_lens = checks.packed_lengths("cu_seqlens_q", cu_seqlens_q, "q", total)
        padded = (len(q_lens), heads, max(q_lens), head_dim)
        found = cls.from_shapes(padded, k_shape, v_shape, block_table=block_table, **options)
        return replace(found, q_lens=q_lens, packed=True)

    @property
    def slopes(self) -> bool:
        """Whether the derivative of a score with respect to Q K^T can differ from ``scale``.

        This is so with a softcap, and with a ``score_mod`` that does more than add to the score.
        """
        return self.softcap is not None or bool(slope_of(self.score_mod, self.score_mod_grad))

    @property
    def options(self) -> dict[str, Any]:
        """Fields that differ from their default values, as a mapping from name to value.

        The sizes, ``dtype`` and ``scale`` are not included.
        """
        named = (*_SIZES, "dtype", "scale")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in named}
        defaults = {f.name: f.default for f in fields(self)}
        return {name: value for name, value in given.items() if value != defaults[name]}

    @property
    def mods(self) -> list[Mod]:
        """The given functions among ``score_mod``, ``score_mod_grad`` and ``mask_mod``."""
        return [mod for name in MODS if (mod := getattr(self, name)) is not None]

    @property
    def group(self) -> int:
        """Number of query heads that share one K/V head."""
        return self.heads_q // self.heads_k

    @property
    def diagonal(self) -> int:
        """seqlen_k - seqlen_q, the number of the last column that row 0 sees with a causal mask."""
        return self.seqlen_k - self.seqlen_q

    @property
    def left(self) -> int | None:
        """Number of columns that a row sees to the left of column ``row + diagonal``.

        None means all columns.
        """
        return None if self.window[0] < 0 else self.window[0]

    @property
    def right(self) -> int | None:
        """Number of columns that a row sees to the right of column ``row + diagonal``.

        None means all columns.
        """
        if self.causal:
            return 0
        return None if self.window[1] < 0 else self.window[1]

    @property
    def q_shape(self) -> tuple[int, ...]:
        """Shape of Q."""
        if self.packed:
            return sum(self.q_lens or ()), self.heads_q, self.head_dim
        return self._in_layout(self.heads_q, self.seqlen_q)

    @property
    def o_shape(self) -> tuple[int, ...]:
        """Shape of O."""
        return *self.q_shape[:-1], self.d_v

    @property
    def o_dtype(self) -> str:
        """Dtype of O: the dtype of Q, or ``out_dtype`` for float8_e4m3fn."""
        return (self.out_dtype or "float16") if DTYPES[self.dtype].scaled else self.dtype

    @property
    def k_shape(self) -> tuple[int, ...]:
        """Shape of K, or of its pages."""
        if self.pages is not None and self.page_size is not None:
            shape = self._in_layout(self.heads_k, self.page_size)
            return self.pages, *shape[1:]
        if self.packed:
            return sum(self.kv_lens or ()), self.heads_k, self.head_dim
        return self._in_layout(self.heads_k, self.seqlen_k)

    @property
    def v_shape(self) -> tuple[int, ...]:
        """Shape of V, or of its pages."""
        return *self.k_shape[:-1], self.d_v

    @property
    def d_v(self) -> int:
        """Head dimension of V and O."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def largest_dim(self) -> int:
        """Larger one of the two head dimensions; block sizes are chosen for it."""
        return max(self.head_dim, self.d_v)

    def _checked_kv_dtype(self) -> str | None:
        """Return ``kv_dtype``, or None if it is ``dtype``.

        Raise ValueError if ``kv_dtype`` is not allowed.
        """
        if self.kv_dtype in (None, self.dtype):
            return None
        if self.kv_dtype != E4M3.name or self.dtype not in ("float16", "bfloat16"):
            raise ValueError(
                f"kv_dtype, the dtype of k and v, must be the dtype of q ({self.dtype}), or "
                f"{E4M3.name} for q in float16 or bfloat16, got {self.kv_dtype!r}"
            )
        if self.pages is None:
            raise ValueError(
                f"k and v of {E4M3.name} with q of {self.dtype} must be pages of a cache; pass "
                "block_table and kv_lens, or quantise q too"
            )
        for name, d in (("q", self.head_dim), ("v", self.head_dim_v or self.head_dim)):
            if d % 32 or d > MAX_WIDENED_DIM:
                raise ValueError(
                    f"head_dim of {name} must be a multiple of 32 and at most {MAX_WIDENED_DIM} "
                    f"with pages of {E4M3.name}, got {d}"
                )
        return self.kv_dtype

    @property
    def whole_chunks(self) -> bool:
        """Whether the bytes of a row of each matrix are a multiple of 16."""
        chunk = DTYPES[self.dtype].chunk
        return self.head_dim % chunk == 0 and self.d_v % chunk == 0

    def _in_layout(self, heads: int, seqlen: int) -> tuple[int, ...]:
        middle = (seqlen, heads) if self.layout == "bnhd" else (heads, seqlen)
        return self.batch, *middle, self.head_dim

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of L, and of FA-1's l and m.

        For packed sequences it is (heads_q, total_q).
        """
        if self.packed:
            return self.heads_q, sum(self.q_lens or ())
        return self.batch, self.heads_q, self.seqlen_q

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        """Shape of S: (batch, heads_q, seqlen_q, seqlen_k)."""
        return self.batch, self.heads_q, self.seqlen_q, self.seqlen_k

    def lengths(self, entry: int = 0) -> tuple[int, int]:
        """Return the numbers of valid rows and columns of a batch entry.

        Parameters
        ----------
        entry : int, default 0
            Number of the batch entry.

        Returns
        -------
        rows : int
            Number of valid rows of Q.
        columns : int
            Number of valid rows of K and V.
        """
        Nq = self.seqlen_q if self.q_lens is None else self.q_lens[entry]
        Nk = self.seqlen_k if self.kv_lens is None else self.kv_lens[entry]
        return Nq, Nk

    def columns_begin(self, row: Any, entry: int = 0) -> Any:
        """Return the first column that a row sees by the causal mask, the window and the lengths.

        The row sees the columns ``columns_begin(row)`` to ``columns_end(row) - 1``. A row after the
        valid rows sees no column. The block mask, ``mask_mod`` and the bias are not considered.

        Parameters
        ----------
        row : int or numpy.ndarray of int
            Row, or rows.
        entry : int, default 0
            Number of the batch entry.

        Returns
        -------
        int or numpy.ndarray of int
            First column of each row.

        Examples
        --------
        >>> problem = Problem(1, 1, 1, 8, 8, 4, window=(2, 0))
        >>> problem.columns_begin(5), problem.columns_end(5)
        (3, 6)
        """
        Nq, Nk = self.lengths(entry)
        begin = np.zeros_like(row)
        if self.left is not None:
            begin = np.clip(row + (Nk - Nq - self.left), 0, Nk)
        begin = np.where(np.asarray(row) >= Nq, 0, begin)
        return begin if isinstance(row, np.ndarray) else int(begin)

    def columns_end(self, row: Any, entry: int = 0) -> Any:
        """Return the end of the columns that a row sees, the last column plus 1.

        See ``columns_begin``.

        Parameters
        ----------
        row : int or numpy.ndarray of int
            Row, or rows.
        entry : int, default 0
            Number of the batch entry.

        Returns
        -------
        int or numpy.ndarray of int
            Last column of each row plus 1. It is at most the number of valid columns of the entry.
        """
        Nq, Nk = self.lengths(entry)
        end = np.full_like(row, Nk)
        if self.right is not None:
            end = np.clip(row + (Nk - Nq + self.right + 1), 0, Nk)
        end = np.where(np.asarray(row) >= Nq, 0, end)
        return end if isinstance(row, np.ndarray) else int(end)


def check_block_mask(
    block_mask: Any, problem: Problem, tiles: BlockSizes | None = None
) -> np.ndarray:
    """Return a block mask with four axes, or raise if it does not fit the problem.

    Parameters
    ----------
    block_mask : array of bool
        Block mask of two to four axes.
    problem : Problem
        Problem that the mask is for.
    tiles : object with Br and Bc, optional
        Block sizes. The mask must have one element per tile. None allows any number of blocks.

    Returns
    -------
    numpy.ndarray of bool
        The mask with four axes, (batch or 1, heads_q or 1, row tiles, column tiles).

    Raises
    ------
    TypeError
        If the dtype is not bool.
    ValueError
        If the shape does not fit.
    """
    checks.check_unmasked("block_mask", block_mask)
    mask = np.asarray(block_mask)
    if mask.dtype != np.bool_:
        raise TypeError(f"block_mask must be bool, got dtype {mask.dtype}; pass block_mask != 0")
    heads, blocks = (problem.batch, problem.heads_q), mask.shape[-2:]
    wanted = "(row tiles, column tiles)"
    if tiles is not None:
        blocks = ceil_div(problem.seqlen_q, tiles.Br), ceil_div(problem.seqlen_k, tiles.Bc)
        wanted = f"{blocks} (one value per tile of Br={tiles.Br}, Bc={tiles.Bc})"
    leading = (1,) * (4 - mask.ndim) + mask.shape[:-2]
    fits = 2 <= mask.ndim <= 4 and mask.shape[-2:] == blocks and 0 not in blocks
    if not fits or any(n not in (1, m) for n, m in zip(leading, heads, strict=True)):
        raise ValueError(
            f"block_mask must have shape {wanted}, got {mask.shape}. Two axes may come before: "
            f"batch entries, of length 1 or {heads[0]}, and heads, of length 1 or {heads[1]}"
        )
    return mask.reshape(*leading, *blocks)
