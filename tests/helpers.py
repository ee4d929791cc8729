"""Runs a call between guard bands and holds its result against float64."""

from __future__ import annotations

import inspect
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fresh_memory
import launch_types  # noqa: F401  it checks every launch
import numba.np.arrayobj  # noqa: F401  Numba reads np.empty once: before `running` replaces it
import numpy as np
import numpy.ma  # noqa: F401  it reads the docstring of np.empty when it is first used
import pytest
from numba.extending import overload
from remembered import remembered

import fa_numba
from fa_numba import device as devices
from fa_numba import reference
from fa_numba.choices.tiles import simt_tiles
from fa_numba.emulator import compiling
from fa_numba.masks import distance
from fa_numba.mods import PARAMETERS, captured, holding
from fa_numba.mods.blocks import BlockMask
from fa_numba.options import AttentionOptions
from fa_numba.scores import checked_call

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

ALGORITHMS = ("standard", "fa1", "fa2")
# What changes the result; of the rest `tiles` does so with a block mask.
# ``layout`` is a test's own word here, for strides; that of the arrays' axes has its own tests.
CHANGING = (*(name for name in AttentionOptions.__annotations__ if name != "layout"), "tiles")
CHANGING += ("dlse",)  # of a backward call
EPS = float(np.finfo(np.float32).eps)
# One rounding to nearest of 16 bits, relative.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@contextmanager
def case(*words):
    """Add the words, which name a case of a test, to an error that is raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case: {', '.join(map(str, words))}")
        raise


# --- inputs ----------------------------------------------------------------------------------


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name) if name in ("bfloat16", "float8_e4m3fn") else name)


def in_halves(x):
    return x.dtype.itemsize == 2


def random_inputs(B, Hq, Hk, Nq, Nk, d, d_v=None, *, seed=0, q_size=1.0, dtype="float32"):
    """q, k and v, normally distributed and then rounded; v has the head dimension `d_v` where it is
    given.
    """
    rng = np.random.default_rng([seed, B, Hq, Hk, Nq, Nk, d])
    q = np.float32(q_size) * rng.standard_normal((B, Hq, Nq, d), dtype=np.float32)
    k, v = rng.standard_normal((2, B, Hk, Nk, max(d, d_v or d)), dtype=np.float32)
    found = q, np.ascontiguousarray(k[..., :d]), np.ascontiguousarray(v[..., : d_v or d])
    return tuple(x.astype(numpy_dtype(dtype), copy=False) for x in found)


# --- memory with guard bands -----------------------------------------------------------------


def _padded(d, e):
    return -(-d // e) * e + 2 * e


def _odd(d):
    return (d + 3) | 1


# name -> (shape of the buffer, the array's view into it) for an array (B, H, N, d) of which 16
# bytes are e elements. Every view leaves a row or more and elements of every row to the guard band.
LAYOUTS: dict[str, tuple] = {
    # rows at 16-byte addresses where the head dimension is a multiple of e
    "padded": (
        lambda B, H, N, d, e: (B, H, N + 2, _padded(d, e)),
        lambda a, B, H, N, d, e: a[:, :, 1 : N + 1, e : d + e],
    ),
    # an odd pitch and an odd start: nothing is aligned
    "odd": (
        lambda B, H, N, d, e: (B, H, N + 2, _odd(d)),
        lambda a, B, H, N, d, e: a[:, :, 1 : N + 1, 1 : d + 1],
    ),
    # (batch, seqlen, heads, head_dim) in memory
    "transposed": (
        lambda B, H, N, d, e: (B, N + 2, H, _padded(d, e)),
        lambda a, B, H, N, d, e: a[:, 1 : N + 1, :, e : d + e].transpose(0, 2, 1, 3),
    ),
    # head_dim is not the innermost axis
    "columns": (
        lambda B, H, N, d, e: (B, H, d + 2, N + 3),
        lambda a, B, H, N, d, e: a[:, :, 1 : d + 1, 2 : N + 2].swapaxes(2, 3),
    ),
    # negative strides on every axis
    "reversed": (
        lambda B, H, N, d, e: (B, H, N + 2, _padded(d, e)),
        lambda a, B, H, N, d, e: a[::-1, ::-1, N:0:-1, d + 3 : 3 : -1],
    ),
    # every second row
    "strided": (
        lambda B, H, N, d, e: (B, H, 2 * N + 1, _padded(d, e)),
        lambda a, B, H, N, d, e: a[:, :, 1::2, e : d + e],
    ),
    # one batch entry for all: inputs alone
    "broadcast": (
        lambda B, H, N, d, e: (1, H, N + 2, _padded(d, e)),
        lambda a, B, H, N, d, e: np.broadcast_to(a[:, :, 1 : N + 1, e : d + e], (B, H, N, d)),
    ),
}

# NaN that no computation makes, so that a band overwritten with NaN shows too.
GUARDS = {4: np.uint32(0x7FC5A5A5), 2: np.uint16(0x7FC5)}
GUARD = np.array([GUARDS[4]]).view(np.float32)[0]


class OnGpu:
    """A view of GPU memory that offers `__cuda_array_interface__` and nothing else."""

    def __init__(self, owner, offset, shape, strides, itemsize=4):
        pointer, _ = owner.__cuda_array_interface__["data"]
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (pointer + offset, False),
            "shape": shape,
            "strides": strides,
            "typestr": f"<f{itemsize}",
            "version": 3,
        }


class Memory:
    """An array of up to four axes inside a guarded buffer, on the emulator's host or on the GPU.

    The last axes are those of (B, H, N, d) in `layout`, or with `rows` of (B, H, N). Holds
    `values`, or those of `fresh_memory` where none are given. `argument` is what a call takes:
    NumPy's bfloat16 is on the host also when the GPU computes, since no array interface describes
    it.
    """

    def __init__(self, device, shape, layout, values=None, rows=False, dtype="float32"):
        last = (1,) if rows else ()
        axes = (0,) * (4 - len(shape) - rows) + (...,) + (0,) * rows
        shape = (1,) * (4 - len(shape) - rows) + (*shape, *last)
        kept = numpy_dtype(dtype) if values is None else values.dtype
        size, each = kept.itemsize, 16 // kept.itemsize
        buffer_shape, view = LAYOUTS[layout]
        whole = buffer_shape(*shape, each)
        flat = np.full(math.prod(whole) + each, GUARDS[size])
        start = -flat.ctypes.data % 16 // size
        self.buffer = flat[start : start + math.prod(whole)].reshape(whole)
        self.view = view(self.buffer, *shape, each).view(kept)
        self.inside = np.zeros(whole, bool)
        if layout != "broadcast":
            view(self.inside, *shape, each)[...] = True
        if values is not None:
            self._fill(layout, values.reshape(shape))
        else:
            fresh_memory.fill(self.view)
        self.before = self.buffer.copy()
        self.view = self.view[axes]
        self.remote: Any = None
        self.argument: Any = self.view
        if device == "gpu" and kept.name != "bfloat16":
            self.remote = devices.to_gpu(self.buffer)
            offset = self.view.ctypes.data - self.buffer.ctypes.data
            self.argument = OnGpu(self.remote, offset, self.view.shape, self.view.strides, size)

    def _fill(self, layout, values):
        if layout == "broadcast":
            assert (values == values[:1]).all(), "a broadcast batch has equal entries"
            self.view.flags.writeable = True
            self.view[:1] = values[:1]
        else:
            self.view[...] = values

    def fetch(self):
        """What the view holds now."""
        if self.remote is not None:
            self.buffer[...] = self.remote.copy_to_host()
        return self.view.copy()

    def assert_intact(self, name, *, whole):
        """The guard band, or the `whole` buffer, is as it was, bit for bit."""
        self.fetch()
        changed = self.buffer != self.before
        if not whole:
            changed &= ~self.inside
        where = "memory" if whole else "the guard band"
        assert not changed.any(), f"{where} of {name} was written at {np.argwhere(changed)[:4]}"


# --- a call ----------------------------------------------------------------------------------


@dataclass
class Result:
    O: np.ndarray
    L: np.ndarray | None


@contextmanager
def refused(error, says, begins=""):
    """What is done inside raises `error`, whose message begins so and has all parts of `says`."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert message.startswith(begins) and all(part in message for part in says), message


def assert_documented(function):
    """Assert that a docstring has its sections, an example and an entry for each parameter."""
    text = inspect.getdoc(function)
    for part in (">>>", "Returns\n----", "Raises\n----"):
        assert part in text
    for name, parameter in inspect.signature(function).parameters.items():
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        explained = f"\n{stars}{name} : " in text
        assert explained, f"{function.__name__} does not explain {name}"


def to_numpy(array):
    return array.copy_to_host() if hasattr(array, "copy_to_host") else np.asarray(array)


def _filled(shape, dtype=float, **options):
    """Return a new array, as `np.empty` does, with `fresh_memory.fill`'s values in it.

    An element that a call does not write then differs from the wanted result.
    """
    array = np.zeros(shape, dtype, **options)
    if array.dtype == np.float32 or array.dtype.itemsize == 2:
        fresh_memory.fill(array)
    return array


_empty = np.empty


@overload(_filled)
def _filled_in_compiled_code(shape, dtype=float):
    """What the emulator's compiled checks find under the name of `np.empty` meanwhile."""

    def empty(shape, dtype=float):
        return _empty(shape, dtype)

    empty.__module__ = np.__name__  # what is kept on disk is loaded where there are no tests too
    return empty


def _filled_on_gpu(shape, dtype="float32"):
    return devices.to_gpu(_filled(shape, dtype))


@contextmanager
def running(device, counted=True):
    """`device` with every new array full of `fresh_memory`'s values; the counts, where there are
    any.
    """
    if device == "gpu":
        with devices.using(device), mock.patch.object(devices, "empty", _filled_on_gpu):
            yield None
    elif counted:
        with (
            devices.using(device),
            mock.patch.object(np, "empty", _filled),
            fa_numba.count_accesses() as counts,
        ):
            yield counts
    else:
        with devices.using(device), mock.patch.object(np, "empty", _filled):
            yield None


def memories(device, layout, options):
    """Guarded copies of the arrays among `options`, and the options of a call with them."""
    given = {
        name: Memory(device, options[name].shape, layout, options[name], rows=name == "dlse")
        for name in ("bias", "alibi_slopes", "sinks", "dlse")
        if options.get(name) is not None
    }
    functions = {
        name: _beside(device, name, options[name]) for name in PARAMETERS if options.get(name)
    }
    others = {name: memory.argument for name, memory in given.items()}
    mask = options.get("block_mask")
    if isinstance(mask, BlockMask):
        moved = _beside(device, "mask_mod", mask.mask_mod)
        others["block_mask"] = replace(mask, mask_mod=moved, captured=captured("mask_mod", moved))
    return given, {**options, **functions, **others}


def _beside(device, option, function):
    """The function; for a GPU it captures copies there of its arrays."""
    if device != "gpu":
        return function
    taken = dict(captured(option, function).values)
    arrays = {name: devices.to_gpu(x) for name, x in taken.items() if isinstance(x, np.ndarray)}
    return holding(function, arrays)


def attend(device, algorithm, q, k, v, *, layout="padded", out_layout="padded", **options):
    """One call on `device` between guard bands: inputs and bands must stay, `out` must be filled.

    On the emulator its accesses must be those of the plan, and the unit the one that is for the
    dtype unless another is asked for. Asks for L unless told otherwise. Biases and slopes are NumPy
    arrays and become guarded memory too.
    """
    options = {"return_lse": True, **options}
    inputs = {
        name: Memory(device, a.shape, layout, a) for name, a in (("q", q), ("k", k), ("v", v))
    }
    others, given = memories(place_of(device, q), layout, options)
    out = Memory(device, (*q.shape[:-1], v.shape[-1]), out_layout, dtype=q.dtype.name)
    with running(device) as counts:
        arguments = [m.argument for m in inputs.values()]
        returned = fa_numba.attention(*arguments, algorithm=algorithm, out=out.argument, **given)
        O, L = returned if options["return_lse"] else (returned, None)
        assert O is out.argument
        if counts is not None:
            assert_planned(counts, (q, k, v), algorithm=algorithm, **options)
        for name, memory in (inputs | others).items():
            memory.assert_intact(name, whole=True)
        out.assert_intact("out", whole=False)
        result = Result(out.fetch(), None if L is None else to_numpy(L))
    if result.L is not None:
        rows = q.shape[:3] if q.ndim == 4 else q.shape[1::-1]
        assert result.L.shape == rows and result.L.dtype == np.float32
    return result


def place_of(device, array):
    """Where the arrays are that come beside one of this dtype."""
    return "emulator" if array.dtype.name == "bfloat16" else device


def assert_planned(counts, arrays, **options):
    """The counts are those of the call's plan, in elements and, in 16 bits, in bytes."""
    dtype = arrays[0].dtype.name
    plan = fa_numba.plan(*(x.shape for x in arrays), dtype=dtype, **options)
    assert_counts(counts, plan)
    if in_halves(arrays[0]):
        moved = sum(n.total() for n in (counts.load_bytes, counts.store_bytes))
        assert plan.unit == options.get("unit", "mma") and plan.accesses.bytes == moved


def assert_counts(counts, plan):
    """Every array's loads and stores are those of the closed form; an absent key is 0."""
    for kind in ("loads", "stores"):
        got, want = dict(getattr(counts, kind)), getattr(plan.accesses, kind)
        assert got == want, f"counts of {kind}: {got}, the closed form has {want}"


# --- the rounding of a float32 computation ---------------------------------------------------

# The most that a rounding moves its result by, relative to it.
U = 2.0**-24
# The same in units of U: of ex2.approx.ftz.f32, 2^-22.5, and lg2.approx.f32, 2^-22 of a logarithm
# of at least 1 (PTX ISA), and of tanhf, 2 ulp (CUDA C++ Programming Guide).
EX2 = 2.0**-22.5 / U
LG2 = 2.0**-22 / U
TANH = 4.0
# Multiply-adds of Q K^T up to which roundings are counted. Beyond, so many are summed that the
# unfused computation errs as much.
COUNTED = 2**28


# By how many U a product of two float32 is off: in two planes of bfloat16 each operand by 2^-18,
# and the product of both second planes is left out.
OF_A_PRODUCT = {"bf16x3": 3 * 2.0**-18 / U}


def counted(problem):
    few = math.prod(problem.score_shape) * problem.head_dim <= COUNTED
    return (
        few or problem.precision in OF_A_PRODUCT
    )  # which the unfused computation knows nothing of


def of_product(problem):
    return OF_A_PRODUCT.get(problem.precision, 1.0)


def halves(d):
    """Where the running sums over the head dimension start."""
    return (0,) if d <= 128 else (0, -(-d // 4) // 2 * 4)


@compiling.compiled()
def _running_sums(A, B, first, last, part, squares):
    """Add A[:, n] B[n] to `part` for each n in turn, and the square of each sum to `squares`."""
    for i in range(A.shape[0]):
        for n in range(first, last):
            a = A[i, n]
            for j in range(B.shape[1]):
                x = part[i, j] + a * B[n, j]
                part[i, j] = x
                squares[i, j] += x * x


def product_squares(A, B, cuts, total=None, steps=0, off=1.0):
    """Squares of the roundings of A B in units of U^2, and A B plus `total`.

    As the kernels make it: a running sum from one of `cuts` to the next, and these added up, with
    `steps` more roundings of each sum before. A product is `off` by so many units: a GPU rounds a
    multiply-add once, the emulator its product too.
    """
    rows = np.ascontiguousarray(A), np.ascontiguousarray(B)
    squares = np.zeros((len(A), B.shape[1]))
    for first, last in zip(cuts, (*cuts[1:], A.shape[1]), strict=True):
        squares += off**2 * (A[:, first:last] ** 2 @ B[first:last] ** 2)
        part = A[:, first, None] * B[first]
        _running_sums(*rows, first + 1, last, part, squares)
        squares += steps * part**2
        if total is not None:
            part = part + total
            squares += part**2
        total = part
    return squares, total


class Scores:
    """S of a head in natural units, P = e^(S - shift), and what roundings do to them.

    `of_S0` and `of_S` are squares of the errors of the scores under the cap and of the rest of what
    P is the exponential of, in units of U^2; `G` is its derivative by the first. Of what is hidden
    all is 0. Each row's largest S is the shift unless one is given; then a sink comes before the
    columns, as one more.
    """

    def __init__(self, call, head, Q, K, shift=None):
        problem, place = call.problem, (head.entry, head.number)
        self.S0 = self.Sc = problem.scale * (Q @ K.T)
        S, self.G = call.scores(head, Q, K, 0)
        seen = S > -np.inf
        self.G = np.where(seen, self.G, 0.0)
        self.S = np.where(seen, S, 0.0)
        sink = call.sink(head) if shift is None else None
        if shift is None:
            shift = S.max(axis=1, keepdims=True, initial=-np.inf if sink is None else sink)
            shift = np.where(shift == -np.inf, 0.0, shift)
        self.shift = shift
        self.P = np.where(seen, np.exp(self.S - shift), 0.0)
        # The sum over d, times scale; S - shift; ex2
        by = of_product(problem)
        chain, _ = product_squares(Q, K.T, halves(problem.head_dim), off=by)
        self.of_S0 = problem.scale**2 * chain + self.S0**2
        self.of_S = (self.S - shift) ** 2 + EX2**2
        self.tanh = self.cap = 0.0
        if problem.softcap is not None:
            self.cap = problem.softcap
            self.tanh = np.tanh(self.S0 / self.cap)
            self.Sc = self.cap * self.tanh
            self.of_S = self.of_S + self.Sc**2
        if call.slopes is not None:
            # Slope times log2(e), times distance, subtracted
            rows, columns = np.arange(head.Nq)[:, None], np.arange(head.Nk)
            away = call.slopes[place] * distance(rows, columns, head.Nk - head.Nq)
            self.of_S = self.of_S + 2 * away**2 + (self.Sc - away) ** 2
        if call.bias is not None:
            # Bias times log2(e), added
            bias = np.where(seen, call.bias[place][: head.Nq, : head.Nk], 0.0)
            self.of_S = self.of_S + bias**2 + self.S**2
        if "score_mod" in call.mods:
            # The function's steps, as of tanh
            self.of_S = self.of_S + (TANH * np.where(seen, self.S, 0.0)) ** 2
        # Squares of the errors of P, relative to it
        self.of_P = self.G**2 * self.of_S0 + self.of_S
        if self.cap:
            self.of_P = self.of_P + (TANH * self.Sc) ** 2
        if sink is not None:
            # s times log2(e); the rest as of a column
            s = sink if sink > -np.inf else 0.0
            off = (s - shift) ** 2 + EX2**2 + s**2
            first = {"S": s, "P": np.exp(sink - shift), "of_S": off, "of_P": off}
            for name in ("S0", "Sc", "S", "P", "G", "of_S0", "of_S", "of_P"):
                x = np.broadcast_to(getattr(self, name), S.shape)
                own = np.broadcast_to(first.get(name, 0.0), (len(S), 1))
                setattr(self, name, np.hstack([own, x]))


def roundings(q, k, v, *, tiles=None, only_L=False, **options):
    """How far float32 takes O and L from the exact ones, as Frobenius norms; of O 0 if `only_L`.

    Follows the kernels step by step. Each rounding counts once, as the most it can be, U times its
    result; roundings are independent, so that their squares add up, each times the square of the
    derivative of O or L by the step's result. A constant's rounding moves the whole call together.

        S   the running sum over d, times scale; the cap's tanh, times the cap; less slope times
            distance; plus bias
        P   S - m and ex2; of the columns before when m grows, once more
        l   the sum over columns, each tile's apart
        O   P V likewise, with the four steps by which FlashAttention-1 takes each tile's O to the
            next, dropout's factor, 1 / l and its product
        L   lg2 of l, added to m, times log(2)
    """
    call, q, k, v = checked_call(q, k, v, tiles=tiles, **options)
    problem = call.problem
    if not counted(problem):
        return 0.0, 0.0
    if only_L:
        v = v[..., :0]
    sizes = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    Bc = (tiles or simt_tiles("fa1", "fwd", *sizes, devices.EMULATED_SHARED_BYTES).value).Bc
    of_O = of_L = 0.0
    for head in call.heads():
        V, cuts = v[head.k], [*range(0, head.Nk, Bc)]
        s, drop = Scores(call, head, q[head.q], k[head.k]), call.dropout(head, slice(0, head.Nq))
        if call.sinks is not None:  # one more column, by itself, without a value
            V, cuts = np.insert(V, 0, 0, axis=0), [0, *(1 + n for n in cuts)]
            drop = drop if np.ndim(drop) == 0 else np.hstack([np.ones((head.Nq, 1)), drop])
        l = s.P.sum(axis=1, keepdims=True)
        log_l = np.log(np.where(l > 0, l, 1.0))
        L = np.where(l > 0, s.shift + log_l, 0.0)
        P = s.P / np.where(l > 0, l, 1.0)
        kept = P * drop
        squares, O = product_squares(kept, V, cuts, steps=4, off=of_product(problem))
        of_l, _ = product_squares(P, np.ones((P.shape[1], 1)), cuts)
        # P o dropout V less P O: the derivative of O by S
        squares += (kept**2 * s.of_P) @ V**2 - 2 * (kept * P * s.of_P) @ V * O
        squares += ((P**2 * s.of_P).sum(axis=1, keepdims=True) + of_l + 2) * O**2
        rows = (P**2 * s.of_P).sum(axis=1, keepdims=True) + of_l + 2 * L**2
        rows += (LG2 * np.maximum(log_l, math.log(2.0))) ** 2 * (l > 0)
        if problem.dropout_p > 0:
            squares += kept**2 @ V**2

        # m and the columns before it grows
        S = np.where(s.P > 0, s.S, -np.inf)
        for cut in cuts[1:]:
            old, new = (S[:, :n].max(axis=1, keepdims=True) for n in (cut, cut + Bc))
            grows = (new > old) & (old > -np.inf)
            of_f = np.where(grows, EX2**2 + (new - np.where(grows, old, new)) ** 2, 0.0)
            share = P[:, :cut].sum(axis=1, keepdims=True)
            squares += of_f * (kept[:, :cut] @ V[:cut] - share * O) ** 2
            rows += of_f * share**2

        # The constants: scale, log2(e), cap, 1 / (1 - dropout_p), log(2)
        for by_S in (s.G * s.S0, s.S - s.Sc, s.Sc if s.cap else None):
            if by_S is not None:
                share = (P * by_S).sum(axis=1, keepdims=True)
                squares += ((kept * by_S) @ V - share * O) ** 2
                rows += share**2
        squares += (problem.dropout_p > 0) * O**2
        rows += L**2
        of_O, of_L = of_O + squares.sum(), of_L + rows.sum()
    return tuple(U * float(np.sqrt(squares)) for squares in (of_O, of_L))


# --- float64 ---------------------------------------------------------------------------------


def _distance(a, b):
    """||a - b||, where equal infinities and NaN at the same place are no distance."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, a - b)
    return float(np.linalg.norm(np.where(np.isnan(difference), np.inf, difference)))


def _size(a):
    return float(np.linalg.norm(np.where(np.isfinite(a), a, 0.0)))


def exact_attention(q, k, v, *, tiles=None, **options):
    """O and L in float64."""
    blocks = {} if options.get("block_mask") is None else {"tiles": tiles}
    return _exact_attention(q, k, v, **blocks, **options)


@remembered
def _exact_attention(q, k, v, **options):
    return reference.attention(q, k, v, return_lse=True, **options)


def truth(q, k, v, *, algorithm="fa2", **options):
    """O and L in float64, and how far a call's of this dtype may be from each."""
    if in_halves(q):
        return _truth_of_halves(q, k, v, algorithm == "standard", options)
    return _truth_of_singles(q, k, v, **options)


@remembered
def _truth_of_singles(q, k, v, *, only_L=False, **options):
    """O and L in float64, and how far a float32 result may be from each, as Frobenius norms.

    Twice the error of the unfused float32 computation, or `roundings` where that is more (in a few
    rows of few columns the unfused one may happen to err little), plus one rounding of the result;
    of L, whose values cancel to near 0, a rounding is that of a number no smaller than 1. With
    `only_L` the bound of O is that of the unfused computation alone.
    """
    with np.errstate(all="ignore"):
        O, L = exact_attention(q, k, v, **options)
        O32, L32 = reference.unfused(q, k, v, return_lse=True, **options)
        of_O, of_L = roundings(q, k, v, only_L=only_L, **options)
    return SimpleNamespace(
        O=O,
        L=L,
        O_bound=max(2 * _distance(O32, O), of_O) + EPS * _size(O),
        L_bound=max(2 * _distance(L32, L), of_L) + EPS * _size(np.maximum(np.abs(L), 1.0)),
        scale=(),
    )


@remembered
def _truth_of_halves(q, k, v, stored, options):
    """O: twice the error of the unfused computation with 16-bit matrices and float32 sums, plus one
    rounding to 16 bits. L: as in float32. Of standard attention S is `stored` in 16 bits too, and L
    may also be off by twice what that does to it. The scale of O is held too, within its rounding.
    """
    dtype = q.dtype.name
    q, k, v = (a.astype(np.float32) for a in (q, k, v))
    single = _truth_of_singles(q, k, v, only_L=True, **options)
    with np.errstate(all="ignore"):
        yardstick = {"matrix_dtype": dtype, "stored_scores": stored, "return_lse": True}
        near, near_L = reference.unfused(q, k, v, **yardstick, **options)
    O_bound = 2 * _distance(near, single.O) + ROUNDING[dtype] * _size(single.O)
    L_bound = single.L_bound + (2 * _distance(near_L, single.L) if stored else 0.0)
    # A row's largest P is 1. Dropout makes 1 / (1 - p) of it, off by the same rounding in all rows.
    shared = 0.0
    if options.get("dropout_p") and not stored:
        kept = 1 / (1 - options["dropout_p"])
        shared = abs(float(reference._to_half(np.float32(kept), dtype)) / kept - 1)
    bounds = {"O_bound": O_bound, "L_bound": L_bound}
    return SimpleNamespace(O=single.O, L=single.L, **bounds, scale=(ROUNDING[dtype], shared))


def assert_within(name, got, expected, bound, rounding=None, shared=0.0):
    """`got` is within `bound` of `expected`, and of its scale where a `rounding` is given."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, f"{name} has shape {got.shape}, not {expected.shape}"
    distance = _distance(got, expected)
    where, a, b = reference.worst(got, expected)
    assert distance <= bound, (
        f"{name} is off by {distance:.3g}, allowed {bound:.3g}; "
        f"worst at {where}: got {a:.9g}, expected {b:.9g}"
    )
    if rounding is not None:
        assert_scale(name, got, expected, rounding, shared)


# How far independent errors of either sign take their sum from 0, in units of the root of the sum
# of their squares: a sum of n numbers x_i whose signs are drawn is beyond STRAY of these with a
# probability of at most 2 exp(-STRAY^2 / 2), 1 in 130,000, whatever their sizes (Hoeffding 1963);
# beyond sqrt(n) of them never.
STRAY = 5.0


def assert_scale(name, got, expected, rounding, shared=0.0):
    """<got, expected> / <expected, expected> is 1, but for what `rounding`, a dtype's, explains.

    The norm of an error allows all of it to point along `expected`: a gradient too large by a
    rounding everywhere would pass. Errors of rounding have either sign and average out. Those of
    two rows (the last axis) are independent, those within a row are not: all elements of a row of O
    have the same rounded P. So the slope is held within STRAY standard errors, which the rows
    themselves tell: about 4 roundings / sqrt(elements) where the result's own rounding is all there
    is. Of STRAY^2 = 25 rows or fewer that is always so. A tenth of `rounding` is allowed in any
    case, for what float32 sums and constants do to all rows alike, and `shared` more, where a
    rounding that all rows share is known. Equal rows are rounded alike, and count as one.
    """
    expected = np.asarray(expected, np.float64).reshape(-1, expected.shape[-1])
    got = np.asarray(got, np.float64).reshape(expected.shape)
    finite = np.isfinite(got) & np.isfinite(expected)
    expected, got = (np.where(finite, a, 0.0) for a in (expected, got))
    _, same = np.unique(expected.astype(np.float32), axis=0, return_inverse=True)
    along = np.bincount(same.ravel(), ((got - expected) * expected).sum(axis=1))
    size = (expected**2).sum()
    off, stray = abs(along.sum()), STRAY * float(np.linalg.norm(along))
    allowed = max(0.1 * rounding * size, stray) + shared * size
    assert off <= allowed, (
        f"{name} is {1 + along.sum() / size:.7f} times what it should be, of {len(along)} rows: "
        f"allowed is {allowed / size:.2g} off"
    )


def assert_close_to_float64(out, q, k, v, lse=None, **options):
    """`out`, and `lse` where given, are as close to float64 as `truth` allows.

    `options` are those that change the result.
    """
    want = truth(q, k, v, **options)
    assert_within("O", np.asarray(out, np.float64), want.O, want.O_bound, *want.scale)
    if lse is not None:
        assert_within("L", lse, want.L, want.L_bound)


def changing(options):
    """Those of a call's options that change its result."""
    return {name: options[name] for name in CHANGING if name in options}


def check(device, algorithm, q, k, v, **options):
    """`attend`, and its result against float64."""
    result = attend(device, algorithm, q, k, v, **options)
    assert result.O.dtype == q.dtype
    options = changing(options)
    assert_close_to_float64(result.O, q, k, v, result.L, algorithm=algorithm, **options)
    return result


# How much more a result may err where a loop takes many passes instead of one or few. Sums are in
# float32 from the first pass to the last, so that the last rounding, to 16 bits, is the same error
# for any number of passes. A sum that is rounded to 16 bits in each of n passes errs about
# sqrt(n / 3) times as much (O, whose early passes weigh less in the end) or sqrt(n / 2) times (a
# gradient, which grows as sqrt(n)).
GROWTH = 1.25


def assert_no_growth(name, few, many, expected):
    """Of results of `few` passes and of `many` the second errs at most GROWTH times as much."""
    once, often = (_distance(np.asarray(a, np.float64), expected) for a in (few, many))
    assert often <= GROWTH * once, (
        f"{name} is off by {often:.3g} after many passes and by {once:.3g} after few: "
        f"allowed is {GROWTH} times that"
    )


class FakeGpuArray:
    """Claims to be in GPU memory."""

    def __init__(self, shape):
        self.__cuda_array_interface__ = {
            "data": (4096, False),
            "shape": shape,
            "strides": None,
            "typestr": "<f4",
            "version": 3,
        }
