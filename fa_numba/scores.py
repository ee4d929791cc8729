"""The scores S of a call with all options, and dropout, in NumPy, one query head at a time.

`reference.py` and the tests' estimates of rounding errors use this module. `checked_call` checks
q, k, v and the options, and returns a `Call`:

    call.heads()    every query head, and the indices of its matrices in the arrays of the call
    call.scores()   S of some rows of a head, with softcap, the caller's functions, ALiBi, bias and
                    masks; and the derivative of S
    call.dropout()  the factors by which dropout multiplies these rows of P

Every option that changes S or P is implemented here, and nowhere else in the reference. This module
imports no kernel. The caller's functions are evaluated for each element separately
(`mods/evaluating.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from . import dropout
from .checks import as_real, check_heads, check_unmasked
from .masks import distance, numeric_mask, visible_causal, visible_window
from .mods import PARAMETERS, captured, evaluated, holding, is_array
from .mods.blocks import BlockMask
from .options import SCALES, as_word, check_names
from .problem import UNBOUNDED, BlockSizes, Problem, check_block_mask, check_blocks

Array = NDArray[Any]
_STEP = 1e-5  # step of difference quotients in float64


@dataclass(frozen=True)
class Head:
    """One query head of one batch entry: its valid lengths, and the indices of its matrices.

    field    meaning
    entry    number of the batch entry, or of the packed sequence
    number   number of the query head
    Nq, Nk   number of valid rows, and number of valid columns
    q        index of the head in Q, O, dO and dQ. For example, `Q[head.q]` is a matrix (Nq, d)
    k        index of the head's matrix (Nk, d) in K, V, dK and dV
    lse      index of the head's vector (Nq,) in L
    """

    entry: int
    number: int
    Nq: int
    Nk: int
    q: tuple
    k: tuple
    lse: tuple


@dataclass(frozen=True)
class Call:
    """A checked call: its problem, its options that are arrays, and the seed of dropout.

    field          meaning
    problem        sizes and options of the call
    dtype          dtype of the arrays and of the results
    bias           array that is added to S, broadcast to (B, Hq, Nq, Nk)
    slopes         ALiBi slopes, (B, Hq)
    sinks          one sink per query head, (Hq,)
    block_mask     block mask, broadcast to (B, Hq, Tr, Tc)
    Br, Bc         rows and columns of a block of the block mask
    seed, offset   the two numbers that determine which elements dropout drops
    mods           maps an option, such as "score_mod", to the caller's function
    captured       maps names in score_mod to the float32 arrays that score_mod captures, in float64

    An array is None if the call does not have the option.
    """

    problem: Problem
    dtype: np.dtype
    bias: Array | None
    slopes: Array | None
    sinks: Array | None
    block_mask: Array | None
    Br: int
    Bc: int
    seed: int
    offset: int
    mods: dict[str, FunctionType] = field(default_factory=dict)
    captured: dict[str, Array] = field(default_factory=dict)

    def heads(self) -> Iterator[Head]:
        """Yield the query heads of every batch entry.

        Heads of a batch entry without valid rows are left out. Heads without valid columns are left
        out too, unless there are sinks.
        """
        problem = self.problem
        row = column = 0
        for b in range(problem.batch):
            Nq, Nk = problem.lengths(b)
            rows, columns = slice(row, row + Nq), slice(column, column + Nk)
            for h in range(problem.heads_q if Nq and (Nk or problem.sinks) else 0):
                hk = h // problem.group
                if problem.packed:
                    yield Head(b, h, Nq, Nk, (rows, h), (columns, hk), (h, rows))
                    continue
                q, k = (b, h, slice(Nq)), (b, hk, slice(Nk))
                if problem.layout == "bnhd":
                    yield Head(b, h, Nq, Nk, (b, slice(Nq), h), (b, slice(Nk), hk), q)
                else:
                    yield Head(b, h, Nq, Nk, q, k, q)
            if problem.packed:
                row, column = rows.stop, columns.stop

    def scores(
        self, head: Head, Qi: Array, K: Array, row: int, sloped: bool = True
    ) -> tuple[Array, Array | float]:
        """Return S of some rows of a head, and the derivative of S with respect to scale Qi K^T.

        Qi (rows, d) are rows of Q, and `row` is the number of the first one. K is (Nk, d). If
        `sloped` is False, the derivative does not contain the derivative of score_mod, which takes
        long to compute.

        S = score_mod(softcap tanh(scale Qi K^T / softcap)) - slope distance + bias. The slope is
        the ALiBi slope of the head. The distance of an element is the distance of its column from
        the diagonal column of its row (`masks.distance`). Elements that a mask hides are -inf.
        """
        b, h = head.entry, head.number
        rows, columns = np.arange(row, row + len(Qi))[:, None], np.arange(head.Nk)[None, :]
        diagonal = head.Nk - head.Nq
        S, derivative = self._capped(Qi, K)
        if "score_mod" in self.mods:
            if sloped:
                derivative = derivative * self._slope(S, head, rows, columns)
            S = self._of_each("score_mod", self.dtype, head, S, rows, columns)
        if self.slopes is not None:
            S -= self.slopes[b, h] * distance(rows, columns, diagonal).astype(self.dtype)
        if self.bias is not None:
            S += self.bias[b, h, row : row + len(Qi), : head.Nk]
        for visible in self._masks(head, rows, columns, diagonal):
            S[~visible] = -np.inf
        return S, derivative

    def _capped(self, Qi: Array, K: Array) -> tuple[Array, Array | float]:
        """Return softcap tanh(scale Qi K^T / softcap), and its derivative with respect to scale Qi
        K^T.

        The first result is the argument of score_mod.
        """
        S = self.dtype.type(self.problem.scale) * (Qi @ K.T)
        if self.problem.softcap is None:
            return S, 1.0
        softcap = self.dtype.type(self.problem.softcap)
        tanh = np.tanh(S / softcap)
        return softcap * tanh, 1 - tanh * tanh

    def captured_slopes(
        self, head: Head, Qi: Array, K: Array, row: int, places: Array, shift: float = 0.0
    ) -> list[tuple[str, tuple, tuple[int, int], float]]:
        """Return the derivatives of scores with respect to elements of captured arrays.

        ``places`` (n, 2) contains pairs (row of Qi, row of K). For each place and each element that
        score_mod reads there, the result has a tuple: the name of the array, the index of the
        element, the place, and the derivative. Derivatives are central differences in float64.
        ``shift`` is added to the score before score_mod is called.
        """
        S = self._capped(Qi, K)[0].astype(np.float64) + shift
        read: dict[tuple[str, tuple], None] = {}
        step: dict[tuple[str, tuple], float] = {}
        arrays = {name: _Read(name, x, read, step) for name, x in self.captured.items()}
        function = holding(self.mods["score_mod"], arrays)
        found = []
        with np.errstate(all="ignore"):
            for (i, j), score in zip(places.tolist(), S[tuple(places.T)].tolist(), strict=True):
                at = score, head.entry, head.number, row + i, j
                read.clear()
                function(*at)
                for name, element in list(read):
                    step[name, element] = -_STEP
                    below = function(*at)
                    step[name, element] = _STEP
                    slope = (function(*at) - below) / (2 * _STEP)
                    step.clear()
                    found.append((name, element, (i, j), slope))
        return found

    def _of_each(self, name: str, dtype: DTypeLike, head: Head, *args: Array) -> Array:
        """Call the caller's function ``name`` for each element, and return an array of ``dtype``.

        ``args`` are arrays that broadcast: (scores, rows, columns), or (rows, columns) for a
        mask_mod.
        """
        function, b, h = self.mods[name], head.entry, head.number
        whole = np.broadcast_arrays(*args)
        places = zip(*(x.ravel().tolist() for x in whole), strict=True)
        with np.errstate(all="ignore"):
            if len(args) == 2:
                found = [function(b, h, i, j) for i, j in places]
            else:
                found = [function(score, b, h, i, j) for score, i, j in places]
            values = np.empty(len(found), object)
            values[:] = found
            return values.astype(dtype).reshape(whole[0].shape)

    def _slope(self, S: Array, head: Head, rows: Array, columns: Array) -> Array:
        """Return the derivative of score_mod with respect to the score, for each element of S.

        The derivative is the result of score_mod_grad if the call has this function. Otherwise it
        is a central difference.
        """
        exact = S.astype(np.float64)
        step = np.maximum(_STEP, 1e-10 * abs(exact))  # large enough for float64 if scores are huge
        if "score_mod_grad" in self.mods:
            own = self._of_each("score_mod_grad", np.float64, head, exact, rows, columns)
            return own.astype(self.dtype)
        ends = exact - step, exact + step
        below, above = (
            self._of_each("score_mod", np.float64, head, end, rows, columns) for end in ends
        )
        with np.errstate(invalid="ignore"):  # scores of -inf
            return ((above - below) / (ends[1] - ends[0])).astype(self.dtype)

    def _masks(self, head: Head, rows: Array, columns: Array, diagonal: int) -> Iterator[Array]:
        """Yield a bool array for each mask of the call, True where a row sees a column.

        The arrays broadcast to (rows, columns).
        """
        problem = self.problem
        if problem.causal:
            yield visible_causal(rows, columns, diagonal)
        if problem.window != (-1, -1):
            left, right = (UNBOUNDED if n < 0 else n for n in problem.window)
            yield visible_window(rows, columns, diagonal, left, right)
        if "mask_mod" in self.mods:
            yield self._of_each("mask_mod", bool, head, rows, columns)
        if self.block_mask is not None:
            yield self.block_mask[head.entry, head.number][rows // self.Br, columns // self.Bc]

    def sink(self, head: Head) -> Any:
        """Return the sink of a head, which takes part in the softmax sum of each row, or None."""
        return None if self.sinks is None else self.sinks[head.number]

    def dropout(self, head: Head, rows: slice) -> Array | float:
        """Return the factors by which dropout multiplies rows of P.

        The result has the shape (rows, Nk). A factor is 1 / (1 - p) or 0. Without dropout, the
        result is 1.0.
        """
        p = self.problem.dropout_p
        if p == 0.0:
            return 1.0
        draw: dict[str, Any] = {"dropout_p": p, "seed": self.seed, "offset": self.offset}
        which = range(rows.start, rows.stop)
        kept = dropout.kept(head.entry, head.number, which, head.Nk, **draw)
        return kept * self.dtype.type(1 / (1 - p))


def checked_call(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, dtype: DTypeLike = np.float64, *,
    tiles: BlockSizes | None = None, bias: Any = None, attn_mask: Any = None,
    alibi_slopes: Any = None, sinks: Any = None, block_mask: Any = None, seed: int | None = None,
    offset: int | None = None, **options: Any,
) -> tuple[Call, Array, Array, Array]:  # fmt: skip
    """Check the arguments, and return the call together with q, k and v as arrays of ``dtype``.

    Raises TypeError or ValueError for wrong arguments. The message names the argument, its value
    and what is allowed.
    """
    check_names(options)
    for name in SCALES:
        if options.pop(name, None) is not None:
            raise ValueError(
                f"{name} must be None in this function; pass the numbers that "
                "fa_numba.reference.dequantize returns for the array and its scales"
            )
    made = block_mask if isinstance(block_mask, BlockMask) else None
    if made is not None:
        options["mask_mod"], tiles = made.mask_mod, made.block_size
    problem = Problem.from_shapes(
        np.shape(q),
        np.shape(k),
        np.shape(v),
        bias=None if bias is None else np.shape(bias),
        attn_mask=None if attn_mask is None else np.shape(attn_mask),
        alibi=alibi_slopes is not None,
        sinks=sinks is not None,
        sparse=block_mask is not None,
        **options,
    )
    if made is not None:
        made.check(problem)
        block_mask = made.visited_tiles(problem)
    if attn_mask is not None:
        bias = numeric_mask(as_real("attn_mask", attn_mask, None))
    if bias is not None:
        bias = np.broadcast_to(as_real("bias", bias, dtype), problem.score_shape)
    if sinks is not None:
        sinks = as_real("sinks", sinks, dtype)
        check_heads(problem.batch, problem.heads_q, sinks=sinks.shape)
    if alibi_slopes is not None:
        alibi_slopes = as_real("alibi_slopes", alibi_slopes, dtype)
        check_heads(problem.batch, problem.heads_q, slopes=alibi_slopes.shape)
        alibi_slopes = np.broadcast_to(alibi_slopes, (problem.batch, problem.heads_q))
    call = Call(
        problem,
        np.dtype(dtype),
        bias,
        alibi_slopes,
        sinks,
        *_blocks(problem, block_mask, tiles),
        as_word("seed", 0 if seed is None else seed, 64),
        as_word("offset", 0 if offset is None else offset, 32),
        {name: _doubled(name, f) for name in PARAMETERS if (f := options.get(name)) is not None},
        _captured_floats(options.get("score_mod")),
    )
    if problem.dropout_p and max(problem.batch, problem.heads_q) > dropout.MAX_HEADS:
        raise ValueError(
            f"batch and heads of q must each be at most {dropout.MAX_HEADS} with dropout, got "
            f"batch {problem.batch} and heads {problem.heads_q}"
        )
    return call, as_real("q", q, dtype), as_real("k", k, dtype), as_real("v", v, dtype)


def _doubled(option: str, function: Any) -> FunctionType:
    """Return a caller's function for evaluation in float64.

    The values that it captures are replaced by Python numbers and by arrays of Python numbers.
    """
    values = captured(option, function).values
    numbers = {name: x.item() for name, x in values if isinstance(x, np.generic)}
    arrays = {name: x.astype(object) for name, x in _arrays(option, function)}
    return evaluated(option, function, {**numbers, **arrays})


def _captured_floats(score_mod: Any) -> dict[str, Array]:
    if score_mod is None:
        return {}
    return {name: x for name, x in _arrays("score_mod", score_mod) if x.dtype == np.float64}


def _arrays(option: str, function: Any) -> Iterator[tuple[str, Array]]:
    """Yield the arrays that a function captures, with their names. float32 becomes float64."""
    for name, value in captured(option, function).values:
        if is_array(value) and np.ndim(value):
            check_unmasked(f"{name} in {option}", value)
            host = np.asarray(value.detach().cpu() if hasattr(value, "cpu") else value)
            yield name, host.astype(np.float64) if host.dtype == np.float32 else host


class _Read:
    """An array that records which elements a caller's function reads, and can change elements.

    The array is the captured array ``name``. ``read`` is a dictionary to which each read element is
    added as the key (name, index). ``step`` maps such a key to a number that is added to the value
    of the element. ``outer`` contains the indices of the first axes. It is empty, unless the object
    is a part of the captured array, such as one row.
    """

    def __init__(self, name: str, array: Array, read: dict, step: dict, outer: tuple = ()) -> None:
        self.name, self.array, self.read, self.step, self.outer = name, array, read, step, outer

    def __getitem__(self, index: Any) -> Any:
        place = self.outer + (index if isinstance(index, tuple) else (index,))
        if len(place) < self.array.ndim:
            return _Read(self.name, self.array, self.read, self.step, place)
        element = self.name, place
        self.read[element] = None
        value = self.array.item(*place)
        return value + self.step.get(element, 0.0) if self.step else value

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[len(self.outer) :]


def _blocks(
    problem: Problem, block_mask: ArrayLike | None, tiles: BlockSizes | None
) -> tuple[Array | None, int, int]:
    """Return the block mask broadcast to all heads, or None, and the block sizes Br and Bc."""
    if block_mask is None:
        return None, 1, 1
    if tiles is None:
        raise ValueError(
            "block_mask needs tiles, because tiles.Br and tiles.Bc are the size of the blocks; "
            "pass tiles=Tiles(Br=..., Bc=...)"
        )
    check_blocks(tiles)
    mask = check_block_mask(block_mask, problem, tiles)
    whole = np.broadcast_to(mask, (problem.batch, problem.heads_q, *mask.shape[2:]))
    return whole, tiles.Br, tiles.Bc


def add_bias_gradient(dbias: Array, head: Head, rows: slice, dS: Array) -> None:
    """Add dS of some rows of a head to dbias, the gradient of the bias.

    dS is (rows, Nk). dbias has four axes. Along axes of dbias with length 1, dS is summed.
    """
    part = dbias[head.entry if len(dbias) > 1 else 0, head.number if dbias.shape[1] > 1 else 0]
    if len(part) > 1:
        part = part[rows]
    else:
        dS = dS.sum(axis=0, keepdims=True)
    if part.shape[1] > 1:
        part[:, : head.Nk] += dS
    else:
        part += dS.sum(axis=1, keepdims=True)
