"""More passes, blocks that share columns or heads, or ranks err no more: sums stay in float32 until
the last part has come, and are rounded to 16 bits once. Passes on unit mma are
mutant_cases'.
"""

import numpy as np
import pytest
from backward_helpers import saved_halves
from helpers import GROWTH, random_inputs
from stand_in_distributed import ranks_of
from stand_in_torch import Tensor, fa_numba_torch
from test_ring import pieces, relative, torch  # noqa: F401

import fa_numba
from fa_numba import Tiles, reference
from fa_numba import device as devices


def made(dtype, *sizes):
    """dout, q, k and v, and all that float64 makes of them: O, dq, dk and dv."""
    shape = 1, *sizes
    inputs = [random_inputs(*shape, seed=1)[0], *random_inputs(*shape)]
    dout, *given = [x.astype(dtype) for x in inputs]
    wide = [x.astype(np.float64) for x in (dout, *given)]
    exact = reference.attention(*wide[1:]), *reference.attention_backward(*wide)
    return [dout, *given], exact


def errors(found, exact):
    return [relative(x, e) for x, e in zip(found, exact, strict=True)]


def assert_no_growth(few, many, dtype="float16"):
    """One more rounding to 16 bits makes an error 1.1 times as large or more."""
    growth = GROWTH if dtype == "float32" else 1.06
    assert (np.array(many) <= growth * np.array(few)).all(), (few, many)


def tiles(Br, *columns):
    return [{"tiles": Tiles(Br, Bc)} for Bc in columns]


def splits(Br, *numbers):
    return [{"tiles": Tiles(Br, 16), "kv_splits": n} for n in numbers]


FORWARD = [
    # unit, algorithm, head dimension, the same columns in few and in many parts
    *(("simt", way, 16, tiles(16, 64, 16)) for way in ("fa1", "fa2")),
    *(("wgmma", way, 64, tiles(64, 64, 16)) for way in ("fa1", "fa2")),
    ("simt", "fa2", 16, splits(16, 1, 16)),
    ("mma", "fa2", 16, splits(16, 1, 16)),
    ("wgmma", "fa2", 64, splits(64, 1, 16)),
]


@pytest.mark.parametrize("unit, algorithm, d, ways", FORWARD)
def test_forward(unit, algorithm, d, ways):
    dtype = "float32" if unit == "simt" else "float16"
    (_, *given), (exact, *_) = made(dtype, 1, 1, 16, 256, d)
    how = {"algorithm": algorithm, "unit": unit}
    with devices.using("emulator"):
        few, many = (errors([fa_numba.attention(*given, **how, **way)], [exact]) for way in ways)
    assert_no_growth(few, many, dtype)


def sizes(*Nk, Nq=64, heads=1, d=64, **options):
    return [((heads, Nq, n, d), options) for n in Nk]


BACKWARD = [
    # unit, algorithm, (heads, Nq, Nk, d) and options of few passes and of many
    *(("simt", way, *[((1, 16, 256, 16), x) for x in tiles(16, 64, 16)]) for way in ("fa1", "fa2")),
    *(
        ("simt", way, *[((1, 256, 64, 16), {"tiles": Tiles(Br, 64)}) for Br in (64, 16)])
        for way in ("fa1", "fa2")
    ),
    # Hopper's tiles are given.
    *(("wgmma", way, *sizes(64, 512)) for way in ("fa1", "fa2")),
    *(("wgmma", way, *sizes(64), *sizes(64, Nq=512)) for way in ("fa1", "fa2")),
    ("wgmma", "fa2", *sizes(64, 512, deterministic=True)),
    ("wgmma", "fa2", *sizes(64, d=136), *sizes(64, Nq=512, d=136)),
    ("wgmma", "fa2", *[sizes(64, heads=4, group_splits=n)[0] for n in (1, 4)]),
]


@pytest.mark.parametrize("unit, algorithm, few, many", BACKWARD)
def test_backward(unit, algorithm, few, many):
    dtype = "float32" if unit == "simt" else "float16"
    found = []
    for (heads, Nq, Nk, d), way in (few, many):
        (dout, *given), (_, *exact) = made(dtype, heads, 1, Nq, Nk, d)
        saved = saved_halves(algorithm, *given)
        how = {"algorithm": algorithm, "unit": unit, **way}
        with devices.using("emulator"):
            gradients = fa_numba.attention_backward(dout, *given, *saved, **how)
        found.append(errors(gradients, exact))
    assert_no_growth(*found, dtype)


# Two ranks round what they add up, once.
@pytest.mark.parametrize("travels", ["kv", "q"])
@pytest.mark.parametrize("ranks, heads", [(3, 4), (8, 1)])
@pytest.mark.in_turn("travels")
def test_ring(torch, travels, ranks, heads):  # noqa: F811
    ft = fa_numba_torch()
    (dout, *given), exact = made("float16", heads, 1 + heads // 4, 48, 48, 16)

    def found(ranks):
        def work(rank):
            held = [pieces(x, rank, ranks, False, 2) for x in (*given, dout)]
            *mine, top = [Tensor.of(x, requires_grad=x is not held[-1]) for x in held]
            out = ft.ring_attention(*mine, travels=travels)
            out.backward(top)
            return [x.values for x in (out, *(x.grad for x in mine))]

        with ranks_of(torch, ranks) as distributed:
            results = distributed.run(work)
        for each in results:
            if isinstance(each, Exception):
                raise each
        return errors([np.concatenate(x, 2) for x in zip(*results, strict=True)], exact)

    assert_no_growth(found(2), found(ranks))
