"""Calls of flash-attn-4, by stand-ins for torch and for flash-attn-4 that compute with NumPy."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import shapes, speed_fp16, variants
from experiments.beside import variant_times
from experiments.lab.measure import calls, flex, pallas, peers
from experiments.lab.measure.series import columns
from experiments.lab.measure.workloads import fa2_setting
from experiments.lab.record import Row
from fa_numba.problem import Problem

PROBLEM = Problem(2, 4, 2, 3, 5, 8, dtype="float16", causal=True)


class Tensor:
    """An array whose methods are those of a tensor."""

    def __init__(self, values):
        self.values, self.wants = values, False
        self.shape = values.shape

    def transpose(self, a, b):
        return Tensor(np.swapaxes(self.values, a, b))

    def contiguous(self):
        return Tensor(np.ascontiguousarray(self.values))

    def detach(self):
        return self

    def __mul__(self, factor):
        return Tensor(self.values * factor)

    def requires_grad_(self):
        self.wants = True
        return self


@pytest.fixture
def asked(monkeypatch):
    """The calls that flash-attn-4 gets. It returns 10 q, and autograd returns its inputs."""
    seen = []

    def flash_attn_func(q, k, v, **options):
        seen.append(((q, k, v), options))
        return Tensor(10 * q.values), None

    def grad(result, leaves, dout, retain_graph=False):
        seen.append((result, dout, retain_graph))
        return leaves

    matmul = SimpleNamespace(allow_tf32=True)
    stand_in = SimpleNamespace(
        as_tensor=lambda x, device: x, autograd=SimpleNamespace(grad=grad),
        backends=SimpleNamespace(cuda=SimpleNamespace(matmul=matmul)),
    )  # fmt: skip
    monkeypatch.setattr(peers, "torch", stand_in)
    monkeypatch.setattr(peers, "fa4", lambda: flash_attn_func)
    return seen


def arrays():
    rng = np.random.default_rng(0)
    of = PROBLEM
    return [
        Tensor(rng.normal(size=shape)) for shape in (of.q_shape, of.k_shape, of.k_shape, of.q_shape)
    ]


def test_the_forward_pass_has_the_layout_of_each_library(asked):
    q, k, v, _ = arrays()
    run = calls.make(peers.FA4, "fwd", PROBLEM, (q, k, v))
    np.testing.assert_array_equal(run().values, 10 * q.values)
    ((given, options),) = asked
    assert [x.shape for x in given] == [(2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8)]
    assert all(x.values.flags.c_contiguous for x in given)  # copied before the call
    assert options == {"softmax_scale": PROBLEM.scale, "causal": True}
    run()
    assert asked[1][0][0] is given[0]


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"window": (7, 0)}, {"window_size": (7, 0)}),
        ({"window": (-1, 2)}, {"window_size": (None, 2)}),
        ({"softcap": 2.0}, {"softcap": 2.0}),
    ],
)
def test_a_window_and_a_softcap_are_given(asked, fields, option):
    problem = replace(PROBLEM, causal=False, **fields)
    calls.make(peers.FA4, "fwd", problem, arrays()[:3])()
    common = {"softmax_scale": problem.scale, "causal": False}
    assert asked[0][1] == common | option and peers.in_fa4(problem)
    other = replace(PROBLEM, alibi=True)
    assert not peers.in_fa4(other)
    with pytest.raises(ValueError, match="without bias, ALiBi, packed sequences and lengths"):
        calls.make(peers.FA4, "fwd", other, arrays()[:3])


def test_the_variants_of_flash_attn_4_are_those_of_our_functions():
    """Its options show each row the columns that our mask shows, and change scores alike."""
    N = variant_times.TIMED.seqlen_q
    seen = variants.VARIANTS["sliding window"](N, 1)["mask_mod"]
    left, right = variant_times.of_fa4("sliding window").window
    for i, j in ((N - 1, N - 1 - left), (N - 1, N - 2 - left), (5, 5 + right), (5, 6 + right)):
        assert seen(0, 0, i, j) == (i - left <= j <= i + right)
    cap = variant_times.of_fa4("softcap").softcap
    change = variants.VARIANTS["softcap"](N, 1)["score_mod"]
    assert change(3.0, 0, 0, 0, 0) == pytest.approx(cap * np.tanh(3.0 / cap))
    assert variant_times.of_fa4("causal").causal and variant_times.of_fa4("alibi") is None
    assert {"causal", "sliding window", "softcap"} <= {*variants.VARIANTS}


@pytest.mark.parametrize("pass_", ["bwd", "fwd+bwd"])
def test_gradients_are_of_the_copies(asked, pass_):
    q, k, v, dout = arrays()
    run = calls.make(peers.FA4, pass_, PROBLEM, (q, k, v, dout))
    assert len(asked) == (1 if pass_ == "bwd" else 0)  # the forward pass is kept, or not yet run
    for made, x in zip(run(), (q, k, v), strict=True):
        np.testing.assert_array_equal(made.values, x.values)
    (leaves, _), (_, upstream, kept) = asked
    assert all(x.wants for x in leaves) and kept == (pass_ == "bwd")
    np.testing.assert_array_equal(upstream.transpose(1, 2).values, dout.values)


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_options_that_flash_attn_4_lacks_are_refused(asked, pass_):
    with pytest.raises(
        ValueError, match="flash-attn-4 does not support .*dropout_p.*; use another"
    ):
        calls.make(peers.FA4, pass_, PROBLEM, arrays(), dropout_p=0.1)
    assert not asked


def test_a_library_that_is_missing_is_not_measured(monkeypatch, capsys):
    every = (*peers.HALF, peers.FA4)
    monkeypatch.setattr(peers, "available", lambda: True)
    monkeypatch.setattr(peers, "fa4", lambda: None)
    assert peers.here(every) == peers.HALF
    peers.say_missing(print)
    assert "flash-attn-4's kernels are not measured" in capsys.readouterr().out
    with pytest.raises(ValueError, match="flash-attn-4 must be installed"):
        peers._call_fa4(PROBLEM, None, None, None)
    monkeypatch.setattr(peers, "fa4", lambda: len)
    assert peers.here(every) == every
    study, problem = speed_fp16.STUDY, fa2_setting(512, 64, dtype="float16")
    assert peers.FA4 in study.at(problem, "bwd")
    plain, dropped = (
        shapes.Point(kind, "x", problem, beside_mma=False) for kind in ("few", "dropout")
    )
    assert shapes.at(plain, "fwd")[-1] == peers.FA4 and peers.FA4 not in shapes.at(dropped, "fwd")
    monkeypatch.setattr(peers, "available", lambda: False)
    assert peers.here(every) == () and study.at(problem, "bwd") == [*study.ours]
    assert peers.versions()["cudnn"] is None and {*peers.versions()} == {
        "flash-attn-4",
        "triton",
        "jax",
        "nvidia-cudnn-frontend",
        "cudnn",
    }


def test_old_gpus_have_no_flash_attn_4(monkeypatch):
    capability = SimpleNamespace(get_device_capability=lambda: (8, 0), is_available=lambda: True)
    monkeypatch.setattr(peers, "torch", SimpleNamespace(cuda=capability))
    assert peers.fa4.__wrapped__() is None and calls.theirs(peers.FA4)


def test_attention_of_jax_gets_scaled_queries_in_its_layout(monkeypatch):
    """By stand-ins: JAX's function returns 10 q. Both libraries hand arrays on in each call."""
    handed, seen = [], []

    def attention(q, k, v, config):
        seen.append(([x.shape for x in (q, k, v)], config))
        return Tensor(10 * q.values)

    def from_dlpack(x):
        handed.append(x)
        return x

    jax = SimpleNamespace(dlpack=SimpleNamespace(from_dlpack=from_dlpack))
    module = SimpleNamespace(attention=attention, TuningConfig=lambda **fields: fields)
    monkeypatch.setattr(pallas, "library", lambda: (jax, module))
    monkeypatch.setattr(pallas, "torch", SimpleNamespace(from_dlpack=from_dlpack))
    problem = Problem(1, 4, 2, 256, 256, 64, dtype="float16", causal=True)
    q, k, v = (Tensor(np.ones(shape)) for shape in (problem.q_shape, *[problem.k_shape] * 2))
    run = calls.make(peers.PALLAS, "fwd", problem, (q, k, v))
    np.testing.assert_array_equal(run().values, 10 * problem.scale * q.values)
    run()
    ((shapes_, config), _) = seen
    assert shapes_ == [(1, 256, 4, 64), (1, 256, 2, 64), (1, 256, 2, 64)] and len(handed) == 8
    assert config["causal"] and config["block_q"] == 64
    with pytest.raises(ValueError, match="jax-pallas must be called forward and without dropout"):
        calls.make(peers.PALLAS, "bwd", problem, (q, k, v, q))


@pytest.mark.parametrize(
    "other", [{"head_dim": 32}, {"seqlen_q": 192}, {"seqlen_k": 200}, {"window": (3, 3)},
              {"dtype": "float32"}, {"causal": True, "seqlen_k": 512}]
)  # fmt: skip
def test_problems_that_jax_does_not_take_are_refused(monkeypatch, other):
    problem = Problem(1, 4, 2, 256, 256, 64, dtype="float16")
    assert pallas.takes(problem) and not pallas.takes(replace(problem, **other))
    monkeypatch.setattr(pallas, "library", lambda: None)
    with pytest.raises(ValueError, match=r"head_dim must be one of \[64, 128\].*another peer"):
        pallas.call(problem, None, None, None)


def test_each_backend_of_flex_attention_is_named(monkeypatch):
    asked = []
    monkeypatch.setattr(
        flex, "_compiled", lambda *arrays, **given: asked.append(given) or (lambda: arrays[1])
    )
    for series, name in peers.FLEX_BACKENDS.items():
        assert calls.make(series, "fwd", PROBLEM, ("q", "k", "v"))() == "q"
        assert asked[-1] == {"backend": name}
        with pytest.raises(ValueError, match=f"{series} must be called forward"):
            calls.make(series, "fwd", PROBLEM, ("q", "k", "v"), dropout_p=0.1)


def test_further_peers_are_measured_at_few_lengths(monkeypatch):
    monkeypatch.setattr(peers, "available", lambda: True)
    monkeypatch.setattr(peers, "fa4", lambda: None)
    monkeypatch.setattr(pallas, "library", lambda: (1, 2))
    study = speed_fp16.STUDY
    few = (peers.EFFICIENT, peers.FLEX_TRITON, peers.PALLAS)  # FLASH needs flash-attn-4
    at = {
        (N, d, pass_): study.at(fa2_setting(N, d, dtype="float16"), pass_)
        for N, d, pass_ in ((1024, 64, "fwd"), (2048, 64, "fwd"), (1024, 256, "fwd"),
                            (1024, 64, "bwd"))
    }  # fmt: skip
    assert tuple(at.pop((1024, 64, "fwd"))[-3:]) == few
    assert not any({*few} & {*series} for series in at.values())
    monkeypatch.setattr(peers, "fa4", lambda: len)
    monkeypatch.setattr(pallas, "library", lambda: None)
    series = study.at(fa2_setting(1024, 64, dtype="float16"), "fwd")
    assert peers.FLEX_FLASH in series and peers.PALLAS not in series


def test_the_table_of_further_peers():
    def row(series, value):
        problem = fa2_setting(1024, 64, dtype="float16")
        return Row(metric="speed", unit="TFLOP/s", value=value,
                   **columns("speed_fp16", series, problem, "some-gpu"))  # fmt: skip

    rows = [row("fa2-wgmma", 400.0), row(peers.FLEX_TRITON, 250.0), row(peers.PALLAS, 320.0)]
    assert "| 64 | no | 1024 | 400 | 250 | 320 | 1.25 |" in speed_fp16.further_peers(rows).body
    assert speed_fp16.further_peers(rows[:1]) is None


@pytest.mark.skipif(peers.torch is None, reason="no torch")
@pytest.mark.parametrize("masked", [False, True])
def test_unfused_attention_of_torch_is_attention_with_gradients(masked):
    """On a CPU. A mask hides columns, of which every row keeps one."""
    torch = peers.torch
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, N, 8, generator=make).requires_grad_() for N in (5, 7, 7))
    hidden = torch.ones(5, 7, dtype=torch.bool).triu_(2) if masked else None
    found = peers.unfused(q, k, v, 0.3, hidden)
    keep = None if hidden is None else ~hidden
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=0.3)
    dout = torch.randn(found.shape, generator=make)
    grads = (torch.autograd.grad(x, (q, k, v), dout) for x in (found, expected))
    for a, b in zip((found, *next(grads)), (expected, *next(grads)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    if masked:  # the causal mask in the softmax, whose backward pass has no mask
        square = q, k[:, :, :5], v[:, :, :5]
        inside = peers.unfused(*square, 0.3, softmax=peers.masked_softmax(compiled=False))
        apart = peers.unfused(*square, 0.3, torch.ones(5, 5, dtype=torch.bool).triu_(1))
        grads = [torch.autograd.grad(x, (q, k, v), dout) for x in (inside, apart)]
        for a, b in zip((inside, *grads[0]), (apart, *grads[1]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    zeros = peers.unfused(q, k, v, 0.3, softmax=lambda S: 0 * S)
    assert not zeros.any() and peers.unfused(q, k, v, 0.3, dropout_p=0.5).shape == found.shape
