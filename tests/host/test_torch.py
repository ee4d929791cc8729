"""fa_numba.torch: gradients against torch's own autograd, streams, memory, seeds, refusals."""

import math
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from backward_helpers import random_gradients, true_gradients
from helpers import OnGpu, assert_close_to_float64, assert_within, random_inputs, truth

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices
from fa_numba.host import launch_cache


def test_the_package_does_not_import_torch_and_without_it_says_what_to_install():
    code = "import sys, fa_numba; print('torch' in sys.modules, hasattr(fa_numba, 'torch')); "
    code += "sys.modules['torch'] = None; import fa_numba.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"]
    assert "ImportError: fa_numba.torch needs PyTorch" in done.stderr
    assert "pip install 'torch>=2.5'" in done.stderr


try:
    import torch

    from fa_numba.torch import attention
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="no torch")
NAMES = ("q", "k", "v")


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


@pytest.fixture
def launches(monkeypatch):
    """(arguments, stream) of every launch; no call is one that was kept."""
    found = []
    launch, replay = devices.launch, devices.replay

    def recorded(kernel, grid, args, stream=0, *more):
        found.append((args, stream))
        launch(kernel, grid, args, stream, *more)

    def replayed(recording, values, stream, ordinal):
        for n, (args, given) in enumerate(found):
            if given is recording:
                found[n] = located(args, values), stream
        replay(recording, values, stream, ordinal)

    monkeypatch.setattr(devices, "launch", recorded)
    monkeypatch.setattr(devices, "replay", replayed)
    monkeypatch.setattr(launch_cache, "replay", lambda *_: None)
    return found


def located(x, values):
    """Launch arguments that were recorded, with the addresses of a run; workspace has none."""
    if isinstance(x, devices.DeviceArray) and x.slot is not None and x.slot >= 0:
        return replace(x, pointer=values[x.slot] + x.pointer)
    if isinstance(x, tuple):
        parts = [located(y, values) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def tensor(array, place, gradient=True):
    return torch.tensor(array, device=place, requires_grad=gradient)


def numpy(x):
    return x.detach().cpu().numpy()


# --- gradients -------------------------------------------------------------------------------


def unfused(q, k, v, *, bias=None, sinks=None, keep=None, hidden=None, **options):
    """O by torch's own operations, (B, H, N, d), in the dtype of q."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    S = q @ k.mT / math.sqrt(q.shape[-1])
    if options.get("softcap"):
        S = options["softcap"] * torch.tanh(S / options["softcap"])
    rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    columns = torch.arange(k.shape[2])
    if "alibi_slopes" in options:
        S = S - options["alibi_slopes"][:, None, None] * (rows - columns).abs()
    if bias is not None:
        S = S + bias
    shown = torch.ones(S.shape[-2:], dtype=bool)
    if options.get("causal"):
        shown &= columns <= rows
    if "window" in options:
        left, right = options["window"]
        shown &= (columns >= rows - left) & (columns <= rows + right)
    if hidden is not None:
        shown &= ~hidden
    S = S.masked_fill(~shown, -math.inf)
    if sinks is not None:
        S = torch.cat([S, sinks[:, None, None].expand(*S.shape[:-1], 1)], dim=-1)
    P = torch.softmax(S, dim=-1)[..., : k.shape[2]]
    if keep is not None:
        P = P * keep / (1 - options["dropout_p"])
    return P @ v


def exact(
    q, k, v, *, bias=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, tiles=None, **options
):
    """The same in float64 for the options of a call; the inputs are float64 tensors on the CPU."""
    if options.pop("seed", None) is not None:
        B, H = (len(cu_seqlens_q) - 1, q.shape[1]) if cu_seqlens_q else q.shape[:2]
        Nq, Nk = (q.shape[0], k.shape[0]) if cu_seqlens_q else (q.shape[2], k.shape[2])
        mask = fa_numba.dropout_mask(B, H, Nq, Nk, dropout_p=options["dropout_p"], seed=SEED)
        options["keep"] = torch.tensor(mask)
    if "block_mask" in options:
        mask = options.pop("block_mask").repeat(tiles.Br, 0).repeat(tiles.Bc, 1)
        options["hidden"] = ~torch.tensor(mask[: q.shape[2], : k.shape[2]])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.tensor(options["alibi_slopes"], dtype=q.dtype)
    if cu_seqlens_q is None:
        return unfused(q, k, v, bias=bias, sinks=sinks, **options)
    keep, parts = options.pop("keep", None), []
    pairs = zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True)
    for n, ((a, b), (c, e)) in enumerate(pairs):
        if keep is not None:
            options["keep"] = keep[n, :, : b - a, : e - c]
        one = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:e], v[c:e]))
        parts.append(unfused(*one, sinks=sinks, **options)[0].transpose(0, 1))
    return torch.cat(parts)


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
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": BIAS},
    "row of bias": {"bias": BIAS[0, 0, :1], "causal": True},
    "bias of heads": {"bias": BIAS[:1, :, :1, :1], "window": (4, 4)},
    "alibi": {"alibi_slopes": SLOPES},
    "dropout": DROPOUT,
    "sinks": {"sinks": SINKS, "causal": True},
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
def test_gradients_are_those_of_torchs_autograd(place, algorithm, case):
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

    doubles = [
        torch.tensor(x, dtype=torch.float64, requires_grad=True)
        for x in (q, k, v, *(options[name] for name in learnt))
    ]
    added = dict(zip(learnt, doubles[3:], strict=True))
    expected = exact(*doubles[:3], **{**options, **added})
    gradients = torch.autograd.grad(expected, doubles, torch.tensor(dout, dtype=torch.float64))

    want = truth(q, k, v, **options)
    assert_within("O", numpy(out), numpy(expected), want.O_bound)
    assert_within("L", numpy(lse), want.L, want.L_bound)
    saved = (numpy(out), numpy(lse))
    asked = {f"return_d{name}": name in options for name in ("bias", "sinks")}
    asked["saved_values"] = saved
    bounds = true_gradients(dout, q, k, v, **asked, **options).bounds
    for (name, bound), got, right in zip(bounds.items(), found, gradients, strict=True):
        assert_within(name, numpy(got), numpy(right), bound)


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


@pytest.mark.parametrize("wrong", ["scale", "seed", "causal"])
def test_the_check_of_gradients_can_fail(wrong):
    """What a wrong backward pass would give is beyond the bounds."""
    if torch is None:
        pytest.skip("no torch")
    options = {"causal": True, **DROPOUT}
    q, k, v, dout = inputs_of(options)
    others = {"scale": {"scale": 0.3539}, "seed": {"seed": SEED + 1}, "causal": {"causal": False}}
    exact_ = fa_numba.reference.attention_backward(dout, q, k, v, **options)
    off = fa_numba.reference.attention_backward(dout, q, k, v, **{**options, **others[wrong]})
    bounds = true_gradients(dout, q, k, v, **options).bounds
    for (name, bound), got, right in zip(bounds.items(), off, exact_, strict=True):
        if (wrong, name) != ("scale", "dv"):
            with pytest.raises(AssertionError, match=f"{name} is off"):
                assert_within(name, got, right, bound)


def test_only_what_needs_a_gradient_gets_one(place):
    q, k, v, dout = inputs_of({})
    whole = [tensor(x, place) for x in (q, k, v)]
    everything = torch.autograd.grad(attention(*whole), whole, tensor(dout, place, gradient=False))
    for n, name in enumerate(NAMES):
        leaves = [tensor(x, place, gradient=m == n) for m, x in enumerate((q, k, v))]
        attention(*leaves, deterministic=True).backward(tensor(dout, place, gradient=False))
        assert [x.grad is not None for x in leaves] == [m == n for m in range(3)]
        right = numpy(everything[n])
        assert_within(name, numpy(leaves[n].grad), right, 1e-5 * np.linalg.norm(right))


def test_a_bias_alone_can_have_a_gradient(place, launches):
    q, k, v, dout = inputs_of({})
    tensors = [tensor(x, place, gradient=False) for x in (q, k, v)]
    bias = tensor(BIAS[0], place)
    attention(*tensors, bias=bias).backward(tensor(dout, place, gradient=False))
    assert bias.grad.shape == bias.shape and bool(bias.grad.any())
    assert "dbias" in launches[-1][0][-1]._fields
    # One that needs none costs no sum: the kernel has no such argument.
    leaf = tensor(q, place)
    attention(leaf, *tensors[1:], bias=bias.detach()).backward(tensor(dout, place, gradient=False))
    assert "dbias" not in launches[-1][0][-1]._fields


@needs_torch
def test_nothing_is_kept_for_a_call_without_gradients(place, launches):
    q, k, v, _ = inputs_of({})
    for leaves in (True, False):
        tensors = [tensor(x, place, gradient=leaves) for x in (q, k, v)]
        with torch.set_grad_enabled(not leaves):
            out = attention(*tensors)
        assert not out.requires_grad and out.grad_fn is None
    assert len(launches) == 2


def test_the_stages_of_tiles_are_the_forward_passes(place):
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal((1, 1, 40, 8)).astype(np.float16) for _ in NAMES]
    found = []
    for stages in (1, 2):
        q, k, v = (tensor(x, place) for x in arrays)
        out = attention(q, k, v, deterministic=True, tiles=Tiles(32, 32, stages=stages))
        out.sum().backward()
        found.append([numpy(x) for x in (out, q.grad, k.grad, v.grad)])
    assert all(np.array_equal(one, two) for one, two in zip(*found, strict=True))


def test_the_backward_pass_has_block_sizes_of_its_own(place, monkeypatch):
    asked = {}
    for name in ("attention", "attention_backward"):
        right = getattr(fa_numba, name)

        def call(*args, right=right, name=name, **options):
            asked[name] = options["tiles"]
            return right(*args, **options)

        monkeypatch.setattr(fa_numba, name, call)
    arrays = [np.full((1, 1, 40, 8), n, np.float32) for n in (1, 2, 3)]
    forward, backward = Tiles(32, 32), Tiles(16, 32)
    for own, second in (({"backward_tiles": backward}, backward), ({}, forward)):
        q, k, v = (tensor(x, place) for x in arrays)
        attention(q, k, v, tiles=forward, **own).sum().backward()
        assert asked == {"attention": forward, "attention_backward": second}
        assert np.allclose(numpy(v.grad), 1)


@pytest.mark.parametrize("of_out", [True, False], ids=["O and L", "L alone"])
@pytest.mark.parametrize("algorithm", ["standard", "fa1", "fa2"])
def test_gradients_of_a_loss_on_lse_are_those_of_torchs_autograd(
    place, launches, algorithm, of_out
):
    """The kernels take a gradient of L where the loss depends on it, and only there."""
    options = {"causal": True}
    q, k, v, dout = inputs_of(options)
    leaves = [tensor(x, place) for x in (q, k, v)]
    out, lse = attention(*leaves, algorithm=algorithm, return_lse=True, **options)
    assert out.requires_grad and lse.requires_grad and lse.shape == (2, 4, 20)
    dL = np.random.default_rng(4).standard_normal(lse.shape, dtype=np.float32)
    given = tensor(dout, place, gradient=False), tensor(dL, place, gradient=False)
    losses, weights = ((out, lse), given) if of_out else ((lse,), given[1:])
    found = torch.autograd.grad(losses, leaves, weights, retain_graph=True)
    assert any("dL" in x[-1]._fields for x, *_ in launches if hasattr(x[-1], "_fields"))

    doubles = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (q, k, v)]
    scores = doubles[0] @ doubles[1].repeat_interleave(2, 1).mT / 8**0.5
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
    L = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    loss = (L * torch.tensor(dL)).sum()
    if of_out:
        loss = loss + (exact(*doubles, **options) * torch.tensor(dout)).sum()
    dout = dout if of_out else np.zeros_like(dout)
    bounds = true_gradients(dout, q, k, v, dlse=dL, **options).bounds
    expected = torch.autograd.grad(loss, doubles, allow_unused=True)
    for (name, bound), got, right in zip(bounds.items(), found, expected, strict=True):
        assert_within(name, numpy(got), 0 * numpy(got) if right is None else numpy(right), bound)
    launches.clear()
    torch.autograd.grad(out, leaves, given[0])
    assert not any("dL" in x[-1]._fields for x, *_ in launches if hasattr(x[-1], "_fields"))


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
    with pytest.raises(TypeError, match=r"lses\[1\] is an int: allowed is a torch tensor"):
        fa_numba.torch.merge(outputs, [lses[0], 1])


@pytest.mark.parametrize("loss", ["sum", "square"])
def test_a_second_derivative_is_refused(place, loss):
    """Also where the gradient of O is a constant, and where only a path to q is asked for."""
    q, k, v = (tensor(x, place) for x in inputs_of({})[:3])
    out = attention(q, k, v)
    total = out.sum() if loss == "sum" else out.square().sum()
    (dq,) = torch.autograd.grad(total, q, create_graph=True)
    assert dq.requires_grad
    with pytest.raises(RuntimeError, match="no gradients of its gradients: allowed is a loss"):
        torch.autograd.grad((dq * q).sum(), q)


def forward_mode(f, q):
    with torch.autograd.forward_ad.dual_level():
        return f(torch.autograd.forward_ad.make_dual(q, q))


TRANSFORMS = {
    "vmap": (lambda f, q: torch.vmap(f)(torch.stack([q, q])), TypeError, "q is a tensor without"),
    "grad": (lambda f, q: torch.func.grad(lambda q: f(q).sum())(q), TypeError, "q is a tensor wi"),
    "jacrev": (lambda f, q: torch.func.jacrev(f)(q), TypeError, "q is a tensor without memory, as"),
    "jvp": (lambda f, q: torch.func.jvp(f, (q,), (q,)), ValueError, "q has a tangent, and attent"),
    "forward mode": (forward_mode, ValueError, "q has a tangent, and attention has no forward-mo"),
}


@needs_torch
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_functions_are_refused(name):
    transform, error, says = TRANSFORMS[name]
    q = torch.ones(1, 1, 4, 4)
    with pytest.raises(error, match=says):
        transform(lambda x: attention(x, q, q), q)
    with torch.no_grad(), pytest.raises(TypeError, match="q is a tensor without memory"):
        torch.vmap(lambda x: fa_numba.attention(x, x, x))(torch.stack([q, q]))


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


@pytest.mark.parametrize("name", ["q_lens", "block_mask"])
def test_lengths_and_masks_are_those_of_the_call(place, name):
    """Changed afterwards, they do not reach the backward pass."""
    q, k, v, dout = inputs_of({})
    given = {
        "q_lens": {"q_lens": torch.tensor([20, 7], dtype=torch.int32)},
        "block_mask": {"block_mask": torch.tensor(BLOCKS), "tiles": Tiles(8, 16)},
    }[name]
    given[name] = given[name].to(place)
    gradients = []
    for changed in (False, True):
        leaves = [tensor(x, place) for x in (q, k, v)]
        out = attention(*leaves, deterministic=True, **given)
        if changed:
            given[name].zero_()
        out.backward(tensor(dout, place, gradient=False))
        gradients.append([numpy(x.grad) for x in leaves])
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_layer_learns(place):
    """Gradients through a module, in a training step."""
    torch.manual_seed(0)
    x = torch.randn(1, 12, 16, device=place)
    mix = torch.nn.Linear(16, 48).to(place)
    optimizer = torch.optim.SGD(mix.parameters(), lr=0.5)
    losses = []
    for _ in range(4):
        q, k, v = mix(x).view(1, 12, 3, 2, 8).permute(2, 0, 3, 1, 4)
        loss = (
            (attention(q, k, v, causal=True).transpose(1, 2).reshape(x.shape) - x).square().mean()
        )
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True)


# --- order of sums ---------------------------------------------------------------------------


@pytest.fixture
def told_to_be_deterministic():
    if torch is None:
        pytest.skip("no torch")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def sweeps(place, launches, **options):
    """Launches of the backward pass: two, and three where dq is summed in order."""
    q, k, v = (tensor(x, place) for x in inputs_of({})[:3])
    out = attention(q, k, v, **options)
    launches.clear()
    out.sum().backward()
    return len(launches)


def test_dq_is_summed_in_order_where_told(place, launches):
    assert sweeps(place, launches) == 2
    assert sweeps(place, launches, deterministic=None) == 2
    assert sweeps(place, launches, deterministic=True) == 3


def test_none_asks_torch(place, launches, told_to_be_deterministic):
    assert sweeps(place, launches, deterministic=None) == 3
    assert sweeps(place, launches, deterministic=False) == 2
    assert sweeps(place, launches, deterministic=None, algorithm="fa1") == 1
    bias = tensor(BIAS[0, 0], place)
    for algorithm in ("standard", "fa1", "fa2"):
        with pytest.raises(ValueError, match="no fixed order, allowed is"):
            sweeps(place, launches, deterministic=None, algorithm=algorithm, bias=bias)
    assert sweeps(place, launches, deterministic=None, bias=tensor(BIAS, place)) == 3


# --- streams and memory ----------------------------------------------------------------------


@on_the_gpu
def test_the_current_stream_is_used_in_both_passes(place, launches):
    side = torch.cuda.Stream()
    q, k, v, dout = (tensor(x, place, gradient=False) for x in inputs_of({}))
    leaves = [torch.zeros_like(x) for x in (q, k, v)]
    late = torch.zeros_like(dout)
    right = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    attention(*right).backward(dout)  # compiles, too: the waits below are shorter than that
    launches.clear()
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
    assert {stream for _, stream in launches} == {side.cuda_stream}
    for a, b in zip(leaves, right, strict=True):
        error = (a.grad - b.grad).norm()
        assert 0 < b.grad.norm() and error < 1e-5 * b.grad.norm()


def pointers(args):
    """Addresses of the arrays among launch arguments."""
    found = set()
    for x in args:
        if isinstance(x, tuple):
            found |= pointers(x)
        elif isinstance(x, devices.DeviceArray):
            found.add(x.pointer)
        elif isinstance(x, np.ndarray):
            found.add(x.ctypes.data)
    return found


# name -> a view of shape (2, 4, 20, 8) of a tensor that it makes
VIEWS = {
    "contiguous": lambda random: random(2, 4, 20, 8),
    "heads last": lambda random: random(2, 20, 4, 8).transpose(1, 2),
    "part of qkv": lambda random: random(2, 20, 3, 4, 8).permute(2, 0, 3, 1, 4)[1],
    "every second row": lambda random: random(2, 4, 40, 8)[:, :, ::2],
    "unaligned": lambda random: random(2, 4, 20, 9)[..., 1:],
    "columns": lambda random: random(2, 4, 8, 20).mT,
}


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_copied(place, launches, view):
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(place)

    q, k, v, dout = (VIEWS[view](random) for _ in range(4))
    bias = random(4, 20, 1).expand(4, 20, 20)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    out, lse = attention(*leaves[:3], bias=leaves[3], return_lse=True)
    seen = pointers(launches[0][0])
    assert seen >= {x.data_ptr() for x in (*leaves, out, lse)}
    launches.clear()
    gradients = torch.autograd.grad(out, leaves, dout)
    seen = set.union(*(pointers(args) for args, _ in launches))
    assert seen >= {x.data_ptr() for x in (*leaves, out, lse, dout, *gradients)}

    plain = [x.detach().contiguous().requires_grad_() for x in (q, k, v, bias)]
    again = attention(*plain[:3], bias=plain[3])
    others = torch.autograd.grad(again, plain, dout.contiguous())
    for a, b in zip((out, *gradients), (again, *others), strict=True):
        right = numpy(b)
        assert_within("a gradient", numpy(a), right, 1e-5 * np.linalg.norm(right))


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


def test_both_passes_drop_the_same(place, monkeypatch):
    seen = []
    for name in ("attention", "attention_backward"):
        function = getattr(fa_numba, name)

        def recorded(*arrays, function=function, **options):
            seen.append((options["dropout_p"], options["seed"], options.get("offset")))
            return function(*arrays, **options)

        monkeypatch.setattr(fa_numba, name, recorded)
    q, k, v = (tensor(x, place) for x in inputs_of({})[:3])
    attention(q, k, v, dropout_p=0.5, offset=3).sum().backward()
    attention(q, k, v, dropout_p=0.5).sum().backward()
    attention(q, k, v, dropout_p=0.5, seed=5).sum().backward()
    assert seen[0::2] == seen[1::2]
    seeds = [seed for _, seed, _ in seen[::2]]
    assert len(set(seeds)) == 3 and seeds[2] == 5 and min(seeds) >= 0


def test_without_dropout_the_generator_is_left_alone(place):
    q, k, v = (tensor(x, place) for x in inputs_of({})[:3])
    for options in ({}, {"dropout_p": 0.0}, {"dropout_p": 0.5, "seed": 1}):
        before = torch.get_rng_state()
        attention(q, k, v, **options)
        assert torch.equal(before, torch.get_rng_state())


# --- masks and layouts ------------------------------------------------------------------------


def gradients_of(algorithm, place, swapped=False, extra=(), **options):
    """O and the gradients of q, k, v and of tensors among the options, as (B, H, N, d)."""
    arrays = random_gradients(2, 2, 1, 5, 9, 4)
    if swapped:
        arrays = [x.swapaxes(1, 2) for x in arrays]
    dout, q, k, v = (tensor(x, place) for x in arrays)
    out = attention(q, k, v, algorithm=algorithm, **options)
    found = torch.autograd.grad(out, [q, k, v, *extra], dout.detach())
    found = [numpy(x) for x in (out, *found)]
    return [x.swapaxes(1, 2) if swapped and n < 4 else x for n, x in enumerate(found)]


@needs_torch
@pytest.mark.parametrize("algorithm", ["standard", "fa1", "fa2"])
def test_a_layout_moves_axes_alone(algorithm, place):
    want = gradients_of(algorithm, place, causal=True)
    found = gradients_of(algorithm, place, causal=True, swapped=True, layout="bnhd")
    for a, b in zip(found, want, strict=True):
        assert np.array_equal(a, b)


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


@needs_torch
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_mask_of_numbers_is_differentiated(dtype, place):
    values = np.random.default_rng(4).standard_normal((5, 9)).astype(dtype)
    mask = tensor(values, place)
    bias = tensor(values.astype(np.float32), place)
    found = gradients_of("fa2", place, attn_mask=mask, extra=[mask])
    want = gradients_of("fa2", place, bias=bias, extra=[bias])
    assert found[-1].dtype == dtype
    for a, b in zip(found, want, strict=True):
        assert np.allclose(a, b, rtol=0, atol=0 if dtype == "float32" else 1e-3)


# --- refusals --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ones:
    """Stands for a tensor of ones, (4, 4), of a torch that is not there yet."""

    dtype: str


# (changed arguments, error, what its message says)
REFUSED = [
    ({"q": np.ones((1, 2, 4, 8), np.float32)}, TypeError, "q is a ndarray: allowed is a torch"),
    ({"v": None}, TypeError, "v is a NoneType: allowed is a torch tensor"),
    ({"bias": BIAS}, TypeError, "bias is a ndarray: allowed is a torch tensor"),
    ({"alibi_slopes": [1.0]}, TypeError, "alibi_slopes is a list: allowed is a torch tensor"),
    ({"slopes": 1}, TypeError, r"slopes is no option \(did you mean alibi_slopes\?\): allowed"),
    ({"out": 1}, TypeError, r"out is no option here \(standard_attention, flash_attention_1, "),
    ({"attn_mask": BIAS}, TypeError, "attn_mask is a ndarray: allowed is a torch tensor"),
    ({"attn_mask": Ones("int32")}, TypeError,
     "attn_mask has dtype int32: allowed is float32 or float16 or bfloat16 or bool"),
    ({"attn_mask": Ones("float32"), "bias": Ones("float32")}, ValueError,
     r"attn_mask is given, of shape \(4, 4\), with a bias"),
    ({"layout": "nbhd"}, ValueError, "layout is 'nbhd': allowed is 'bhnd' for"),
    ({"stream": 1}, TypeError, "stream is no option"),
    ({"query_splits": 2, "algorithm": "fa1"}, TypeError, "query_splits is no option"),
    ({"algorithm": "fa3"}, ValueError, "algorithm is 'fa3': allowed is one of"),
    ({"return_lse": 1}, TypeError, "return_lse is 1: allowed is True or False$"),
    ({"deterministic": 1}, TypeError, "deterministic is 1: allowed is True or False, or None"),
    (
        {"deterministic": True, "algorithm": "fa1"}, ValueError,
        "deterministic is True with algorithm 'fa1': only fa2",
    ),
    ({"dropout_p": 1.0}, ValueError, "dropout_p is 1.0"),
    ({"dropout_p": "0.1"}, TypeError, "dropout_p is '0.1'"),
    ({"dropout_p": 0.1, "seed": -1}, ValueError, "seed is -1"),
    ({"scale": "1"}, TypeError, "scale is '1'"),
    ({"tiles": (8, 16)}, TypeError, "tiles is"),
    ({"backward_tiles": (8, 16)}, TypeError, "backward_tiles is"),
    ({"block_mask": BLOCKS}, ValueError, "block_mask is given without tiles"),
    ({"q_lens": [9, 9, 9]}, ValueError, "q_lens"),
]  # fmt: skip


@needs_torch
@pytest.mark.parametrize(("changes", "error", "says"), REFUSED, ids=str)
@pytest.mark.parametrize("gradient", [False, True])
def test_bad_arguments_are_refused(changes, error, says, gradient, monkeypatch):
    monkeypatch.setattr(devices, "launch", lambda *_: pytest.fail("something was launched"))
    q = torch.ones(1, 2, 4, 8, requires_grad=gradient)
    given = {"q": q, "k": q.detach(), "v": q.detach(), **changes}
    for name, x in given.items():
        if isinstance(x, Ones):
            given[name] = torch.ones(4, 4, dtype=getattr(torch, x.dtype))
    with devices.using("emulator"), pytest.raises(error, match=says):
        attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@needs_torch
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alibi_slopes": "leaf"}, "alibi_slopes requires a gradient and attention computes none"),
        ({"bias": "leaf", "deterministic": True}, "deterministic is True with return_dbias"),
        ({"tiles": Tiles(128, 256)}, "^tiles: Br=128, Bc=256"),
        ({"backward_tiles": Tiles(128, 256)}, "^backward_tiles: Br=128, Bc=256"),
        ({"backward_tiles": Tiles(16, 16, stages=2)}, "^backward_tiles: stages=2"),
    ],
    ids=str,
)
def test_what_has_no_gradient_is_refused_before_the_forward_pass(options, says, monkeypatch):
    monkeypatch.setattr(devices, "launch", lambda *_: pytest.fail("something was launched"))
    q = torch.ones(1, 2, 300, 64, requires_grad=True)
    leaf = torch.ones(2, 1, 1, requires_grad=True) if "bias" in options else torch.ones(2)
    leaf.requires_grad_()
    given = {name: leaf if x == "leaf" else x for name, x in options.items()}
    with devices.using("emulator"), pytest.raises(ValueError, match=says):
        attention(q, q, q, **given)
