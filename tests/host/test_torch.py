"""fa_numba.torch with torch itself: gradients against float64, streams, seeds, refusals."""

import math
import subprocess
import sys

import numpy as np
import pytest
from backward_helpers import random_gradients, true_gradients
from helpers import OnGpu, assert_close_to_float64, assert_within, random_inputs, truth

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices
from fa_numba.host import held

try:
    import torch

    from fa_numba.torch import attention
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="no torch")


on_the_gpu = pytest.mark.parametrize(
    "device", [pytest.param("gpu", marks=pytest.mark.gpu)], scope="session"
)


@pytest.fixture
def place(device):
    """Where tensors lie: "cpu" on the emulator, "cuda" on the GPU."""
    if torch is None:
        pytest.skip("no torch")
    if device == "gpu" and not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    with devices.using(device):
        yield "cpu" if device == "emulator" else "cuda"


def tensor(array, place, gradient=True):
    return torch.tensor(array, device=place, requires_grad=gradient)


def numpy(x):
    return x.detach().cpu().numpy()


# --- gradients -------------------------------------------------------------------------------

SEED = 2**40 + 7
RNG = np.random.default_rng(5)
BIAS = RNG.standard_normal((2, 4, 20, 28), dtype=np.float32)
SINKS = np.float32([0.5, -1.0, 4.0, 0.0])
SLOPES = 2.0 ** -np.arange(1, 5, dtype=np.float32)
BLOCKS = np.array([[True, False], [True, True], [False, True]])
PACKED = {"cu_seqlens_q": [0, 9, 20], "cu_seqlens_k": [0, 13, 28]}
DROPOUT = {"dropout_p": 0.25, "seed": SEED}
CASES = {
    "plain": {},
    "window": {"window": (5, 2)},
    "sinks, packed": {"sinks": SINKS, **PACKED},
    "blocks": {"block_mask": BLOCKS, "tiles": Tiles(8, 16)},
    "packed": PACKED,
    "packed, dropout": {**PACKED, **DROPOUT, "causal": True},
    "all": {"bias": BIAS[:, :1], "softcap": 2.0, "causal": True, "alibi_slopes": SLOPES, **DROPOUT}
    | {"sinks": SINKS},
}


def inputs_of(options):
    """q, k, v and dout: (2, 4, 20, 8) and (2, 2, 28, 8), or packed sequences."""
    q, k, v = random_inputs(2, 4, 2, 20, 28, 8)
    dout = RNG.standard_normal(q.shape, dtype=np.float32)
    if "cu_seqlens_q" in options:
        q, k, v, dout = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v, dout))
    return q, k, v, dout


@pytest.mark.parametrize(
    ("algorithm", "case"),
    [
        *(("fa2", case) for case in CASES),
        *((name, case) for name in ("fa1", "standard") for case in ("plain", "all", "packed")),
    ],
)
def test_gradients_are_those_of_float64(place, algorithm, case):
    options = CASES[case]
    q, k, v, dout = inputs_of(options)
    learnt = [name for name in ("bias", "sinks") if name in options]
    leaves = [tensor(x, place) for x in (q, k, v)]
    given = options | {name: tensor(options[name], place) for name in learnt}
    if "alibi_slopes" in options:
        given["alibi_slopes"] = tensor(SLOPES, place, gradient=False)
    out, lse = attention(*leaves, algorithm=algorithm, return_lse=True, **given)
    wanted = [*leaves, *(given[name] for name in learnt)]
    found = torch.autograd.grad(out, wanted, tensor(dout, place, gradient=False))

    want = truth(q, k, v, **options)
    assert_within("O", numpy(out), want.O, want.O_bound)
    assert_within("L", numpy(lse), want.L, want.L_bound)
    asked = {f"return_d{name}": name in options for name in ("bias", "sinks")}
    right = true_gradients(dout, q, k, v, saved_values=(numpy(out), numpy(lse)), **asked, **options)
    for (name, bound), got in zip(right.bounds.items(), found, strict=True):
        assert_within(name, numpy(got), getattr(right, name), bound)


@needs_torch
def test_gradients_with_a_block_mask_of_a_function():
    """One mask, whose blocks are smaller than the tiles, for both passes."""
    q, k, v, dout = inputs_of({})
    with devices.using("emulator"):
        mask = fa_numba.create_block_mask(lambda b, h, i, j: j <= i + 8, 1, 1, 20, 28, block_size=8)
        leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
        found = torch.autograd.grad(attention(*leaves, block_mask=mask), leaves, torch.tensor(dout))
        causal = attention(*leaves, causal=True)
        want = torch.autograd.grad(causal, leaves, torch.tensor(dout))
    for got, expected in zip(found, want, strict=True):
        assert (got - expected).abs().max() < 1e-5


@needs_torch
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_gradients_of_what_a_function_captures(algorithm):
    """Beside autograd's, of a weight that the captured tensor is made of."""
    q, k, v, dout = map(torch.tensor, inputs_of({}))
    leaves = [x.double().requires_grad_() for x in (q, k, v, torch.randn(4, 48), torch.randn(4))]
    row, col = torch.arange(20)[:, None], torch.arange(28)
    table, scale = 2 * leaves[3], leaves[4][:, None, None]
    k2, v2 = (x.repeat_interleave(2, dim=1) for x in leaves[1:3])
    S = leaves[0] @ k2.mT / math.sqrt(8) * scale + table[:, row - col + 28]
    wanted = torch.autograd.grad((torch.softmax(S, -1) @ v2 * dout).sum(), leaves)

    single = [x.detach().float().requires_grad_() for x in leaves]
    table, scale = 2 * single[3], single[4]
    with devices.using("emulator"):
        out = attention(
            *single[:3],
            algorithm=algorithm,
            score_mod=lambda s, b, h, i, j: s * scale[h] + table[h, i - j + 28],
        )
        found = torch.autograd.grad((out * dout).sum(), single)
    for got, want in zip(found, wanted, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("algorithm", ["standard", "fa1", "fa2"])
def test_gradients_of_a_loss_on_lse(place, algorithm):
    q, k, v, dout = inputs_of({})
    leaves = [tensor(x, place) for x in (q, k, v)]
    out, lse = attention(*leaves, algorithm=algorithm, return_lse=True, causal=True)
    dL = np.random.default_rng(4).standard_normal(lse.shape, dtype=np.float32)
    weights = [tensor(x, place, gradient=False) for x in (dout, dL)]
    for of_out in (True, False):
        given = ((out, lse), leaves, weights) if of_out else (lse, leaves, weights[1])
        found = torch.autograd.grad(*given, retain_graph=True)
        right = true_gradients(dout if of_out else 0 * dout, q, k, v, dlse=dL, causal=True)
        for (name, bound), got in zip(right.bounds.items(), found, strict=True):
            assert_within(name, numpy(got), getattr(right, name), bound)


@pytest.mark.parametrize("parts", [2, 3])
def test_merged_parts_have_the_gradients_of_the_whole(place, parts):
    """Through outputs and logsumexps, to q, k and v."""
    q, k, v, dout = inputs_of({})
    leaves = [tensor(x, place) for x in (q, k, v)]
    some = [
        attention(leaves[0], *(x[:, :, n::parts] for x in leaves[1:]), return_lse=True)
        for n in range(parts)
    ]
    outputs, lses = zip(*some, strict=True)
    out, lse = fa_numba.torch.merge(outputs, lses)
    dL = np.random.default_rng(4).standard_normal(lse.shape, dtype=np.float32)
    weights = tensor(dout, place, gradient=False), tensor(dL, place, gradient=False)
    exact = fa_numba.reference.attention_backward(dout, q, k, v, dlse=dL)
    found = torch.autograd.grad((out, lse), leaves, weights, retain_graph=True)
    for got, right in zip(found, exact, strict=True):
        assert np.abs(numpy(got) - right).max() < 1e-5 * np.abs(right).max()
    exact = fa_numba.reference.attention_backward(0 * dout, q, k, v, dlse=dL)
    for got, right in zip(torch.autograd.grad(lse, leaves, weights[1]), exact, strict=True):
        assert np.abs(numpy(got) - right).max() <= 1e-5 * np.abs(right).max()
    with torch.no_grad():
        again, _ = fa_numba.torch.merge(outputs, lses)
        assert not again.requires_grad and bool((again == out).all())
    with pytest.raises(TypeError, match=r"lses\[1\] must be a torch tensor, got an int"):
        fa_numba.torch.merge(outputs, [lses[0], 1])


@pytest.mark.parametrize("loss", ["sum", "square"])
def test_a_second_derivative_is_refused(place, loss):
    """Also where the gradient of O is a constant, and where only a path to q is asked for."""
    q, k, v = (tensor(x, place) for x in inputs_of({})[:3])
    out = attention(q, k, v)
    total = out.sum() if loss == "sum" else out.square().sum()
    (dq,) = torch.autograd.grad(total, q, create_graph=True)
    assert dq.requires_grad
    with pytest.raises(
        RuntimeError, match="does not compute gradients of its gradients .*use a loss"
    ):
        torch.autograd.grad((dq * q).sum(), q)


def forward_mode(f, q):
    with torch.autograd.forward_ad.dual_level():
        return f(torch.autograd.forward_ad.make_dual(q, q))


TRANSFORMS = {
    "vmap": (
        lambda f, q: torch.vmap(f)(torch.stack([q, q])),
        TypeError,
        "q must .*a tensor without memory",
    ),
    "grad": (
        lambda f, q: torch.func.grad(lambda q: f(q).sum())(q),
        TypeError,
        "q must .*without memory",
    ),
    "jacrev": (
        lambda f, q: torch.func.jacrev(f)(q),
        TypeError,
        "q must .*a tensor without memory. torch",
    ),
    "jvp": (lambda f, q: torch.func.jvp(f, (q,), (q,)), ValueError, "q has a tangent .*backward"),
    "forward mode": (
        forward_mode,
        ValueError,
        r"q has a tangent \(forward-mode differentiation\), which",
    ),
}


@needs_torch
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_functions_are_refused(name):
    transform, error, says = TRANSFORMS[name]
    q = torch.ones(1, 1, 4, 4)
    with pytest.raises(error, match=says):
        transform(lambda x: attention(x, q, q), q)
    with torch.no_grad(), pytest.raises(TypeError, match="q must .*got a tensor without memory"):
        torch.vmap(lambda x: fa_numba.attention(x, x, x))(torch.stack([q, q]))


@needs_torch
@pytest.mark.parametrize("layout", ["strided", "jagged"])
@pytest.mark.parametrize("of", [fa_numba.attention, lambda *x: attention(*x)], ids=["arrays", ""])
def test_nested_and_masked_tensors_are_refused(of, layout):
    parts = [torch.ones(n, 2, 4) for n in (3, 5)]
    q = torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
    with pytest.raises(TypeError, match="q must be a dense tensor, got a nested tensor; pack the "):
        of(q, q, q)
    q = torch.ones(2, 1, 4, 4)
    masked = torch.masked.masked_tensor(q, q > 0)
    with pytest.raises(TypeError, match=r"k must be a tensor without a mask, got a MaskedTensor; "):
        of(q, masked, q)
    lens = torch.nested.nested_tensor([torch.arange(n) for n in (3, 5)])
    with pytest.raises(TypeError, match="kv_lens must be a dense tensor, got a nested tensor$"):
        fa_numba.attention(q, q, q, kv_lens=lens)


COMPILED = """
import torch, fa_numba.torch
x = torch.linspace(-1, 1, 16).reshape(1, 1, 4, 4).requires_grad_()
def layer(x):
    return 2 * fa_numba.torch.attention(3 * x, x, x, causal=True)
fa_numba.torch.attention(x, x, x)
made = []
def backend(graph, inputs):
    made.append(len(graph.graph.nodes))
    return graph.forward
compiled = torch.compile(layer, backend=backend)
want = torch.autograd.grad(layer(x).square().sum(), x)
for _ in range(3):
    assert torch.equal(*want, *torch.autograd.grad(compiled(x).square().sum(), x))
    print(len(made))
"""


@needs_torch
@pytest.mark.slow
def test_a_compiled_function_leaves_its_graph_for_the_call():
    """3 x before it and 2 O after it are the two graphs; nothing of the call is traced."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["2"] * 3, "")


def test_inputs_changed_before_the_backward_pass_are_noticed(place):
    q, k, v = (tensor(x, place) for x in inputs_of({})[:3])
    k2 = k * 1.0
    out = attention(q, k2, v)
    k2.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    of_row = tensor(np.ones(q.shape[2], np.float32), place, gradient=False)
    out = attention(q, k, v, score_mod=lambda s, b, h, i, j: s * of_row[i])
    of_row.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_block_mask_keeps_its_tensors_or_notices_that_they_changed(place, large):
    q, k, v = (tensor(x, place) for x in inputs_of({})[:3])
    (Nq, Nk), n = (q.shape[2], k.shape[2]), held.COPIED_BYTES // 4 + 1 if large else 1
    first = torch.full((n,), 5.0, device=place)
    with torch.inference_mode():
        second = torch.full((n,), 9.0, device=place)
    mask = fa_numba.create_block_mask(
        lambda b, h, i, j: j < first[0] + second[0], 1, 1, Nq, Nk, tiles=Tiles(Br=16, Bc=16)
    )
    want = torch.autograd.grad(attention(q, k, v, block_mask=mask).sum(), (q, k, v))
    out = attention(q, k, v, block_mask=mask)
    with torch.inference_mode():
        second.zero_()
    found = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    assert all(map(torch.equal, found, want))
    first.zero_()
    if large:
        with pytest.raises(
            ValueError, match="^first in mask_mod, a lambda .* must still have the values"
        ):
            out.sum().backward()
    else:
        out.sum().backward()
        assert torch.equal(q.grad, want[0])


# --- streams and memory ----------------------------------------------------------------------


@on_the_gpu
def test_the_current_stream_is_used_in_both_passes(place):
    side = torch.cuda.Stream()
    q, k, v, dout = (tensor(x, place, gradient=False) for x in inputs_of({}))
    leaves = [torch.zeros_like(x) for x in (q, k, v)]
    late = torch.zeros_like(dout)
    right = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    attention(*right).backward(dout)  # compiles, too: the waits below are shorter than that
    with torch.cuda.stream(side):
        # What the inputs hold, and the gradient, comes only after the wait: on another stream the
        # kernels would see zeros.
        torch.cuda._sleep(2 * 10**8)
        for x, value in zip(leaves, (q, k, v), strict=True):
            x.copy_(value)
            x.requires_grad_()
        out = attention(*leaves)
        torch.cuda._sleep(2 * 10**8)
        late.copy_(dout)
        out.backward(late)
    side.synchronize()
    for a, b in zip(leaves, right, strict=True):
        error = (a.grad - b.grad).norm()
        assert 0 < b.grad.norm() and error < 1e-5 * b.grad.norm()


@on_the_gpu
def test_an_array_with_the_interface_alone_is_enough(place):
    q, k, v = random_inputs(1, 2, 2, 20, 28, 8)
    owners = [devices.to_gpu(x) for x in (q, k, v)]
    arrays = [OnGpu(o, 0, x.shape, x.strides) for o, x in zip(owners, (q, k, v), strict=True)]
    out, lse = fa_numba.attention(*arrays, causal=True, return_lse=True)
    devices.synchronize()
    assert not isinstance(out, torch.Tensor)
    got = torch.as_tensor(out, device="cuda"), torch.as_tensor(lse, device="cuda")
    assert_close_to_float64(numpy(got[0]), q, k, v, numpy(got[1]), causal=True)


@pytest.mark.gpu
def test_cupy_arrays_go_in_and_come_out():
    cupy = pytest.importorskip("cupy")
    q, k, v = random_inputs(1, 2, 2, 20, 28, 8)
    with cupy.cuda.Stream(non_blocking=True):
        out, lse = fa_numba.attention(*map(cupy.asarray, (q, k, v)), causal=True, return_lse=True)
        assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
        assert_close_to_float64(cupy.asnumpy(out), q, k, v, cupy.asnumpy(lse), causal=True)


# --- dropout ---------------------------------------------------------------------------------


def test_torchs_seed_makes_dropout_repeatable(place):
    q, k, v = (tensor(x, place) for x in inputs_of({})[:3])

    def drawn(seed=None, **options):
        if seed is not None:
            torch.manual_seed(seed)
        return numpy(attention(q, k, v, dropout_p=0.5, **options))

    first, second = drawn(1), drawn()
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, drawn(1))
    np.testing.assert_array_equal(second, drawn())
    with torch.no_grad():
        np.testing.assert_array_equal(first, drawn(1))
    np.testing.assert_array_equal(drawn(seed=1, offset=0), drawn(seed=1))
    assert not np.array_equal(drawn(1, offset=1), first)


# --- masks -----------------------------------------------------------------------------------


def gradients_of(algorithm, place, extra=(), **options):
    """O and the gradients of q, k, v and of tensors among the options."""
    dout, q, k, v = (tensor(x, place) for x in random_gradients(2, 2, 1, 5, 9, 4))
    out = attention(q, k, v, algorithm=algorithm, **options)
    found = torch.autograd.grad(out, [q, k, v, *extra], dout.detach())
    return [numpy(x) for x in (out, *found)]


@needs_torch
@pytest.mark.parametrize("algorithm", ["standard", "fa1", "fa2"])
def test_a_boolean_mask_is_what_torch_means_by_it(algorithm, place):
    mask = np.random.default_rng(3).random((5, 9)) < 0.6
    mask[:, 4] = True
    given = torch.tensor(mask, device=place)
    found = gradients_of(algorithm, place, attn_mask=given)
    q, k, v = (tensor(x, place) for x in random_gradients(2, 2, 1, 5, 9, 4)[1:])
    k2, v2 = (x.repeat_interleave(2, dim=1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k2, v2, attn_mask=given)
    dout = torch.tensor(random_gradients(2, 2, 1, 5, 9, 4)[0], device=place)
    want = [numpy(x) for x in (out, *torch.autograd.grad(out, [q, k, v], dout))]
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@needs_torch
@on_the_gpu
def test_a_boolean_mask_on_another_stream(place):
    q, k, v = (tensor(x, place, gradient=False) for x in random_gradients(2, 2, 1, 5, 9, 4)[1:])
    mask = torch.tensor(np.random.default_rng(3).random((5, 9)) < 0.6, device=place)
    want = fa_numba.flash_attention_2(q, k, v, attn_mask=mask)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for given in (stream, stream.cuda_stream):
        found = fa_numba.flash_attention_2(q, k, v, attn_mask=mask, stream=given)
        stream.synchronize()
        assert torch.equal(found, want)
