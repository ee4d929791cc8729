"""The public functions: what they refuse and how they say so, and which arrays they take."""

import inspect
import re
from array import array as array_of
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    ALGORITHMS,
    GUARD,
    FakeGpuArray,
    Memory,
    assert_close_to_float64,
    assert_documented,
    random_inputs,
)

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices
from fa_numba.emulator import Counts
from fa_numba.host import placement
from fa_numba.problem import Problem
from fa_numba.tiling import splits

FUNCTIONS = {
    "standard": fa_numba.standard_attention,
    "fa1": fa_numba.flash_attention_1,
    "fa2": fa_numba.flash_attention_2,
}


@pytest.fixture(autouse=True)
def emulator(request):
    if request.node.get_closest_marker("gpu"):
        yield
    else:
        with devices.using("emulator"):
            yield


def array(*shape, dtype="float32"):
    return np.ones(shape, dtype)


# q (1, 2, 5, 4), k and v (1, 1, 7, 4) unless a case replaces them
GOOD = {"q": array(1, 2, 5, 4), "k": array(1, 1, 7, 4), "v": array(1, 1, 7, 4)}


class OnlyDlpack:
    """Host memory that offers the DLPack protocol and nothing else."""

    def __init__(self, values):
        self.values = values

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


# --- bad input -------------------------------------------------------------------------------

# bytes of shared memory that Tiles(64, 256) needs at d = 256
TOO_LARGE = min(s.shared_bytes for s in splits(64, 256, 256, any_registers=True))

# (replaced arguments, error, what its message says: the argument, its value, what is allowed)
REFUSED = {
    # kinds of arrays
    "a list": ({"q": [[1.0]]}, TypeError, ["q must be a NumPy", "torch", "DLPack, got a list"]),
    "None": ({"v": None}, TypeError, ["v must be a NumPy", "got None"]),
    "a number": ({"k": np.float32(1)}, TypeError, ["k must be a NumPy", "got a float32"]),
    "GPU memory beside host memory": (
        {"k": FakeGpuArray((1, 1, 7, 4))}, (TypeError, ValueError), ["k must be "],
    ),
    "GPU memory without a GPU": (
        {n: FakeGpuArray(a.shape) for n, a in GOOD.items()} | {"out": None},
        (TypeError, ValueError), ["q must be "],
    ),
    # dtypes
    **{
        dtype: (
            {"q": array(1, 2, 5, 4, dtype=dtype)}, TypeError,
            ["q must be float32, float16", f"got {dtype}"],
        )
        for dtype in ("float64", "int32", "bool", "complex64", ">f4")
    },
    "mixed dtypes": (
        {"k": array(1, 1, 7, 4, dtype="f2")}, TypeError,
        ["k must have the dtype of q (float32), got float16; convert it with k.astype(np.float32)"],
    ),
    "float64 of v": (
        {"v": array(1, 1, 7, 4, dtype="f8")}, TypeError,
        ["v must be float32", "got float64; convert it with v.astype(np.float32)"],
    ),
    "heads": (
        {"k": array(1, 3, 7, 4)}, ValueError,
        ["k must have a number of heads that divides the 2 heads of q", "got 3"],
    ),
    # memory that no float32 access can reach
    "a start between two floats": (
        {"q": np.ndarray((1, 2, 5, 4), "f4", bytearray(1000), 1)}, ValueError, ["q "],
    ),
    "a stride between two floats": (
        {"k": np.ndarray((1, 1, 7, 4), "f4", bytearray(1000), 0, (200, 200, 18, 4))}, ValueError,
        ["k "],
    ),
    # options
    "return_lse None": (
        {"return_lse": None}, TypeError, ["return_lse must be True or False, got None"],
    ),
    "tiles a tuple": (
        {"tiles": (8, 8)}, TypeError, ["tiles must be a Tiles(Br=..., Bc=...)", "got (8, 8)"],
    ),
    "tiles too large": (
        {n: array(1, 1, 2, 256) for n in "qkv"} | {"tiles": Tiles(64, 256)}, ValueError,
        ["tiles", "Br=64, Bc=256", f"got {TOO_LARGE} bytes", f"fit in {227 * 1024}"],
    ),
    "tiles beyond shared memory": (
        {"tiles": Tiles(4096, 512)}, ValueError, ["tiles", "Br=4096", "bytes of shared memory"],
    ),
    "threads": ({"tiles": Tiles(16, 16, 96)}, ValueError, ["32, 64, 128 or 256", "got 96"]),
    "no threads": ({"tiles": Tiles(16, 16, 0)}, ValueError, ["32, 64, 128 or 256", "got 0"]),
    "stream": ({"stream": 1}, ValueError, ["stream must be None on the emulator", "got 1"]),
    # out
    "out a list": ({"out": []}, TypeError, ["out must be a NumPy", "got a list"]),
    "out shape": (
        {"out": array(1, 2, 5, 8)}, ValueError,
        ["out must have shape (1, 2, 5, 4), got (1, 2, 5, 8)"],
    ),
    "out dtype": (
        {"out": array(1, 2, 5, 4, dtype="f8")}, TypeError,
        ["out must have the dtype of the inputs (float32), got float64"],
    ),
    "out of another library": (
        {"out": OnlyDlpack(array(1, 2, 5, 4))}, ValueError,
        ["out must have the same array type as q (NumPy array), got array with DLPack"],
    ),
    "out on the GPU": (
        {"out": FakeGpuArray((1, 2, 5, 4))}, (TypeError, ValueError), ["out must be "],
    ),
    "out a broadcast": (
        {"out": np.lib.stride_tricks.as_strided(array(400), (1, 2, 5, 4), (80, 80, 0, 4))},
        ValueError,
        ["out must have a separate address for each element", "got strides (80, 80, 0, 4)"],
    ),
    "out over itself": (
        {"out": np.lib.stride_tricks.as_strided(array(400), (1, 2, 5, 4), (80, 80, 4, 4))},
        ValueError,
        ["out must have a separate address for each element", "got strides (80, 80, 4, 4)"],
    ),
}  # fmt: skip


@pytest.fixture
def launches(monkeypatch):
    """Every launch of the test; none is made."""
    made = []
    monkeypatch.setattr(devices, "launch", lambda *args: made.append(args))
    return made


def unchanged(values):
    return {n: a.copy() for n, a in values.items() if isinstance(a, np.ndarray)}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_any_launch(algorithm, name, launches):
    replaced, error, says = REFUSED[name]
    out = Memory("emulator", (1, 2, 5, 4), "padded")
    arguments = {**GOOD, "out": out.argument, **replaced}
    if replaced.get("out", out) is out and arguments["q"] is not GOOD["q"]:
        arguments["out"] = None  # it fits the good q alone
    before = unchanged(arguments)
    with pytest.raises(error) as caught:
        FUNCTIONS[algorithm](**arguments)
    message = str(caught.value)
    assert all(part in message for part in says), message
    assert not launches
    out.assert_intact("out", whole=True)
    for argument, values in before.items():
        assert np.array_equal(arguments[argument], values, equal_nan=values.dtype.kind == "f")


def test_options_that_a_function_does_not_have_are_refused(launches):
    for algorithm in ("standard", "fa2"):
        with pytest.raises(TypeError, match="query_splits"):
            FUNCTIONS[algorithm](**GOOD, query_splits=2)
        with pytest.raises(TypeError, match="query_splits"):
            fa_numba.attention(**GOOD, algorithm=algorithm, query_splits=2)
        with pytest.raises(
            ValueError, match="query_splits must be 1 with .*got 2; splitting .* algorithm 'fa1'$"
        ):
            fa_numba.plan((1, 2, 5, 4), (1, 1, 7, 4), algorithm=algorithm, query_splits=2)
    for algorithm in ALGORITHMS:
        with pytest.raises(TypeError, match="dropout"):
            fa_numba.attention(**GOOD, algorithm=algorithm, dropout=0.1)
    with pytest.raises(ValueError, match="algorithm must be 'standard', 'fa1' or 'fa2', got 'fa3'"):
        fa_numba.attention(**GOOD, algorithm="fa3")
    with pytest.raises(ValueError, match="algorithm must be 'standard', 'fa1' or 'fa2', got 'fa3'"):
        fa_numba.plan((1, 2, 5, 4), (1, 1, 7, 4), algorithm="fa3")
    assert not launches


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_problem_too_large_for_the_emulator_is_refused(algorithm, launches):
    q = np.zeros((1, 1, 4096, 64), np.float32)
    out = np.full_like(q, GUARD)
    with pytest.raises(ValueError) as caught:
        FUNCTIONS[algorithm](q, q, q, out=out)
    message = str(caught.value)
    for part in ("q of shape (1, 1, 4096, 64)", "k of shape (1, 1, 4096, 64)", "the emulator up to",
                 f"limit of {placement.EMULATOR_SECONDS} s", "no CUDA GPU", "smaller problem",
                 "fa_numba.reference", "fa_numba.plan"):  # fmt: skip
        assert part in message
    assert not launches and (out.view(np.uint32) == GUARD.view(np.uint32)).all()
    plan = fa_numba.plan(q.shape, q.shape, algorithm=algorithm)  # the way out works
    assert plan.flops == 4 * 4096 * 4096 * 64


# --- plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "q, k, options, error, says",
    [
        ((1, 2, 5, 4), (1, 3, 7, 4), {}, ValueError,
         ["k must have a number of heads that divides the 2 heads of q", "got 3"]),
        ((1, 2, 5, 4), (1, 1, 7, 4), {"return_lse": None}, TypeError,
         ["return_lse must be True or False, got None"]),
        ((1, 2, 5, 4), (1, 1, 7, 4), {"tiles": 8}, TypeError, ["tiles must be a Tiles(", "got 8"]),
        ((1, 1, 5, 256), (1, 1, 7, 256), {"tiles": Tiles(64, 256)}, ValueError,
         [f"got {TOO_LARGE} bytes", f"fit in {227 * 1024}"]),
        ((65536, 1, 1, 4), (65536, 1, 1, 4), {}, ValueError,
         ["batch must be at most 65535", "got 65536"]),
        ((1, 65536, 1, 4), (1, 1, 1, 4), {}, ValueError,
         ["heads of q must be at most 65535", "got 65536"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_plan_refuses_as_the_call_does(algorithm, q, k, options, error, says):
    with pytest.raises(error) as caught:
        fa_numba.plan(q, k, algorithm=algorithm, **options)
    assert all(part in str(caught.value) for part in says), caught.value


# --- arrays of other libraries ---------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_torch_tensors_in_host_memory(algorithm):
    torch = pytest.importorskip("torch")
    q, k, v = random_inputs(1, 2, 1, 9, 17, 8)
    tensors = [torch.from_numpy(a) for a in (q, k, v)]
    O, L = FUNCTIONS[algorithm](*tensors, return_lse=True)
    for result in (O, L):
        assert isinstance(result, torch.Tensor) and result.dtype == torch.float32
    assert_close_to_float64(O.numpy(), q, k, v, L.numpy())
    out = torch.full_like(tensors[0], float("nan"))
    pointer = out.data_ptr()
    assert FUNCTIONS[algorithm](*tensors, out=out) is out
    assert out.data_ptr() == pointer and torch.equal(out, O)


def test_a_torch_tensor_that_wants_a_gradient_is_refused(launches):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.ones(1, 1, 3, 4) for _ in range(3))
    k.requires_grad_()
    with pytest.raises(
        ValueError, match=r"k requires a gradient.*torch\.attention.*detach.*no_grad"
    ):
        fa_numba.flash_attention_2(q, k, v)
    assert not launches
    with torch.no_grad():
        fa_numba.flash_attention_2(q, k, v)
    assert len(launches) == 1


def test_torch_tensors_of_another_dtype_are_refused(launches):
    torch = pytest.importorskip("torch")
    q = torch.ones(1, 1, 3, 4)
    with pytest.raises(TypeError, match=r"v must be float32.*float64; .*v\.to\(torch\.float32\)"):
        fa_numba.flash_attention_2(q, q, q.to(torch.float64))
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(TypeError, match=r"v must have the dtype of q \(float32\), got"):
            fa_numba.flash_attention_2(q, q, q.to(dtype))
    assert not launches


@pytest.mark.gpu
def test_mixed_places_are_refused_on_a_gpu():
    q, k, v = random_inputs(1, 1, 1, 8, 8, 8)
    remote = devices.to_gpu(k)
    with pytest.raises(ValueError, match=r"k .* device of q \(host memory\), got GPU 0"):
        fa_numba.flash_attention_2(q, remote, v)
    with pytest.raises(ValueError, match=r"out .* of q \(host memory\), got GPU 0"):
        fa_numba.flash_attention_2(q, k, v, out=devices.to_gpu(q))
    with devices.using("emulator"), pytest.raises(ValueError, match="q must .* got GPU 0"):
        fa_numba.flash_attention_2(devices.to_gpu(q), remote, devices.to_gpu(v))
    with pytest.raises(TypeError, match="stream must be .*got 'default'"):
        fa_numba.flash_attention_2(q, k, v, stream="default")


# --- the documentation -----------------------------------------------------------------------


def test_the_public_names():
    assert sorted(fa_numba.__all__) == sorted(
        ["AttentionOptions", "Plan", "Tiles", "algorithms", "append_kv", "attention",
         "attention_backward", "count_accesses", "create_block_mask", "dropout_mask",
         "flash_attention_1", "flash_attention_1_backward", "flash_attention_2",
         "flash_attention_2_backward", "io_model", "merge", "merge_backward", "plan", "quantize",
         "reference", "show_config", "softmax",
         "standard_attention", "standard_attention_backward"]
    )  # fmt: skip
    for name in fa_numba.__all__:
        assert inspect.getdoc(getattr(fa_numba, name)), f"{name} has no docstring"


def test_docstrings_say_what_comes_back_and_what_is_raised():
    whole = inspect.getdoc(fa_numba.flash_attention_2)
    for part in ("Returns\n----", "Raises\n----", "\nTypeError\n", "\nValueError\n", "float32",
                 "(batch, heads_q, seqlen_q, head_dim)"):  # fmt: skip
        assert part in whole
    for function in (*FUNCTIONS.values(), fa_numba.attention, fa_numba.plan):
        assert_documented(function)


def test_the_three_functions_share_one_signature():
    want = dict(inspect.signature(fa_numba.flash_attention_2).parameters)
    first = dict(inspect.signature(fa_numba.flash_attention_1).parameters)
    assert first.pop("query_splits").default == 1
    assert first.pop("warp_partition").default == "rows"
    assert want.pop("kv_splits").default == "auto"
    assert want.pop("prefix_k").default is want.pop("prefix_v").default is None
    assert first == want
    assert want.pop("ablate").default == ()
    assert dict(inspect.signature(fa_numba.standard_attention).parameters) == want


def test_lengths_beyond_32_bits_are_refused():
    with pytest.raises(ValueError, match="seqlen of q must be at most 2147482624, got 4294967301"):
        fa_numba.plan((1, 1, 2**32 + 5, 1), (1, 1, 8, 1))
    with pytest.raises(ValueError, match="seqlen of k must be at most .*got 2147483648"):
        fa_numba.plan((1, 1, 8, 1), (1, 1, 2**31, 1))


def test_a_scale_that_float32_would_make_zero_is_refused():
    q = array(1, 1, 4, 4)
    with pytest.raises(
        ValueError,
        match="scale must not round to 0 in float32 .the kernels compute in float32.*got 1e-46",
    ):
        fa_numba.flash_attention_2(q, q, q, scale=1e-46)


def _masked(*shape, dtype=np.float32):
    return np.ma.masked_array(np.ones(shape, dtype))


_MASKED_FUNCTION = _masked(4)
_PAGES = {"k": array(1, 1, 16, 4), "v": array(1, 1, 16, 4)}


@pytest.mark.parametrize(
    "name, given",
    [
        *((name, {name: _masked(1, 1, 4, 4)}) for name in ("q", "k", "v", "out", "bias")),
        *(("attn_mask", {"attn_mask": _masked(4, 4, dtype=x)}) for x in ("f4", "f2", bool)),
        *((name, {name: _masked(1)}) for name in ("alibi_slopes", "sinks")),
        *((name, {name: _masked(1, dtype=int)}) for name in ("q_lens", "kv_lens")),
        ("kv_lens", {"kv_lens": [_masked(dtype=int)]}),
        ("block_mask", {"block_mask": _masked(1, 1, dtype=bool), "tiles": Tiles(32, 32)}),
        ("block_table", {"block_table": _masked(1, 1, dtype=int), "kv_lens": [3], **_PAGES}),
        ("kv_lens", {"block_table": [[0]], "kv_lens": _masked(1, dtype=int), **_PAGES}),
        ("_MASKED_FUNCTION in score_mod", {"score_mod": lambda s, b, h, i, j: _MASKED_FUNCTION[j]}),
        ("prefix_k", {"prefix_k": _masked(1, 4, 4), "prefix_v": array(1, 4, 4)}),
    ],
)
def test_a_masked_array_is_refused(name, given):
    q = array(1, 1, 4, 4)
    wrong = f"{name}.* must be an array without a mask, got a NumPy masked array; pass "
    with pytest.raises(TypeError, match=wrong) as error:
        fa_numba.flash_attention_2(**{"q": q, "k": q, "v": q} | given)
    assert ("attn_mask to hide keys" in str(error.value)) == (name in ("q", "k", "v"))


def test_what_takes_no_masked_array_beside_attention():
    q, packed = array(1, 1, 4, 4), array(4, 1, 4)
    starts, wrong = _masked(2, dtype=int), "must be an array without a mask"
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        lens = {"cu_seqlens_q": [0, 4], "cu_seqlens_k": [0, 4], name: starts}
        with pytest.raises(TypeError, match=f"{name} {wrong}"):
            fa_numba.attention(packed, packed, packed, **lens)
    with pytest.raises(TypeError, match=f"bias {wrong}"):
        fa_numba.plan(q.shape, q.shape, bias=_masked(4, 4))
    with pytest.raises(TypeError, match=f"q {wrong}"):
        fa_numba.reference.attention(_masked(1, 1, 4, 4), q, q)
    with pytest.raises(TypeError, match=f"block_mask {wrong}"):
        fa_numba.io_model.flops(
            Problem(1, 1, 1, 4, 4, 4, sparse=True), block_mask=_masked(1, 1, dtype=bool)
        )
    with pytest.raises(TypeError, match=f"kv_lens {wrong}"):
        Problem(1, 1, 1, 4, 4, 4, kv_lens=_masked(1, dtype=int))
    pages, new = np.zeros((2, 1, 1, 16, 4), np.float32), np.ones((2, 1, 1, 1, 4), np.float32)
    for name in ("block_table", "kv_lens", "new_lens"):
        given = {"block_table": [[0]], "kv_lens": [0], "new_lens": [1]}
        given[name] = np.ma.masked_array(given[name])
        with pytest.raises(TypeError, match=f"{name} {wrong}"):
            fa_numba.append_kv(*pages, *new, **given)


@pytest.mark.parametrize("lens", [range(3), array_of("l", range(3)), deque(range(3))], ids=repr)
def test_lengths_are_any_sequence_of_integers(lens):
    q = array(3, 1, 4, 4)
    right = fa_numba.attention(q, q, q, kv_lens=[0, 1, 2])
    assert (fa_numba.attention(q, q, q, kv_lens=lens) == right).all()
    with pytest.raises(TypeError, match="kv_lens must be an array or a sequence of values, got a"):
        fa_numba.attention(q, q, q, kv_lens="012")


@pytest.mark.gpu
@pytest.mark.skipif(not devices.gpu_available(), reason="no CUDA GPU")
def test_the_readmes_torch_example_runs():
    torch = pytest.importorskip("torch")
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(q, k, v = \(torch.*?)```", readme, re.DOTALL)
    names = {"torch": torch, "fa_numba": fa_numba}
    exec(example, names)
    assert isinstance(names["out"], torch.Tensor) and names["out"].shape == (4, 32, 4096, 64)


def test_plans_and_counts_have_one_line_and_tables():
    shape = (1, 2, 64, 16)
    p = fa_numba.plan(shape, shape, algorithm="fa1", causal=True)
    assert repr(p) == (
        "<Plan: fa1 forward, unit simt, float32, q (1, 2, 64, 16), k (1, 2, 64, 16), causal=True, "
        f"tiles {p.tiles.Br} x {p.tiles.Bc}, kernels: fa1_forward>"
    )
    assert p._repr_html_().count("<table>") == 2
    html = p._repr_html_()
    heads = ("kernel", "grid", "threads", "shared memory, bytes")
    for names in (heads, ("array", "elements loaded", "elements stored")):
        assert f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>" in html
    (k,) = p.kernels
    cells = "".join(f"<td>{x}</td>" for x in (k.grid, k.threads, f"{k.shared_bytes:,}"))
    assert f"<tr><th>{k.name}</th>{cells}</tr>" in html
    totals = f"<td>{p.accesses.total_loads:,}</td><td>{p.accesses.total_stores:,}</td>"
    assert f"<tr><th>all</th>{totals}</tr>" in html
    for name in ("K", "O"):
        moved = [getattr(p.accesses, of).get(name, 0) for of in ("loads", "stores")]
        cells = "".join(f"<td>{number:,}</td>" for number in moved)
        assert f"<tr><th>{name}</th>{cells}</tr>" in p._repr_html_()
    counts = Counts()
    counts.loads["Q"], counts.load_bytes["Q"], counts.stores["O<"] = 1000, 4000, 8
    assert repr(counts) == ("<Counts: 1,000 elements loaded, 8 stored, 4,000 bytes; arrays: O<, Q>")
    assert "<tr><th>O&lt;</th><td>0</td><td>8</td><td>0</td><td>0</td></tr>" in counts._repr_html_()
    with_prefix = fa_numba.plan(shape, shape, prefix_k=(2, 32, 16))
    assert repr(with_prefix).startswith("<Plan: fa2 forward, ")


def test_plan_does_not_take_arrays():
    q = np.zeros((1, 2, 64, 16), np.float32)
    text = (
        r"q must be a shape of 4 integers, .*, got an array of shape \(1, 2, 64, 16\); pass q.shape"
    )
    with pytest.raises(TypeError, match=text):
        fa_numba.plan(q, q)
    assert fa_numba.plan(np.array(q.shape), q.shape).problem.seqlen_q == 64
