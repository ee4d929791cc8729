"""Blocks that share a column tile backward (`group_splits`): gradients, counts, choice."""

import numpy as np
import pytest
from backward_helpers import check_gradients, half_gradients

import fa_numba
from fa_numba import bounds, io_model
from fa_numba import device as devices

UNIT = {"unit": "wgmma"}
H200 = bounds.DEVICES["H200"]
# Two query heads a block, or one; a half or a third of one's rows.
CASES = [
    ("fa2", (1, 4, 1, 37, 67, 64), {"group_splits": 2}),
    ("fa2-deterministic", (1, 4, 2, 61, 133, 40), {"group_splits": 2, "causal": True}),
    ("fa2", (1, 2, 1, 300, 133, 64), {"group_splits": 4, "causal": True}),
    ("fa2", (2, 1, 1, 150, 67, 128), {"group_splits": 3, "q_lens": [150, 70]}),
]


@pytest.mark.parametrize("way, sizes, options", CASES)
def test_gradients_and_counts(way, sizes, options):
    check_gradients("emulator", way, *half_gradients("float16", *sizes), **UNIT, **options)


def planned(group_splits, Hq=8, Hk=2, N=4096, d=128, B=2, gpu=H200, **options):
    facts = {"dtype": "float16", "passes": "bwd", "group_splits": group_splits, **options}
    with gpu.planning() if gpu else devices.using("emulator"):
        return fa_numba.plan((B, Hq, N, d), (B, Hk, N, d), **facts)


def test_the_plan_shows_its_grid_kernels_workspace_and_accesses():
    plain, split = planned(1, N=500), planned(2, N=500)
    names = [k.name for k in plain.kernels]
    assert [k.name for k in split.kernels] == [*names, "round_rows", "round_rows"]
    assert (plain.kernels[1].grid, split.kernels[1].grid) == ((4, 2, 2), (4, 4, 2))
    assert split.kernels[-1].grid == (125, 2, 2)
    assert "group_splits  2 blocks share a column tile" in str(split)
    assert "group_splits" not in str(plain)
    shape = (2, 4, 500, 128)
    assert [x.shape for x in split.workspace if x.name.startswith("parts")] == [shape, shape]
    for plan, splits in ((plain, 1), (split, 2), (planned(4, N=500), 4)):
        want = io_model.workspace("fa2", plan.problem, passes="bwd", group_splits=splits)
        assert plan.workspace_bytes == want
        assert plan.launches[1].arguments["group"] == ("group" if splits == 1 else 4 // splits)
    keys = 2 * 2 * 500 * 128
    (a, b), (c, e) = ((p.accesses.loads, p.accesses.stores) for p in (plain, split))
    assert (c["K"] - a["K"], c["A"] - a["A"], e["dK"] - b["dK"]) == (keys, 4 * keys, keys)
    assert e["dQ"] - b["dQ"] == 2 * keys
    # K, V and the results in 16 bits, the parts in 32.
    assert split.accesses.bytes - plain.accesses.bytes == (2 * 2 + 4 * 4 + 2 * 2 * 4) * keys


@pytest.mark.parametrize(
    "splits, options, error, says",
    [
        (0, {}, ValueError, "group_splits must be an integer of at least 1, or 'auto', got 0"),
        (True, {}, TypeError, "group_splits must be an integer of at least 1, or 'auto', got True"),
        (
            "all",
            {},
            ValueError,
            "group_splits must be an integer of at least 1, or 'auto', got 'all'",
        ),
        (
            3,
            {},
            ValueError,
            "group_splits must be 1, 2 or 4, a multiple of 4, or 'auto' with .*got 3",
        ),
        (
            8,
            {"softcap": 2.0},
            ValueError,
            r"group_splits must be at most 4 \(the query heads per K/V head\) or .*got 8",
        ),
        (
            40000,
            {},
            ValueError,
            r"group_splits must be at most 32767 with 2 K/V heads \(an axis .*got 40000",
        ),
        (
            2,
            {"unit": "mma"},
            ValueError,
            "group_splits must be 1 or 'auto' with algorithm 'fa2' and a .*got 2",
        ),
        (
            2,
            {"d": 136},
            ValueError,
            "group_splits must be 1 or 'auto' .* head_dim of 136 .* got 2;.* of at most 128",
        ),
        (2, {"algorithm": "fa1", **UNIT}, ValueError, "algorithm 'fa1'"),
        (2, {"algorithm": "standard"}, ValueError, "algorithm 'standard'"),
        (2, {"passes": "fwd"}, ValueError, "group_splits must be 'auto' with passes='fwd', got 2"),
    ],
)
def test_splits_that_cannot_be(splits, options, error, says):
    with pytest.raises(error, match=says):
        planned(splits, **options)


def test_calls_refuse_what_plans_do():
    given = [*half_gradients("float16", 1, 2, 1, 3, 5, 64)]
    given += [given[1], np.zeros((1, 2, 3), np.float32)]
    for splits, unit in ((3, "wgmma"), (2, "mma"), (0, "wgmma")):
        with pytest.raises(ValueError, match=f"group_splits must be .*got {splits}"):
            fa_numba.attention_backward(*given, group_splits=splits, unit=unit)
    with pytest.raises(
        TypeError, match="group_splits is not an option .*flash_attention_2_backward takes it"
    ):
        fa_numba.attention_backward(*given, algorithm="fa1", group_splits=2)


def test_auto_takes_the_number_that_ends_first():
    def chosen(*of, **options):
        return planned("auto", *of, **options).group_splits

    # 128 column tiles, 132 resident at once: as long as each other, or the first twice as most.
    for d in (64, 128):
        assert chosen(d=d) == 1 and chosen(d=d, causal=True) == 2
    # 32 tiles of one head, and 8 times as many once every query head has blocks of its own.
    assert chosen(8, 1, B=1) == 4 and chosen(8, 1, 16384, B=1) == 1
    assert chosen(32, 1, 512, B=1) == 32 and chosen(6, 2, 512, B=1) == 12
    # Blocks with a part of a head's rows.
    assert chosen(1, 1, 8192, B=1) == 2 and chosen(1, 1, 8192, B=1, causal=True) == 4
    assert chosen(4, 4, B=1, causal=True) == 2 and chosen(1, 1, 32768, B=1) == 1
    assert chosen(1, 1, B=1, softcap=2.0) == 1 < chosen(1, 1, B=1)
    # The parts of dK and dV grow with columns times heads, and are read and added up.
    assert chosen(16, 4, 2048, B=4, causal=True) == chosen(16, 1, 8192, B=4, causal=True) == 1
    assert chosen(6, 2, 1024, 64, B=4) == 3
    # Enough blocks; a window as long for each tile; nothing to share.
    assert chosen(32, 8, B=8, causal=True) == chosen(window=(256, 0)) == chosen(8, 8, B=1) == 1
    assert chosen(d=136, causal=True) == chosen(causal=True, unit="mma") == 1
    half = {"dtype": "float16", "passes": "bwd", "causal": True}
    with H200.planning():
        by_default = fa_numba.plan((2, 8, 4096, 64), (2, 2, 4096, 64), **half)
    assert by_default.group_splits == 2
    assert chosen(gpu=None, causal=True, **UNIT) == chosen(causal=True, algorithm="fa1") == 1
