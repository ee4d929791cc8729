"""Runs a backward call between guard bands and holds its gradients against float64."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from helpers import (
    EPS,
    EX2,
    ROUNDING,
    TANH,
    Memory,
    Scores,
    U,
    _distance,
    _size,
    assert_planned,
    assert_within,
    changing,
    counted,
    exact_attention,
    halves,
    in_halves,
    memories,
    of_product,
    place_of,
    product_squares,
    random_inputs,
    running,
    to_numpy,
)
from remembered import remembered

import fa_numba
from fa_numba import device as devices
from fa_numba import reference
from fa_numba.choices.tiles import simt_tiles
from fa_numba.mods import captured
from fa_numba.options import drop_threshold
from fa_numba.scores import add_bias_gradient, checked_call

# Every way to a gradient: (algorithm, what its function takes beside).
WAYS = {
    "standard": ("standard", {}),
    "fa1": ("fa1", {}),
    "fa2": ("fa2", {}),
    "fa2-deterministic": ("fa2", {"deterministic": True}),
}
ALL_WAYS = {**WAYS, "fa1-split": ("fa1", {"query_splits": 3})}
NAMES = ("dq", "dk", "dv")
MOST_SCORES = 100_000  # of which each is asked for its derivatives by captured arrays


def random_gradients(*shape, **options):
    """dout, q, k and v, normally distributed and then rounded."""
    q, k, v = random_inputs(*shape, **options)
    rng = np.random.default_rng([1, *shape])
    dout = rng.standard_normal((*q.shape[:-1], v.shape[-1]), dtype=np.float32)
    return dout.astype(q.dtype, copy=False), q, k, v


def half_gradients(dtype, *sizes, **options):
    return random_gradients(*sizes, dtype=dtype, **options)


def with_dlse(arrays, options):
    """`options` and a gradient of L, normally distributed, of (dout, q, k, v): NaN where no column
    is seen.
    """
    single = [x.astype(np.float32) for x in arrays[1:]]
    with np.errstate(all="ignore"):
        _, L = exact_attention(*single, **changing(options))
    dL = np.random.default_rng([2, *L.shape]).standard_normal(L.shape, dtype=np.float32)
    return {**options, "dlse": np.where(L == -np.inf, np.float32(np.nan), dL)}


def as_plan(options):
    """What a plan takes of a backward call's options."""
    return {**options, "dlse": options.get("dlse") is not None}


def saved(q, k, v, *, dlse=None, **options):
    """O and L as a forward pass leaves them: float64, rounded once to float32."""
    with np.errstate(all="ignore"):
        O, L = exact_attention(q, k, v, **options)
        return O.astype(np.float32), L.astype(np.float32)


def saved_halves(way, q, k, v, **options):
    """In 16 bits; standard attention needs neither without a gradient of L or of sinks, and gets
    zeros.
    """
    if way == "standard" and options.get("dlse") is None and "sinks" not in options:
        rows = q.shape[:3] if q.ndim == 4 else q.shape[1::-1]
        return np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), np.zeros(rows, "f4")
    single = [x.astype(np.float32) for x in (q, k, v)]
    O, L = saved(*single, **changing(options))
    return O.astype(q.dtype), L


def saved_for(way, q, k, v, **options):
    if in_halves(q):
        return saved_halves(way, q, k, v, **options)
    return saved(q, k, v, **changing(options))


@dataclass
class Gradients:
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None = None
    dsinks: np.ndarray | None = None
    dcaptured: dict[str, np.ndarray] | None = None

    def __iter__(self):
        others = (x for x in (self.dbias, self.dsinks, self.dcaptured) if x is not None)
        return iter((self.dq, self.dk, self.dv, *others))


def names_of(dbias, dsinks, dcaptured=False):
    """Of the gradients that a call gives, in their order."""
    asked = {"dbias": dbias, "dsinks": dsinks, "dcaptured": dcaptured}
    return (*NAMES, *(name for name, asks in asked.items() if asks))


def each(names, gradients):
    """Every gradient with its name, those of arrays that a function captures by the names of
    these; without what has none.
    """
    for name, gradient in zip(names, gradients, strict=True):
        if name == "dcaptured":
            yield from ((f"d{own}", x) for own, x in gradient.items() if x is not None)
        else:
            yield name, gradient


def floats_of(score_mod):
    """The float32 arrays that a function captures, by name."""
    values = captured("score_mod", score_mod).values if score_mod else ()
    return {name: x for name, x in values if isinstance(x, np.ndarray) and x.dtype == np.float32}


def asks_for_dcaptured(way, q, k, options):
    """Whether `way` can differentiate by arrays that this call's function captures, and float64
    has an end of it.
    """
    few = q.size // q.shape[-1] * k.shape[-2] <= MOST_SCORES
    there = way in ("fa1", "fa1-split", "fa2") and few
    return there and bool(floats_of(options.get("score_mod")))


def asks_for_dbias(way, q, k, bias):
    """Whether `way` can differentiate by this bias, by two kernels one of its own shape alone."""
    if bias is None or way != "fa2-deterministic":
        return bias is not None
    return q.ndim == 4 and bias.shape == (*q.shape[:3], k.shape[2])


def differentiate(
    device, way, dout, q, k, v, *, layout="padded", saved_values=None, counted=True, **options
):
    """One backward call on `device` between guard bands: every input and band must stay.

    out and lse are `saved_for`'s unless `saved_values` gives them. On the emulator the accesses
    must be those of the plan. Asks for dbias, dsinks and dcaptured wherever it can, unless told
    otherwise.
    """
    algorithm, own = ALL_WAYS[way]
    asks = asks_for_dbias(way, q, k, options.get("bias"))
    asks = {"return_dbias": asks, "return_dsinks": "sinks" in options}
    asks["return_dcaptured"] = asks_for_dcaptured(way, q, k, options)
    options = {**asks, **options, **own}
    names = names_of(*(options[name] for name in asks))
    out, lse = saved_values or saved_for(way, q, k, v, **options)
    inputs = {
        name: Memory(device, a.shape, layout, a)
        for name, a in (("dout", dout), ("q", q), ("k", k), ("v", v), ("out", out))
    }
    place = place_of(device, q)
    inputs["lse"] = Memory(place, lse.shape, layout, lse, rows=True)
    others, given = memories(place, layout, options)
    with running(device, counted) as counts:
        arguments = [m.argument for m in inputs.values()]
        found = fa_numba.attention_backward(*arguments, algorithm=algorithm, **given)
        assert type(found) is tuple and len(found) == len(names)
        if counts is not None:
            facts = {"algorithm": algorithm, "passes": "bwd", **as_plan(options)}
            assert_planned(counts, (q, k, v), **facts)
        for name, memory in (inputs | others).items():
            memory.assert_intact(name, whole=True)
        gradients = Gradients(**dict(zip(names, map(on_host, found), strict=True)))
    of = {"q": q, "k": k, "v": v, **options, **floats_of(options.get("score_mod"))}
    for name, gradient in each(names, gradients):
        x = of[name[1:]]
        assert gradient.shape == x.shape, name
        assert gradient.dtype == (q.dtype if name in NAMES else np.float32), name
    return gradients


def on_host(found):
    """A gradient in NumPy, or those of captured arrays."""
    if isinstance(found, dict):
        return {name: None if x is None else to_numpy(x) for name, x in found.items()}
    return to_numpy(found)


# --- the rounding of a float32 computation ---------------------------------------------------


class Errors:
    """Squares of the errors of a gradient's elements in units of U^2.

    `of` a rounding that meets many elements sums what it does to each, before that is squared.
    """

    def __init__(self, shape):
        self.squares = np.zeros(shape)
        self._shared = {}

    def of(self, rounding):
        return self._shared.setdefault(rounding, np.zeros(self.squares.shape))

    def norm(self):
        shared = sum(np.sum(x**2) for x in self._shared.values())
        return U * float(np.sqrt(self.squares.sum() + shared))


def gradient_roundings(
    dout, q, k, v, out, lse, *, tiles=None, dlse=None, return_dbias=False, return_dsinks=False,
    return_dcaptured=False, **options,
):  # fmt: skip
    """How far float32 takes dq, dk, dv (dbias, dsinks and dcaptured) from the exact ones, as
    Frobenius norms; of dcaptured one for each of its arrays.

    As `helpers.roundings`. One that a row shares (L, D) moves all of it together, as one of a
    constant moves the whole call.

        S       the running sum over d, times scale; the cap's tanh, times the cap; less slope times
                distance; plus bias
        P       L log2(e), S - L, ex2; L as far off as it was given
        D       dO O and its sum, as one chain; less the gradient of L; O as far off as it was given
        dP, dS  the running sum over d; dropout's factor; dP - D, times P; with a cap 1 - tanh^2,
                times that
        dV, dK, dQ, dbias   the sums over rows or columns, each tile's apart; times scale
        dsinks   s log2(e) and the steps of P; times D; the sum over rows and batch entries
        dcaptured   the steps of dS, times the function's slope, of a score that is off; the sum
    """
    given = q, k, v
    call, q, k, v = checked_call(q, k, v, tiles=tiles, **options)
    problem, scale, d = call.problem, call.problem.scale, call.problem.head_dim
    product = of_product(problem)
    if not counted(problem):
        arrays = len(call.captured) if return_dcaptured else 0
        return [0.0] * (3 + return_dbias + return_dsinks + arrays)
    if tiles is None:
        sizes = problem.seqlen_q, problem.seqlen_k, d
        tiles = simt_tiles("fa2", "bwd", *sizes, devices.EMULATED_SHARED_BYTES).value
    O, L = exact_attention(*given, tiles=tiles, **options)
    finite = np.isfinite(L)
    off_O, off_L = (out - O) / U, (np.where(finite, lse, 0.0) - np.where(finite, L, 0.0)) / U
    dL = np.where(finite, 0.0 if dlse is None else dlse, 0.0)
    L = np.where(finite, L, 0.0)
    dout = np.asarray(dout, np.float64)
    found = [Errors(a.shape) for a in (q, k, v)]
    dq, dk, dv = found
    if return_dbias:
        found.append(Errors(problem.bias))
    of_sinks, sinks = Errors((problem.heads_q,)), np.zeros(problem.heads_q)
    floats = call.captured if return_dcaptured else {}
    of_captured = {name: Errors(x.shape) for name, x in floats.items()}
    captured_sums = {name: np.zeros(x.shape) for name, x in floats.items()}
    all_dS, sums = np.zeros(problem.score_shape), {}
    for head in call.heads():
        Q, K, V, dO, Li = q[head.q], k[head.k], v[head.k], dout[head.q], L[head.lse][:, None]
        rows, entry = slice(0, head.Nq), (head.entry, head.number // problem.group)
        row_cuts, column_cuts = range(0, head.Nq, tiles.Br), range(0, head.Nk, tiles.Bc)
        s = Scores(call, head, Q, K, Li)
        of_L = Li**2 + off_L[head.lse][:, None] ** 2
        terms = dO * O[head.q]
        of_D = (terms**2 + np.cumsum(terms, axis=1) ** 2).sum(axis=1, keepdims=True)
        of_D += (dO * off_O[head.q]).sum(axis=1, keepdims=True) ** 2

        drop, P, G = call.dropout(head, rows), s.P, s.G
        kept, of_kept = P * drop, s.of_P
        dP = dO @ V.T * drop
        of_dP = drop**2 * product_squares(dO, V.T, halves(problem.d_v), off=product)[0]
        if problem.dropout_p > 0:
            of_dP, of_kept = of_dP + dP**2, of_kept + 1
        D = (P * dP).sum(axis=1, keepdims=True) - dL[head.lse][:, None]
        of_D += D**2 * (dlse is not None)
        if return_dsinks:
            sink = call.sink(head)
            s_L = np.where(sink > -np.inf, sink - Li, 0.0)
            share = np.where(sink > -np.inf, np.exp(s_L), 0.0)
            terms = share * D
            off = terms**2 * (2 * s_L**2 + EX2**2 + of_L + 2) + share**2 * of_D
            running = np.cumsum(terms) + sinks[head.number]
            of_sinks.squares[head.number] += off.sum() + (running**2).sum()
            of_sinks.of("log2(e)")[head.number] += (terms * s_L).sum()
            # What O and L are off by is given, row by row, and may add up.
            by_O = share * (dO * off_O[head.q]).sum(axis=1, keepdims=True)
            of_sinks.of("O, L")[head.number] += (by_O - terms * off_L[head.lse][:, None]).sum()
            sinks[head.number] = running[-1]
        if head.Nk == 0:  # rows that have a sink alone
            continue
        dS = P * (dP - D)
        of_dS = dS**2 * (s.of_P + 2) + P**2 * of_dP
        # The same of the scores under the cap, `by_S0` the derivative of that by them
        dS0, by_S0, of_dS0 = dS, dS, of_dS
        if s.cap:
            dS0, by_S0 = dS * G, dS * G * (G - 2 * s.tanh / s.cap)
            of_dS0 = by_S0**2 * s.of_S0 + dS0**2 * (s.of_S + 3) + (P * G) ** 2 * of_dP
            by_tanh = TANH * (s.Sc * G - 2 * s.tanh**2)
            of_dS0 += dS**2 * (by_tanh**2 + s.tanh**4 + G**2)
        elif "score_mod" in call.mods:
            dS0, of_dS0 = dS * G, G**2 * of_dS
        if "score_mod" in call.mods:  # its slope's steps, as of tanh
            of_dS0 = of_dS0 + (TANH * dS0) ** 2

        # Each product's own sums, and what its operands bring along
        squares, _ = product_squares(dS0, K, column_cuts, steps=1, off=product)
        squares += of_dS0 @ K**2 + (dS0 @ K) ** 2 * of_L + (P * G @ K) ** 2 * of_D
        dq.squares[head.q] = scale**2 * squares
        _, sum_k, sum_v = sums.get(entry, (None,) * 3)
        squares, sum_k = product_squares(dS0.T, Q, row_cuts, sum_k, off=product)
        squares += (of_dS0 + dS0**2 * of_L + (P * G) ** 2 * of_D).T @ Q**2
        dk.squares[head.k] += scale**2 * squares
        squares, sum_v = product_squares(kept.T, dO, row_cuts, sum_v, off=product)
        dv.squares[head.k] += squares + (kept**2 * (of_kept + of_L)).T @ dO**2
        sums[entry] = head.k, sum_k, sum_v
        if return_dbias:
            by_L, by_D = dS, P
            if problem.bias[3] == 1:
                by_L, by_D = (x.sum(axis=1, keepdims=True) for x in (dS, P))
            for each in (of_dS, by_L**2 * of_L + by_D**2 * of_D):
                add_bias_gradient(found[3].squares, head, rows, each)
            all_dS[head.entry, head.number, rows, : head.Nk] = dS

        if return_dcaptured:
            of_score = np.broadcast_to(s.of_S0 + s.Sc**2, dS.shape)
            of_rows: dict = defaultdict(lambda: np.zeros(2))  # sums by L and D of a row
            # Of a row that sees one column dS is 0, but for roundings.
            given_ = call, head, Q, K, np.argwhere(P)
            for name, element, place, slope, bend in bent_slopes(*given_):
                by, running = of_captured[name], captured_sums[name]
                term = dS[place] * slope
                running[element] += term
                steps = slope**2 * of_dS[place] + (TANH * term) ** 2 + running[element] ** 2
                by.squares[element] += steps + (bend * dS[place]) ** 2 * of_score[place]
                of_rows[name, element, place[0]] += term, P[place] * slope
                for constant in ("scale log2(e)", "log2(e)"):
                    by.of(constant)[element] += abs(term * s.S0[place])
            for (name, element, row), (by_L, by_D) in of_rows.items():
                squares = by_L**2 * of_L[row, 0] + by_D**2 * of_D[row, 0]
                of_captured[name].squares[element] += squares

        # The constants: what they do to P o dropout, to dS, and to dS of the scores under the cap
        rest = s.S - s.Sc - Li
        constants = {
            "scale log2(e)": (kept * G * s.S0, dS * G * s.S0, by_S0 * s.S0),
            "log2(e)": (kept * rest, dS * rest, dS0 * rest),
            "scale": (0 * kept, 0 * dS, dS0),
        }
        if s.cap:
            constants["cap log2(e)"] = (kept * s.Sc, dS * s.Sc, dS0 * s.Sc)
        if problem.dropout_p > 0:
            constants["1 / (1 - p)"] = (kept, P * dP, P * G * dP)
        for name, (to_kept, to_dS, to_dS0) in constants.items():
            dq.of(name)[head.q] += scale * (to_dS0 @ K)
            dk.of(name)[head.k] += scale * (to_dS0.T @ Q)
            dv.of(name)[head.k] += to_kept.T @ dO
            if return_dbias:
                add_bias_gradient(found[3].of(name), head, rows, to_dS)
    for place, sum_k, _ in sums.values():
        dk.squares[place] += (scale * sum_k) ** 2
    if return_dbias:
        found[3].squares += adding_squares(all_dS, problem.bias)
    return [x.norm() for x in (*found, *[of_sinks] * return_dsinks, *of_captured.values())]


def bent_slopes(call, head, Q, K, places, step=1e-3):
    """`Call.captured_slopes` with each slope's own derivative by the score behind it."""
    facts = head, Q, K, 0, places
    ahead = call.captured_slopes(*facts, shift=step)
    for here, other in zip(call.captured_slopes(*facts), ahead, strict=False):
        yield *here, (other[-1] - here[-1]) / step if here[:3] == other[:3] else 0.0


def adding_squares(terms, shape):
    """Squares of the roundings of sums over the axes that are 1 in `shape`, in index order."""
    kept = [n for n in range(4) if shape[n] > 1]
    others = [n for n in range(4) if shape[n] == 1]
    terms = terms.transpose(*kept, *others).reshape(*(shape[n] for n in kept), -1)
    steps = np.cumsum(terms, axis=-1)[..., 1:] * (terms[..., 1:] != 0)
    return (steps**2).sum(axis=-1).reshape(shape)


# --- float64 ---------------------------------------------------------------------------------


@remembered
def true_gradients(
    dout, q, k, v, *, saved_values=None, tiles=None, return_dbias=False, return_dsinks=False,
    return_dcaptured=False, **options,
):  # fmt: skip
    """The gradients in float64 and how far float32 ones may be from them, as Frobenius norms.

    Twice the error of the unfused float32 computation, or `gradient_roundings` where that is more,
    plus one rounding of the gradient. The unfused computation subtracts a row's own maximum and its
    own sum of P o dP, so that errors cancel, down to 0 in a row of one key; the kernels compare L
    and O, rounded by the forward pass, with numbers that they round themselves.
    """
    names = names_of(return_dbias, return_dsinks, return_dcaptured)
    options |= {"tiles": tiles}
    both = options | {"return_dbias": return_dbias, "return_dsinks": return_dsinks}
    both["return_dcaptured"] = return_dcaptured
    with np.errstate(all="ignore"):
        exact = reference.attention_backward(dout, q, k, v, **both)
        unfused = reference.unfused_backward(dout, q, k, v, **both)
        out, lse = saved_values or saved(q, k, v, **options)
        steps = gradient_roundings(dout, q, k, v, out, lse, **both)
    exact, unfused = dict(each(names, exact)), dict(each(names, unfused))
    bounds = {
        name: max(2 * _distance(unfused[name], e), r) + EPS * _size(e)
        for (name, e), r in zip(exact.items(), steps, strict=True)
    }
    return SimpleNamespace(**exact, bounds=bounds)


def asked(found, options):
    """What ``found`` has beside the three, with dsinks wherever there are sinks."""
    dcaptured = isinstance(found[-1], dict)
    dsinks = len(found) - dcaptured > 3 and options.get("sinks") is not None
    dbias = len(found) - dcaptured - dsinks == 4
    return {"return_dbias": dbias, "return_dsinks": dsinks, "return_dcaptured": dcaptured}


def standard_yardstick(dout, q, k, v, *, tiles=None, dlse=None, **options):
    """Standard attention's gradients with S, P, dP and dS rounded to 16 bits as they are stored.

    dbias is in float32; dsinks comes from O and L, not from here. After dropout P is stored once
    more; the scale goes into dS, and the cap's slope after it.
    """
    dtype = q.dtype.name
    single = [x.astype(np.float32) for x in (q, k, v)]
    call, q, k, v = checked_call(*single, np.float32, tiles=tiles, **options)
    dout, problem = dout.astype(np.float32), call.problem

    def rounded(x):
        return reference._to_half(x, dtype)

    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    dbias = np.zeros(problem.bias or (), np.float32)
    dL = np.zeros(problem.lse_shape) if dlse is None else np.nan_to_num(dlse)
    for head in call.heads():
        Q, K, V, dO = q[head.q], k[head.k], v[head.k], dout[head.q]
        rows = slice(0, head.Nq)
        S, slope = call.scores(head, Q, K, 0)
        dropped = call.dropout(head, rows)
        P = rounded(reference._rounded_softmax(rounded(S), None, call.sink(head)))
        dP = rounded(dO @ V.T) * dropped
        D = (P * dP).sum(axis=1, keepdims=True) - dL[head.lse][:, None]
        dS = P * (dP - D)
        if problem.bias:
            add_bias_gradient(dbias, head, rows, dS)
        dS = rounded(np.float32(problem.scale) * dS)
        if problem.softcap is not None:
            dS = rounded(dS * slope)
        dv[head.k] += rounded(P * dropped).T @ dO
        dq[head.q] = rounded(dS @ K)
        dk[head.k] += dS.T @ Q
    gradients = [dq, rounded(dk), rounded(dv)]
    return gradients if not problem.bias else [*gradients, dbias]


@remembered
def expected(
    way, dout, q, k, v, *, dbias=False, dsinks=False, dcaptured=False, saved_values=None, **options
):
    """The gradients in float64, and how far 16-bit ones may be from each, as Frobenius norms.

    Twice the error of the unfused computation with 16-bit matrices, or of standard attention that
    of `standard_yardstick`; twice what rounding to float32 does, and what the given O and L are off
    by, which the unfused computation makes itself; and one rounding.
    """
    dtype, options = q.dtype.name, changing(options)
    asks = {"return_dbias": dbias, "return_dsinks": dsinks, "return_dcaptured": dcaptured}
    single = [x.astype(np.float32) for x in (dout, q, k, v)]
    with np.errstate(all="ignore"):
        exact = reference.attention_backward(*single, **asks, **options)
        if way == "standard":
            near = standard_yardstick(dout, q, k, v, **options)
            whole = reference.unfused_backward(*single, matrix_dtype=dtype, **asks, **options)
            near += whole[-1:] if dsinks else []
            out, lse = saved(*single[1:], **options)  # it makes its own P, in float32 at first
        else:
            near = reference.unfused_backward(*single, matrix_dtype=dtype, **asks, **options)
            out, lse = saved_values or saved_halves(way, q, k, v, **options)
        steps = gradient_roundings(*single, out.astype("f4"), lse, **asks, **options)
        if way == "standard" and dsinks:  # of the O that was given
            out, lse = saved_values or saved_halves(way, q, k, v, **options)
            given_ = gradient_roundings(*single, out.astype("f4"), lse, **asks, **options)
            steps[-1] = given_[-1]
    if way != "standard":
        exact, near = ([x for _, x in each(names_of(*asks.values()), y)] for y in (exact, near))
    last = [ROUNDING[dtype]] * 3 + [EPS] * (len(exact) - 3)  # the others are in float32
    bounds = [
        2 * (_distance(u.reshape(e.shape), e) + s) + r * _size(e)
        for u, e, s, r in zip(near, exact, steps, last, strict=False)
    ]
    return exact, bounds


def wanted_gradients(asks, dout, q, k, v, *, way="fa2", **options):
    """name -> (a gradient in float64, how far one of this dtype may be from it), as
    `true_gradients` or, in 16 bits, `expected` have them.
    """
    if not in_halves(q):
        want = true_gradients(dout, q, k, v, **asks, **options)
        return {name: (getattr(want, name), bound) for name, bound in want.bounds.items()}
    of = {name.removeprefix("return_"): x for name, x in asks.items()}
    names = [*names_of(of["dbias"], of["dsinks"])]
    if of["dcaptured"]:
        names += [f"d{name}" for name in floats_of(options["score_mod"])]
    way = way if way == "standard" else "fa2"  # all others are held alike
    found = zip(*expected(way, dout, q, k, v, **of, **options), strict=True)
    return dict(zip(names, found, strict=True))


def assert_gradients(gradients, dout, q, k, v, **options):
    """`gradients` are those of `wanted_gradients`, as far as they have to be."""
    gradients = list(gradients)
    asks = asked(gradients, options)
    wanted = wanted_gradients(asks, dout, q, k, v, **options)
    found = dict(each(names_of(*asks.values()), gradients))
    assert found.keys() == wanted.keys()
    shared = {}
    if options.get("way") == "standard" and options.get("dropout_p") and in_halves(q):
        shared["dv"] = abs(bias_of_two_roundings(options["dropout_p"], q.dtype.name))
    for name, got in found.items():
        rounding = ROUNDING.get(q.dtype.name)
        assert_within(
            name, np.asarray(got, np.float64), *wanted[name], rounding, shared.get(name, 0.0)
        )


def bias_of_two_roundings(dropout_p, dtype):
    """Return the mean relative error of P times dropout's factor, both stored in 16 bits.

    Standard attention stores P, and later P / (1 - dropout_p) for dV. The second rounding starts
    from a number of few bits. With a factor just below 5/4 every tie goes down: dropout_p = 0.2,
    rounded to a multiple of 2^-16, gives -7e-5 in float16.
    """
    significands = np.arange(2**10, 2**11) if dtype == "float16" else np.arange(2**7, 2**8)
    exact = significands / (1 - drop_threshold(dropout_p) / 2**16)
    stored = reference._to_half(exact.astype(np.float32), dtype).astype(np.float64)
    return (stored - exact).sum() / exact.sum()


# What atomic adds on a GPU sum in no fixed order.
UNORDERED = {"fa2": {"dq"}, "fa1-split": {"dk", "dv"}}


def assert_same(way, found, others):
    """All bits equal, but on a GPU those of sums without an order."""
    for name, a, b in zip(NAMES, found, others, strict=False):
        if name not in UNORDERED.get(way, ()):
            assert np.array_equal(a, b), name


def check_gradients(device, way, dout, q, k, v, *, saved_values=None, **options):
    """`differentiate`, and its result against float64."""
    saved_values = saved_values or saved_for(way, q, k, v, **options)
    found = differentiate(device, way, dout, q, k, v, saved_values=saved_values, **options)
    options = {**changing(options), "way": way, "saved_values": saved_values}
    assert_gradients(found, dout, q, k, v, **options)
    return found
