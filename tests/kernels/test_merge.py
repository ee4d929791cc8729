"""Attention over parts of the columns, merged: values, gradients, counts, refusals, kept calls."""

import numpy as np
import pytest
from stand_in_device import on_gpu

import fa_numba
from fa_numba import device as devices
from fa_numba import reference

CASES = [
    # parts, head dimension, dtype, layout, elements a thread
    (2, 16, "float32", None, 8),
    (3, 16, "float16", "bhnd", 8),
    (5, 24, "float16", "bnhd", 8),
    (4, 20, "float16", "packed", 1),
    (3, 37, "float32", "packed", 1),
]
ORDER = {"bnhd": (0, 2, 1, 3), "packed": (1, 0, 2)}


def parts_of(parts, d, dtype, layout):
    """Outputs and their L, and gradients of O and L; rows that some parts, and none, have seen."""
    rng, (B, H, N) = np.random.default_rng([parts, d]), (1 if layout == "packed" else 2, 3, 45)
    shapes = [(parts, B, H, N, d), (parts, B, H, N), (B, H, N, d), (B, H, N)]
    outputs, lses, dout, dlse = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    lses *= 10
    for n in range(parts):
        lses[n, 0, 1, n : n + 2] = -np.inf
    lses[:, 0, 2, 7], dlse[0, 2, 7] = -np.inf, np.nan
    outputs[lses == -np.inf] = 0

    def seen(x, axes):
        x = x.astype(dtype) if axes == 4 else x
        x = x[0] if layout == "packed" else x
        order = ORDER.get(layout)
        return x if order is None or axes == 3 else x.transpose(order)

    rows = [seen(x, 3) for x in lses], seen(dlse, 3)
    return [seen(x, 4) for x in outputs], rows[0], seen(dout, 4), rows[1]


def said(layout):
    return {} if layout in (None, "packed") else {"layout": layout}


def heads_first(x, layout):
    """In float64."""
    return np.asarray(x, np.float64).transpose(np.argsort(ORDER.get(layout, range(x.ndim))))


def assert_within(name, got, want, bound):
    off = np.abs(got - want) - bound
    assert got.shape == want.shape and (off <= 0).all(), (name, off.max())


def weights_of(lses):
    lses = np.array(lses, np.float64)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(lses).sum(0))
    return np.where(lse == -np.inf, 0, np.exp(lses - np.where(lse == -np.inf, 0, lse))), lse


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c[:-1])))
def test_parts_become_the_whole(device, case):
    parts, _, dtype, layout, width = case
    outputs, lses, *_ = parts_of(*case[:-1])
    weights, want_lse = weights_of(lses)
    x = np.array([heads_first(o, layout) for o in outputs])
    want = (weights[..., None] * x).sum(0)
    with devices.using(device), fa_numba.count_accesses() as counts:
        out, lse = fa_numba.merge(outputs, lses, **said(layout))
    assert (out.shape, out.dtype) == (outputs[0].shape, dtype) and lse.dtype == np.float32
    # Weights are exponentials of differences, exact to some roundings of L, in each step.
    rounding = 2.0**-11 if dtype == "float16" else 2.0**-24
    bound = rounding * np.abs(want) + parts * 2.0**-19 * np.abs(x).max(0)
    assert_within("O", heads_first(out, layout), want, bound)
    np.testing.assert_allclose(lse, want_lse, rtol=parts * 2.0**-22, atol=parts * 2.0**-22)
    if device == "emulator":
        n, rows, steps = want.size, lse.size, parts - 1
        stored = {"O": steps * n, "L": steps * rows}
        loads = {"X": steps * n, "Y": steps * n}
        loads |= {"LX": steps * n // width, "LY": steps * n // width}
        assert (dict(counts.loads), dict(counts.stores)) == (loads, stored)


@pytest.mark.parametrize("with_dlse", [True, False], ids=["dlse", "no dlse"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c[:-1])))
def test_gradients_are_the_central_differences(device, case, with_dlse):
    parts, d, dtype, layout, width = case
    outputs, lses, dout, dlse = parts_of(*case[:-1])
    if not with_dlse:
        dlse = None
    given = (dout, outputs, lses, *fa_numba.merge(outputs, lses, **said(layout)))
    with devices.using(device), fa_numba.count_accesses() as counts:
        douts, dlses = fa_numba.merge_backward(*given, dlse=dlse, **said(layout))

    x = np.array([heads_first(o, layout) for o in outputs])
    dO = heads_first(dout, layout)
    L = np.array(lses, np.float64)

    def loss(outputs, lses):
        """Of each row by itself."""
        weights, lse = weights_of(lses)
        found = (dO * (weights[..., None] * outputs).sum(0)).sum(-1)
        return found if dlse is None else found + np.where(lse == -np.inf, 0, dlse * lse)

    rounding, step = 2.0**-11 if dtype == "float16" else 2.0**-24, 1e-6
    weights, _ = weights_of(lses)
    for n in range(parts):
        want = weights[n][..., None] * dO  # O is linear in a part's
        bound = rounding * np.abs(want) + 2.0**-18 * np.abs(dO)
        bound += 2.0**-25 * (dtype == "float16")  # subnormal
        assert_within(f"douts[{n}]", heads_first(douts[n], layout), want, bound)
        up, down = L.copy(), L.copy()
        up[n], down[n] = L[n] + step, L[n] - step
        with np.errstate(invalid="ignore"):
            want = (loss(x, up) - loss(x, down)) / (2 * step)
        want = np.where(L[n] == -np.inf, 0, want)
        sizes = (np.abs(dO) * (np.abs(x[n]) + 2 * np.abs(x).max(0))).sum(-1)
        sizes += 0 if dlse is None else np.abs(np.nan_to_num(dlse))
        assert_within(f"dlses[{n}]", dlses[n], want, (rounding + 2.0**-18) * sizes + 1e-8)
    if device == "emulator":
        n, rows = dO.size, L[0].size
        threads = min(32, 1 << (d // width - 1).bit_length())
        seen = threads * (L > -np.inf).sum()
        loads = {name: parts * n for name in ("dO", "O", "Y")}
        loads |= {"LY": parts * rows * threads, "L": seen} | (
            {"dL": seen // threads} if with_dlse else {}
        )
        assert dict(counts.loads) == loads
        assert dict(counts.stores) == {"dY": parts * n, "dLY": parts * rows}


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c[:-1])))
def test_rows_that_a_part_has_not_seen_may_be_nan(device, case):
    """As another library leaves them: 0, and then NaN, give the same results."""
    *sizes, layout, _ = case
    outputs, lses, dout, dlse = parts_of(*sizes, layout)
    results = []
    with devices.using(device):
        for _ in range(2):
            whole = fa_numba.merge(outputs, lses, **said(layout))
            douts, dlses = fa_numba.merge_backward(
                dout, outputs, lses, *whole, dlse=dlse, **said(layout)
            )
            results.append([*whole, *douts, *dlses])
            for x, L in zip(outputs, lses, strict=True):
                x.transpose(np.argsort(ORDER.get(layout, range(x.ndim))))[L == -np.inf] = np.nan
    assert np.isnan(outputs[0].astype("f4")).any()
    for zeros, nans in zip(*results, strict=True):
        np.testing.assert_array_equal(zeros, nans)


def test_parts_of_attention_are_attention_with_its_gradients():
    """Causal, where the first rows see nothing of the last part."""
    q, k, v, dout = np.random.default_rng(1).standard_normal((4, 1, 2, 40, 8)).astype(np.float32)
    cut = slice(0, 17), slice(17, 40)
    masks = {"window": (-1, 23)}, {"causal": True}  # about the bottom right of each part
    parts = [
        fa_numba.attention(q, k[:, :, s], v[:, :, s], return_lse=True, **mask)
        for s, mask in zip(cut, masks, strict=True)
    ]
    outputs, lses = zip(*parts, strict=True)
    out, lse = fa_numba.merge(outputs, lses)
    want, want_lse = reference.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)
    douts, dlses = fa_numba.merge_backward(dout, outputs, lses, out, lse)
    exact = reference.attention_backward(dout, q, k, v, causal=True)
    found = [
        fa_numba.attention_backward(do, q, k[:, :, s], v[:, :, s], o, l, dlse=dl, **mask)
        for do, dl, o, l, s, mask in zip(douts, dlses, outputs, lses, cut, masks, strict=True)
    ]
    dq, dk, dv = zip(*found, strict=True)
    whole = sum(dq), np.concatenate(dk, axis=2), np.concatenate(dv, axis=2)
    for got, want in zip(whole, exact, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_what_does_not_fit_is_refused():
    outputs, lses, dout, dlse = parts_of(2, 16, "float32", None)
    for given, error, says in (
        (
            (outputs[0], lses),
            TypeError,
            "outputs must be a list or tuple of arrays, got an ndarray",
        ),
        (
            (outputs[:1], lses[:1]),
            ValueError,
            "outputs and lses must contain .* two or more, got 1 and 1",
        ),
        ((outputs, lses[:1]), ValueError, "outputs and lses must contain .*got 2 and 1"),
        (([outputs[0], outputs[1][:, :2]], lses), ValueError, r"outputs\[1\] must have shape"),
        ((outputs, [lses[0], lses[1][:, :2]]), ValueError, r"lses\[1\] must have shape"),
        (
            ([outputs[0], outputs[1].astype("f2")], lses),
            TypeError,
            r"outputs\[1\] must have the dtype of outputs\[0\]",
        ),
        (
            (outputs, [x.astype("f8") for x in lses]),
            TypeError,
            r"lses\[0\] must be float32, got float64",
        ),
        (
            ([x[0, 0] for x in outputs], lses),
            ValueError,
            r"outputs\[0\] must have .*got shape \(45, 16\)",
        ),
    ):
        with pytest.raises(error, match=says):
            fa_numba.merge(*given)
    with pytest.raises(ValueError, match=r"outputs\[0\] must have .*got shape \(3, 45, 16\)"):
        fa_numba.merge([x[0] for x in outputs], lses, layout="bhnd")
    many = np.broadcast_to(np.float32(0), (1, 1, 2**24, 8))
    with pytest.raises(
        ValueError, match=r"launch over outputs\[0\], with .* the emulator up to .* limit of"
    ):
        fa_numba.merge([many] * 2, [many[..., 0]] * 2)
    with pytest.raises(ValueError, match="layout must be .*got 'nhd'"):
        fa_numba.merge(outputs, lses, layout="nhd")
    out, lse = fa_numba.merge(outputs, lses)
    with pytest.raises(ValueError, match="dlse must have shape"):
        fa_numba.merge_backward(dout, outputs, lses, out, lse, dlse=dlse[..., :3])
    with pytest.raises(ValueError, match="dout must have shape"):
        fa_numba.merge_backward(dout[..., :3], outputs, lses, out, lse)


def test_parts_may_begin_anywhere():
    """At no multiple of 16 bytes either."""
    outputs, lses, *_ = parts_of(2, 16, "float32", None)
    want = fa_numba.merge(outputs, lses)

    def shifted(x):
        return np.frombuffer(bytes(4) + x.tobytes(), x.dtype, offset=4).reshape(x.shape)

    for x in (outputs[0], outputs[1]):
        assert x.ctypes.data % 16 == 0 != shifted(x).ctypes.data % 16
    for given in ([shifted(outputs[0]), outputs[1]], [outputs[0], shifted(outputs[1])]):
        for got, exact in zip(fa_numba.merge(given, lses), want, strict=True):
            np.testing.assert_allclose(got, exact, rtol=1e-6)


def test_a_kept_call_is_of_one_layout(gpu, kept):
    """Of as many heads as rows both layouts have one shape."""
    outputs, lses, *_ = parts_of(2, 16, "float32", None)
    outputs, lses = [x[:, :, :3] for x in outputs], [x[:, :, :3] for x in lses]
    arrays = [[on_gpu(x.copy()) for x in some] for some in (outputs, lses)]
    for layout in ("bhnd", "bnhd"):
        found, _ = fa_numba.merge(*arrays, layout=layout)
        with devices.using("emulator"):
            want, _ = fa_numba.merge(outputs, lses, layout=layout)
        np.testing.assert_array_equal(found.values, want)
    assert len(kept) == 2


@pytest.mark.parametrize("parts", [2, 4])
def test_a_call_on_a_gpu_is_kept_and_made_again_with_other_arrays(gpu, kept, parts):
    for seed in range(2):
        outputs, lses, dout, dlse = parts_of(parts, 16, "float16", None)
        outputs = [np.roll(x, seed) for x in outputs]
        arrays = [[on_gpu(x) for x in some] for some in (outputs, lses)]
        out, lse = fa_numba.merge(*arrays)
        weights, want_lse = weights_of(lses)
        want = (weights[..., None] * np.array(outputs)).sum(0)
        np.testing.assert_allclose(out.values, want, atol=4e-3)
        np.testing.assert_allclose(lse.values, want_lse, atol=1e-5)
        fa_numba.merge_backward(on_gpu(dout), *arrays, out, lse, dlse=on_gpu(dlse))
    assert len(kept) == 2
