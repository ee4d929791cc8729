"""Keys and values appended to e4m3 pages: each number within half a step, scales of every page."""

import numpy as np
import pytest
from helpers import numpy_dtype
from stand_in_device import aligned, no_calls_kept, no_gpu_but_its_driver
from stand_in_torch import Tensor, no_torch_but_its_names

import fa_numba
from fa_numba import device as devices
from fa_numba.device import linking
from fa_numba.kernels.simt.append_e4m3 import make_append_e4m3

PAGE, D, D_V = 16, 32, 48
TABLE = np.array([[3, 1, 6], [0, 4, 2]], np.int32)


def cache(pages=7, heads=2):
    """Pages with NaN, and scales with NaN: whatever has no row is not read."""
    nan = np.uint8(0x7F)
    stored = [
        np.full((pages, heads, PAGE, d), nan).view(numpy_dtype("float8_e4m3fn")) for d in (D, D_V)
    ]
    return stored, [np.full((pages, heads), np.nan, np.float32) for _ in range(2)]


def rows(batch, count, dtype, seed, size=1.0):
    rng = np.random.default_rng(seed)
    made = [rng.standard_normal((batch, 2, count, d)) * size for d in (D, D_V)]
    return [x.astype(numpy_dtype(dtype)) for x in made]


def assert_cached(stored, scales, expected, lens):
    """``expected``: rows (B, H, N, d) of K and V; all of them lie in the pages, within half a step.

    A scale is the least power of two for the largest number of its page.
    """
    for pages, scale, x in zip(stored, scales, expected, strict=True):
        for b, N in enumerate(lens):
            for first in range(0, N, PAGE):
                page, these = TABLE[b, first // PAGE], slice(first, min(first + PAGE, N))
                want = x[b, :, these].astype(float)
                largest = np.abs(want).max((1, 2))
                power = 2.0 ** np.ceil(np.log2(largest / 448))
                assert np.array_equal(scale[page], power), (page, scale[page], power)
                found = pages[page, :, : want.shape[1]].astype(float) * power[:, None, None]
                least = 2.0**-5 * power[:, None, None]  # below, earlier rows are rounded twice
                error = np.abs(found - want) / np.maximum(np.abs(want), least)
                assert error.max() <= 2.0**-4, (page, error.max())


CASES = [
    # dtype, numbers of rows of each call for the two sequences, sizes of the numbers
    ("float32", [(20, 20), (1, 1), (13, 13)], (1.0, 1.0, 1.0)),
    ("float16", [(5, 3), (30, 7), (1, 0)], (0.1, 20.0, 3.0)),
    ("bfloat16", [(16, 1), (1, 16)], (1.0, 100.0)),
]


@pytest.mark.parametrize(
    "dtype, calls, sizes", CASES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_rows_and_scales(dtype, calls, sizes):
    stored, scales = cache()
    lens, every = [0, 0], [np.zeros((2, 2, 48, d)) for d in (D, D_V)]
    for n, (new, size) in enumerate(zip(calls, sizes, strict=True)):
        given = rows(2, max(new), dtype, n, size)
        for b, count in enumerate(new):
            for x, y in zip(every, given, strict=True):
                x[b, :, lens[b] : lens[b] + count] = y[b, :, :count]
        ragged = {} if len(set(new)) == 1 else {"new_lens": new}
        with fa_numba.count_accesses() as counts:
            fa_numba.append_kv(
                *stored, *given, TABLE, lens, k_scale=scales[0], v_scale=scales[1], **ragged
            )
        assert counts.loads["new"] == 2 * 2 * sum(new) * (D + D_V)
        assert {*counts.loads, *counts.stores} <= {"new", "pages", "scales"}
        lens = [x + count for x, count in zip(lens, new, strict=True)]
    assert_cached(stored, scales, every, lens)
    assert np.isnan(scales[0][5]).all() and np.isnan(stored[0][5].astype(float)).all()


def test_unaligned_rows_and_the_other_layout():
    stored, scales = cache()
    given = [np.pad(x, 3 * [(0, 0)] + [(1, 0)])[..., 1:] for x in rows(2, 20, "float16", 0)]
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in stored]
    new = [x.swapaxes(1, 2) for x in given]
    how = {"k_scale": scales[0], "v_scale": scales[1]}
    fa_numba.append_kv(*turned, *new, TABLE, [0, 0], layout="bnhd", **how)
    assert_cached([x.swapaxes(1, 2) for x in turned], scales, given, [20, 20])


def test_zeros_infinity_and_nan():
    stored, scales = cache()
    new = [np.zeros((2, 2, 1, d), np.float32) for d in (D, D_V)]
    new[0][0, 0, 0, :3] = np.inf, np.nan, 448.0
    how = {"k_scale": scales[0], "v_scale": scales[1]}
    fa_numba.append_kv(*stored, *new, TABLE, [0, 0], **how)
    found = stored[0][3, 0, 0, :4].astype(float)
    assert np.isnan(found[:2]).all() and found[2:].tolist() == [448.0, 0.0]
    assert scales[0][3].tolist() == [1.0, 2.0**-100] and not stored[1][3, :, 0].astype(float).any()


REFUSED = [
    (
        {"k_scale": None},
        TypeError,
        r"k_scale must be a float32 array of shape \(7, 2\), \(pages, h",
    ),
    (
        {"v_scale": np.zeros((7, 1), np.float32)},
        ValueError,
        r"v_scale must have shape \(7, 2\), got",
    ),
    ({"v_scale": np.zeros((7, 2))}, TypeError, "v_scale must be float32, got float64"),
    ({"v_new": "float32"}, TypeError, "v_new must have the dtype of k_new"),
    ({"same": True}, ValueError, "v_scale must not share memory with k_scale"),
    (
        {"pages": "float16"},
        ValueError,
        "k_scale must be None unless the pages are float8_e4m3fn, got",
    ),
    (
        {"d": 24},
        ValueError,
        r"k_pages must have rows that start at multiples of 16 bytes \(head_dim",
    ),
    (
        {"d": 24, "memory": lambda x: x},  # a row of 24 elements every 32 or 48 bytes
        ValueError,
        r"k_pages must have rows that start at multiples of 16 bytes \(head_dim",
    ),
]


@pytest.mark.parametrize("change, error, says", REFUSED, ids=lambda x: "" if x is None else None)
def test_what_is_refused(change, error, says):
    stored, scales = cache()
    new = rows(2, 1, "float16", 0)
    how = {"k_scale": scales[0], "v_scale": scales[1]}
    if "v_new" in change:
        new = [new[0], new[1].astype(change["v_new"])]
    if change.get("same"):
        how["v_scale"] = scales[0]
    if "pages" in change:
        stored = [np.zeros(x.shape, np.float16) for x in stored]
    if "d" in change:
        memory = change.get("memory", np.copy)
        stored, new = [memory(x[..., :24]) for x in stored], [x[..., :24].copy() for x in new]
    how |= {name: x for name, x in change.items() if name in how}
    with pytest.raises(error, match=says):
        fa_numba.append_kv(*stored, *new, TABLE, [0, 0], **how)


def test_older_gpus_are_refused(monkeypatch):
    stored, scales = cache()
    monkeypatch.setattr(devices, "compute_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match="float8_e4m3fn need .* capability 8.9 or newer, got 8.0"):
        fa_numba.append_kv(
            *stored, *rows(2, 1, "float16", 0), TABLE, [0, 0], k_scale=scales[0], v_scale=scales[1]
        )


UNALIGNED = r"^k_pages must have rows that start at multiples of 16 bytes \(head_dim"


@pytest.mark.parametrize(
    "where, offset",
    [("on the emulator", 8), ("copied to a GPU", 8), ("on a GPU", 0), ("on a GPU", 8)],
)
def test_rows_of_pages_start_at_multiples_of_16_bytes(where, offset):
    """Pages that are copied to a GPU are aligned there. The oldest GPU with e4m3 is taken."""
    how = [((7, 2, PAGE, d), "uint8", 0, offset) for d in (D, D_V)]

    def append(made):
        stored = [made(aligned(*each), "float8_e4m3fn") for each in how]
        new = [made(aligned((2, 2, 1, d))) for d in (D, D_V)]
        scales = [made(aligned((7, 2))) for _ in range(2)]
        given = dict(zip(("k_scale", "v_scale"), scales, strict=True))
        if offset and where != "copied to a GPU":
            with pytest.raises(ValueError, match=UNALIGNED):
                fa_numba.append_kv(*stored, *new, TABLE, [0, 0], **given)
        else:
            fa_numba.append_kv(*stored, *new, TABLE, [0, 0], **given)

    def on_host(values, dtype="float32"):
        return values.view(numpy_dtype(dtype))

    if where == "on the emulator":
        with devices.using("emulator"):
            append(on_host)
        return
    with no_calls_kept(), no_gpu_but_its_driver((8, 9)) as gpu, no_torch_but_its_names(gpu):
        gpu.runs = False
        append(Tensor.of if where == "on a GPU" else on_host)
        assert bool(gpu.launches) is (where == "copied to a GPU" or offset == 0)


def test_scales_on_another_gpu_are_refused():
    with no_calls_kept(), no_gpu_but_its_driver((9, 0), (9, 0)) as gpu, no_torch_but_its_names(gpu):
        pages = [Tensor.of(aligned((7, 2, PAGE, d), "uint8"), "float8_e4m3fn") for d in (D, D_V)]
        new = [Tensor.of(aligned((2, 2, 1, d))) for d in (D, D_V)]
        k_scale, v_scale = (Tensor.of(aligned((7, 2), gpu=n)) for n in (0, 1))
        with pytest.raises(ValueError, match="^v_scale must be on the device of k_pages"):
            fa_numba.append_kv(*pages, *new, TABLE, [0, 0], k_scale=k_scale, v_scale=v_scale)


@pytest.mark.slow
def test_the_kernel_compiles_without_spills():
    ptx, _, log = linking.ptx_and_cubin(make_append_e4m3(128, "float16", 64, True, True), (9, 0))
    assert ".local" not in ptx and ".f64" not in ptx and "0 bytes spill stores" in log
