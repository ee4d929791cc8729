"""Other ways to say the same: where axes lie, masks, None and NumPy's scalars, JAX arrays."""

import importlib.util
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from backward_helpers import random_gradients

import fa_numba
from fa_numba import device as devices
from fa_numba import options, reference
from fa_numba.host.arrays import on_host
from fa_numba.options import NAMES

B, Hq, Hk, Nq, Nk, d = 2, 2, 1, 5, 11, 4
SIZES = (B, Hq, Hk, Nq, Nk, d)
ALGORITHMS = ("standard", "fa1", "fa2")


@pytest.fixture(autouse=True)
def emulator():
    with devices.using("emulator"):
        yield


def both_passes(algorithm, dtype="float32", of=fa_numba, swapped=False, **options):
    """O and L, dq, dk and dv of one set of inputs, always as (B, H, N, d)."""
    dout, q, k, v = (x.astype(dtype) for x in random_gradients(*SIZES))
    if swapped:
        dout, q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (dout, q, k, v))
    if of is fa_numba:
        forward, backward = fa_numba.attention, fa_numba.attention_backward
        options["algorithm"] = algorithm
        out, lse = forward(q, k, v, return_lse=True, **options)
        found = (out, *backward(dout, q, k, v, out, lse, **options))
    else:
        out, lse = reference.attention(q, k, v, return_lse=True, **options)
        found = (out, *reference.attention_backward(dout, q, k, v, **options))
    assert found[0].shape == q.shape and found[3].shape == k.shape
    if swapped:
        found = tuple(x.swapaxes(1, 2) for x in found)
    return (*found, lse)


def assert_same(found, want):
    for a, b in zip(found, want, strict=True):
        assert np.array_equal(a, b)


# --- layout ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_layout_changes_where_axes_lie_and_nothing_else(algorithm, dtype):
    options = {"causal": True, "kv_lens": [11, 6]}
    want = both_passes(algorithm, dtype, **options)
    assert_same(both_passes(algorithm, dtype, swapped=True, layout="bnhd", **options), want)
    assert_same(both_passes(algorithm, dtype, layout="bhnd", **options), want)
    assert_same(both_passes(algorithm, dtype, layout=None, **options), want)


# --- attn_mask -------------------------------------------------------------------------------


def random_mask(*shape):
    mask = np.random.default_rng(5).random(shape) < 0.6
    if shape[-2] > 1:
        mask[..., 0, :] = False  # a row that sees nothing
    return mask


@pytest.mark.in_turn("algorithm")
@pytest.mark.parametrize("shape", [(Nq, Nk), (B, 1, Nq, Nk), (B, Hq, Nq, Nk), (1, 1, 1, Nk)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_boolean_mask_is_a_bias_of_minus_infinity(algorithm, shape):
    mask = random_mask(*shape)
    bias = np.where(mask, np.float32(0), np.float32(-np.inf))
    found = both_passes(algorithm, attn_mask=mask)
    assert_same(found, both_passes(algorithm, bias=bias))
    exact = both_passes(algorithm, of=reference, attn_mask=mask)
    assert_same(exact, both_passes(algorithm, of=reference, bias=bias))
    if shape[-2] > 1:
        assert (found[0][:, :, 0] == 0).all() and (found[4][:, :, 0] == -np.inf).all()
    for a, b in zip(found, exact, strict=True):
        finite = np.isfinite(b)
        assert np.array_equal(finite, np.isfinite(a))
        assert abs(a[finite] - b[finite]).max() < 1e-5


# --- values ----------------------------------------------------------------------------------

SAME = {
    "causal": ({"causal": np.True_}, {"causal": True}),
    "scale": ({"scale": np.float32(0.25)}, {"scale": 0.25}),
    "window": ({"window": (np.int64(3), None)}, {"window": (3, -1)}),
    "softcap": ({"softcap": np.float32(2.0)}, {"softcap": 2.0}),
    "no softcap": ({"softcap": 0.0}, {}),
    "no softcap of an int": ({"softcap": 0}, {}),
    "seed": (
        {"dropout_p": np.float32(0.5), "seed": np.int64(7), "offset": np.uint32(3)},
        {"dropout_p": 0.5, "seed": 7, "offset": 3},
    ),
    "None": (dict.fromkeys(NAMES), {}),
}  # fmt: skip


@pytest.mark.in_turn("algorithm")
@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_obvious_values_are_taken(algorithm, name):
    given, plain = SAME[name]
    want = both_passes(algorithm, **plain)
    assert_same(both_passes(algorithm, **given), want)
    shapes = (B, Hq, Nq, d), (B, Hk, Nk, d)
    assert fa_numba.plan(*shapes, **given) == fa_numba.plan(*shapes, **plain)
    exact = both_passes(algorithm, of=reference, **plain)
    assert_same(both_passes(algorithm, of=reference, **given), exact)


# --- names -----------------------------------------------------------------------------------

FUNCTIONS = [
    getattr(fa_numba, name)
    for name in fa_numba.__all__
    if inspect.isfunction(getattr(fa_numba, name)) and "attention" in name
]


def test_every_option_is_in_the_help_of_every_function():
    for function in (*FUNCTIONS, fa_numba.plan):
        for name in NAMES:
            assert f"\n{name} : " in inspect.getdoc(function), (function.__name__, name)
    assert len(FUNCTIONS) == 8


@pytest.mark.parametrize("function", [*FUNCTIONS, fa_numba.plan, reference.unfused])
def test_options_follow_a_functions_own_parameters(function):
    titles = re.findall(r"^([A-Z][\w ]*)\n-{3,}$", inspect.getdoc(function), re.MULTILINE)
    assert titles[0] == "Parameters" and len(set(titles)) == len(titles)
    section = re.split(r"^[A-Z][\w ]*\n-{3,}$", inspect.getdoc(function), flags=re.MULTILINE)[1]
    listed = re.findall(r"^(\S+) : ", section, re.MULTILINE)
    own = listed.index("**options")
    assert listed[own + 1 :] == list(NAMES)
    assert len(set(listed)) == len(listed)


def test_a_function_without_a_docstring_takes_the_options(monkeypatch):
    monkeypatch.setattr(options, "_functions", [])

    def undocumented(**options):
        pass

    assert options.documents_options(undocumented).__doc__ is None
    monkeypatch.setattr(options.AttentionOptions, "__doc__", None)  # as python -OO has it

    def documented(**options):
        """Return nothing."""

    assert options.documents_options(documented).__doc__ == "Return nothing."


@pytest.mark.parametrize(
    "call, name, says",
    [
        (
            "flash_attention_2",
            "query_splits",
            "flash_attention_1, flash_attention_1_backward take it",
        ),
        (
            "standard_attention",
            "ablate",
            "of this function (flash_attention_1, flash_attention_2 take it)",
        ),
        (
            "flash_attention_2",
            "deterministic",
            "of this function (flash_attention_2_backward takes it)",
        ),
        ("flash_attention_2", "tile", "(did you mean tiles?)"),
        ("flash_attention_1", "is_causal", "(did you mean causal?)"),
        ("flash_attention_2", "softmax_scale", "(did you mean scale?)"),
        ("flash_attention_1", "mask", "(did you mean attn_mask?)"),
        ("flash_attention_2", "cache_seqlens", "(did you mean kv_lens?)"),
        (
            "flash_attention_2",
            "nonsense",
            "nonsense is not an option; options: alibi_slopes, attn_mask,",
        ),
    ],
)
def test_a_name_of_another_function_is_said_to_be_there(call, name, says):
    q = np.zeros((1, 1, 4, 4), np.float32)
    with pytest.raises(TypeError) as caught:
        getattr(fa_numba, call)(q, q, q, **{name: 2})
    assert f"{name} is not an option" in str(caught.value) and says in str(caught.value)


# --- what the package says of itself ---------------------------------------------------------


def test_the_version_is_that_of_the_source_tree():
    import configparser

    source = configparser.ConfigParser()
    source.read(Path(__file__).parents[2] / "setup.cfg")
    assert fa_numba.__version__ == source["metadata"]["version"]
    cited = Path(__file__).parents[2] / "CITATION.cff"
    assert f"\nversion: {fa_numba.__version__}\n" in cited.read_text(encoding="utf-8")
    changes = Path(__file__).parents[2] / "CHANGELOG.md"
    assert f"\n## {fa_numba.__version__}\n" in changes.read_text(encoding="utf-8")


# --- JAX -------------------------------------------------------------------------------------

needs_jax = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is not installed")


@needs_jax
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_jax_arrays_in_and_out(algorithm, dtype):
    import jax.numpy as jnp

    given = [jnp.asarray(x, dtype) for x in random_gradients(*SIZES)]
    dout, q, k, v = given
    mask = jnp.asarray(random_mask(Nq, Nk))
    options = {"algorithm": algorithm, "attn_mask": mask, "kv_lens": jnp.asarray([11, 6])}
    out, lse = fa_numba.attention(q, k, v, return_lse=True, **options)
    found = (out, lse, *fa_numba.attention_backward(dout, q, k, v, out, lse, **options))
    options |= {"attn_mask": np.asarray(mask), "kv_lens": [11, 6]}
    same = [np.asarray(x) for x in given]
    o, l = fa_numba.attention(*same[1:], return_lse=True, **options)
    want = (o, l, *fa_numba.attention_backward(*same, o, l, **options))
    for a, b in zip(found, want, strict=True):
        assert isinstance(a, jnp.ndarray) and a.devices() == q.devices()
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.array_equal(np.asarray(a), b)


@needs_jax
def test_jax_arrays_that_are_refused():
    import jax
    import jax.numpy as jnp

    q = jnp.ones((1, 1, 4, 4))
    with pytest.raises(TypeError, match="q must be an array with values, got the JAX tracer"):
        jax.jit(lambda q: fa_numba.flash_attention_2(q, q, q))(q)
    with pytest.raises(ValueError, match="out must be writable, got a read-only JAX array"):
        fa_numba.flash_attention_2(q, q, q, out=jnp.zeros((1, 1, 4, 4)))
    with pytest.raises(TypeError, match="q must be float32, .* or float8_e4m3fn, got int32"):
        fa_numba.flash_attention_2(*3 * [jnp.ones((1, 1, 4, 4), int)])


def test_small_arrays_come_by_dlpack_too():
    class Lengths:
        def __init__(self, *values):
            self.__dlpack__ = np.array(values).__dlpack__
            self.__dlpack_device__ = lambda: (1, 0)

    for lengths in (Lengths(3, 4), np.array([3, 4], ">i4")):  # which DLPack has no type for
        assert on_host("kv_lens", lengths).tolist() == [3, 4]
    with pytest.raises(
        TypeError, match="kv_lens must be an array or a sequence of values, got an object"
    ):
        on_host("kv_lens", object())
