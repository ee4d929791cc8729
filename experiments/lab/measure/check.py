"""Checks of results against float64. A call is timed only after its result has passed a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fa_numba import reference
from fa_numba.problem import Problem

# Allowed in addition to the error of the unfused computation: one rounding of the result, and one
# rounding of an input element to a sum of planes.
ROUNDING = {"float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}
PLANES_ROUNDING = {"ieee": 0.0, "fp16x3": 2.0**-22, "bf16x6": 2.0**-24, "bf16x3": 2.0**-16}
# Bounds for other libraries' kernels. They detect a forgotten scale or mask, and TF32 in float32.
# They allow another order of summation, and scores in 16 bits.
PEER_BOUND = {"float32": 1e-4, "float16": 2.0**-8, "bfloat16": 2.0**-5}
# Dropout: relative error allowed in the deviation and in the size of a result (`DropoutGate`).
DEVIATION_BOUND, SIZE_BOUND = 0.2, 0.06
ROWS, DROPPED_ROWS = 32, 128  # rows of a checked block without and with dropout
GRADIENTS = ("dq", "dk", "dv")

Check = Callable[[Any], float]
# A part of a result: name, exact values in float64, values of the unfused computation.
Part = tuple[str, np.ndarray, np.ndarray]


class WrongResult(Exception):
    """Raised if a result differs from the float64 result by more than the tolerance allows."""


def to_host(array: Any) -> np.ndarray:
    """Return an array of any library as a NumPy array. torch's arrays become float32.

    Parameters
    ----------
    array : array
        An array of NumPy, Numba or torch.

    Returns
    -------
    ndarray
        Its values.
    """
    if hasattr(array, "copy_to_host"):
        return array.copy_to_host()
    if hasattr(array, "cpu"):
        return array.detach().float().cpu().numpy()
    return np.asarray(array)


def rounds(problem: Problem) -> dict[str, Any]:
    """Return arguments with which `reference.unfused` rounds as kernels of a problem's dtype do.

    The matrices are rounded to the dtype. The sums are in float32 for every dtype.

    Parameters
    ----------
    problem : Problem
        The problem.

    Returns
    -------
    dict
        The argument `matrix_dtype`: the dtype, or None for float32.
    """
    return {"matrix_dtype": None if problem.dtype == "float32" else problem.dtype}


class Gate:
    """A check of a call's result against float64, separately for each part of the result.

    The parts of a gradient (dq, dk, dv), for example, are checked one by one. There are two checks:

    | check | for results of | allowed relative error |
    |---|---|---|
    | ``gate(result)`` | our kernels | twice the error of unfused attention, plus one rounding |
    | ``gate.peer(result)`` | other libraries | `PEER_BOUND` of the dtype |

    Unfused attention is computed in NumPy with matrices in the dtype of the problem. Both checks
    return the largest relative error of a part. If the error of a part is too large, they raise
    `WrongResult` with the name of the part.

    Parameters
    ----------
    dtype : str
        Dtype of the problem.
    take : callable
        Takes a result and returns its parts, in the order of `parts`.
    parts : sequence of (str, ndarray, ndarray)
        Name of each part, its exact values in float64, and its values by the unfused computation.
    at : str, default ""
        Text for the error message, such as " at N=512".
    """

    def __init__(
        self, dtype: str, take: Callable[[Any], Any], parts: Sequence[Part], at: str = ""
    ) -> None:
        self._take, self._parts, self._at = take, parts, at
        self.bounds = [
            2 * float(reference.relative_error(unfused, exact)) + ROUNDING[dtype]
            for _, exact, unfused in parts
        ]
        self.peer_bounds = [PEER_BOUND[dtype]] * len(parts)

    @classmethod
    def of_rows(cls, problem: Problem, q: Any, k: Any, v: Any, **options: Any) -> Gate:
        """Return a gate that checks some rows of O, in two heads.

        The two heads are the first head of the first batch entry and the last head of the last
        batch entry. The gate checks the first, the middle and the last 32 rows of each. No other
        rows of O are copied from the GPU.

        Parameters
        ----------
        problem : Problem
            The problem.
        q, k, v : array
            Inputs.
        **options
            Options of the call. A block mask and dropout are not supported.

        Returns
        -------
        Gate
            The gate, with the single part "O".
        """
        problem = _with_lengths(problem, options)
        places, exact, unfused = [], [], []
        for place, block, own in _blocks(problem, (q, k, v), (0, 1, 2), ROWS, 1, options):
            places.append(place)
            exact.append(np.ravel(reference.attention(*block, **own)))
            unfused.append(np.ravel(reference.unfused(*block, **own | rounds(problem))))
        part = "O", np.concatenate(exact), np.concatenate(unfused)
        return cls(problem.dtype, _taken(places), [part])

    @classmethod
    def of_whole(
        cls, problem: Problem, pass_: str, *arrays: Any, take: Callable[[Any], Any] = tuple,
        **options: Any,
    ) -> Gate:  # fmt: skip
        """Return a gate that checks all elements of a result: (O,), or (dq, dk, dv).

        Parameters
        ----------
        problem : Problem
            The problem.
        pass_ : str
            "fwd" to check O. Any other text: to check the gradients.
        *arrays : ndarray
            Arrays q, k and v; for gradients also dout.
        take : callable, default tuple
            Takes a result and returns its parts.
        **options
            Options of the call.

        Returns
        -------
        Gate
            The gate.
        """
        own = {"scale": problem.scale, "causal": problem.causal, **options}
        exact: Any
        unfused: Any
        q, k, v = arrays[:3]
        if pass_ == "fwd":
            names: tuple[str, ...] = ("O",)
            exact = [reference.attention(q, k, v, **own)]
            unfused = [reference.unfused(q, k, v, **own, **rounds(problem))]
        else:
            names = GRADIENTS
            exact = reference.attention_backward(arrays[3], q, k, v, **own)[:3]
            unfused = reference.unfused_backward(arrays[3], q, k, v, **own, **rounds(problem))[:3]
        parts = list(zip(names, exact, unfused, strict=True))
        return cls(problem.dtype, take, parts, f" at N={problem.seqlen_q}")

    @classmethod
    def of_gradients(cls, problem: Problem, *arrays: Any) -> Gate:
        """Return a gate that checks the gradients of one K/V head and of its query heads.

        The head is the last K/V head of the last batch entry.

        Parameters
        ----------
        problem : Problem
            The problem.
        *arrays : ndarray
            Complete arrays q, k, v and dout.

        Returns
        -------
        Gate
            The gate, with the parts "dq", "dk" and "dv". It takes the complete result (dq, dk, dv).
        """
        last = slice(problem.batch - 1, problem.batch)
        queries = last, slice(problem.heads_q - problem.group, problem.heads_q)
        keys = last, slice(problem.heads_k - 1, problem.heads_k)
        at = (queries, keys, keys)
        cut = (x[place] for x, place in zip(arrays, (*at, queries), strict=True))
        return cls.of_whole(
            problem,
            "bwd",
            *cut,
            take=lambda found: [x[place] for x, place in zip(found, at, strict=True)],
        )

    def __call__(self, result: Any) -> float:
        """Return the largest error of our result. Raise WrongResult if an error is too large."""
        return self._check(result, self.bounds)

    def peer(self, result: Any) -> float:
        """Return the largest error of another library's result.

        Parameters
        ----------
        result : Any
            The result.

        Returns
        -------
        float
            The relative error.

        Raises
        ------
        WrongResult
            If the error of a part is above `PEER_BOUND`.
        """
        return self._check(result, self.peer_bounds)

    def by(self, precision: str) -> Check:
        """Return the check for one of our calls that computes float32 products from 16-bit planes.

        In addition to the gate's bounds, the check allows the rounding of the inputs to planes.

        Parameters
        ----------
        precision : str
            A key of `PLANES_ROUNDING`, such as "fp16x3".

        Returns
        -------
        callable
            Takes a result and returns its largest relative error, or raises WrongResult.
        """
        more = PLANES_ROUNDING[precision]
        return lambda result: self._check(result, [bound + more for bound in self.bounds])

    def _check(self, result: Any, bounds: Sequence[float]) -> float:
        errors = []
        for got, (name, exact, _), bound in zip(
            self._take(result), self._parts, bounds, strict=True
        ):
            errors.append(float(reference.relative_error(to_host(got), exact)))
            if not errors[-1] <= bound:
                raise WrongResult(
                    f"{name}: the error against float64{self._at} must be at most {bound:.2e}, got "
                    f"{errors[-1]:.2e}"
                )
        return max(errors)


class DropoutGate(Gate):
    """A check of O for a forward call with dropout.

    torch drops other elements of P than our kernels do. Therefore O has no exact value to compare
    with. Instead, O is compared with O0, the result in float64 without dropout. Two numbers must be
    near the values that follow from the dropout probability p:

    - The deviation |O - O0| / |O0| is expected to be sqrt(p / (1 - p) s) / |O0|, where s is the sum
      of Pij^2 |vj|^2. The difference must be at most 20 %.
    - The scalar product of O and O0, divided by |O0|^2, is expected to be 1. The difference must be
      at most 6 %.

    The numbers are computed for 128 rows in the middle and 128 rows at the end of two heads. For
    sequences of less than 256 rows, half of the rows are taken instead of 128.

    Parameters
    ----------
    problem : Problem
        The problem.
    q, k, v : array
        Inputs.
    dropout_p : float
        Probability that an element of P is dropped.
    **options
        Further options of the call.
    """

    def __init__(
        self, problem: Problem, q: Any, k: Any, v: Any, *, dropout_p: float, **options: Any
    ) -> None:
        problem = _with_lengths(problem, options)
        places, exact, spread = [], [], 0.0
        # Statistics need many rows, and rows that see more than a few columns.
        for place, block, own in _blocks(problem, (q, k, v), (1, 2), DROPPED_ROWS, 2, options):
            places.append(place)
            exact.append(np.ravel(reference.attention(*block, **own)))
            spread += _spread(*(x[0, 0].astype(np.float64) for x in block), **own)
        self._take, self._exact = _taken(places), np.concatenate(exact)
        size = float(self._exact @ self._exact)
        self._deviation = float(np.sqrt(dropout_p / (1 - dropout_p) * spread / size))
        self.bounds = self.peer_bounds = [DEVIATION_BOUND, SIZE_BOUND]

    def _check(self, result: Any, bounds: Sequence[float]) -> float:
        (got,), exact = self._take(result), self._exact
        found = float(reference.relative_error(got, exact))
        size = float(got @ exact / (exact @ exact))
        off = abs(found / self._deviation - 1), abs(size - 1)
        if not all(x <= bound for x, bound in zip(off, bounds, strict=True)):
            raise WrongResult(
                "O with dropout differs too much from O in float64 without dropout: the deviation "
                f"must be about {self._deviation:.3f} and the relative size about 1, got "
                f"{found:.3f} and {size:.3f}"
            )
        return found


def gate(problem: Problem, pass_: str, *arrays: Any, **options: Any) -> Gate:
    """Return the gate that checks the result of a call.

    =========  ============  ===================================================
    pass       options       gate
    =========  ============  ===================================================
    "fwd"      dropout_p     `DropoutGate`: statistics of some rows of O
    "fwd"      no dropout_p  `Gate.of_rows`: some rows of O
    others     no options    `Gate.of_gradients`: dq, dk and dv of the last head
    others     any options   `Gate.of_whole`: all elements of dq, dk and dv
    =========  ============  ===================================================

    Parameters
    ----------
    problem : Problem
        The problem.
    pass_ : str
        "fwd", "bwd" or "fwd+bwd".
    *arrays : array
        Arrays q, k and v; for a pass with gradients also dout.
    **options
        Options of the call.

    Returns
    -------
    Gate
        The gate.
    """
    if pass_ != "fwd" and options:
        return Gate.of_whole(problem, "bwd", *arrays, **options)
    if pass_ != "fwd":
        return Gate.of_gradients(problem, *arrays)
    if options.get("dropout_p"):
        return DropoutGate(problem, *arrays[:3], **options)
    return Gate.of_rows(problem, *arrays[:3], **options)


def _with_lengths(problem: Problem, options: dict[str, Any]) -> Problem:
    """Return the problem with the valid lengths `q_lens` and `kv_lens` that the options contain."""
    lens = {n: tuple(map(int, x)) for n, x in options.items() if n in ("q_lens", "kv_lens")}
    return replace(problem, **lens)  # type: ignore[arg-type]


def _blocks(
    problem: Problem, arrays: Sequence[Any], halves: Sequence[int], rows: int, share: int,
    options: dict[str, Any],
) -> Iterator[tuple[Any, list[np.ndarray], dict[str, Any]]]:  # fmt: skip
    """Yield some blocks of rows of Q, with the keys and values that the rows see.

    The blocks are from the first head of the first batch entry and from the last head of the last
    batch entry. A block has at most `rows` rows, and at most 1 / `share` of the rows of the
    sequence. `halves` says where in the sequence the blocks are: 0 at the beginning, 1 in the
    middle, 2 at the end.

    Each item has three parts: the index of the block in O, the arrays [q, k, v] of the block, and
    options for `reference.attention`. q has the shape (1, 1, rows, d). k and v have the shape
    (1, 1, columns, d), and end at the last column that a row of the block sees. A block that sees
    no column is left out.
    """
    for b, h in dict.fromkeys([(0, 0), (problem.batch - 1, problem.heads_q - 1)]):
        Nq, _ = problem.lengths(b)
        most = min(rows, -(-Nq // share))
        for first in dict.fromkeys((Nq - most) * half // 2 for half in halves):
            end = problem.columns_end(first + most - 1, b)
            if end == 0:
                continue
            at = _place(problem, problem.q_lens, b, h, first, first + most)
            columns = _place(problem, problem.kv_lens, b, h // problem.group, 0, end)
            places = (at, columns, columns)
            block = [to_host(x[p])[None, None] for x, p in zip(arrays, places, strict=True)]
            own: dict[str, Any] = {"scale": problem.scale, "causal": problem.causal}
            own |= {n: options[n] for n in ("window", "softcap") if n in options}
            if "alibi_slopes" in options:
                own["alibi_slopes"] = options["alibi_slopes"][h : h + 1]
            if "bias" in options:
                bias = np.broadcast_to(options["bias"], problem.score_shape)
                own["bias"] = bias[b : b + 1, h : h + 1, first : first + most, :end]
            yield at, block, own


def _place(
    problem: Problem, lens: Sequence[int] | None, entry: int, head: int, first: int, end: int
) -> tuple[Any, ...]:
    """Return the index of the rows `first` to `end` of a head in an array.

    The array is (batch, heads, N, d), or (total, heads, d) if the problem is packed. `lens`
    contains the lengths of packed sequences.
    """
    if not problem.packed:
        return entry, head, slice(first, end)
    begin = sum((lens or ())[:entry])
    return slice(begin + first, begin + end), head


def _taken(places: Sequence[Any]) -> Callable[[Any], list[np.ndarray]]:
    return lambda out: [np.concatenate([to_host(out[place]).ravel() for place in places])]


def _spread(Q: np.ndarray, K: np.ndarray, V: np.ndarray, scale: float, causal: bool) -> float:
    """Return the sum of Pij^2 |vj|^2 over all rows i and columns j of one head.

    P is the softmax of scale Q KT, and vj is row j of V. `DropoutGate` needs the sum. Q has the
    shape (rows, d), and K and V have the shape (columns, d). With a causal mask, the last row sees
    all columns.
    """
    S = scale * (Q @ K.T)
    if causal:
        above = np.arange(len(K)) > np.arange(len(Q))[:, None] + len(K) - len(Q)
        S[above] = -np.inf
    P = np.exp(S - S.max(axis=1, keepdims=True))
    P /= P.sum(axis=1, keepdims=True)
    return float(np.sum(P**2 @ np.sum(V**2, axis=1)))
