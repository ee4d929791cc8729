"""The float64 reference against a plain loop, central differences and worked examples."""

import itertools
import math
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from remembered import remembered

from fa_numba import reference
from fa_numba.dropout import dropout_mask
from fa_numba.reference import (
    attention,
    attention_backward,
    attention_e4m3,
    dequantize,
    relative_error,
    unfused,
    unfused_backward,
    worst,
)

EPS = np.finfo(np.float64).eps


@remembered
def plain_loop(
    q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=None, bias=None, attn_mask=None,
    alibi_slopes=None, sinks=None, q_lens=None, kv_lens=None, block_mask=None, tiles=None,
    dropout_p=0.0, **draw,
):  # fmt: skip
    """(O, L) element by element, exactly summed; of the package it takes the dropout mask alone."""
    (B, Hq, Nq, d), (_, Hk, Nk, _) = q.shape, k.shape
    scale = 1 / math.sqrt(d) if scale is None else scale
    if attn_mask is not None:
        hides = attn_mask.dtype == bool
        bias = np.where(attn_mask, 0.0, -np.inf) if hides else attn_mask
    bias = None if bias is None else np.broadcast_to(bias, (B, Hq, Nq, Nk))
    slopes = None if alibi_slopes is None else np.broadcast_to(alibi_slopes, (B, Hq))
    if block_mask is not None:
        block_mask = np.broadcast_to(block_mask, (B, Hq, *np.shape(block_mask)[-2:]))
    if dropout_p:
        dropout_p = round(dropout_p * 2**16) / 2**16
        kept = dropout_mask(B, Hq, Nq, Nk, dropout_p=dropout_p, **draw)

    def score(b, h, i, j):
        """None where i does not see j."""
        # How far j is before the column of row i, counted from the last row and column.
        before = (columns - 1 - j) - (rows - 1 - i)
        left, right = window
        if (causal and before < 0) or 0 <= left < before or 0 <= right < -before:
            return None
        if block_mask is not None and not block_mask[b, h, i // tiles.Br, j // tiles.Bc]:
            return None
        products = zip(q[b, h, i], k[b, h // (Hq // Hk), j], strict=True)
        s = scale * math.fsum(float(x) * float(y) for x, y in products)
        if softcap is not None:
            s = softcap * math.tanh(s / softcap)
        if slopes is not None:
            s -= slopes[b, h] * abs(before)
        return s if bias is None else s + float(bias[b, h, i, j])

    O, L = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, h in np.ndindex(B, Hq):
        V = v[b, h // (Hq // Hk)]
        rows = Nq if q_lens is None else q_lens[b]
        columns = Nk if kv_lens is None else kv_lens[b]
        for i in range(rows):
            s = {j: x for j in range(columns) if (x := score(b, h, i, j)) is not None}
            if sinks is not None:
                s[None] = float(sinks[h])
            m = max(s.values(), default=-math.inf)
            if m == -math.inf:
                continue
            w = {j: math.exp(x - m) for j, x in s.items()}
            total = math.fsum(w.values())
            L[b, h, i] = m + math.log(total)
            w.pop(None, None)
            if dropout_p:
                w = {j: x / (1 - dropout_p) for j, x in w.items() if kept[b, h, i, j]}
            for c in range(d):
                O[b, h, i, c] = math.fsum(x * float(V[j, c]) for j, x in w.items()) / total
    return O, L


def random_inputs(B, Hq, Hk, Nq, Nk, d, *, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((B, Hq, Nq, d))
    k, v = rng.standard_normal((2, B, Hk, Nk, d))
    for a in (q, k, v):
        a.setflags(write=False)
    return q, k, v


Q, K = np.ones((1, 1, 1, 4)), np.ones((1, 1, 8, 4))
V = K


# --- options ---------------------------------------------------------------------------------

TILES = SimpleNamespace(Br=2, Bc=3)


def with_infinities(bias):
    """Some elements -inf, and all of row 1."""
    bias[..., ::2, 1] = -np.inf
    bias[..., 1, :] = -np.inf
    return bias


def visited(shape, *leading):
    """A block mask that hides about half, and all of the second row of blocks."""
    _, _, _, Nq, Nk, _ = shape
    rng = np.random.default_rng([3, *shape])
    mask = rng.random((*leading, -(-Nq // TILES.Br), -(-Nk // TILES.Bc))) < 0.6
    mask[..., 1, :] = False
    mask[..., 0, 0] = True
    return dict(block_mask=mask, tiles=TILES)


def lengths(B, longest):
    """Shorter than the longest, empty, and as long, as far as there are entries."""
    return {1: [longest - 1], 2: [longest - 1, longest], 3: [longest - 1, 0, longest]}[B]


def option(name, shape):
    """The arguments of one option for inputs of this shape."""
    B, Hq, _, Nq, Nk, _ = shape
    rng = np.random.default_rng([7, *shape])
    normal, slopes = rng.standard_normal, partial(rng.uniform, 0.05, 1.0)
    return {
        "scale": lambda: dict(scale=-0.7),
        "causal": lambda: dict(causal=True),
        "window": lambda: dict(window=(2, 1)),
        "window on the left": lambda: dict(window=(1, -1)),
        "window on the right": lambda: dict(window=(-1, 1)),
        "softcap": lambda: dict(softcap=0.8),
        "bias": lambda: dict(bias=normal((B, Hq, Nq, Nk))),
        "bias of columns": lambda: dict(bias=normal(Nk)),
        "bias of rows": lambda: dict(bias=normal((Hq, Nq, 1))),
        "bias of -inf": lambda: dict(bias=with_infinities(normal((B, 1, Nq, Nk)))),
        "attn_mask": lambda: dict(attn_mask=rng.random((B, 1, Nq, Nk)) < 0.7),
        "attn_mask of numbers": lambda: dict(attn_mask=normal((Hq, 1, Nk)).astype(np.float32)),
        "alibi": lambda: dict(alibi_slopes=slopes(Hq)),
        "alibi of entries": lambda: dict(alibi_slopes=slopes((B, Hq))),
        "sinks": lambda: dict(sinks=np.where(np.arange(Hq) == 1, -np.inf, normal(Hq))),
        "q_lens": lambda: dict(q_lens=lengths(B, Nq)),
        "kv_lens": lambda: dict(kv_lens=lengths(B, Nk)[::-1]),
        "block mask": lambda: visited(shape),
        "block mask of heads": lambda: visited(shape, B, Hq),
        "dropout": lambda: dict(dropout_p=0.4, seed=2**40 + 5, offset=6),
    }[name]()


SINGLE = [
    *("scale", "causal", "window", "window on the left", "window on the right", "softcap"),
    *("bias", "bias of columns", "bias of rows", "bias of -inf", "alibi", "alibi of entries"),
    *("attn_mask", "attn_mask of numbers"),
    *("sinks", "q_lens", "kv_lens", "block mask", "block mask of heads", "dropout"),
]
TINY = (2, 2, 1, 3, 4, 2)


def fit_together(*names):
    """Whether no two of them are the same argument; attn_mask is one with bias."""
    given = [name.replace("attn_mask", "bias") for n in names for name in option(n, TINY)]
    return len(given) == len(set(given))


PAIRS = [pair for pair in itertools.combinations(SINGLE, 2) if fit_together(*pair)]
EVERYTHING = [
    ("causal", "softcap", "bias", "alibi", "q_lens", "kv_lens", "block mask", "dropout"),
    ("causal", "bias", "sinks", "q_lens", "kv_lens", "dropout"),
    ("window", "scale", "softcap", "bias of -inf", "alibi of entries", "block mask of heads"),
]


def together(names, shape):
    """The arguments of these options."""
    return {key: value for name in names for key, value in option(name, shape).items()}


FORWARD = [attention, partial(unfused, dtype=np.float64)]


@pytest.mark.parametrize("names", [*((n,) for n in SINGLE), *PAIRS, *EVERYTHING], ids=" + ".join)
def test_options_are_the_plain_loop(names, monkeypatch):
    monkeypatch.setattr(reference, "_ROWS", 3)  # so that pieces are computed with every option
    shapes = [(3, 2, 1, 7, 5, 2), (2, 4, 2, 4, 7, 3)]
    for shape in [shapes[PAIRS.index(names) % 2]] if names in PAIRS else shapes:
        q, k, v = random_inputs(*shape)
        options = together(names, shape)
        want = plain_loop(q, k, v, **options)
        for compute in FORWARD:
            found = compute(q, k, v, **options, return_lse=True)
            # Absolute too: L and a weighted mean of V may cancel to nearly 0.
            for name, out, ref in zip("OL", found, want, strict=True):
                assert out.dtype == np.float64
                np.testing.assert_allclose(out, ref, rtol=50 * EPS, atol=50 * EPS, err_msg=name)
            if names not in PAIRS:
                np.testing.assert_array_equal(compute(q, k, v, **options), found[0])


# --- lengths and packed sequences ------------------------------------------------------------

LONG = (4, 4, 2, 6, 7, 3)
Q_LENS, KV_LENS = [4, 0, 6, 3], [7, 5, 0, 2]
LENGTHS = dict(q_lens=Q_LENS, kv_lens=KV_LENS)
OF_ARRAYS = Q_LENS, Q_LENS, KV_LENS, KV_LENS  # dout, q, k, v
BESIDE = [n for n in SINGLE if "lens" not in n]
ALL_FOUR = [attention, unfused, attention_backward, unfused_backward]


def asks(options):
    """For the gradients of a bias and of sinks, where there are any."""
    return {f"return_d{name}": name in options for name in ("bias", "sinks")}


def run(compute, dout, q, k, v, **options):
    """Every result of any of the four functions."""
    if compute in (attention, unfused):
        return compute(q, k, v, return_lse=True, **options)
    return compute(dout, q, k, v, **asks(options), **options)


def filled(a, lens, value):
    """A copy of (B, H, N, d) with this value at and after the lengths."""
    a = a.copy()
    for b, n in enumerate(lens):
        a[b, :, n:] = value
    return a


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("compute", ALL_FOUR)
def test_what_lengths_hide_is_not_read(compute, name):
    given = with_output_gradient(LONG)
    options = LENGTHS | option(name, LONG)
    results = []
    for value in (0.0, np.nan, np.inf):
        arrays = [filled(a, n, value) for a, n in zip(given, OF_ARRAYS, strict=True)]
        if name == "bias":
            bias = options["bias"].copy()
            for b, (Nq, Nk) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
                bias[b, :, Nq:] = bias[b, :, :, Nk:] = value
            options = options | dict(bias=bias)
        results.append(run(compute, *arrays, **options))
    for zeros, *others in zip(*results, strict=True):
        assert not np.isnan(zeros).any()
        for other in others:
            np.testing.assert_array_equal(other, zeros)
    for b, (Nq, Nk) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
        rows = slice(Nq if Nk or name == "sinks" else 0, None)
        columns = slice(Nk if Nq else 0, None)
        if compute in (attention, unfused):
            O, L = results[0]
            assert np.all(O[b, :, rows] == 0) and np.all(L[b, :, rows] == -np.inf)
        else:
            for gradient, hidden in zip(results[0][:3], (rows, columns, columns), strict=True):
                assert np.all(gradient[b, :, hidden] == 0)


def packed(a, lens):
    """(total, H, d) of (B, H, N, d)."""
    return np.concatenate([a[b, :, :n].swapaxes(0, 1) for b, n in enumerate(lens)])


CUMULATIVE = dict(cu_seqlens_q=np.cumsum([0, *Q_LENS]), cu_seqlens_k=np.cumsum([0, *KV_LENS]))


@pytest.mark.parametrize("names", [(), *((n,) for n in BESIDE), *EVERYTHING], ids=" + ".join)
@pytest.mark.parametrize("compute", ALL_FOUR)
def test_packed_sequences_are_the_padded_ones(compute, names):
    dout, q, k, v = with_output_gradient(LONG)
    options = together([n for n in names if "lens" not in n], LONG)
    padded = run(compute, dout, q, k, v, **LENGTHS, **options)
    given = [packed(a, n) for a, n in zip((dout, q, k, v), OF_ARRAYS, strict=True)]
    found = run(compute, *given, **CUMULATIVE, **options)
    close = partial(np.testing.assert_allclose, rtol=0, atol=20 * np.finfo(found[0].dtype).eps)
    if compute in (attention, unfused):
        assert found[0].shape == (13, 4, 3) and found[1].shape == (4, 13)
        close(found[0], packed(padded[0], Q_LENS))
        close(found[1], packed(padded[1][..., None], Q_LENS)[..., 0].T)
    else:
        for got, want, n in zip(found[:3], padded[:3], (Q_LENS, KV_LENS, KV_LENS), strict=True):
            close(got, packed(want, n))
        for got, want in zip(found[3:], padded[3:], strict=True):
            close(got, want)


@pytest.mark.parametrize("names", [(), *((n,) for n in BESIDE), *EVERYTHING], ids=" + ".join)
@pytest.mark.parametrize("compute", ALL_FOUR)
def test_the_other_layout_is_the_same_call(compute, names):
    given = with_output_gradient(LONG)
    options = LENGTHS | together([n for n in names if "lens" not in n], LONG)
    want = run(compute, *given, **options)
    got = run(compute, *(a.swapaxes(1, 2) for a in given), layout="bnhd", **options)
    turned = 1 if compute in (attention, unfused) else 3  # L and dbias have one shape in both
    for n, (out, ref) in enumerate(zip(got, want, strict=True)):
        out = out.swapaxes(1, 2) if n < turned else out
        np.testing.assert_allclose(out, ref, rtol=0, atol=20 * np.finfo(ref.dtype).eps)


# --- gradients -------------------------------------------------------------------------------

IN_FLOAT64 = [attention_backward, partial(unfused_backward, dtype=np.float64)]


def with_output_gradient(shape, *, seed=0):
    q, k, v = random_inputs(*shape, seed=seed)
    return np.random.default_rng(seed + 1000).standard_normal(q.shape), q, k, v


@remembered
def central_differences(dout, q, k, v, *, dlse=None, **options):
    """The gradients of sum(dout o attention(q, k, v)), one element moved at a time, the same of all
    batch entries and heads, which know nothing of each other. With a `dlse` of sum(dlse o L) too,
    where L is finite.

    Four where there is a bias or sinks. `unfused` in float64 is attention, and faster.
    """

    def losses(**given):
        O, L = unfused(**given, dtype=np.float64, return_lse=True)
        if dlse is None:
            return dout * O
        of_L = np.where(L == -np.inf, 0.0, dlse * np.where(L == -np.inf, 0.0, L))
        return np.concatenate([dout * O, of_L[..., None]], axis=-1)

    step = 1e-5  # error: step^2 of the method, EPS / step of the arithmetic
    names = ["q", "k", "v"] + [name for name in ("bias", "sinks") if name in options]
    given = {"q": q, "k": k, "v": v, **options}
    gradients = []
    for name in names:
        gradient = np.empty(given[name].shape)
        entries, heads = gradient.shape[:2] if gradient.ndim == 4 else (1, 1)
        for where in np.ndindex(gradient.shape[-2:] if gradient.ndim == 4 else gradient.shape):
            moved = given[name].copy()
            moved[..., *where] += step
            loss = losses(**{**given, name: moved})
            moved[..., *where] -= 2 * step
            loss -= losses(**{**given, name: moved})
            # One number for each entry and head, of which a group or all may share the element.
            loss = np.where(np.isnan(loss), 0.0, loss) if name == "sinks" else loss
            own = loss.reshape(entries, len(loss) // entries, heads, -1).sum(axis=(1, 3))
            gradient[..., *where] = (own if gradient.ndim == 4 else own[0, 0]) / (2 * step)
        gradients.append(gradient)
    return gradients


@pytest.mark.parametrize(
    "names", [(), ("bias",), ("sinks",), ("q_lens", "kv_lens"), *EVERYTHING], ids=" + ".join
)
def test_gradients_of_a_loss_on_L_too_are_the_central_differences(names):
    shape = (2, 2, 1, 5, 4, 2)
    dout, q, k, v = with_output_gradient(shape)
    options = dict(together(names, shape), causal=True)
    _, L = attention(q, k, v, return_lse=True, **options)
    dlse = np.where(L == -np.inf, np.nan, np.random.default_rng(5).standard_normal(L.shape))
    want = central_differences(dout, q, k, v, dlse=dlse, **options)
    for compute in IN_FLOAT64:
        found = compute(dout, q, k, v, dlse=dlse, **options, **asks(options))
        for got, ref in zip(found, want, strict=True):
            np.testing.assert_allclose(got, ref, rtol=0, atol=1e-8)
        with pytest.raises(
            ValueError, match=r"dlse must have shape \(2, 2, 5\) \(the shape .*got \(2, 2, 1\)"
        ):
            compute(dout, q, k, v, dlse=dlse[..., :1], **options)


ALIKE = {  # one of each kind makes the pairs
    *("scale", "window on the left", "window on the right", "bias of columns", "bias of rows"),
    *("alibi of entries", "block mask of heads", "attn_mask of numbers", "sinks"),
}
GRADIENT_PAIRS = [pair for pair in PAIRS if ALIKE.isdisjoint(pair)]


@pytest.mark.parametrize(
    "names", [*((n,) for n in SINGLE), *GRADIENT_PAIRS, *EVERYTHING], ids=" + ".join
)
def test_gradients_with_options_are_the_central_differences(names, monkeypatch):
    monkeypatch.setattr(reference, "_ROWS", 2)
    for shape in [TINY, (1, 2, 2, 4, 3, 1)] if len(names) == 1 else [(2, 2, 1, 3, 4, 1)]:
        dout, q, k, v = with_output_gradient(shape)
        options = together(names, shape)
        want = central_differences(dout, q, k, v, **options)
        for compute in IN_FLOAT64:
            found = compute(dout, q, k, v, **options, **asks(options))
            for got, ref in zip(found, want, strict=True):
                assert got.dtype == np.float64 and got.shape == ref.shape
                np.testing.assert_allclose(got, ref, rtol=0, atol=1e-8)


def rounded(dout, q, k, v, dtype, kept):
    """O, L and the gradients of one head, each step of `options_to_round` in `dtype`."""
    one = np.dtype(dtype).type
    scale, softcap, inverse_keep = one(0.3), one(1.5), one(1 / (1 - 0.25))
    o = options_to_round(dtype)
    i, j = np.arange(len(q))[:, None], np.arange(len(k))[None, :]
    tanh = np.tanh(scale * (q @ k.T) / softcap)
    S = softcap * tanh
    S = S - o["alibi_slopes"][0] * np.abs(i + len(k) - len(q) - j).astype(dtype)
    S = S + o["bias"]
    S = np.where(j <= i + len(k) - len(q), S, one(-np.inf))
    m = S.max(axis=1, keepdims=True)
    P = np.exp(S - m)
    l = P.sum(axis=1, keepdims=True)
    P = P / l
    dropped = kept * inverse_keep
    dP = dout @ v.T * dropped
    dS = P * (dP - (P * dP).sum(axis=1, keepdims=True))
    dX = dS * (1 - tanh * tanh)
    forward = (P * dropped) @ v, (m + np.log(l))[:, 0]
    return forward, (scale * (dX @ k), scale * (dX.T @ q), (P * dropped).T @ dout, dS)


def options_to_round(dtype):
    bias = np.random.default_rng(2).standard_normal((33, 65)).astype(dtype)
    return dict(
        scale=0.3, softcap=1.5, alibi_slopes=np.array([0.11], dtype), bias=bias, causal=True,
        dropout_p=0.25, seed=4,
    )  # fmt: skip


@pytest.mark.parametrize("dtype, low, high", [("f4", 1e-9, 1e-5), ("f2", 1e-5, 1e-1)])
def test_unfused_rounds_every_step_of_the_options(dtype, low, high):
    dout, q, k, v = (a.astype(dtype) for a in with_output_gradient((1, 1, 1, 33, 65, 16)))
    options = options_to_round(dtype)
    kept = dropout_mask(1, 1, 33, 65, dropout_p=0.25, seed=4)[0, 0]
    forward, backward = rounded(*(a[0, 0] for a in (dout, q, k, v)), dtype, kept)
    got = unfused(q, k, v, dtype=dtype, return_lse=True, **options)
    exact = attention(q, k, v, return_lse=True, **options)
    got += unfused_backward(dout, q, k, v, dtype=dtype, return_dbias=True, **options)
    exact += attention_backward(dout, q, k, v, return_dbias=True, **options)
    for g, w, e in zip(got, forward + backward, exact, strict=True):
        assert g.dtype == w.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(g.reshape(w.shape), w)
        assert low < relative_error(g, e) < high


@pytest.mark.parametrize("compute", ALL_FOUR)
def test_complex_numbers_are_refused(compute):
    given = dict(dout=Q, q=Q, k=K, v=V) if "backward" in compute.__name__ else dict(q=Q, k=K, v=V)
    for name, x in given.items():
        wrong = given | {name: x.astype(np.complex64)}
        with pytest.raises(
            TypeError, match=f"^{name} must be an array of real numbers, got dtype complex64"
        ):
            compute(**wrong)


@pytest.mark.parametrize("compute", [attention_backward, unfused_backward])
def test_shapes_of_gradients_are_checked(compute):
    with pytest.raises(
        ValueError, match=r"dout must have shape \(1, 1, 1, 4\) \(the .*got \(1, 1, 1, 3\)"
    ):
        compute(Q[..., :3], Q, K, V)
    with pytest.raises(ValueError, match="v must have seqlen=8 like k .*got seqlen=7"):
        compute(Q, Q, K, V[:, :, :7])


HIDING = dict(block_mask=np.ones((1, 3), bool), tiles=TILES)


@pytest.mark.parametrize("compute", ALL_FOUR)
@pytest.mark.parametrize(
    "options, error, says",
    [
        (
            {"windo": (1, 1)},
            TypeError,
            r"windo is not an option \(did you mean window\?\); options: alibi_slopes,",
        ),
        (
            {"packed": True},
            TypeError,
            "packed is not an option; options: alibi_slopes, attn_mask, bias,",
        ),
        (
            {"bias": np.ones((1, 8), complex)},
            TypeError,
            "bias must be an array of real numbers, got dtype complex128",
        ),
        (
            {"attn_mask": np.ones((1, 8), complex)},
            TypeError,
            "attn_mask must be an array of real numbers, got dtype complex128",
        ),
        (
            {"alibi_slopes": [1j]},
            TypeError,
            "alibi_slopes must be an array of real numbers, got dtype complex128",
        ),
        (
            {"alibi_slopes": np.ones(2)},
            ValueError,
            r"alibi_slopes must have shape \(1,\) or \(1, 1\), got \(2,\)",
        ),
        ({"seed": -1}, ValueError, r"seed must be an integer from 0 to 2\*\*64 - 1, got -1"),
        ({"seed": 0.5}, TypeError, r"seed must be an integer from 0 to 2\*\*64 - 1, got 0\.5"),
        (
            {"offset": 2**32},
            ValueError,
            r"offset must be an integer from 0 to 2\*\*32 - 1, got 4294967296",
        ),
        (
            {**HIDING, "tiles": None},
            ValueError,
            "block_mask needs tiles, because tiles.Br and tiles.Bc are the size of the blocks;",
        ),
        (
            {**HIDING, "tiles": SimpleNamespace(Br=2, Bc=0)},
            ValueError,
            r"tiles\.Bc must be an integer of at least 1, got 0",
        ),
        (
            {**HIDING, "block_mask": np.ones((1, 3))},
            TypeError,
            "block_mask must be bool, got dtype float64; pass block_mask != 0",
        ),
        (
            {**HIDING, "block_mask": np.ones((1, 4), bool)},
            ValueError,
            r"block_mask must have shape \(1, 3\) \(one value per tile .*got \(1, 4\)",
        ),
        (
            {**HIDING, "block_mask": np.ones((2, 1, 1, 3), bool)},
            ValueError,
            r"block_mask must have shape \(1, 3\) \(one value .*got \(2, 1, 1, 3\)",
        ),
        (
            {**HIDING, "block_mask": np.ones(3, bool)},
            ValueError,
            r"block_mask must have shape \(1, 3\) \(one value per tile of .*got \(3,\)",
        ),
        (
            {**HIDING, "block_mask": np.ones((1,) * 4 + (3,), bool)},
            ValueError,
            r"block_mask must have shape \(1, 3\) \(one value per .*got \(1, 1, 1, 1, 3\)",
        ),
    ],
    ids=str,
)
def test_bad_options_are_refused(compute, options, error, says):
    arrays = (Q, Q, K, V) if compute in (attention_backward, unfused_backward) else (Q, K, V)
    with pytest.raises(error, match=says):
        compute(*arrays, **options)


@pytest.mark.parametrize("compute", ALL_FOUR)
def test_dropout_of_more_heads_than_the_counter_holds_is_refused(compute):
    q = np.zeros((1, 2**16 + 1, 1, 1))
    arrays = (q,) * (4 if compute in (attention_backward, unfused_backward) else 3)
    with pytest.raises(ValueError, match="each be at most 65536 .*got batch 1 and heads 65537"):
        compute(*arrays, dropout_p=0.5)


@pytest.mark.parametrize("compute", [attention_backward, unfused_backward])
def test_the_gradient_of_no_bias_is_refused(compute):
    for options in ({}, {"bias": None}):
        with pytest.raises(ValueError, match="return_dbias must be False without a bias, got True"):
            compute(Q, Q, K, V, return_dbias=True, **options)


def test_relative_error():
    ref = np.array([[3.0, 0.0], [0.0, 4.0]])
    assert relative_error(ref, ref) == 0.0
    assert relative_error(ref + [[0, 0.3], [0.4, 0]], ref) == pytest.approx(0.1)
    assert relative_error(np.zeros(3), np.zeros(3)) == 0.0
    assert relative_error(np.array([0.0, 1e-9]), np.zeros(2)) == np.inf
    both = np.array([-np.inf, 1.0, np.nan])
    assert relative_error(both, both) == 0.0
    for wrong in ([0.0, 1.0, np.nan], [np.inf, 1.0, np.nan], [-np.inf, np.nan, np.nan]):
        assert relative_error(np.array(wrong), both) == np.inf
    assert relative_error(np.array([-np.inf, 1.0, 0.0]), both) == np.inf
    assert relative_error(np.array([-np.inf, 1.5, np.nan]), both) == pytest.approx(0.5)


@pytest.mark.parametrize("compare", [relative_error, worst])
def test_comparing_different_shapes_is_refused(compare):
    with pytest.raises(
        ValueError, match=r"out must have shape \(3,\) \(the shape of ref\), got \(1, 3\)"
    ):
        compare(np.ones((1, 3)), np.ones(3))
    with pytest.raises(
        TypeError, match="ref must be an array of real numbers, got dtype complex128"
    ):
        compare(np.ones(3), np.ones(3, complex))
    with pytest.raises(ValueError, match="empty axis"):
        compare(np.ones((0, 3)), np.ones((0, 3)))


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_numbers_of_numpy_that_a_function_captures_leave_float64(kind):
    """Else NumPy makes scores times a float16 float16, and derivatives by differences are noise."""
    dout, q, k, v = np.random.default_rng(3).standard_normal((4, 1, 1, 9, 8))
    by = kind(1.5)
    found = reference.attention_backward(dout, q, k, v, score_mod=lambda s, b, h, i, j: s * by)
    want = reference.attention_backward(dout, q, k, v, scale=1.5 / math.sqrt(8))
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-8)


# --- e4m3 ------------------------------------------------------------------------------------


def in_e4m3(*shape, seed=0):
    x = np.random.default_rng(seed).standard_normal(shape)
    return x.astype(ml_dtypes.float8_e4m3fn)


def test_numbers_of_e4m3_are_those_of_ml_dtypes():
    bits = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    stored = bits.view(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(dequantize(bits), stored.astype(float), equal_nan=True)
    x = np.concatenate([np.geomspace(2.0**-12, 500, 2000), np.arange(0, 460, 0.5)])
    wanted = np.minimum(x, 448).astype(ml_dtypes.float8_e4m3fn).astype(float)
    assert np.array_equal(reference._to_e4m3(x), wanted)


def test_scales_of_heads_and_of_blocks():
    x = np.ones((2, 3, 130, 16), ml_dtypes.float8_e4m3fn)
    of_heads = np.arange(6.0).reshape(2, 3)
    of_blocks = np.arange(12.0).reshape(2, 3, 2)
    assert (dequantize(x, of_heads) == of_heads[..., None, None]).all()
    made = dequantize(x, of_blocks)
    assert (made[:, :, :128] == of_blocks[..., :1, None]).all()
    assert (made[:, :, 128:] == of_blocks[..., 1:, None]).all()
    with pytest.raises(
        ValueError, match=r"scale must have the shape \(\) or \(2, 3\) or \(2, 3, 2"
    ):
        dequantize(x, np.ones(3))


def test_attention_with_p_in_e4m3_is_a_plain_loop():
    q, k, v = in_e4m3(1, 2, 5, 16), in_e4m3(1, 1, 40, 16, seed=1), in_e4m3(1, 1, 40, 16, seed=2)
    scales = {"q_scale": np.array([[2.0, 0.5]]), "k_scale": 3.0, "v_scale": np.array([[0.25]])}
    for descending in (False, True):
        O, L = attention_e4m3(
            q, k, v, **scales, columns=16, causal=True, descending=descending, return_lse=True
        )
        for h, i in np.ndindex(2, 5):
            s = k[0, 0].astype(float) @ q[0, h, i].astype(float)
            s = s[: i + 36] * scales["q_scale"][0, h] * 3.0 / 4
            m, l, o = -np.inf, 0.0, 0.0
            tiles = [slice(j, min(j + 16, len(s))) for j in range(0, len(s), 16)]
            for tile in reversed(tiles) if descending else tiles:
                new = max(m, s[tile].max())
                p = 256 * np.exp(s[tile] - new)
                l, o = l * np.exp(m - new) + p.sum(), o * np.exp(m - new)
                o = o + p.astype(ml_dtypes.float8_e4m3fn).astype(float) @ v[0, 0, tile].astype(
                    float
                )
                m = new
            np.testing.assert_allclose(O[0, h, i], 0.25 * o / l, rtol=1e-12)
            np.testing.assert_allclose(L[0, h, i], m + np.log(l / 256), rtol=1e-12)
    with pytest.raises(ValueError, match="sinks must not be given"):
        attention_e4m3(q, k, v, sinks=np.zeros(2))
    with pytest.raises(ValueError, match="scores_dtype must be 'float16' or None, got 'float32'"):
        attention_e4m3(q, k, v, scores_dtype="float32")
