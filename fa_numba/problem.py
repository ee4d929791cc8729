"""What is to be computed: sizes, dtype, scale, mask and the other options that are values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np

from fa_numba import checks
from fa_numba.checks import LAYOUTS, PACKED_AXES, UNBOUNDED
from fa_numba.dtypes import DTYPES, PRECISIONS
from fa_numba.integers import ceil_div
from fa_numba.mods import PARAMETERS as MODS
from fa_numba.mods import Mod, as_mod, slope_of

MAX_HEAD_DIM = 256
MAX_SEQLEN = 2**31 - 1024  # rows and columns are 32-bit in the kernels, with room for a tile

_SIZES = ("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim")


class BlockSizes(Protocol):
    """Whatever has two block sizes, such as Tiles: rows of Q, and of K and V, in one tile."""

    @property
    def Br(self) -> int: ...
    @property
    def Bc(self) -> int: ...


def check_blocks(tiles: BlockSizes) -> None:
    """Raise TypeError or ValueError unless both block sizes are integers >= 1."""
    if not (hasattr(tiles, "Br") and hasattr(tiles, "Bc")):
        raise TypeError(f"tiles is {tiles!r}: allowed is what has Br and Bc, such as a Tiles")
    checks.as_size("tiles.Br", tiles.Br, axis=False)
    checks.as_size("tiles.Bc", tiles.Bc, axis=False)


@dataclass(frozen=True)
class Problem:
    """One attention call: O = softmax(scale Q K^T, masked) V for every batch entry and head.

    Q and O are (batch, heads_q, seqlen_q, head_dim), K and V (batch, heads_k, seqlen_k, head_dim).
    Query head h reads K/V head h // group. `scale` multiplies the scores; None stands for
    1/sqrt(head_dim) and is stored as that number. `head_dim_v` is that of V, and so of O, where it
    is another; None where it is not. `causal` aligns the mask to the bottom right: row i sees
    columns j <= i + seqlen_k - seqlen_q; `window` (left, right) lets it see left columns before and
    right columns after that one, -1 for all. `softcap` c makes c tanh(s / c) of a score, `bias` is
    the 4-D shape of an array added to the scores, `alibi` whether slopes are, `sinks` whether each
    row's sum has one more term.
    `score_mod`, its derivative `score_mod_grad` and `mask_mod` are the caller's functions, or what
    `mods` has made of them.
    `q_lens` and `kv_lens` are the valid lengths of each batch entry, to which masks are then
    aligned. `packed`: the sequences of these lengths lie one after the other in tensors
    (total, heads, head_dim), and seqlen_q, seqlen_k are the longest. `sparse`: a block mask is
    given. `dropout_p` is the probability that an element of P is dropped. `layout` "bnhd" says that
    arrays lie as (batch, seqlen, heads, head_dim), which `q_shape` and `k_shape` then have; what is
    computed is the same. `pages`: K and V lie in so many pages of `page_size` rows, (pages,
    heads_k, page_size, head_dim), of which a table has seqlen_k / page_size for each batch entry;
    without `kv_lens` their lengths are on the device. `precision` names how products of float32
    matrices are computed, one of `dtypes.PRECISIONS`.

    Raises TypeError or ValueError with the argument's name, its value and what is allowed.
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
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        own = vars(self)  # what a frozen class sets its fields by
        own.update({name: checks.as_size(name, own[name]) for name in _SIZES})
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {self.head_dim}: allowed is 1 to {MAX_HEAD_DIM}")
        if self.head_dim_v is not None:
            size = checks.as_size("head_dim_v", self.head_dim_v)
            if size > MAX_HEAD_DIM:
                raise ValueError(f"head_dim_v is {size}: allowed is 1 to {MAX_HEAD_DIM}, or None")
            own["head_dim_v"] = None if size == self.head_dim else size
        if self.heads_q % self.heads_k:
            raise ValueError(
                f"heads_k is {self.heads_k} with heads_q {self.heads_q}: "
                f"allowed is a divisor of {self.heads_q}"
            )
        if not isinstance(self.dtype, str):
            raise TypeError(f"dtype is {self.dtype!r}: allowed is a name, {' or '.join(DTYPES)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: allowed is {' or '.join(DTYPES)}")
        own["precision"] = checks.as_precision(self.precision, tuple(PRECISIONS), self.dtype)
        for name in ("causal", "alibi", "sinks", "packed", "sparse"):
            own[name] = checks.as_flag(name, own[name])
        own["layout"] = checks.as_layout(self.layout)
        own["scale"] = checks.as_scale(self.scale, self.head_dim)
        own["window"] = checks.as_window(self.window)
        own["softcap"] = checks.as_softcap(self.softcap)
        own["dropout_p"] = checks.as_dropout(self.dropout_p)
        own.update({name: as_mod(name, own[name]) for name in MODS})
        if self.score_mod_grad is not None and self.score_mod is None:
            raise ValueError(
                f"score_mod_grad is {self.score_mod_grad} without a score_mod: allowed is None"
            )
        if self.softcap is not None and self.scale:
            inner = abs(self.scale) / self.softcap
            single = np.finfo(np.float32)
            if not float(single.tiny) <= inner <= float(single.max):
                raise ValueError(
                    f"softcap is {self.softcap!r} with scale {self.scale!r}: allowed is a float32 "
                    "for scale / softcap"
                )
        longest = MAX_SEQLEN if self.window == (-1, -1) else UNBOUNDED
        for name, size in (("q", self.seqlen_q), ("k", self.seqlen_k)):
            if size > longest:
                given = "" if longest == MAX_SEQLEN else " with a window"
                raise ValueError(f"{name} has seqlen {size}: allowed is at most {longest}{given}")
        for name, longest in (("q_lens", self.seqlen_q), ("kv_lens", self.seqlen_k)):
            if own[name] is not None:
                own[name] = checks.as_lengths(name, own[name], self.batch, longest)
        if self.bias is not None:
            own["bias"] = checks.added_shape("bias", self.bias, self.score_shape)

    @classmethod
    def from_shapes(
        cls, q_shape: Sequence[int], k_shape: Sequence[int], v_shape: Sequence[int] | None = None,
        *, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, attn_mask: Any = None,
        block_table: Any = None, **options: Any,
    ) -> Problem:  # fmt: skip
        """The problem of q, k and v with these shapes; v's is k's unless given.

        With ``cu_seqlens_q`` and ``cu_seqlens_k`` (batch + 1 cumulative lengths each) the shapes
        are (total, heads, head_dim). ``attn_mask`` is the shape of a mask in the place of a bias.
        With the shape of a ``block_table`` k and v are pages. ``options`` are the fields that
        shapes do not tell.
        """
        if attn_mask is not None:
            checks.check_alone(attn_mask, options.get("bias"))
            lens = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
            lens |= {"block_table": block_table}
            found = cls.from_shapes(q_shape, k_shape, v_shape, **lens, **options)
            bias = checks.added_shape("attn_mask", attn_mask, found.score_shape)
            return replace(found, bias=bias)
        packed = cu_seqlens_q is not None or cu_seqlens_k is not None
        options = {name: value for name, value in options.items() if value is not None}
        layout = checks.as_layout(options.get("layout"))
        if packed and layout != "bhnd":
            turned = ", for which pages can be k.transpose(0, 2, 1, 3)" if block_table else ""
            raise ValueError(
                f"layout is {layout!r} with cu_seqlens_q: packed q is (total, heads, head_dim), "
                f"allowed is 'bhnd' or None{turned}"
            )
        if packed and block_table is not None:
            lens = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
            return cls._of_packed_on_pages(q_shape, k_shape, v_shape, block_table, lens, options)
        axes = PACKED_AXES if packed else LAYOUTS[layout]
        q, k = checks.as_sizes("q", q_shape, axes), checks.as_sizes("k", k_shape, axes)
        heads, seqlen = axes.index("heads"), axes.index("seqlen")
        if not packed and block_table is None:
            checks.check_same("batch", "k", k, "q", q, axes)
        checks.check_same("head_dim", "k", k, "q", q, axes)
        if q[-1] > MAX_HEAD_DIM:
            raise ValueError(f"q has head_dim {q[-1]} (shape {q}): allowed is 1 to {MAX_HEAD_DIM}")
        if q[heads] % k[heads]:
            raise ValueError(
                f"k has heads {k[heads]} (shape {k}): allowed is a divisor of {q[heads]}, "
                f"the heads of q (shape {q}){checks.other_layout(axes)}"
            )
        if v_shape is not None:
            v = checks.as_sizes("v", v_shape, axes)
            for axis in axes[:-1]:
                checks.check_same(axis, "v", v, "k", k, axes)
            if v[-1] > MAX_HEAD_DIM:
                raise ValueError(
                    f"v has head_dim {v[-1]} (shape {v}): allowed is 1 to {MAX_HEAD_DIM}"
                )
        sizes: dict[str, Any] = {"heads_q": q[heads], "heads_k": k[heads], "head_dim": q[-1]}
        if v_shape is not None:
            sizes["head_dim_v"] = v[-1]
        if block_table is not None:
            table = checks.as_table_shape(block_table, q[0])
            page_size = checks.as_page_size(k[seqlen], k)
            if options.get("kv_lens") is not None:
                options["kv_lens"] = checks.table_lengths(options["kv_lens"], table, page_size)
            sizes |= {"pages": k[0], "page_size": page_size, "seqlen_k": table[1] * page_size}
            return cls(batch=q[0], seqlen_q=q[seqlen], **sizes, **options)
        if not packed:
            return cls(batch=q[0], seqlen_q=q[seqlen], seqlen_k=k[seqlen], **sizes, **options)
        if cu_seqlens_q is None or cu_seqlens_k is None:
            given, other = ("q", "k") if cu_seqlens_k is None else ("k", "q")
            raise ValueError(
                f"cu_seqlens_{given} is given without cu_seqlens_{other}: both or none"
            )
        for name in ("q_lens", "kv_lens"):
            if options.get(name) is not None:
                raise ValueError(f"{name} is given with cu_seqlens_q: allowed is one of the two")
        q_lens = checks.packed_lengths("cu_seqlens_q", cu_seqlens_q, "q", q[seqlen])
        kv_lens = checks.packed_lengths("cu_seqlens_k", cu_seqlens_k, "k", k[seqlen])
        if len(q_lens) != len(kv_lens):
            raise ValueError(
                f"cu_seqlens_k holds {len(kv_lens)} sequences: allowed is {len(q_lens)}, as "
                "cu_seqlens_q has them"
            )
        options |= {"q_lens": q_lens, "kv_lens": kv_lens, "packed": True}
        longest: dict[str, Any] = {"seqlen_q": max(q_lens), "seqlen_k": max(kv_lens)}
        return cls(batch=len(q_lens), **longest, **sizes, **options)

    @classmethod
    def _of_packed_on_pages(
        cls, q_shape: Sequence[int], k_shape: Sequence[int], v_shape: Sequence[int] | None,
        block_table: Any, lens: Mapping[str, Any], options: Mapping[str, Any],
    ) -> Problem:  # fmt: skip
        """Queries packed, K and V in pages: as of sequences that are padded to the longest one."""
        if lens["cu_seqlens_k"] is not None:
            raise ValueError(
                "cu_seqlens_k is given with a block_table: allowed is kv_lens, the keys that each "
                "sequence has in its pages"
            )
        if options.get("q_lens") is not None:
            raise ValueError("q_lens is given with cu_seqlens_q: allowed is one of the two")
        total, heads, head_dim = checks.as_sizes("q", q_shape, PACKED_AXES)
        q_lens = checks.packed_lengths("cu_seqlens_q", lens["cu_seqlens_q"], "q", total)
        padded = (len(q_lens), heads, max(q_lens), head_dim)
        found = cls.from_shapes(padded, k_shape, v_shape, block_table=block_table, **options)
        return replace(found, q_lens=q_lens, packed=True)

    @property
    def slopes(self) -> bool:
        """Whether some option makes the scores' derivative another one than scale."""
        return self.softcap is not None or bool(slope_of(self.score_mod, self.score_mod_grad))

    @property
    def options(self) -> dict[str, Any]:
        """The fields unlike plain attention's, by name; sizes, dtype and scale apart."""
        named = (*_SIZES, "dtype", "scale")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in named}
        defaults = {f.name: f.default for f in fields(self)}
        return {name: value for name, value in given.items() if value != defaults[name]}

    @property
    def mods(self) -> list[Mod]:
        """The caller's functions."""
        return [mod for name in MODS if (mod := getattr(self, name)) is not None]

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads_q // self.heads_k

    @property
    def diagonal(self) -> int:
        """seqlen_k - seqlen_q: the last column that row 0 sees when causal and without lengths."""
        return self.seqlen_k - self.seqlen_q

    @property
    def left(self) -> int | None:
        """Columns that a row sees before its diagonal one; None for all."""
        return None if self.window[0] < 0 else self.window[0]

    @property
    def right(self) -> int | None:
        """Columns that a row sees after its diagonal one; None for all."""
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
        """The head dimension of V and O."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def largest_dim(self) -> int:
        """The larger head dimension, which block sizes are for."""
        return max(self.head_dim, self.d_v)

    @property
    def whole_chunks(self) -> bool:
        """Whether rows of all matrices are whole pieces of 16 bytes."""
        chunk = DTYPES[self.dtype].chunk
        return self.head_dim % chunk == 0 and self.d_v % chunk == 0

    def _in_layout(self, heads: int, seqlen: int) -> tuple[int, ...]:
        middle = (seqlen, heads) if self.layout == "bnhd" else (heads, seqlen)
        return self.batch, *middle, self.head_dim

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of L (and of FA-1's l and m); (heads_q, total) when packed."""
        if self.packed:
            return self.heads_q, sum(self.q_lens or ())
        return self.batch, self.heads_q, self.seqlen_q

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        """Shape of S: (batch, heads_q, seqlen_q, seqlen_k)."""
        return self.batch, self.heads_q, self.seqlen_q, self.seqlen_k

    def lengths(self, entry: int = 0) -> tuple[int, int]:
        """Valid rows and columns of a batch entry."""
        Nq = self.seqlen_q if self.q_lens is None else self.q_lens[entry]
        Nk = self.seqlen_k if self.kv_lens is None else self.kv_lens[entry]
        return Nq, Nk

    def columns_begin(self, row: Any, entry: int = 0) -> Any:
        """The first column that `row`, an integer or an array of them, sees; columns_begin(row) ..
        columns_end(row) - 1 are all.

        The block mask and the bias are not asked. A row at or past the valid ones sees none.
        """
        Nq, Nk = self.lengths(entry)
        begin = np.zeros_like(row)
        if self.left is not None:
            begin = np.clip(row + (Nk - Nq - self.left), 0, Nk)
        begin = np.where(np.asarray(row) >= Nq, 0, begin)
        return begin if isinstance(row, np.ndarray) else int(begin)

    def columns_end(self, row: Any, entry: int = 0) -> Any:
        """One past the last column that `row` sees: at most the entry's valid columns."""
        Nq, Nk = self.lengths(entry)
        end = np.full_like(row, Nk)
        if self.right is not None:
            end = np.clip(row + (Nk - Nq + self.right + 1), 0, Nk)
        end = np.where(np.asarray(row) >= Nq, 0, end)
        return end if isinstance(row, np.ndarray) else int(end)


def check_block_mask(
    block_mask: Any, problem: Problem, tiles: BlockSizes | None = None
) -> np.ndarray:
    """``block_mask`` with four axes: (batch or 1, heads_q or 1, Tr, Tc), bool.

    It has a block for each tile of ``tiles``; without them any number of blocks is allowed.
    Raises TypeError unless it is bool, ValueError unless its shape fits.
    """
    mask = np.asarray(block_mask)
    if mask.dtype != np.bool_:
        raise TypeError(f"block_mask has dtype {mask.dtype}: allowed is bool")
    heads, blocks, allowed = (problem.batch, problem.heads_q), mask.shape[-2:], "(Tr, Tc)"
    if tiles is not None:
        blocks = ceil_div(problem.seqlen_q, tiles.Br), ceil_div(problem.seqlen_k, tiles.Bc)
        allowed = f"{blocks}, the blocks of Br={tiles.Br}, Bc={tiles.Bc},"
    leading = (1,) * (4 - mask.ndim) + mask.shape[:-2]
    fits = 2 <= mask.ndim <= 4 and mask.shape[-2:] == blocks and 0 not in blocks
    if not fits or any(n not in (1, m) for n, m in zip(leading, heads, strict=True)):
        raise ValueError(
            f"block_mask has shape {mask.shape}: allowed is {allowed} or that with leading axes "
            f"that broadcast to {heads}"
        )
    return mask.reshape(*leading, *blocks)
