"""What the options of a call make of S and P, in NumPy, one query head at a time.

The reference is built on this, and so are the tests' estimates of rounding errors. `checked_call`
checks q, k, v and the options, as a caller gives them, and makes a `Call` of them:

    call.heads()    every query head, and where its matrices lie in the arrays of the call
    call.scores()   S of some of its rows, with softcap, the caller's functions, ALiBi, bias and
                    masks, and its derivative
    call.dropout()  what dropout multiplies these rows of P by

An option that changes S or P is written here, and nowhere else in the reference. No kernel is
imported, and of a function of the caller's every element is computed by itself
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
from .options import as_word, check_names
from .problem import UNBOUNDED, BlockSizes, Problem, check_block_mask, check_blocks

Array = NDArray[Any]
_STEP = 1e-5  # of a difference quotient, in float64


@dataclass(frozen=True)
class Head:
    """One query head of one batch entry: its valid lengths, and where its matrices lie.

    The last three are indices: `array[head.q]` is the head's matrix in an array of the call.
    """

    entry: int  # the batch entry; of packed sequences the number of the sequence
    number: int  # the query head
    Nq: int
    Nk: int
    q: tuple  # of Q, O, dO and dQ: (Nq, d)
    k: tuple  # of K, V, dK and dV: (Nk, d)
    lse: tuple  # of L: (Nq,)


@dataclass(frozen=True)
class Call:
    """A checked call: its problem, and the options that are arrays or random."""

    problem: Problem
    dtype: np.dtype  # of every array here and of every result
    bias: Array | None  # (B, Hq, Nq, Nk), as a view
    slopes: Array | None  # (B, Hq)
    sinks: Array | None  # (Hq,)
    block_mask: Array | None  # (B, Hq, Tr, Tc), as a view
    Br: int  # of the block mask
    Bc: int
    seed: int  # of dropout
    offset: int
    mods: dict[str, FunctionType] = field(default_factory=dict)  # functions of the caller's
    # The float32 arrays that score_mod captures, in float64, by its names for them
    captured: dict[str, Array] = field(default_factory=dict)

    def heads(self) -> Iterator[Head]:
        """Query heads of every batch entry, but those without a row, or a column and a sink."""
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
        """S of the rows Qi of Q, the first of which is `row`, and its derivative by scale Qi K^T.

        If not `sloped`, the derivative leaves out the factor of score_mod, which takes long.

        S = score_mod(softcap tanh(scale Qi K^T / softcap)) - slope distance + bias, -inf where
        hidden.
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
        """softcap tanh(scale Qi K^T / softcap), what score_mod is given, and its derivative."""
        S = self.dtype.type(self.problem.scale) * (Qi @ K.T)
        if self.problem.softcap is None:
            return S, 1.0
        softcap = self.dtype.type(self.problem.softcap)
        tanh = np.tanh(S / softcap)
        return softcap * tanh, 1 - tanh * tanh

    def captured_slopes(
        self, head: Head, Qi: Array, K: Array, row: int, places: Array, shift: float = 0.0
    ) -> list[tuple[str, tuple, tuple[int, int], float]]:
        """Of a score at each of ``places`` (in Qi and K) the derivative by each element of what
        score_mod captures that it reads there: the array's name, the element, the place and the
        derivative, a central difference in float64. The score is ``shift`` more.
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
        """A function of the caller's, of each element by itself: of a score, a row and a column."""
        function, b, h = self.mods[name], head.entry, head.number

        def of_place(i: int, j: int) -> Any:
            return function(b, h, i, j)

        def of_score(score: Any, i: int, j: int) -> Any:
            return function(score, b, h, i, j)

        with np.errstate(all="ignore"):
            of_one = of_place if len(args) == 2 else of_score
            return np.vectorize(of_one, otypes=[dtype])(*args)

    def _slope(self, S: Array, head: Head, rows: Array, columns: Array) -> Array:
        """The derivative of score_mod: the caller's, or a central difference in float64."""
        exact = S.astype(np.float64)
        step = np.maximum(_STEP, 1e-10 * abs(exact))  # of huge ones what float64 can tell apart
        if "score_mod_grad" in self.mods:
            own = self._of_each("score_mod_grad", np.float64, head, exact, rows, columns)
            return own.astype(self.dtype)
        ends = exact - step, exact + step
        below, above = (
            self._of_each("score_mod", np.float64, head, end, rows, columns) for end in ends
        )
        with np.errstate(invalid="ignore"):  # of -inf
            return ((above - below) / (ends[1] - ends[0])).astype(self.dtype)

    def _masks(self, head: Head, rows: Array, columns: Array, diagonal: int) -> Iterator[Array]:
        """Which columns each row sees, (rows, columns), by each mask that the call has."""
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
        """The logit that each row of a head has beside its scores, or None."""
        return None if self.sinks is None else self.sinks[head.number]

    def dropout(self, head: Head, rows: slice) -> Array | float:
        """What dropout multiplies these rows of P by, (rows, Nk): 1 / (1 - p), or 0."""
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
    """The call, and q, k and v in its dtype.

    Raises TypeError or ValueError with an argument's name, its value and what is allowed.
    """
    check_names(options)
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
    """A caller's function that finds Python's numbers, by which scores stay in float64."""
    values = captured(option, function).values
    numbers = {name: x.item() for name, x in values if isinstance(x, np.generic)}
    arrays = {name: x.astype(object) for name, x in _arrays(option, function)}
    return evaluated(option, function, {**numbers, **arrays})


def _captured_floats(score_mod: Any) -> dict[str, Array]:
    if score_mod is None:
        return {}
    return {name: x for name, x in _arrays("score_mod", score_mod) if x.dtype == np.float64}


def _arrays(option: str, function: Any) -> Iterator[tuple[str, Array]]:
    """The arrays that a function captures, by name; in float64 those of float32."""
    for name, value in captured(option, function).values:
        if is_array(value) and np.ndim(value):
            check_unmasked(f"{name} in {option}", value)
            host = np.asarray(value.detach().cpu() if hasattr(value, "cpu") else value)
            yield name, host.astype(np.float64) if host.dtype == np.float32 else host


class _Read:
    """An array that notes which of its elements are ``read``, and adds a ``step`` to some."""

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
    """The block mask for every head, and its block sizes."""
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
    """Add dS of these rows, and of all columns, to where a dbias of four axes has them.

    Along an axis where dbias is 1 long it takes the sum.
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
