"""What ``create_block_mask`` returns: which calls it is for, and copies of it."""

import copy
import pickle
import re
from functools import partial

import numpy as np
import pytest
from backward_helpers import check_gradients, random_gradients
from helpers import check

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices
from fa_numba.host.arrays import HOST
from fa_numba.host.blocks import block_size_of
from fa_numba.integers import ceil_div
from fa_numba.mods.blocks import BlockSize, states_of_tiles
from fa_numba.problem import Problem

TILES = Tiles(16, 16)


def made(mask_mod, batch, heads, seqlen_q, seqlen_k):
    return fa_numba.create_block_mask(mask_mod, batch, heads, seqlen_q, seqlen_k, tiles=TILES)


def planned(mask, q, k, **options):
    """The plan of a call with this mask, whose q and k have these shapes."""
    return fa_numba.plan(q, k, block_mask=mask, tiles=TILES, **options)


# --- sizes -----------------------------------------------------------------------------------


def test_a_mask_is_for_its_numbers_of_rows_and_columns():
    """Block counts alone do not tell 17 columns from 18, of which the last one was never seen."""
    mask = made(lambda b, h, i, j: j != 17, 1, 1, 17, 17)
    assert (mask.seqlen_q, mask.seqlen_k) == (17, 17) and (mask.blocks == 2).all()
    assert str(mask).startswith("(1, 1, 2, 2) blocks of 16 x 16 for 17 rows and 17 columns: ")
    says = (
        r"block_mask must be made for seqlen_q=17 and seqlen_k=18, the sizes of the arrays, got a "
        r"BlockMask for seqlen_q=17 and seqlen_k=17; create a block mask for these sizes with"
    )
    q, k = (np.ones((1, 1, n, 4), np.float32) for n in (17, 18))
    for function in (fa_numba.attention, fa_numba.reference.attention):
        with pytest.raises(ValueError, match=says):
            function(q, k, k, block_mask=mask)
    for passes in ("fwd", "bwd"):
        with pytest.raises(ValueError, match=says):
            planned(mask, q.shape, k.shape, passes=passes)
        for lens in ({}, {"kv_lens": [9]}):
            planned(mask, q.shape, q.shape, passes=passes, **lens)
    with pytest.raises(ValueError, match="seqlen_q=16 and seqlen_k=17, the sizes of the arrays"):
        planned(mask, (1, 1, 16, 4), q.shape, kv_lens=[16])


def test_packed_sequences_may_be_shorter_than_their_mask():
    """Rows and columns count from 0 in each of them."""
    starts = {"cu_seqlens_q": [0, 20, 29], "cu_seqlens_k": [0, 20, 29]}
    x = np.random.default_rng(0).standard_normal((29, 1, 4), np.float32)
    mask = made(lambda b, h, i, j: j <= i, 1, 1, 33, 40)
    want = fa_numba.reference.attention(x, x, x, causal=True, **starts)
    for function in (fa_numba.attention, fa_numba.reference.attention):
        assert abs(function(x, x, x, block_mask=mask, **starts) - want).max() < 1e-5
    counted = planned(mask, x.shape, x.shape, **starts)
    assert counted.block_mask.tolist() == [[[[True, False], [True, True]]]]
    short = made(lambda b, h, i, j: j <= i, 1, 1, 20, 19)
    with pytest.raises(
        ValueError,
        match="seqlen_q=20 or more and seqlen_k=20 or more, the sizes of the longest sequence, got "
        "a BlockMask for seqlen_q=20 and seqlen_k=19; create",
    ):
        planned(short, x.shape, x.shape, **starts)


def test_a_mask_may_be_for_more_columns_than_the_pages_have():
    """Which an allocator adds, when a sequence grows."""
    pages, table = (4, 1, 16, 4), {"block_table": (1, 2)}
    for n in (32, 48):
        planned(made(lambda b, h, i, j: j >= i, 1, 1, 1, n), (1, 1, 1, 4), pages, **table)
    for rows, columns in ((1, 31), (2, 48)):
        mask = made(lambda b, h, i, j: j >= i, 1, 1, rows, columns)
        with pytest.raises(ValueError, match="for seqlen_q=1 and seqlen_k=32 or more, the sizes"):
            planned(mask, (1, 1, 1, 4), pages, **table)


# --- heads and batch entries -----------------------------------------------------------------


@pytest.mark.parametrize("name, parameter, shape", [("heads", "h", (1, 2)), ("batch", "b", (2, 1))])
def test_a_function_of_the_head_has_blocks_for_every_head(name, parameter, shape):
    reads = {"b": lambda b, h, i, j: j <= b, "h": lambda b, h, i, j: j <= h}[parameter]
    q = (*shape, 20, 4)
    alike = made(lambda b, h, i, j: j <= i, 1, 1, 20, 20)
    assert alike.reads == ("i", "j") and parameter in made(reads, 1, 1, 20, 20).reads
    for mask in (alike, made(reads, *shape, 20, 20)):
        planned(mask, q, q)
    planned(made(reads, 1, 1, 20, 20), (1, 1, 20, 4), (1, 1, 20, 4))
    says = rf"be made for {name}=2, because its mask_mod \(a lambda .*\) uses {parameter}"
    with pytest.raises(ValueError, match=rf"{says}, got .* {name}=1; pass {name}=2 to create_blo"):
        planned(made(reads, 1, 1, 20, 20), q, q)
    three = [3 if n == 2 else n for n in shape]
    with pytest.raises(
        ValueError, match=rf"made for {name}=2 \(or {name}=1, if .* use {parameter}\)"
    ):
        planned(made(lambda b, h, i, j: j <= i, *three, 20, 20), q, q)


def test_what_a_function_reads():
    """Whatever it calls its parameters."""

    def through_a_name(entry, head, row, column):
        of = head + 1
        return row < of

    assert made(through_a_name, 1, 2, 20, 20).reads == ("h", "i")
    assert made(lambda h, b, _, i: i + b, 1, 2, 20, 20).reads == ("h", "j")


# --- block sizes and tiles -------------------------------------------------------------------


def near(b, h, i, j):
    return (i * 5 - j) % 37 < 9 or abs(i - j) < 4


def states(seen, size):
    """The states of blocks of S, (rows, columns), by their definition."""
    Tr, Tc = (ceil_div(n, s) for n, s in zip(seen.shape, size, strict=True))
    found = np.ones((1, 1, Tr, Tc), np.uint8)
    for i, j in np.ndindex(Tr, Tc):
        part = seen[i * size.Br :, j * size.Bc :][: size.Br, : size.Bc]
        found[0, 0, i, j] = 2 * part.all() or part.any()
    return found


@pytest.mark.parametrize("size", [(16, 16), (8, 48), (64, 32), (24, 40)])
def test_tiles_get_the_state_of_the_blocks_that_they_overlap(size):
    """A state that a tile gets is right for every size, and exact for tiles of complete blocks."""
    sizes = (150, 130)
    seen = np.tril(np.ones(sizes, bool), 9)
    seen[100:, :50] = False
    size = BlockSize(*size)
    blocks = states(seen, size)
    for tile in (BlockSize(*x) for x in [(16, 16), (64, 32), (192, 112), (48, 80), (8, 16)]):
        found, exact = states_of_tiles(blocks, size, tile, sizes), states(seen, tile)
        assert found.dtype == np.uint8 and found.shape == exact.shape
        assert ((found == 1) | (found == exact)).all()
        if tile.Br % size.Br == tile.Bc % size.Bc == 0:
            assert (found == exact).all()
    assert {0, 1, 2} == set(blocks.flat)


def test_one_mask_trains_at_the_head_dimension_of_128_on_hopper():
    """Forward and backward kernels have tiles of their own there, 128 x 128 and 64 x 128."""
    sizes, shape = (1, 1, 300, 300), (1, 1, 300, 128)
    masks = [fa_numba.create_block_mask(near, *sizes)]
    masks += [fa_numba.create_block_mask(near, *sizes, block_size=n) for n in (64, (128, 32))]
    masks.append(fa_numba.create_block_mask(near, *sizes, tiles=Tiles(128, 128)))
    with devices.planning_for((9, 0), 227 * 1024):
        for passes, rows in (("fwd", 128), ("bwd", 64)):
            how = {"dtype": "float16", "passes": passes}
            without = fa_numba.plan(shape, shape, mask_mod=near, **how)
            for mask in masks:
                plan = fa_numba.plan(shape, shape, block_mask=mask, **how)
                assert (plan.unit, plan.tiles.Br, plan.tiles.Bc) == ("wgmma", rows, 128)
                if mask.tiles is None:
                    assert plan.tiles == without.tiles
                seen = mask.visited_tiles(plan.problem, plan.tiles)
                assert np.array_equal(plan.block_mask, seen) and "block_mask" in str(plan.problem)


def test_kernels_of_other_tiles_than_the_blocks():
    """Held against float64, and against the closed form of the accesses."""
    arrays = random_gradients(1, 1, 1, 33, 40, 4)
    mask = fa_numba.create_block_mask(near, 1, 1, 33, 40, block_size=(24, 40))
    how = {"block_mask": mask, "tiles": Tiles(16, 16)}
    check("emulator", "fa1", *arrays[1:], **how)
    check_gradients("emulator", "fa2", *arrays, **how)


def test_the_block_size_that_nobody_chose():
    """Fine for short sequences; and no more than so many blocks."""
    problem = partial(Problem, heads_q=1, heads_k=1, head_dim=1)
    for batch, longest, size in (
        *((1, 2048, 16), (1, 2049, 32), (1, 4096, 32), (1, 8192, 64), (1, 2**16, 64)),
        *((1, 2**17, 128), (1, 2**20, 128), (65, 2048, 32), (600, 2048, 64), (3000, 1024, 64)),
    ):
        sizes = problem(batch, seqlen_q=longest, seqlen_k=longest)
        assert block_size_of("block_size", "auto", sizes) == (size, size)
    sizes = problem(1, seqlen_q=1, seqlen_k=2**20)
    assert block_size_of("block_size", "auto", sizes) == (64, 64)


def test_block_sizes_that_are_refused():
    refused = (0, 1025, 16.0, True, (16,), (16, 16, 16), "32", None, (16, "auto"))
    for given in (*refused, np.array([16, 16]), np.array("auto")):
        with pytest.raises(
            ValueError, match="block_size must be 'auto', an integer from 1 to 1024, or two of them"
        ):
            fa_numba.create_block_mask(near, 1, 1, 20, 20, block_size=given)
    with pytest.raises(
        ValueError, match="block_size must be 'auto' if tiles is given, .* got 16; leave"
    ):
        fa_numba.create_block_mask(near, 1, 1, 20, 20, block_size=16, tiles=TILES)
    with pytest.raises(ValueError, match="tiles.Br and tiles.Bc must each be an integer from 1 to"):
        fa_numba.create_block_mask(near, 1, 1, 20, 20, tiles=Tiles(2048, 64))


# --- copies ----------------------------------------------------------------------------------

REACH, ROWS = 9, np.arange(40, dtype=np.int32) // 7


def in_a_document(b, h, i, j):
    return ROWS[i] == ROWS[j] or abs(i - j) % REACH == h


def test_a_pickled_mask_is_the_mask(monkeypatch):
    """With the values that its function had, and for tiles that nobody asked for before."""
    mask = fa_numba.create_block_mask(in_a_document, 1, 2, 40, 40, block_size=(24, 16))
    monkeypatch.setitem(globals(), "REACH", 3)
    found = pickle.loads(pickle.dumps(mask))
    assert repr(found) == repr(mask) and str(found) == str(mask) and found.reads == mask.reads
    for size in (mask.block_size, BlockSize(16, 32)):
        for name, want in mask.lists.at(HOST, size).items():
            assert np.array_equal(found.lists.at(HOST, size)[name].host, want.host)
    q = np.random.default_rng(0).standard_normal((1, 2, 40, 4), np.float32)
    one, other = (fa_numba.reference.attention(q, q, q, block_mask=x) for x in (mask, found))
    assert np.array_equal(one, other)
    changed = pickle.dumps(mask)
    monkeypatch.setitem(globals(), "in_a_document", near)
    with pytest.raises(ValueError, match="mask_mod must be the function with .* got near .* which"):
        pickle.loads(changed)
    with pytest.raises(TypeError, match="to pickle a BlockMask, .*, got in_a_document"):
        pickle.dumps(mask)


def test_a_mask_of_a_lambda_is_copied_but_not_pickled():
    mask = made(lambda b, h, i, j: j <= i, 1, 1, 20, 20)
    assert copy.deepcopy({"mask": mask})["mask"] is mask and copy.copy(mask) is mask
    says = r"must be defined by def at the top level of a module, got a lambda \(test_block"
    with pytest.raises(TypeError, match=says):
        pickle.dumps(mask)


def test_a_mask_shows_its_sizes_in_a_line_and_never_changes():
    mask = fa_numba.create_block_mask(in_a_document, 1, 2, 40, 30, block_size=16)
    sizes = r"batch=1, heads=2, seqlen_q=40, seqlen_k=30, blocks of 16 x 16"
    assert re.fullmatch(rf"BlockMask\(in_a_document \(.*, line \d+\), {sizes}\)", repr(mask))
    assert not mask.blocks.flags.writeable
    assert ", blocks of 16 x 16, tiles=Tiles(Br=16," in repr(made(near, 1, 1, 20, 20))


@pytest.mark.parametrize("options", [{}, {"prefix_k": (2, 32, 16)}, {"block_mask": 1}])
def test_a_pickled_plan_is_the_plan(options):
    """For the GPU that it was made for."""
    shape = (2, 2, 40, 16)
    if "block_mask" in options:
        options = {
            "block_mask": fa_numba.create_block_mask(lambda b, h, i, j: j <= i, 1, 1, 40, 40)
        }
    with devices.planning_for((9, 0), 227 * 1024, 7):
        plan = fa_numba.plan(shape, shape, dtype="float16", **options)
    for found in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert found == plan and str(found) == str(plan) and found.asked == plan.asked
        assert found.launched == plan.launched and found.request.multiprocessors == 7
