"""fa_numba.torch where torch is not installed: seeds, options, gradients asked for and given.

The torch is a stand-in with the names that fa_numba asks for. On its GPU nothing runs: the steps of
a pass are compared with those of the same call to ``fa_numba`` itself. On its CPU the emulator
computes, and gradients are held against float64.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from backward_helpers import random_gradients, true_gradients
from helpers import assert_within, truth
from stand_in_device import aligned, no_gpu_but_its_driver
from stand_in_torch import Tensor, fa_numba_torch
from test_merge import parts_of

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices
from fa_numba.host import arrays, blocks

SIZES = B, Hq, Hk, Nq, Nk, d = 2, 2, 1, 5, 9, 8
Q, K = (B, Hq, Nq, d), (B, Hk, Nk, d)
FIRST_SEED = 11  # that the stand-in's generator gives


@pytest.fixture
def gpu(kept):
    with no_gpu_but_its_driver() as found:
        found.runs = False
        yield found


@pytest.fixture
def attention(torch):
    return fa_numba_torch().attention


def tensor(shape, dtype="float32", gradient=True, values=0.5):
    return Tensor.of(aligned(shape, dtype, values), requires_grad=gradient)


def leaves(shapes=(Q, K, K), dtype="float32"):
    return {name: tensor(shape, dtype) for name, shape in zip("qkv", shapes, strict=True)}


# --- options ---------------------------------------------------------------------------------

SWAPPED = ((B, Nq, Hq, d), (B, Nk, Hk, d), (B, Nk, Hk, d))
PACKED = ((7, Hq, d), (9, Hk, d), (9, Hk, d))
# name -> (options, shapes of q, k and v)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "lengths": {"q_lens": (5, 2), "kv_lens": (0, 9)},
    "blocks": {"block_mask": np.array([[True]]), "tiles": Tiles(16, 16)},
    "dropout": {"dropout_p": 0.25, "seed": 2**63 + 7, "offset": 3},
    "layout": {"layout": "bnhd", "causal": True},
    "packed": {"cu_seqlens_q": (0, 3, 7), "cu_seqlens_k": (0, 9, 9)},
    "tiles": {"tiles": Tiles(16, 32)},
    "all": {"causal": True, "softcap": 2.0, "scale": 0.3, "dropout_p": 0.25, "seed": 5,
            "kv_lens": (7, 9), "tiles": Tiles(16, 16)},
}  # fmt: skip
SHAPES = {"layout": SWAPPED, "packed": PACKED}
# Options that are tensors, and whether they need a gradient
ADDED = {
    "nothing": {},
    "bias": {"bias": ((B, Hq, Nq, Nk), True)},
    "bias without a gradient": {"bias": ((Hq, 1, Nk), False)},
    "row of bias": {"bias": ((Nk,), True), "alibi_slopes": ((Hq,), False)},
    "mask": {"attn_mask": ((Nq, Nk), True)},
    "slopes": {"alibi_slopes": ((B, Hq), False)},
    "sinks": {"sinks": ((Hq,), True)},
    "sinks without a gradient, bias": {"sinks": ((Hq,), False), "bias": ((Hq, Nq, Nk), True)},
    "sinks and bias": {"bias": ((Nk,), True), "sinks": ((Hq,), True)},
}


def check_both_passes(gpu, attention, tensors, options, algorithm="fa2", backward=None, **own):
    """Both passes ask the driver what ``fa_numba`` does for the same ``options``; the backward pass
    for those in ``backward`` too, which ``own`` are the words of in ``fa_numba.torch``.
    """
    dout = tensor(tensors["q"].shape, tensors["q"].dtype.name, gradient=False)

    def steps(**made):
        found, _ = gpu.steps(tensors | {"dout": dout} | made)
        gpu.log.clear()
        return found

    wanted = [n for n, x in tensors.items() if x.requires_grad]
    gpu.log.clear()
    out, lse = attention(**tensors, **options, **own, algorithm=algorithm, return_lse=True)
    assert out.requires_grad and lse.requires_grad
    forward = steps(out=out, lse=lse)
    out.backward(dout)
    gradients = {f"d{n}": tensors[n].grad for n in wanted}
    for n in wanted:
        assert gradients[f"d{n}"] is not None and gradients[f"d{n}"].shape == tensors[n].shape
    found = steps(out=out, lse=lse, **gradients)

    given = options | {n: x.detach() for n, x in tensors.items()} | {"algorithm": algorithm}
    first = [given.pop(n) for n in "qkv"]
    out, lse = fa_numba.attention(*first, return_lse=True, **given)
    assert forward == steps(out=out, lse=lse)
    given |= backward or {}
    added = [n for n in ("bias", "attn_mask", "sinks") if n in wanted]
    asks = {"return_dbias": bool({*added} - {"sinks"}), "return_dsinks": "sinks" in added}
    made = fa_numba.attention_backward(dout, *first, out, lse, **asks, **given)
    names = ("q", "k", "v", *added)
    made = {f"d{n}": x for n, x in zip(names, made, strict=True) if n in wanted}
    assert made.keys() == gradients.keys()
    assert found == steps(out=out, lse=lse, **made) and found


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("algorithm", ["standard", "fa1", "fa2"])
def test_both_passes_have_the_options(gpu, attention, algorithm, name):
    tensors = leaves(SHAPES.get(name, (Q, K, K)))
    check_both_passes(gpu, attention, tensors, OPTIONS[name], algorithm)


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("algorithm", ["standard", "fa1", "fa2"])
def test_both_passes_have_the_tensors_among_the_options(gpu, attention, algorithm, name):
    added = {n: tensor(shape, gradient=wants) for n, (shape, wants) in ADDED[name].items()}
    for options in ({}, OPTIONS["all"]):
        check_both_passes(gpu, attention, leaves() | added, options, algorithm)
    for n in "qkv":
        tensors = {m: tensor(x.shape, gradient=m == n) for m, x in leaves().items()}
        check_both_passes(gpu, attention, tensors | added, {"causal": True}, algorithm)


def test_the_backward_pass_has_options_of_its_own(gpu, attention, torch):
    for own, backward in (
        ({"deterministic": True}, {"deterministic": True}),
        ({"deterministic": False}, {}),
        ({"deterministic": None}, {}),
        ({"backward_tiles": Tiles(16, 32)}, {"tiles": Tiles(16, 32)}),
    ):
        check_both_passes(gpu, attention, leaves(), {}, backward=backward, **own)
        tiles = {"tiles": Tiles(32, 32)}
        check_both_passes(gpu, attention, leaves(), tiles, backward=tiles | backward, **own)
    torch.deterministic = True
    strict = {"deterministic": True}
    check_both_passes(gpu, attention, leaves(), {}, backward=strict, deterministic=None)
    check_both_passes(gpu, attention, leaves(), {}, "fa1", deterministic=None)
    check_both_passes(gpu, attention, leaves(), {}, deterministic=False)
    # The gradient of a bias has a fixed order where the bias repeats nothing, or there is none.
    whole, row = {"bias": tensor((B, Hq, Nq, Nk))}, {"bias": tensor((Nk,))}
    fixed = {"bias": tensor((Nk,), gradient=False)}
    for bias in (whole, fixed):
        check_both_passes(gpu, attention, leaves() | bias, {}, backward=strict, deterministic=None)
    check_both_passes(gpu, attention, leaves() | row, {}, deterministic=False)


# --- gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_attention_over_pages_reads_no_integers_back(gpu, attention, torch, packed):
    """Table and lengths stay on the GPU; a gradient, which there is none of, is refused. The starts
    of packed queries are the host's.
    """
    q = tensor((B + 2, Hq, d) if packed else (B, Hq, 1, d))
    pages = [tensor((6, Hk, 16, d), gradient=False) for _ in range(2)]
    starts = {"cu_seqlens_q": np.array([0, *range(3, B + 3)])} if packed else {}
    integers = {"block_table": Tensor.of(aligned((B, 3), np.int32))}
    integers["kv_lens"] = Tensor.of(aligned((B,), np.int32))
    with pytest.raises(
        ValueError, match="^q requires a gradient, which attention with a block_table"
    ):
        attention(q, *pages, **integers, **starts)
    assert not gpu.log
    for torch.grad, given in ((True, q.detach()), (False, q)):
        tensors = {"q": given, "k": pages[0], "v": pages[1], **integers}
        out = attention(given, *pages, **integers, **starts)
        found, _ = gpu.steps(tensors | {"out": out})
        gpu.log.clear()
        out = fa_numba.attention(given, *pages, **integers, **starts)
        assert found == gpu.steps(tensors | {"out": out})[0] and found
        assert not any("host" in str(step[0]) for step in found)
        gpu.log.clear()


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks", "learnt", "nothing"])
def test_one_tensor_that_learns_is_enough(gpu, attention, torch, name):
    """And where none does, or no gradients are wanted, nothing is kept for a backward pass."""
    shapes = {"q": Q, "k": K, "v": K, "bias": (Hq, Nq, Nk), "sinks": (Hq,), "learnt": (Hq,)}
    tensors = {n: tensor(shape, gradient=n == name) for n, shape in shapes.items()}
    learnt, slopes = tensors.pop("learnt"), tensor((Hq,), gradient=name == "q")
    for torch.grad in (True, False):
        if not torch.grad:
            tensors["alibi_slopes"] = slopes
        before, kept = torch.applied, torch.grad and name != "nothing"
        out, lse = attention(
            **tensors, score_mod=lambda s, b, h, i, j: s * learnt[h], return_lse=True
        )
        assert torch.applied - before == kept == out.requires_grad == lse.requires_grad
    attention(*leaves().values(), mask_mod=lambda b, h, i, j: learnt[h] > 0)


def test_without_a_gradient_of_o_nothing_is_launched(gpu, attention):
    """Of L alone there is none."""
    learnt, tensors = tensor((Hq,)), leaves()
    for options in ({}, {"score_mod": lambda s, b, h, i, j: s * learnt[h]}):
        out, lse = attention(**tensors, **options, return_lse=True)
        gpu.log.clear()
        out.backward(None)
        assert not gpu.log and all(x.grad is None for x in (learnt, *tensors.values()))


def test_a_loss_of_l_alone_has_gradients(gpu, attention):
    tensors = leaves()
    out, lse = attention(**tensors, return_lse=True)
    gpu.log.clear()
    lse.backward(tensor(lse.shape, gradient=False))
    assert gpu.log and all(x.grad.shape == x.shape for x in tensors.values())


def test_lengths_and_masks_are_those_of_the_call(gpu, attention):
    """Changed afterwards, they do not reach the backward pass."""
    lengths, mask = np.array([9, 4], np.int32), np.array([[True]])
    for given, tiles in (
        ({"kv_lens": lengths}, None),
        ({"kv_lens": Tensor.of(lengths)}, None),
        ({"block_mask": mask}, Tiles(16, 16)),
    ):
        lengths[:], mask[:] = (9, 4), True
        out = attention(**leaves(), **given, tiles=tiles)
        before = gpu.given[-1]
        lengths[:], mask[:] = (1, 2), False
        out.backward(tensor(Q, gradient=False))
        for name in before.keys() & {"kv_lens", "block_mask"}:
            assert (gpu.given[-1][name] == before[name]).all()
            assert set(before[name].ravel().tolist()) in ({9, 4}, {1})


def test_one_block_mask_serves_both_passes(gpu, attention):
    """Whose tiles differ on Hopper at this head dimension; each has its own array of blocks."""
    shape = (1, 1, 300, 128)
    with devices.using("emulator"):
        mask = fa_numba.create_block_mask(lambda b, h, i, j: j <= i, 1, 1, 300, 300)
    q, k, v = (tensor(shape, "float16") for _ in "qkv")
    for _ in range(2):  # by the launch cache the second time
        out = attention(q, k, v, block_mask=mask)
        forward = gpu.given[-1]["block_mask"]
        out.backward(tensor(shape, "float16", gradient=False))
        backward = next(x["block_mask"] for x in gpu.given[::-1] if "block_mask" in x)
        assert (forward[0, 0] == [[1, 0, 0], [2, 1, 0], [2, 2, 1]]).all()
        assert (backward[0, 0, ::2] == forward[0, 0]).all() and backward.shape == (1, 1, 5, 3)


def test_blocks_of_the_size_of_the_tiles_stay_on_the_gpu(gpu, attention, monkeypatch):
    """No call waits for the GPU to read them, also if each step has a mask of its own."""
    shape = (1, 1, 300, 64)
    rows = tensor((300,), gradient=False)
    q, k, v = (tensor(shape, "float16") for _ in "qkv")
    for n in range(3):
        mask = fa_numba.create_block_mask(
            lambda b, h, i, j: rows[i] == rows[j], 1, 1, 300, 300, block_size=128
        )
        with monkeypatch.context() as patch:
            if n:
                patch.setattr(blocks, "on_host", None)
            attention(q, k, v, block_mask=mask).backward(tensor(shape, "float16", gradient=False))


def test_what_has_no_gradient_is_refused_before_the_forward_pass(gpu, attention, torch):
    torch.deterministic = True
    shapes = 3 * [(1, 2, 300, 64)]
    bias, learnt = {"bias": tensor((2, 1, 300))}, tensor((2,))
    mod = {"score_mod": lambda s, b, h, i, j: s * learnt[h]}
    for options, says in (
        (
            mod | {"deterministic": True},
            "^deterministic must be False with return_dcaptured=True, because .*, got True",
        ),
        (mod | {"deterministic": None, "algorithm": "fa1"}, r"torch\.use_deterministic_algorithms"),
        (
            mod | {"algorithm": "standard"},
            "return_dcaptured must be False with algorithm 'standard'",
        ),
        (
            {"mask_mod": lambda b, h, i, j: learnt[h] > 0},
            "^the tensor 'learnt' that mask_mod uses .a lambda .* requires a gradient, but",
        ),
        ({"alibi_slopes": tensor((2,))}, "^alibi_slopes requires a gradient"),
        (bias | {"deterministic": True}, "^deterministic must be False with return_dbias"),
        (
            bias | {"deterministic": True, "backward_tiles": Tiles(16, 16)},
            "^deterministic must be False with return_dbias",
        ),
        (
            bias | {"deterministic": None, "algorithm": "fa1"},
            r"torch\.use_deterministic_algorithms",
        ),
        ({"tiles": Tiles(128, 256)}, "^tiles must fit .* for Br=128, Bc=256"),
        ({"backward_tiles": Tiles(128, 256)}, "^backward_tiles must fit .* for Br=128, Bc=256"),
        ({"backward_tiles": Tiles(16, 16, stages=2)}, r"^backward_tiles\.stages must be 1 .*got 2"),
        ({"group_splits": 2}, "^group_splits must be 1 .* with algorithm 'fa2' .*got 2"),
        (
            {"group_splits": 2, "algorithm": "fa1"},
            "^group_splits must be 1 .* with algorithm 'fa1' .*got 2",
        ),
        ({"group_splits": 0}, "^group_splits must be an integer of at least 1, or 'auto', got 0"),
    ):
        with pytest.raises(ValueError, match=says):
            attention(**leaves(shapes), **options)
    learnt.tangent = learnt
    with pytest.raises(ValueError, match="^learnt in score_mod, a lambda .* has a tangent"):
        attention(**leaves(shapes), **mod)
    assert not gpu.log


def test_a_backward_pass_of_minutes_is_refused_before_the_forward_pass(attention, monkeypatch):
    """Of which the emulator would do the forward pass in less."""
    monkeypatch.setattr(devices, "launch", None)
    q = np.zeros((1, 1, 2400, 64), np.float32)
    with (
        devices.using("emulator"),
        pytest.raises(
            ValueError, match=r"q of shape \(1, 1, 2400, 64\) .* more than the limit of 30 s"
        ),
    ):
        attention(*(Tensor.of(q, requires_grad=True) for _ in range(3)))


@dataclass(frozen=True)
class Ones:
    """Stands for a tensor of ones, (4, 4), where there is no torch yet."""

    dtype: str


ARRAY = np.ones((2, 4))
# (changed arguments, error, what its message says)
REFUSED = [
    ({"q": np.ones((1, 2, 4, 8), np.float32)}, TypeError,
     "q must be a torch tensor, got an ndarray"),
    ({"v": None}, TypeError, "v must be a torch tensor, got None"),
    ({"bias": ARRAY}, TypeError, "bias must be a torch tensor, got an ndarray"),
    ({"alibi_slopes": [1.0]}, TypeError, "alibi_slopes must be a torch tensor, got a list"),
    ({"slopes": 1}, TypeError,
     r"slopes is not an option \(did you mean alibi_slopes\?\); options: alibi_slopes,"),
    ({"out": 1}, TypeError, r"out is not an option of this function \(standard_attention,"),
    ({"attn_mask": ARRAY}, TypeError, "attn_mask must be a torch tensor, got an ndarray"),
    ({"attn_mask": Ones("int32")}, TypeError,
     "attn_mask must be float32, float16, bfloat16 or bool, got int32"),
    ({"attn_mask": Ones("float32"), "bias": Ones("float32")}, ValueError,
     r"attn_mask and bias cannot both be given; .*got attn_mask of shape \(4, 4\)"),
    ({"layout": "nbhd"}, ValueError,
     r"layout must be 'bhnd' for \(batch, heads, seqlen, head_dim\) or .*got 'nbhd'"),
    ({"stream": 1}, TypeError, r"stream is not an option of this function \(standard_attention,"),
    ({"kv_splits": 2, "algorithm": "fa1"}, TypeError,
     r"kv_splits is not an option of this function \(flash_attention_2 takes it\);"),
    ({"query_splits": 2, "algorithm": "fa1"}, TypeError,
     r"query_splits is not an option of this function \(flash_attention_1,"),
    ({"algorithm": "fa3"}, ValueError, "algorithm must be 'standard', 'fa1' or 'fa2', got 'fa3'"),
    ({"return_lse": 1}, TypeError, "return_lse must be True or False, got 1$"),
    ({"deterministic": 1}, TypeError, "deterministic must be True or False, got 1"),
    (
        {"deterministic": True, "algorithm": "fa1"}, ValueError,
        "deterministic must be False with algorithm 'fa1', got True",
    ),
    ({"dropout_p": 1.0}, ValueError,
     r"dropout_p must be a number of at least 0 and less than 1, got 1\.0"),
    ({"dropout_p": "0.1"}, TypeError,
     r"dropout_p must be a number of at least 0 and less than 1, got '0\.1'"),
    ({"dropout_p": 0.1, "seed": -1}, ValueError,
     r"seed must be an integer from 0 to 2\*\*64 - 1, got -1"),
    ({"scale": "1"}, TypeError, "scale must be a finite real number or None, got '1'"),
    ({"tiles": (8, 16)}, TypeError,
     r"tiles must be a Tiles\(Br=\.\.\., Bc=\.\.\.\) or None, got \(8, 16\)"),
    ({"backward_tiles": (8, 16)}, TypeError,
     r"backward_tiles must be a Tiles\(Br=\.\.\., Bc=\.\.\.\) or None, got \(8, 16\)"),
    ({"block_mask": ARRAY > 0}, ValueError,
     "block_mask needs tiles, because tiles.Br and tiles.Bc are the size of the blocks;"),
    ({"q_lens": [9, 9, 9]}, ValueError, "q_lens"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "says"), REFUSED, ids=str)
@pytest.mark.parametrize("gradient", [False, True])
def test_bad_arguments_are_refused(gpu, attention, changes, error, says, gradient):
    tensors = {name: tensor((1, 2, 4, 8), gradient=gradient and name == "q") for name in "qkv"}
    given = tensors | changes
    for name, x in given.items():
        if isinstance(x, Ones):
            given[name] = tensor((4, 4), x.dtype, gradient=False)
    with pytest.raises(error, match=says):
        attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    assert not gpu.launches


def test_a_tensor_without_memory_is_refused_also_where_a_call_like_it_was_kept(gpu, torch):
    def raises():
        raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    given = {name: tensor((1, 2, 4, 8), gradient=False) for name in "qkv"}
    fa_numba.attention(**given)
    before = len(gpu.launches)
    given["k"].data_ptr = raises
    with pytest.raises(
        TypeError, match="k must be a tensor with values, got a tensor without memory"
    ):
        fa_numba.attention(**given)
    assert len(gpu.launches) == before > 0


# --- dropout ---------------------------------------------------------------------------------


def words(gpu):
    """The words of the seed that the last launch got."""
    found = gpu.given[-1]
    return found["seed_low"], found["seed_high"], found["offset"]


def test_dropout_without_a_seed_draws_one_from_torch(gpu, attention, torch):
    """Another for each call, with gradients or without; both passes drop the same."""
    drawn = []
    for enabled in (True, False, True):
        torch.grad = enabled
        out = attention(**leaves(), dropout_p=0.5, offset=3)
        drawn.append(words(gpu))
        if enabled:
            out.backward(tensor(Q, gradient=False))
            assert words(gpu) == drawn[-1]
    assert drawn == [(FIRST_SEED + n, 0, 3) for n in range(3)]


# --- values ----------------------------------------------------------------------------------


SINKS = np.linspace(-1, 1, Hq, dtype=np.float32)
TABLES = np.random.default_rng(4).standard_normal((2, Hq, Nq + Nk), np.float32)


@pytest.mark.parametrize(
    "names, instead",
    [
        (("outputs[0]", "lses[12]"), "call fa_numba.torch.merge instead, or pass "),
        (
            ("q", "k", "v", "bias", "attn_mask", "sinks", "w in score_mod, a lambda,"),
            "call fa_numba.torch.attention instead, or pass ",
        ),
        (("x", "dout", "k_pages", "new_lens", "w in mask_mod, a lambda,"), "pass "),
    ],
)
def test_what_to_do_with_a_gradient_that_is_not_computed(names, instead):
    for name in names:
        said = arrays._instead(name)
        variable = name.partition(" ")[0]
        assert said == f"{instead}{variable}.detach(), or call it under torch.no_grad()"


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_tensors_that_a_function_captures_have_gradients(torch, attention, algorithm):
    """Those that require one, as they were when they were given."""
    dout, q, k, v = random_gradients(*SIZES)
    table, fixed = TABLES
    with devices.using("emulator"):
        values = {"q": q, "k": k, "v": v, "table": table, "sinks": SINKS}
        tensors = {name: Tensor.of(x.copy(), requires_grad=True) for name, x in values.items()}
        table, fixed = tensors["table"], Tensor.of(fixed)

        def relative(score, b, h, i, j):
            return score * fixed[h, j] + table[h, i - j + Nk]

        given = {"score_mod": relative, "algorithm": algorithm, "return_lse": True}
        out, lse = attention(*(tensors[n] for n in "qkv"), sinks=tensors["sinks"], **given)
        # Of all that are saved torch knows whether they change before the backward pass.
        assert {id(table), id(fixed)} <= {*map(id, out.node[1].saved_tensors)}
        learnt, (table, fixed) = table, TABLES  # what it takes from outside is another thing now
        same = {"score_mod": relative, "sinks": SINKS}
        want = truth(q, k, v, **same)
        assert_within("O", out.values, want.O, want.O_bound)
        out.backward(Tensor.of(dout))
        how = {"saved_values": (out.values, lse.values), "return_dcaptured": True}
        right = true_gradients(dout, q, k, v, **same, return_dsinks=True, **how)
        got = {f"d{name}": x.grad.values for name, x in tensors.items()}
        assert learnt.grad.shape == learnt.shape and {*right.bounds} == {*got, "dfixed"}
        for name, gradient in got.items():
            assert_within(name, gradient, getattr(right, name), right.bounds[name])


@pytest.mark.parametrize("layout", [None, "bnhd"])
def test_parts_are_merged_with_the_gradients_of_fa_numba(torch, layout):
    """Of a loss on O and of one on L; of neither there is none."""
    merge, how = fa_numba_torch().merge, {"layout": layout}
    outputs, lses, dout, dlse = parts_of(3, 16, "float32", layout)
    with devices.using("emulator"):
        O, L = fa_numba.merge(outputs, lses, **how)
        for n, given in enumerate((dout, dlse, None)):
            tensors = [[Tensor.of(x, requires_grad=True) for x in y] for y in (outputs, lses)]
            made = merge(*tensors, **how)
            assert all(map(np.array_equal, (x.values for x in made), (O, L)))
            made[n % 2].backward(given if given is None else Tensor.of(given))
            found = [x.grad if x.grad is None else x.grad.values for y in tensors for x in y]
            if given is None:
                assert found == [None] * 6
                continue
            d = (dout, None) if n == 0 else (np.zeros_like(dout), dlse)
            want = fa_numba.merge_backward(d[0], outputs, lses, O, L, dlse=d[1], **how)
            assert all(map(np.array_equal, found, (*want[0], *want[1])))


def test_what_is_merged_without_a_gradient_keeps_nothing(torch):
    merge = fa_numba_torch().merge
    outputs, lses, *_ = parts_of(2, 16, "float32", "bnhd")
    plain = [[Tensor.of(x) for x in some] for some in (outputs, lses)]
    with devices.using("emulator"):
        want = fa_numba.merge(outputs, lses, layout="bnhd")
        for enabled, of in ((True, None), (True, 0), (True, 1), (False, 0)):
            torch.grad, kept = enabled, enabled and of is not None
            for n, some in enumerate(plain):
                some[1].requires_grad = n == of
            before = torch.applied
            made = merge(*plain, layout="bnhd")
            assert torch.applied - before == kept
            assert all(map(np.array_equal, (x.values for x in made), want))
            assert all((x.node is not None) == x.requires_grad == kept for x in made)
    with pytest.raises(TypeError, match=r"lses\[1\] must be a torch tensor, got an ndarray"):
        merge(plain[0], [plain[1][0], lses[1]])
    plain[0][1].tangent = plain[0][0]
    with pytest.raises(ValueError, match=r"outputs\[1\] has a tangent"):
        merge(*plain)


def test_a_small_tensor_must_be_dense(torch):
    """Lengths and block tables are copied to the host, which needs a dense tensor."""
    lengths = np.array([3, 4], np.int32)
    assert arrays.on_host("kv_lens", Tensor.of(lengths)).tolist() == [3, 4]
    with pytest.raises(TypeError, match="kv_lens must be a dense tensor .*got layout sparse"):
        arrays.on_host("kv_lens", Tensor.of(lengths, layout="sparse"))
