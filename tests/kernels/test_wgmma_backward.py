"""The backward kernels on Hopper's tensor cores as the emulator runs them: gradients and counts."""

import math
from functools import cache

import numpy as np
import pytest
from backward_helpers import check_gradients, differentiate, half_gradients, saved_halves, with_dlse
from mma_helpers import DTYPES_AND_LAYOUTS, no_bfloat16
from options_helpers import cumulative
from test_plans import on_h200

import fa_numba
from fa_numba import bounds, emulator
from fa_numba.choices import tiles as rules
from fa_numba.host import planning
from fa_numba.tiling import default_wgmma_backward_tiles

UNIT = {"unit": "wgmma"}
BIAS = {
    "bias": np.random.default_rng(3).standard_normal((1, 2, 150, 150), dtype=np.float32),
    "return_dbias": False,
}
OF_BOTH = [
    # B, Hq, Hk, Nq, Nk, d, options
    (2, 1, 1, 1, 1, 64, {}),
    (1, 1, 1, 77, 200, 64, {}),
    (1, 1, 1, 200, 77, 128, {"causal": True}),
    (1, 3, 1, 70, 130, 64, {"causal": True}),
    (1, 1, 1, 300, 300, 64, {"window": (40, 8)}),
    (1, 2, 1, 128, 256, 64, {"causal": True}),  # no ragged edge
]
CASES = [
    *OF_BOTH,
    (1, 2, 1, 70, 150, 128, {"causal": True, "group_splits": 2}),
    (1, 1, 1, 150, 150, 80, {"window": (40, -1)}),
    (1, 1, 1, 70, 60, 40, {}),
    (1, 2, 1, 77, 130, 64, {"causal": True, "alibi_slopes": np.float32([0.7, -0.2])}),
    (1, 2, 1, 150, 150, 128, {"causal": True, **BIAS}),
    (1, 2, 2, 150, 150, 64, BIAS),
    (1, 1, 1, 384, 384, 64, {"causal": True}),  # no ragged edge, in three row tiles
]
FA1_TILES = default_wgmma_backward_tiles(64, algorithm="fa1")
FA1_CASES = [
    *OF_BOTH,
    (1, 2, 1, 70, 150, 128, {"causal": True}),
    (1, 2, 1, 150, 150, 80, {"window": (40, -1)}),
    (1, 1, 1, 70, 260, 40, {}),
    (1, 1, 1, 128, 2, 64, {"block_mask": np.ones((1, 1), bool), "tiles": FA1_TILES}),
    (1, 1, 1, 1, 128, 64, {}),  # whole column tiles, behind which nothing may be loaded
]
# Blocks that share a head
SPLIT_CASES = [(1, 2, 1, 300, 140, 64, x) for x in ({"causal": True}, {"window": (30, 5)})]


@pytest.mark.parametrize(
    "way, B, Hq, Hk, Nq, Nk, d, options",
    [
        (way, *case)
        for way, cases in (("fa2", CASES), ("fa1", FA1_CASES), ("fa1-split", SPLIT_CASES))
        for case in cases
    ],
)
def test_gradients_and_counts(way, B, Hq, Hk, Nq, Nk, d, options):
    inputs = half_gradients("float16", B, Hq, Hk, Nq, Nk, d)
    check_gradients("emulator", way, *inputs, **UNIT, **options)


CAPPED = {"causal": True, "softcap": 2.0, "layout": "transposed"}
# dQ by a kernel of its own; a cap on the scores, either way.
WAYS = [
    # way, dtype, B, Hq, Hk, Nq, Nk, d, options
    ("fa2-deterministic", "float16", 1, 1, 1, 1, 1, 64, {}),
    ("fa2-deterministic", "float16", 1, 1, 1, 1, 128, 64, {}),
    ("fa2-deterministic", "float16", 1, 1, 1, 77, 300, 64, {}),
    ("fa2-deterministic", "float16", 1, 1, 1, 200, 77, 128, {"causal": True}),
    (*("fa2-deterministic", "float16"), 1, 2, 1, 70, 150, 80, {"window": (40, 8), "softcap": 2.0}),
    ("fa2", "float16", 1, 1, 1, 77, 200, 64, {"softcap": 2.0}),
    ("fa2", "float16", 1, 1, 1, 177, 140, 128, {"softcap": 1.5, "causal": True}),
    *(
        pytest.param(way, "bfloat16", 1, 3, 1, 70, 130, 64, CAPPED, marks=no_bfloat16)
        for way in ("fa2", "fa2-deterministic")
    ),
]


LENS = {"causal": True, "q_lens": [80, 90]}
# Rows that see a sink alone
SINKS = LENS | {"sinks": np.float32([1.0, -np.inf])}
DLSE = [
    ("fa2", (2, 2, 1, 90, 70, 64), LENS),
    ("fa2-deterministic", (2, 2, 1, 90, 70, 72), LENS),
    ("fa2", (2, 2, 1, 90, 70, 72), SINKS),
    ("fa2-deterministic", (2, 2, 1, 90, 70, 64), SINKS),
    ("fa1", (1, 2, 1, 200, 130, 64), {"causal": True}),
    ("fa1", (1, 1, 1, 130, 150, 72), {"window": (30, 5)}),
    ("fa1", (1, 2, 1, 70, 50, 64), {"causal": True, "sinks": np.float32([-1.0, 2.0])}),
]


@pytest.mark.parametrize("way, sizes, options", DLSE)
def test_a_gradient_of_lse(way, sizes, options):
    inputs = half_gradients("float16", *sizes)
    check_gradients("emulator", way, *inputs, **UNIT, **with_dlse(inputs, options))


FAR = np.random.default_rng(5).standard_normal((2, 150)).astype(np.float32)
ADDS = {"score_mod": lambda s, b, h, i, j: s + FAR[h, j] * FAR[h, i]}
TURNS = {"score_mod": lambda s, b, h, i, j: s * FAR[h, j] - s * s / 9 if i != j else 2 * s}
ALONE = {"return_dcaptured": False}
# Without an array whose gradient is asked for.
BENDS = {"score_mod": lambda s, b, h, i, j: s - s * s / 9 if i != j else 2 * s}
# Whose tanh is taken of a score at once, hidden ones beside it.
CAPS = {"score_mod": lambda s, b, h, i, j: 2.5 * math.tanh(s / 2.5)}
FUNCTIONS = [
    # way, Hq, Hk, Nq, Nk, d, options
    ("fa2", 2, 1, 77, 150, 64, TURNS | {"mask_mod": lambda b, h, i, j: (i + j) % 7 != h}),
    ("fa2", 2, 1, 70, 150, 128, TURNS | {"softcap": 2.0, "causal": True, "group_splits": 2}),
    ("fa2-deterministic", 1, 1, 70, 130, 72, TURNS | {"q_lens": [50], "kv_lens": [120]}),
    ("fa2", 1, 1, 70, 90, 192, TURNS | {"window": (40, 8)}),
    ("fa2", 2, 1, 77, 140, 64, ALONE | ADDS | {"q_lens": [60], "dropout_p": 0.25, "seed": 3}),
    ("fa2", 1, 1, 77, 90, 72, ADDS | {"softcap": 2.0}),
    ("fa1", 2, 1, 77, 140, 64, TURNS | {"causal": True}),
    ("fa1", 2, 1, 150, 130, 128, ADDS),  # as many rows as are read
    ("fa2", 2, 1, 77, 150, 64, BENDS | {"causal": True}),
    ("fa1", 1, 1, 77, 70, 64, CAPS | {"causal": True}),
    ("fa2", 2, 1, 77, 90, 64, CAPS | {"mask_mod": lambda b, h, i, j: i != j, "kv_lens": [80]}),
    # Another function's derivative
    ("fa2", 1, 1, 70, 40, 64, BENDS | {"score_mod_grad": lambda s, b, h, i, j: 1 - s / 5}),
]


@pytest.mark.parametrize(
    "way, Hq, Hk, Nq, Nk, d, options",
    [pytest.param(*x, marks=pytest.mark.slow) if x[5] == 128 else x for x in FUNCTIONS],
)
def test_slopes_of_a_function_on_the_scores(way, Hq, Hk, Nq, Nk, d, options):
    inputs = half_gradients("float16", 1, Hq, Hk, Nq, Nk, d)
    check_gradients("emulator", way, *inputs, **UNIT, **options)


def test_hoppers_unit_is_taken_for_a_function_on_the_scores():
    how = {"passes": "bwd", "score_mod": TURNS["score_mod"]}
    assert on_h200(4096, 64, **how)[0] == on_h200(4096, 128, **how)[0] == "wgmma"
    assert on_h200(4096, 64, dropout_p=0.5, **how)[0] == "wgmma"
    assert on_h200(4096, 64, dropout_p=0.5, deterministic=True, **how)[0] == "mma"
    assert on_h200(4096, 128, bias=(4096,), **how)[0] == "mma"
    heads = {"passes": "bwd", "score_mod": lambda s, b, h, i, j: s - FAR[h, 0] * abs(i - j)}
    for d, given_, unit in ((64, how, "mma"), (128, how, "wgmma"), (64, heads, "wgmma")):
        assert on_h200(4096, d, return_dcaptured=True, **given_)[0] == unit


def _some_blocks(heads, Nq, Nk, tiles, share):
    """At random, of each head, and of the first none in the first columns."""
    shape = heads, -(-Nq // tiles.Br), -(-Nk // tiles.Bc)
    mask = np.random.default_rng(7).random(shape) < share
    mask[0, :, 0] = False
    return mask


SQUARE, LOW = fa_numba.Tiles(128, 128), fa_numba.Tiles(64, 128)
BLOCKS = [
    # way, Hq, Hk, Nq, Nk, d, tiles, share of blocks, options
    ("fa2", 2, 1, 300, 300, 64, SQUARE, 0.5, {"dropout_p": 0.25, "seed": 3}),
    ("fa2", 3, 1, 192, 260, 128, LOW, 0.3, {"causal": True}),
    ("fa2", 2, 1, 200, 150, 128, LOW, 0.5, {"group_splits": 4}),
    ("fa2", 1, 1, 200, 260, 64, SQUARE, 0.0, {}),
    ("fa2", 3, 3, 300, 150, 8, SQUARE, 0.5, {}),  # by the consumer for masks alone
    ("fa2", 1, 1, 330, 150, 72, LOW, 0.6, {"causal": True}),
    ("fa1", 3, 1, 200, 260, 64, SQUARE, 0.4, {"causal": True}),
    ("fa1", 1, 1, 200, 150, 128, LOW, 0.5, TURNS),
]


@pytest.mark.parametrize("way, Hq, Hk, Nq, Nk, d, tiles, share, options", BLOCKS)
def test_blocks_left_out(way, Hq, Hk, Nq, Nk, d, tiles, share, options):
    inputs = half_gradients("float16", 1, Hq, Hk, Nq, Nk, d)
    mask = _some_blocks(Hq, Nq, Nk, tiles, share)
    check_gradients("emulator", way, *inputs, **UNIT, tiles=tiles, block_mask=mask, **options)


@pytest.mark.parametrize(
    "way, d, Hk, tiles",
    [("fa2", 128, 1, LOW), ("fa1", 64, 1, SQUARE), ("fa2", 8, 2, SQUARE)],
)
def test_full_blocks_are_not_asked(way, d, Hk, tiles):
    """A consumer's columns are a part of the block's."""
    inputs = half_gradients("float16", 1, 2, Hk, 130, 200, d)
    mask = fa_numba.create_block_mask(
        lambda b, h, i, j: i + 120 * h >= j, 1, 2, 130, 200, tiles=tiles
    )
    check_gradients("emulator", way, *inputs, **UNIT, block_mask=mask)
    assert {0, 1, 2} == set(mask.blocks.flat)


def test_block_masks_have_no_kernel_of_dq_alone():
    how = {"passes": "bwd", "dtype": "float16", "block_mask": np.ones((1, 1), bool)}
    for more in ({"deterministic": True}, {"head_dim": 192}):
        shape = (1, 1, 64, more.pop("head_dim", 64))
        with pytest.raises(
            ValueError, match="support the option block_mask where dQ is computed by a kernel"
        ):
            fa_numba.plan(shape, shape, tiles=LOW, **UNIT, **how, **more)


@pytest.mark.parametrize("way, dtype, B, Hq, Hk, Nq, Nk, d, options", WAYS)
def test_a_kernel_of_dq_alone_and_a_cap(way, dtype, B, Hq, Hk, Nq, Nk, d, options):
    inputs = half_gradients(dtype, B, Hq, Hk, Nq, Nk, d)
    check_gradients("emulator", way, *inputs, **UNIT, **options)


LENGTHS = [
    # way, Hq, Hk, q_lens, kv_lens, d, options
    ("fa2", 1, 1, [70, 0, 150], [90, 30, 0], 64, {}),
    ("fa2", 2, 1, [70, 140], None, 128, {"causal": True, "group_splits": 2}),
    ("fa2-deterministic", 1, 1, None, [150, 20], 72, {"window": (30, 9), "softcap": 2.0}),
    ("fa2", 1, 1, [130], [33], 192, {"causal": True}),
]


@pytest.mark.parametrize("way, Hq, Hk, q_lens, kv_lens, d, options", LENGTHS)
def test_lengths(way, Hq, Hk, q_lens, kv_lens, d, options):
    """Padding is NaN, and reaches no gradient."""
    B, given = len(q_lens or kv_lens), {"q_lens": q_lens, "kv_lens": kv_lens, **options}
    inputs = half_gradients("float16", B, Hq, Hk, 150, 150, d)
    given = {name: value for name, value in given.items() if value is not None}
    saved = saved_halves(way, *inputs[1:], **given)
    dout, q, k, v = (x.copy() for x in inputs)
    for arrays, lens in (((dout, q, *saved), q_lens), ((k, v), kv_lens)):
        for b, n in enumerate(lens or ()):
            for array in arrays:
                array[b, :, n:] = np.nan
    found = differentiate("emulator", way, dout, q, k, v, saved_values=saved, **UNIT, **given)
    right = check_gradients("emulator", way, *inputs, **UNIT, **given)
    for a, b in zip(found, right, strict=True):
        assert (a == b).all()


def _packed_gradients(q_lens, kv_lens, Hq, Hk, d):
    """dout, q, k and v of sequences one after the other, and where they begin."""
    dout, q, _, _ = half_gradients("float16", 1, Hq, Hk, sum(q_lens), 1, d)
    _, _, k, v = half_gradients("float16", 1, Hq, Hk, 1, sum(kv_lens), d)
    arrays = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (dout, q, k, v)]
    return arrays, cumulative(q_lens, kv_lens)


SEQUENCES = [
    # way, Hq, Hk, q_lens, kv_lens, d, options
    ("fa2", 1, 1, [130, 0, 5, 70], [70, 64, 0, 140], 64, {"causal": True}),
    ("fa2", 2, 1, [40, 0, 80], [30, 33, 150], 128, {"causal": True, "group_splits": 2}),
    ("fa2-deterministic", 2, 1, [1, 1, 130], [3, 0, 150], 72, {"window": (40, 8)}),
    ("fa2", 1, 1, [77, 40], [33, 100], 136, {"softcap": 2.0}),
]


@pytest.mark.parametrize("way, Hq, Hk, q_lens, kv_lens, d, options", SEQUENCES)
def test_packed_sequences(way, Hq, Hk, q_lens, kv_lens, d, options):
    inputs, starts = _packed_gradients(q_lens, kv_lens, Hq, Hk, d)
    check_gradients("emulator", way, *inputs, **starts, **UNIT, **options)


@pytest.mark.parametrize("d, options", [(64, {}), (64, {"deterministic": True}), (136, {})])
def test_packed_sequences_are_those_alone_whatever_lies_beside_them(d, options):
    """NaN in the sequences around it reaches none of a sequence's gradients."""
    inputs, starts = _packed_gradients([40, 70, 90], [90, 75, 50], 1, 1, d)
    row, column = (slice(*starts[f"cu_seqlens_{x}"][1:3]) for x in "qk")
    places = (row, row, column, column)
    dout, q, k, v = (x[place].swapaxes(0, 1)[None] for x, place in zip(inputs, places, strict=True))
    own = dout, q, k, v, *saved_halves("fa2", q, k, v, causal=True)
    beside = [np.full_like(x, np.nan) for x in (*inputs, inputs[1])]
    for array, alone, place in zip(beside, own[:5], (*places, row), strict=True):
        array[place] = alone[0].swapaxes(0, 1)
    L = np.full((1, 200), np.nan, np.float32)
    L[:, row] = own[5][0]
    facts = {"causal": True, **options, **UNIT}
    with fa_numba.device.using("emulator"):
        found = fa_numba.flash_attention_2_backward(*beside, L, **starts, **facts)
        # Of a length, by the same kernel: without one dS is of P in 16 bits.
        right = fa_numba.flash_attention_2_backward(*own, kv_lens=[75], **facts)
    for a, b, place in zip(found, right, (row, column, column), strict=True):
        assert np.array_equal(a[place].swapaxes(0, 1)[None], b)


# Beyond 128 dimensions dQ has a kernel of its own in any case.
WIDE = [
    ("fa2", "float16", 1, 1, 1, 1, 1, 256, {}),
    ("fa2", "float16", 1, 1, 1, 70, 200, 192, {}),
    ("fa2", "float16", 1, 2, 1, 128, 128, 192, {}),
    ("fa2", "float16", 1, 2, 1, 130, 90, 256, {"causal": True}),
    ("fa2-deterministic", "float16", 1, 1, 1, 150, 77, 136, {"causal": True, "softcap": 1.5}),
    pytest.param(
        *("fa2", "bfloat16", 1, 2, 1, 70, 130, 160, {"softcap": 2.0, "window": (40, 8)}),
        marks=no_bfloat16,
    ),
]


@pytest.mark.parametrize("way, dtype, B, Hq, Hk, Nq, Nk, d, options", WIDE)
def test_head_dimensions_above_128(way, dtype, B, Hq, Hk, Nq, Nk, d, options):
    inputs = half_gradients(dtype, B, Hq, Hk, Nq, Nk, d)
    found = check_gradients("emulator", way, *inputs, **UNIT, **options)
    if d == 192 and Nq < Nk:  # several column tiles
        with emulator.schedule(1):
            again = differentiate("emulator", way, *inputs, **UNIT, **options)
        assert (found.dq == again.dq).all()


DROPPED = [
    # way, B, Hq, Hk, Nq, Nk, d, options
    ("fa2", 1, 1, 1, 1, 1, 64, {}),
    ("fa2", 1, 2, 1, 77, 130, 64, {"causal": True}),
    ("fa2", 1, 2, 1, 70, 200, 128, {"window": (60, 40), "group_splits": 2}),
    ("fa2", 3, 1, 1, 270, 100, 64, {"q_lens": [270, 77, 0], "kv_lens": [99, 100, 90]}),
    ("fa2", 1, 2, 1, 70, 100, 192, {"causal": True}),
    ("fa2-deterministic", 1, 2, 1, 77, 200, 64, {"causal": True}),
    ("fa2-deterministic", 1, 2, 2, 70, 77, 128, {"alibi_slopes": np.float32([0.3, -0.1])}),
]
WORDS = {"dropout_p": 0.4, "seed": 2**63 + 2**40 + 5, "offset": 2**31 + 11}


@pytest.mark.parametrize("way, B, Hq, Hk, Nq, Nk, d, options", DROPPED)
def test_dropout(way, B, Hq, Hk, Nq, Nk, d, options):
    inputs = half_gradients("float16", B, Hq, Hk, Nq, Nk, d)
    check_gradients("emulator", way, *inputs, **UNIT, **WORDS, **options)


@no_bfloat16
def test_dropout_of_packed_sequences_in_bfloat16():
    inputs, starts = _packed_gradients([130, 0, 40], [70, 64, 140], 2, 1, 64)
    inputs = [x.astype("bfloat16") for x in inputs]
    check_gradients("emulator", "fa2", *inputs, **starts, **UNIT, **WORDS, causal=True)


@pytest.mark.parametrize("way, scale", [("fa2", None), ("fa1", -0.3)])
@pytest.mark.parametrize("dtype, layout", DTYPES_AND_LAYOUTS)
def test_dtypes_and_strides(way, scale, dtype, layout):
    inputs = half_gradients(dtype, 1, 2, 2, 70, 150, 64)
    check_gradients("emulator", way, *inputs, causal=True, layout=layout, scale=scale, **UNIT)


def test_tiles_that_cannot_be_are_refused_by_name():
    shape = (1, 1, 300, 128)
    facts = {"algorithm": "fa2", "passes": "bwd", "dtype": "float16", **UNIT}
    for tiles, said in (
        (
            fa_numba.Tiles(128, 128),
            "tiles must be Br=64, Bc=128 in the backward pass on .*got Br=128, Bc=128",
        ),
        (fa_numba.Tiles(64, 128, 128), r"tiles\.threads must be 384, or None, .*got 128"),
        (fa_numba.Tiles(64, 128, stages=2), r"tiles\.stages must be 1 .*got 2"),
    ):
        with pytest.raises(ValueError, match=said):
            fa_numba.plan(shape, shape, tiles=tiles, **facts)
    with pytest.raises(ValueError, match=r"support a head_dim above 128 \(here 136\)"):
        fa_numba.plan((1, 1, 300, 136), (1, 1, 300, 136), **(facts | {"algorithm": "fa1"}))
    with pytest.raises(ValueError, match="tiles must be Br=64, Bc=64 .*got Br=64, Bc=128"):
        fa_numba.plan((1, 1, 300, 136), (1, 1, 300, 136), tiles=fa_numba.Tiles(64, 128), **facts)


def test_what_else_is_added_to_the_scores_goes_to_mma_where_there_is_no_room():
    def auto_unit(d, **options):
        return on_h200(300, d, heads=1, passes="bwd", **options)[0]

    facts = {"algorithm": "fa2", "passes": "bwd", "dtype": "float16", **UNIT}
    for d, options in ((64, {}), (128, {"causal": True, "softcap": 2.0})):
        slopes = {"alibi_slopes": (1,), **options}
        with pytest.raises(
            ValueError, match="unit 'wgmma' does not support the option alibi_slopes"
        ):
            fa_numba.plan((1, 1, 300, d), (1, 1, 300, d), **slopes, **facts)
        assert auto_unit(d, **slopes) == "mma"
    assert auto_unit(128, alibi_slopes=(1,)) == auto_unit(48, alibi_slopes=(1,)) == "wgmma"
    assert auto_unit(64, alibi_slopes=(1,), causal=True) == "wgmma"
    lens = {"q_lens": (200,)}
    for name in ("window", "softcap"):
        crowded = {**lens, name: {"window": (9, 9), "softcap": 2.0}[name]}
        with pytest.raises(ValueError, match=f"q_lens together with {name} at a head_dim of 56"):
            fa_numba.plan((1, 1, 300, 56), (1, 1, 300, 56), **crowded, **facts)
        assert auto_unit(56, **crowded) == "mma" != auto_unit(72, **crowded)
    assert auto_unit(64, **lens) == auto_unit(64, causal=True, **lens) == "wgmma"
    # A bias's gradient, and one with slopes or a cap, on mma.
    for more, said in (
        ({"return_dbias": True}, "'wgmma' does not support the option return_dbias"),
        (
            {"alibi_slopes": (1,)},
            "'wgmma' does not support the option alibi_slopes together with bias",
        ),
        ({"softcap": 2.0}, "'wgmma' does not support the option bias together with softcap"),
    ):
        with pytest.raises(ValueError, match=said):
            fa_numba.plan((1, 1, 300, 80), (1, 1, 300, 80), bias=(1, 300), **more, **facts)
    assert auto_unit(128, bias=(1, 300)) == auto_unit(64, bias=(1, 300)) == "wgmma"


@cache
@pytest.mark.parametrize("way", ["fa1", "fa2", "fa2-deterministic"])
def test_gradients_do_not_depend_on_the_order(way):
    """In no bit, but those of dQ where blocks add to it."""
    # Three row tiles and two column tiles, or the other way round where dQ is made apart.
    sizes = (200, 300) if way == "fa2-deterministic" else (300, 200)
    inputs = half_gradients("float16", 1, 1, 1, *sizes, 64)
    saved = saved_halves("fa2", *inputs[1:], causal=True)
    facts = {"saved_values": saved, "causal": True, **UNIT}
    first = differentiate("emulator", way, *inputs, **facts)
    with emulator.schedule(1):
        second = differentiate("emulator", way, *inputs, **facts)
    for name in ("dk", "dv") if way == "fa2" else ("dq", "dk", "dv"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name
    assert np.allclose(first.dq.astype("f4"), second.dq.astype("f4"), rtol=2e-3, atol=1e-4)


def test_auto_leaves_fa1_backward_to_mma():
    assert on_h200(4096, 64, passes="bwd", algorithm="fa1")[0] == "mma"


def take_chunks(monkeypatch, few, columns):
    """Choose chunks of this many columns in calls of more than `few` K/V heads."""
    known, facts = rules.measured, {"heads of K and V that are few": few}
    facts["columns of a head whose causal tiles go side by side"] = columns
    monkeypatch.setattr(rules, "measured", lambda fact, *of: facts.get(fact, known(fact, *of)))
    uncached = getattr(planning.planned, "__wrapped__", planning.planned)
    monkeypatch.setattr(planning, "planned", uncached)


@pytest.mark.parametrize(
    "d, Hk, few, chunk, grid",
    [
        (64, 2, 8, 1, (2, 1, 3)),
        (192, 2, 0, 2, (4, 1, 3)),
        (64, 4, 0, 2, (8, 1, 2)),
        (128, 4, 0, 2, (8, 1, 2)),
    ],
)
def test_column_tiles_in_chunks(monkeypatch, d, Hk, few, chunk, grid):
    """The same gradients, counted alike: one tile of each head after the other, or two, the last
    chunk with one; of shared heads and, with masks alone, of own ones.
    """
    Nq, Nk = 70 if d == 64 else 33, 300
    take_chunks(monkeypatch, few, chunk * default_wgmma_backward_tiles(d, adds_dq=d <= 128).Bc)
    shapes = (1, 4, Nq, d), (1, Hk, Nk, d)
    plan = fa_numba.plan(*shapes, dtype="float16", passes="bwd", causal=True, **UNIT)
    assert plan.kernels[1].grid == grid
    inputs = half_gradients("float16", 1, 4, Hk, Nq, Nk, d)
    check_gradients("emulator", "fa2", *inputs, **UNIT, causal=True)


@pytest.mark.parametrize("tiles", [3, 4])
def test_chunks_of_whole_tiles_with_a_block_mask(monkeypatch, tiles):
    """The last chunk is full, or its second tile begins where K ends: behind the block mask."""
    take_chunks(monkeypatch, 0, 256)
    own = default_wgmma_backward_tiles(64)
    mask = np.ones((1, tiles), bool)
    mask[0, 1] = False
    inputs = half_gradients("float16", 1, 1, 1, 5, 128 * tiles, 64)
    options = {"block_mask": mask, "tiles": own, **UNIT}
    shapes = [x.shape for x in inputs[1:3]]
    plan = fa_numba.plan(*shapes, dtype="float16", passes="bwd", **options)
    assert plan.kernels[1].grid == (2, 1, 2)
    check_gradients("emulator", "fa2", *inputs, **options)


def test_a_chunk_of_each_head_and_one_with_a_tile_and_nothing():
    """As a plan has them, of more heads than begin at once: four column tiles of each, then one."""
    inputs = half_gradients("float16", 1, 9, 9, 16, 520, 8)
    check_gradients("emulator", "fa2", *inputs, **UNIT, causal=True)


def test_columns_of_unequal_work_are_in_chunks():
    def grid(heads, N, d=64, **options):
        with bounds.DEVICES["H200"].planning():
            plan = fa_numba.plan(*[(2, heads, N, d)] * 2, dtype="float16", passes="bwd", **options)
        return plan.kernels[1].grid

    assert grid(4, 500, causal=True) == (4, 2, 4) and grid(4, 500) == (4, 4, 2)
    assert grid(5, 513, causal=True) == (20, 2, 2) and grid(5, 512, causal=True) == (4, 5, 2)
    for d in (64, 128):  # above 2048 columns, chunks are larger
        assert grid(5, 2048, d, causal=True) == (20, 2, 4)
        assert grid(5, 2049, d, causal=True) == (80, 2, 2)
    assert grid(5, 2048, 192, causal=True) == (32, 5, 2)
    assert grid(5, 2049, 192, causal=True) == (160, 2, 2)
    most = 65535 * 128  # columns of a grid whose last axis has one tile a place
    assert grid(1, most, causal=True) == (1, 2, 65535)
    assert grid(1, most + 1, causal=True) == (2, 2, 32768)
