"""What ``create_block_mask`` returns: which calls it is for, and copies of it."""

import numpy as np
import pytest

import fa_numba
from fa_numba import Tiles

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
        r"BlockMask for seqlen_q=17 and seqlen_k=17; make a mask for these sizes with create_block"
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


@pytest.mark.parametrize("algorithm", ["standard", "fa1", "fa2"])
def test_packed_sequences_may_be_shorter_than_their_mask(algorithm):
    """Rows and columns count from 0 in each of them."""
    starts = {"cu_seqlens_q": [0, 20, 29], "cu_seqlens_k": [0, 20, 29]}
    x = np.random.default_rng(0).standard_normal((29, 1, 4), np.float32)
    mask = made(lambda b, h, i, j: j <= i, 1, 1, 33, 40)
    for function in (fa_numba.attention, fa_numba.reference.attention):
        own = {} if function is fa_numba.reference.attention else {"algorithm": algorithm}
        want = fa_numba.reference.attention(x, x, x, causal=True, **starts)
        assert abs(function(x, x, x, block_mask=mask, **starts, **own) - want).max() < 1e-5
    # Two of the two row tiles see one and two column tiles.
    counted = planned(mask, x.shape, x.shape, algorithm=algorithm, **starts)
    assert counted.block_mask.tolist() == [[[[True, False], [True, True]]]]
    short = made(lambda b, h, i, j: j <= i, 1, 1, 20, 19)
    with pytest.raises(
        ValueError,
        match="seqlen_q=20 or more and seqlen_k=20 or more, the sizes of the longest sequence, got "
        "a BlockMask for seqlen_q=20 and seqlen_k=19; make",
    ):
        planned(short, x.shape, x.shape, algorithm=algorithm, **starts)


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
