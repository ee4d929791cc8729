"""Problems with options: the arrays, the options, and what a mask lets each row see."""

from __future__ import annotations

import math

import numpy as np
from backward_helpers import random_gradients
from hypothesis import strategies as st

from fa_numba import Tiles

# --- one option each, its values drawn from `rng` for a problem (B, Hq, Hk, Nq, Nk, d) ---------


def draw_causal(rng, shape, tiles):
    return {"causal": True}


def draw_window(rng, shape, tiles):
    """Either side open now and then, some windows wider than the sequences."""
    longest = max(shape[3:5])
    sides = rng.integers(-1, [longest + 2, longest // 2 + 1])
    return {"window": tuple(sides.tolist())}


def draw_softcap(rng, shape, tiles):
    return {"softcap": float(rng.choice([0.5, 1.0, 3.0]))}


def draw_score_mod(rng, shape, tiles):
    """Of an array, of numbers and math, or another one for some elements."""
    _, Hq, _, Nq, Nk, _ = shape
    table = rng.standard_normal((Hq, Nq + Nk), np.float32)
    slope, cap = rng.uniform([-1, 1], [1, 4]).tolist()
    of = [
        lambda s, b, h, i, j: s + table[h, j - i + Nq],
        lambda s, b, h, i, j: cap * math.tanh(s / cap) + b - slope * abs(i - j),
        lambda s, b, h, i, j: s * slope if (i + j) % 3 else max(s, -cap) + 1,
    ]
    return {"score_mod": of[rng.integers(3)]}


def draw_mask_mod(rng, shape, tiles):
    """Of documents, of distances, or at random; rows that see nothing among them."""
    B, _, _, Nq, Nk, _ = shape
    document = np.sort(rng.integers(0, 3, (B, max(Nq, Nk)), np.int32))
    seen, step = rng.random((Nq, Nk)) < 0.6, int(rng.integers(3))
    of = [
        lambda b, h, i, j: document[b, i] == document[b, j],
        lambda b, h, i, j: (i - j) % 3 != step and i + h > 0,
        lambda b, h, i, j: seen[i, j],
    ]
    return {"mask_mod": of[rng.integers(3)]}


def draw_bias(rng, shape, tiles):
    """Any axes broadcast, leading ones left out; sometimes of -inf here and there."""
    B, Hq, _, Nq, Nk, _ = shape
    whole = [n if rng.random() < 0.7 else 1 for n in (B, Hq, Nq, Nk)]
    first = rng.integers(0, 3)
    bias = rng.standard_normal(whole[first:] if whole[:first] == [1] * first else whole)
    if rng.random() < 0.3:
        bias[rng.random(bias.shape) < 0.3] = -np.inf
    return {"bias": bias.astype(np.float32)}


def draw_alibi(rng, shape, tiles):
    B, Hq, *_ = shape
    slopes = rng.uniform(0, 0.5, (Hq,) if rng.random() < 0.5 else (B, Hq))
    return {"alibi_slopes": slopes.astype(np.float32)}


def draw_sinks(rng, shape, tiles):
    """Sometimes none, -inf, in a head."""
    sinks = rng.uniform(-3, 4, shape[1])
    if rng.random() < 0.3:
        sinks[rng.integers(shape[1])] = -np.inf
    return {"sinks": sinks.astype(np.float32)}


def draw_lengths(rng, shape, tiles):
    """Of queries, of keys, or of both; 0 and full among them."""
    B, _, _, Nq, Nk, _ = shape
    which = rng.integers(0, 3)
    options = {}
    if which != 1:
        options["q_lens"] = np.minimum(rng.integers(0, Nq + 3, B), Nq).astype(np.int32)
    if which != 0:
        options["kv_lens"] = np.minimum(rng.integers(0, Nk + 3, B), Nk).astype(np.int32)
    return options


def draw_packed(rng, shape, tiles):
    """Sequences of up to Nq and Nk, one of them of each, others empty now and then."""
    B, _, _, Nq, Nk, _ = shape
    q_lens, kv_lens = rng.integers(0, [[Nq + 1], [Nk + 1]], (2, B))
    q_lens[rng.integers(B)], kv_lens[rng.integers(B)] = Nq, Nk
    return cumulative(q_lens, kv_lens)


def draw_block_mask(rng, shape, tiles):
    B, Hq, _, Nq, Nk, _ = shape
    lead = [(), (Hq,), (1,), (B, 1), (B, Hq)][rng.integers(5)]
    return {"block_mask": rng.random((*lead, *blocks(shape, tiles))) < 0.6}


def draw_dropout(rng, shape, tiles):
    p = float(rng.choice([0.1, 0.5, 0.9]))
    seed, offset = int(rng.integers(2**63)) * 2, int(rng.integers(2**32))
    return {"dropout_p": p, "seed": seed, "offset": offset}


DRAWS = {
    name.removeprefix("draw_"): draw
    for name, draw in list(globals().items())
    if name.startswith("draw_")
}


SMALL = Tiles(8, 16)
# Any options at once, but for two ways to tell lengths.
names_of_options = st.sets(st.sampled_from(sorted(DRAWS))).filter(
    lambda names: not {"lengths", "packed"} <= names
)


def drawn(names, shape, tiles=SMALL, seed=0):
    """The options `names`, and tiles."""
    options = {"tiles": tiles}
    for name in sorted(names):
        options |= DRAWS[name](np.random.default_rng([seed, *map(ord, name)]), shape, tiles)
    return options


# --- sizes -----------------------------------------------------------------------------------


def blocks(shape, tiles):
    """(Tr, Tc)."""
    return -(-shape[3] // tiles.Br), -(-shape[4] // tiles.Bc)


def cumulative(q_lens, kv_lens):
    """cu_seqlens of sequences with these lengths."""
    names = ("cu_seqlens_q", "cu_seqlens_k")
    return {
        n: np.cumsum([0, *x], dtype=np.int32) for n, x in zip(names, (q_lens, kv_lens), strict=True)
    }


def lengths(shape, options):
    """(Nq, Nk) of every batch entry."""
    B, _, _, Nq, Nk, _ = shape
    found = []
    for each, packed, longest in (("q_lens", "cu_seqlens_q", Nq), ("kv_lens", "cu_seqlens_k", Nk)):
        if options.get(packed) is not None:
            found.append(np.diff(options[packed]).tolist())
        elif options.get(each) is not None:
            found.append(list(options[each]))
        else:
            found.append([longest] * B)
    return list(zip(*found, strict=True))


def packed(array, lens):
    """(total, heads, ...) of (B, heads, N, ...)."""
    parts = [np.moveaxis(a[:, :n], 0, 1) for a, n in zip(array, lens, strict=True)]
    return np.concatenate(parts)


# --- arrays ----------------------------------------------------------------------------------


def inputs(shape, options, **sizes):
    """dout, q, k, v, and the options with NaN in all that lengths hide; packed if they say so."""
    dout, q, k, v = random_gradients(*shape, **sizes)
    options = dict(options)
    each = lengths(shape, options)
    q_lens, kv_lens = zip(*each, strict=True)
    bias = options.get("bias")
    if bias is not None and bias.ndim == 4:
        options["bias"] = bias = bias.copy()
        for b, (Nq, Nk) in enumerate(each if len(bias) == len(each) else ()):
            if bias.shape[2] > 1:
                bias[b, :, Nq:] = np.nan
            if bias.shape[3] > 1:
                bias[b, :, :, Nk:] = np.nan
    if "cu_seqlens_q" in options:
        return [
            packed(a, n)
            for a, n in zip((dout, q, k, v), (q_lens, q_lens, kv_lens, kv_lens), strict=True)
        ], options
    for b, (Nq, Nk) in enumerate(each):
        for a, n in ((dout, Nq), (q, Nq), (k, Nk), (v, Nk)):
            a[b, :, n:] = np.nan
    return [dout, q, k, v], options


# --- masks -----------------------------------------------------------------------------------


def visible(shape, options):
    """Whether row i sees column j, by the definition: bool (B, Hq, Nq, Nk)."""
    B, Hq, _, Nq, Nk, _ = shape
    seen = np.zeros((B, Hq, Nq, Nk), bool)
    left, right = options.get("window", (-1, -1))
    for b, (nq, nk) in enumerate(lengths(shape, options)):
        away = np.arange(nk) - (np.arange(nq)[:, None] + nk - nq)
        see = np.ones((nq, nk), bool)
        if options.get("causal"):
            see &= away <= 0
        if left >= 0:
            see &= away >= -left
        if right >= 0:
            see &= away <= right
        seen[b, :, :nq, :nk] = see
        if "mask_mod" in options:
            for h, i, j in np.argwhere(seen[b]):
                seen[b, h, i, j] = options["mask_mod"](b, h, i, j)
    if options.get("block_mask") is not None:
        tiles = options["tiles"]
        mask = np.repeat(np.repeat(options["block_mask"], tiles.Br, axis=-2), tiles.Bc, axis=-1)
        seen &= mask[..., :Nq, :Nk]
    return seen


def visited(shape, options):
    """Rows r_i and columns c_j of the tiles (i, j) of which some element is seen, else 0.

    Two arrays (B, Hq, Tr, Tc).
    """
    tiles, (Tr, Tc) = options["tiles"], blocks(shape, options["tiles"])
    seen = np.zeros((*shape[:2], Tr * tiles.Br, Tc * tiles.Bc), bool)
    seen[:, :, : shape[3], : shape[4]] = visible(shape, options)
    any_seen = seen.reshape(*shape[:2], Tr, tiles.Br, Tc, tiles.Bc).any(axis=(3, 5))
    rows, columns = (np.zeros((shape[0], 1, n), int) for n in (Tr, Tc))
    for b, (nq, nk) in enumerate(lengths(shape, options)):
        rows[b, 0] = np.clip(nq - np.arange(Tr) * tiles.Br, 0, tiles.Br)
        columns[b, 0] = np.clip(nk - np.arange(Tc) * tiles.Bc, 0, tiles.Bc)
    return any_seen * rows[..., None], any_seen * columns[..., None, :]
