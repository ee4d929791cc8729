"""What the driver is asked for: keys of kept calls, addresses, alignment, GPUs, streams, order.

The GPUs are stand-ins that take down and run nothing, so that each call takes a millisecond.
"""

import inspect
import itertools
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from helpers import numpy_dtype
from stand_in_device import (
    CONTEXT,
    Array,
    Dlpack,
    JaxArray,
    address,
    aligned,
    no_calls_kept,
    no_cupy_but_its_names,
    no_gpu_but_its_driver,
    no_jax_but_its_names,
    on_gpu,
    owner_of,
)
from stand_in_torch import Tensor

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices
from fa_numba.choices.requests import Choices
from fa_numba.device import kernel_cache, launch_record
from fa_numba.emulator.global_memory import used_strides
from fa_numba.host import binding, launch_cache, overlap, planning
from fa_numba.host.arrays import operand
from fa_numba.intrinsics.reduction import add_pair, add_pair_vector
from fa_numba.problem import Problem

# Batch 2, two heads of q that share one of k: rows of q and of k, head dimension.
NQ, NK, D = 5, 9, 8
SHAPES = {
    **dict.fromkeys(("q", "out", "dout"), (2, 2, NQ, D)),
    **dict.fromkeys("kv", (2, 1, NK, D)),
    "lse": (2, 2, NQ),
    "bias": (2, 2, NQ, NK),
    "alibi_slopes": (2,),
}
FLOAT32 = ("lse", "bias", "attn_mask", "alibi_slopes")  # whatever q has


@pytest.fixture
def gpu(kept):
    with no_gpu_but_its_driver((9, 0), (8, 0)) as found:
        found.runs = False
        yield found


@pytest.fixture
def cupy(gpu):
    with no_cupy_but_its_names(gpu) as found:
        yield found


# --- calls -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Where an array of a call lies: ``layout`` is a name among ``LAYOUTS``."""

    shape: tuple
    dtype: str = "float32"
    layout: str = "dense"
    offset: int = 0
    gpu: int = 0
    read_only: bool = False

    def values(self):
        host = {"bfloat16": "uint16"}.get(self.dtype, self.dtype)
        return LAYOUTS[self.layout](self.shape, host, offset=self.offset, gpu=self.gpu)

    def of(self, library):
        if library == "torch":
            return Tensor.of(self.values(), self.dtype)
        if library == "dlpack":
            return Dlpack(self.values())
        return Array(self.values(), self.read_only)


def _far(shape, dtype, **where):
    """Rows twice as far from one another as they are long."""
    return aligned((*shape[:-1], 2 * shape[-1]), dtype, **where)[..., : shape[-1]]


def _heads_last(shape, dtype, **where):
    *batch, heads, rows, d = shape
    return aligned((*batch, rows, heads, d), dtype, **where).swapaxes(-3, -2)


LAYOUTS = {
    "dense": aligned,
    "far rows": _far,
    "heads last": _heads_last,
    "last row first": lambda shape, dtype, **where: aligned(shape, dtype, **where)[..., ::-1, :],
    "every second element": lambda shape, dtype, **where: aligned(
        (*shape[:-1], 2 * shape[-1]), dtype, **where
    )[..., ::2],
}


@dataclass(frozen=True)
class Call:
    """A call to be made: its arrays by name, and its other arguments."""

    arrays: dict
    options: dict
    backward: bool = False

    def changed(self, names, **facts):
        """The same, but for facts of the arrays ``names``."""
        names = names.split() if isinstance(names, str) else names
        found = {n: replace(x, **facts) if n in names else x for n, x in self.arrays.items()}
        return replace(self, arrays=found)

    def without(self, name):
        return replace(self, arrays={n: x for n, x in self.arrays.items() if n != name})

    def having(self, **options):
        return replace(self, options=self.options | options)

    def made(self, library):
        return {name: x.of(library) for name, x in self.arrays.items()}

    def run(self, arrays):
        arrays = dict(arrays)
        names = ("dout", "q", "k", "v", "out", "lse") if self.backward else "qkv"
        first = [arrays.pop(n) for n in names]
        function = fa_numba.attention_backward if self.backward else fa_numba.attention
        return function(*first, **arrays, **self.options)


def call_of(*names, backward=False, **options):
    """A call whose arrays are all dense, float32 and on GPU 0."""
    return Call({n: Memory(SHAPES[n]) for n in names}, options, backward)


FORWARD = call_of("q", "k", "v", "out", "bias", "alibi_slopes", return_lse=True)
BACKWARD = call_of(
    "q", "k", "v", "out", "dout", "lse", "bias", "alibi_slopes", backward=True, return_dbias=True
)


def described(array, name):
    """What there is to say of a result; ``name`` tells its address."""
    values = array.values
    where = owner_of(values.ctypes.data)
    return type(array).__name__, values.shape, values.strides, str(array.dtype), where, name


def asked(gpu, call, arrays):
    """What the driver is asked by ``call``, and the results, each address as the name of the array
    that is there or its number among the others; or how the call is refused.
    """
    gpu.log.clear()
    try:
        results = call.run(arrays)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error), str(error), len(gpu.log)
    steps, named = gpu.steps(arrays)
    results = results if isinstance(results, tuple) else (results,)
    return steps, [described(x, named(address(x))) for x in results]


def as_first(gpu, call, arrays):
    """``asked``, as if there had been no call before."""
    planning.planned.cache_clear()
    binding._on_gpu.cache_clear()
    with no_calls_kept():
        return asked(gpu, call, arrays)


# --- kept calls ------------------------------------------------------------------------------


def changes(plain, library):
    """Calls by name of which each differs from ``plain``, and from all others, in one respect."""
    found = {"plain": plain}
    tiles = [n for n, x in plain.arrays.items() if len(x.shape) == 4]
    for name in plain.arrays:
        for bytes_ in (4, 8):
            found[f"{name} {bytes_} bytes on"] = plain.changed(name, offset=bytes_)
        found[f"{name} on another GPU"] = plain.changed(name, gpu=1)
        found[f"{name} of another dtype"] = plain.changed(name, dtype="float16")
        layouts = set(LAYOUTS) - {"dense"} if name in tiles else {"every second element"}
        for layout in sorted(layouts):
            if library == "torch" and layout == "last row first":
                continue  # torch has no negative strides
            found[f"{name}: {layout}"] = plain.changed(name, layout=layout)
        if library == "interface":
            found[f"{name} is read-only"] = plain.changed(name, read_only=True)
    found["all on another GPU"] = plain.changed(list(plain.arrays), gpu=1)
    rows = [n for n in plain.arrays if n not in FLOAT32]
    half = {"dtype": "float16", "layout": "every second element"}  # strides of a dense float32
    found["float16"] = plain.changed(rows, dtype="float16")
    found["float16 in strides of float32"] = plain.changed(rows, **half)
    if library == "torch":
        found["bfloat16"] = plain.changed(rows, dtype="bfloat16")
    for shape in ((1, 2, NQ, NK), (NQ, NK), (NQ, 1), (NK,)):
        found[f"bias of {shape}"] = plain.changed("bias", shape=shape)
    found["slopes of entries"] = plain.changed("alibi_slopes", shape=(2, 2))
    found["without slopes"] = plain.without("alibi_slopes")
    if plain.backward:
        found["without bias"] = plain.without("bias").having(return_dbias=False)
        found["no gradient of the bias"] = plain.having(return_dbias=False)
        found["dq in one order"] = plain.having(deterministic=True)
    else:
        found["without bias"] = plain.without("bias")
        found["without out"] = plain.without("out")
    mask = plain.without("bias")
    found["a mask"] = replace(mask, arrays=mask.arrays | {"attn_mask": plain.arrays["bias"]})
    fewer = plain.changed("k v", shape=(2, 1, NK - 1, D))
    found["fewer columns"] = fewer.changed("bias", shape=(2, 2, NQ, NK - 1))
    for name, value in (
        *(("causal", True), ("window", (3, 1)), ("softcap", 2.0), ("softcap", 2), ("scale", 0.5)),
        *(("scale", 0.25), ("dropout_p", 0.5), ("tiles", Tiles(16, 16)), ("unit", "simt")),
        *(("kv_lens", (9, 4)), ("kv_lens", (4, 5)), ("q_lens", (4, 5)), ("algorithm", "fa1")),
    ):
        found[f"{name} {value}"] = plain.having(**{name: value})
    found["splits"] = plain.having(algorithm="fa1", query_splits=2)
    if not plain.backward:
        found["without L"] = plain.having(return_lse=False)
    return found


def check_kept_calls(gpu, kept, cases, library):
    """Each of ``cases`` asks what it asks as a first call, whatever was kept before; a second one
    with other arrays that are alike asks the same without a plan, and what is refused is not kept.
    """
    wanted = {}
    for name, call in cases.items():
        wanted[name] = as_first(gpu, call, call.made(library))
        assert asked(gpu, call, call.made(library)) == wanted[name], name
    refused = {name for name, found in wanted.items() if isinstance(found[0], type)}
    assert len(kept) == len(cases) - len(refused)
    with mock.patch.object(launch_cache, "run_and_keep") as planned:
        for name in cases.keys() - refused:
            assert asked(gpu, cases[name], cases[name].made(library)) == wanted[name], name
    assert not planned.called
    for name in refused:
        assert asked(gpu, cases[name], cases[name].made(library)) == wanted[name], name
    return {name: wanted[name] for name in refused}


@pytest.mark.parametrize("library", ["interface", "torch"])
@pytest.mark.parametrize("plain", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_a_kept_call_asks_what_a_first_one_does(gpu, torch, kept, plain, library):
    refused = check_kept_calls(gpu, kept, changes(plain, library), library)
    want = {f"{n} {how}" for n in plain.arrays for how in ("on another GPU", "of another dtype")}
    if "out" in plain.arrays and not plain.backward and library == "interface":
        want.add("out is read-only")
    assert refused.keys() == want
    for name in plain.arrays.keys() - {"q"}:
        says = f"{name} must be on the device of q (GPU 0), got GPU 1"
        assert refused[f"{name} on another GPU"] == (ValueError, says, 0)


def test_a_kept_call_makes_planes_anew(gpu, kept):
    """Of its own arrays, each precision by its own kernels, before the one that multiplies them."""
    cases = {
        f"{name} {algorithm}": call_of("q", "k", "v", precision=name, algorithm=algorithm)
        for name in ("ieee", "fp16x3", "bf16x6", "bf16x3")
        for algorithm in ("fa1", "fa2")
    }
    names = ("q", "k", "v", "out", "dout", "lse")
    for name in ("ieee", "fp16x3", "bf16x6", "bf16x3"):
        cases[f"{name} backward"] = call_of(*names, backward=True, precision=name)
    assert not check_kept_calls(gpu, kept, cases, "interface")
    launched = {"fp16x3 fa2": 7, "bf16x6 fa1": 4, "fp16x3 backward": 11, "bf16x3 backward": 7}
    for name, launches in launched.items():
        call = cases[name]
        steps, _ = as_first(gpu, call, call.made("interface"))
        assert sum(step[0] == "launch" for step in steps) == launches, [s[:2] for s in steps]


def test_a_launch_that_is_made_at_once_has_its_tensor_map_until_then(gpu):
    kernel = devices.Kernel(lambda X: None, (devices.tiled_type(4),), 32, 0)
    array = on_gpu(np.zeros((1, 1, 8, 64), np.float16))
    devices.launch(kernel, (1,), (devices.TiledArray(devices.argument(array), 8, "float16"),))
    assert gpu.launches[0][3][0] == address(array)


# What a map is made of, columns first, and what the driver's manual allows.
MAP = {"dtype": "FLOAT16", "address": 2**32, "shape": (64, 99, 3, 2), "box": (64, 16, 1, 1)}
MAP |= {"strides": (128, 12800, 38400), "swizzle": "128B"}
MAPS = [
    ({}, True), ({"strides": (12800, 128, 38400)}, True), ({"address": 2**32 + 8}, False),
    ({"strides": (136, 12800, 38400)}, False), ({"strides": (2**40, 128, 128)}, False),
    ({"shape": (64, 2**32, 3, 2)}, True), ({"shape": (64, 2**32 + 1, 3, 2)}, False),
    ({"shape": (64, 0, 3, 2)}, False), ({"box": (64, 256, 1, 1)}, True),
    ({"box": (64, 257, 1, 1)}, False), ({"box": (64, 0, 1, 1)}, False),
    ({"box": (72, 16, 1, 1)}, False), ({"box": (72, 16, 1, 1), "swizzle": "NONE"}, True),
    ({"box": (4, 16, 1, 1)}, False), ({"swizzle": "64B"}, False), ({"dtype": "FLOAT32"}, False),
]  # fmt: skip


def map_is_made(change):
    """Whether the driver makes a map that differs from ``MAP`` in this."""
    driver, given = launch_record.driver, MAP | change
    made, *_ = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{given['dtype']}"),
        4,
        given["address"],
        *([driver.cuuint64_t(n) for n in given[name]] for name in ("shape", "strides")),
        *([driver.cuuint32_t(n) for n in sizes] for sizes in (given["box"], (1, 1, 1, 1))),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{given['swizzle']}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return made == driver.CUresult.CUDA_SUCCESS


@pytest.mark.parametrize("change, allowed", MAPS, ids=str)
def test_the_stand_in_makes_the_maps_that_a_driver_makes(gpu, change, allowed):
    assert map_is_made(change) is allowed


@pytest.mark.gpu
@pytest.mark.parametrize("change, allowed", MAPS, ids=str)
def test_gpu_driver_makes_these_maps(change, allowed):
    devices.synchronize()  # which makes a context
    assert map_is_made(change) is allowed


def test_seeds_and_offsets_are_no_part_of_a_kept_call(gpu, kept):
    """Words of each call's own: all of the seed's 64 bits and the offset's 32."""
    call = call_of("q", "k", "v", dropout_p=0.5)
    cases = [{}, {"seed": 3}, {"offset": 3}, {"seed": 2**63 + 2**31}, {"seed": 2**64 - 1},
             {"offset": 2**32 - 1}, {"seed": 1, "offset": 2}, {"seed": 0, "offset": 0}]  # fmt: skip
    for options in cases:
        asked(gpu, call.having(**options), call.made("interface"))
        given, (low, high, offset) = gpu.given[-1], (0, 0, 0)
        if "seed" in options:
            low, high = (int(x) for x in np.array([options["seed"]], "<u8").view("<i4"))
        if "offset" in options:
            offset = int(np.array([options["offset"]], "<u4").view("<i4")[0])
        assert (given["seed_low"], given["seed_high"], given["offset"]) == (low, high, offset)
    assert len(kept) == 1


def test_what_is_read_on_the_host_is_read_in_every_call(gpu, kept):
    """Lengths and block masks in arrays, or nested in tuples, which show no types. Of these only
    NumPy's are kept, by their values.
    """
    call, tiles = call_of("q", "k", "v"), {"tiles": Tiles(16, 16)}
    for lengths in (np.zeros(2, np.int32), on_gpu(np.zeros(2, np.int32))):
        for values in ([9, 4], [2, 7], [2, 8]):
            (lengths if isinstance(lengths, np.ndarray) else lengths.values)[:] = values
            asked(gpu, call.having(kv_lens=lengths), call.made("interface"))
            assert gpu.given[-1]["kv_lens"].tolist() == values
    assert len(kept) == 3
    for mask in (((True,),), np.array([[False]]), ((False,),), np.array([[True]])):
        asked(gpu, call.having(block_mask=mask, **tiles), call.made("interface"))
        assert (gpu.given[-1]["block_mask"] == np.array(mask)).all()
    assert len(kept) == 5
    wrong = call.having(block_mask=((1,),), **tiles)
    assert asked(gpu, wrong, call.made("interface"))[:1] == (TypeError,)


# --- addresses and layouts -------------------------------------------------------------------

MIXED = {"q": "heads last", "k": "far rows", "v": "every second element", "out": "last row first",
         "dout": "far rows", "bias": "heads last"}  # fmt: skip
KERNEL_NAMES = {"q": "Q", "k": "K", "v": "V", "out": "O", "dout": "dO", "lse": "L"}


def seen_as(values, axes=None):
    """Address, shape and used strides of an array, its axes in the order ``axes``."""
    values = values if axes is None or values.ndim != 4 else values.transpose(axes)
    strides = used_strides(values.shape, values.strides, values.itemsize)
    return values.ctypes.data, values.shape, strides


@pytest.mark.parametrize("library", ["interface", "dlpack"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("plain", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_kernels_get_arrays_as_the_caller_has_them(gpu, plain, layout, library):
    call, axes = plain.having(layout=layout), None
    for name, how in MIXED.items():
        call = call.changed(name, layout=how)
    arrays = call.made(library)
    if layout == "bnhd":
        axes = (0, 2, 1, 3)
        for name in (KERNEL_NAMES.keys() & arrays.keys()) - {"lse"}:
            arrays[name] = type(arrays[name])(arrays[name].values.swapaxes(1, 2))
    for _ in range(2):
        gpu.given.clear()
        results = call.run(arrays)
        want = {
            kernels: seen_as(arrays[name].values, axes)
            for name, kernels in KERNEL_NAMES.items()
            if name in arrays
        }
        made = ("O", "L") if not plain.backward else ("dQ", "dK", "dV")
        want |= {n: seen_as(x.values, axes) for n, x in zip(made, results, strict=False)}
        if plain.backward:
            want["dbias"] = seen_as(results[3].values)
        where, shape, strides = seen_as(arrays["alibi_slopes"].values)
        want |= {"bias": seen_as(arrays["bias"].values), "slopes": (where, (2, 2), (0, *strides))}
        seen = set()
        for given in gpu.given:
            for name in given.keys() & want.keys():
                assert seen_as(given[name]) == want[name], name
                seen.add(name)
        assert seen == want.keys()


@pytest.mark.parametrize("library", [Array, Dlpack])
def test_strides_that_are_left_out_are_those_of_dense_rows(gpu, library):
    arrays = FORWARD.made("interface")
    want = {KERNEL_NAMES[n]: seen_as(arrays[n].values) for n in ("q", "k", "v", "out")}
    compact = {n: library(x.values) for n, x in arrays.items()}
    for x in compact.values():
        x.leave_out_strides()
    for _ in range(2):
        FORWARD.run(compact)
        assert {n: seen_as(gpu.given[-1][n]) for n in want} == want


# --- other libraries -------------------------------------------------------------------------


def test_arrays_of_the_host_are_those_of_their_library(torch):
    """bfloat16 as torch names it; JAX's are never written, and made from what was written."""
    x = operand("q", Tensor.of(np.zeros((1, 2, 3, 4), np.uint16), "bfloat16"))
    assert (x.dtype, x.host.dtype, x.library) == ("bfloat16", np.int16, "torch")
    unread = Tensor.of(np.zeros((1, 2, 3, 4), np.float32))
    unread.dtype = "torch.complex32"
    with pytest.raises(TypeError, match=r"^q must be float32, .* got complex32$"):
        operand("q", unread)
    on_host = type("OnHost", (JaxArray,), {"__array__": lambda self, *_, **__: self.values})
    with no_jax_but_its_names() as jax:
        jax.device_put = lambda made, where: ("put", made, where.platform)
        x = operand("q", on_host(np.zeros((1, 2, 3, 4), np.float32), "cpu"))
        assert x.library == "jax" and not x.writable and x.finish(5) == ("put", 5, "cpu")


def test_jax_arrays_are_read_when_ready_and_made_when_done(gpu, kept):
    with no_jax_but_its_names():
        for ordinal in (1, 0):
            gpu.log.clear()
            q, k, v = (JaxArray(Memory(SHAPES[n], gpu=ordinal).values()) for n in "qkv")
            O, L = fa_numba.flash_attention_2(q, k, v, return_lse=True)
            assert type(O) is type(L) is JaxArray and O.shape == q.shape
            steps = [step[0] for step in gpu.log if step[0] != "take"]
            assert steps == ["ready", "ready", "ready", "launch", "wait", "wait"]
            made = gpu.given[-1]
            assert address(O) == made["O"].ctypes.data and address(L) == made["L"].ctypes.data
        assert not kept
        for bad, error, says in (
            (
                {"out": JaxArray(aligned(SHAPES["q"]))},
                ValueError,
                "out must be writable, got a read-only JAX array",
            ),
            (
                {"k": JaxArray(k.values, "tpu")},
                TypeError,
                "k must be a JAX array on a CPU or a CUDA GPU, got one on tpu",
            ),
            (
                {"v": JaxArray(v.values, count=2)},
                ValueError,
                "v must be on one JAX device, got an array on 2 devices",
            ),
            (
                {"q": JaxArray(aligned(SHAPES["q"], "float64"))},
                TypeError,
                "q must be float32, float16 or float8_e4m3fn if it is a JAX array on a GPU, got fl",
            ),
        ):
            given = {"q": q, "k": k, "v": v} | bad
            with pytest.raises(error, match=says):
                fa_numba.flash_attention_2(**given)


# --- alignment -------------------------------------------------------------------------------


def strided(shape, strides, offset=0, dtype="float32"):
    """An array of GPU 0 with these strides, in bytes."""
    size = sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True)) + 16
    buffer = aligned((size,), "uint8", offset=offset)[:16].view(dtype)
    return np.lib.stride_tricks.as_strided(buffer, shape, strides)


@pytest.mark.parametrize(
    "shape, strides, offset, dtype, wide",
    [
        ((2, 2, 5, 8), (320, 160, 32, 4), 0, "float32", True),
        ((2, 2, 5, 8), (320, 160, 32, 4), 16, "float32", True),
        ((2, 2, 5, 8), (320, 160, 32, 4), 4, "float32", False),
        ((2, 2, 5, 8), (320, 160, 32, 4), 8, "float32", False),
        ((2, 2, 5, 8), (400, 200, 40, 4), 0, "float32", False),  # rows at multiples of 8
        ((2, 2, 5, 8), (336, 168, 32, 4), 0, "float32", False),  # heads
        ((2, 2, 5, 8), (328, 160, 32, 4), 0, "float32", False),  # entries
        ((1, 2, 5, 8), (326, 160, 32, 4), 0, "float32", True),  # the only entry
        ((2, 2, 1, 8), (320, 160, 40, 4), 0, "float32", True),
        ((2, 2, 5, 8), (0, 160, 32, 4), 0, "float32", True),  # one entry twice
        ((2, 2, 5, 8), (640, 320, 64, 8), 0, "float32", False),  # every second element
        ((2, 2, 5, 8), (320, 32, 64, 4), 0, "float32", True),  # heads last
        ((2, 2, 5, 8), (160, 80, 16, 2), 0, "float16", True),
        ((2, 2, 5, 8), (160, 80, 16, 2), 8, "float16", False),
        ((2, 2, 5, 8), (240, 120, 24, 2), 0, "float16", False),
        ((2, 2, 5, 8), (320, 160, 32, 4), 0, "float16", False),
    ],
)  # fmt: skip
def test_aligned_rows_start_at_16_byte_addresses(gpu, torch, shape, strides, offset, dtype, wide):
    values = strided(shape, strides, offset, dtype)
    assert operand("q", Array(values)).aligned is wide
    assert operand("q", Tensor.of(values)).aligned is wide


def plan_of(call, aligned):
    """The plan of a call that is like ``FORWARD`` or ``BACKWARD``."""
    x = call.arrays
    facts = {"bias": x["bias"].shape, "alibi": True, "dtype": x["q"].dtype}
    problem = Problem.from_shapes(x["q"].shape, x["k"].shape, x["k"].shape, **facts)
    if call.backward:
        return planning.plan_of_attention(
            problem, Choices("fa2", "bwd", return_dbias=True), aligned
        )
    return planning.plan_of_attention(problem, Choices("fa2", return_lse=True), aligned)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("plain", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_one_unaligned_array_makes_the_kernel_one_for_all(gpu, kept, plain, dtype):
    rows = [n for n in plain.arrays if n not in FLOAT32]
    plain = plain.changed(rows, dtype=dtype)
    wide, narrow = (plan_of(plain, x).launched for x in (True, False))
    assert wide != narrow
    cases = [(plain, wide), *((plain.changed(n, offset=8), narrow) for n in rows)]
    cases += [(plain.changed(n, offset=8), wide) for n in plain.arrays.keys() - set(rows)]
    for _ in range(2):
        for call, kernels in cases:
            gpu.launched.clear()
            call.run(call.made("interface"))
            assert tuple(gpu.launched) == kernels
    assert len(kept) == len(cases)


# --- which bytes are whose -------------------------------------------------------------------


def layouts(random, bytes_):
    """Arrays of up to four axes with strides of any sign, in one block of memory."""
    while True:
        shape = tuple(random.integers(1, 4, random.integers(1, 5)).tolist())
        strides = tuple((4 * random.integers(-6, 7, len(shape))).tolist())
        reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
        first, last = sum(min(0, n) for n in reach), sum(max(0, n) for n in reach) + 4
        if last - first <= bytes_:
            pointer = 2**40 + 4 * int(random.integers(0, (bytes_ - last + first) // 4 + 1)) - first
            yield SimpleNamespace(pointer=pointer, shape=shape, strides=strides, dtype="float32")


def addresses_of(memory):
    """The address of every element, one by one."""
    places = itertools.product(*map(range, memory.shape))
    return [
        memory.pointer + sum(n * s for n, s in zip(x, memory.strides, strict=True)) for x in places
    ]


def test_extents_and_overlaps_are_those_of_the_elements():
    random = np.random.default_rng(11)
    found = layouts(random, 200)
    shared = itself = too_long = 0
    for a, b in itertools.islice(zip(found, found, strict=False), 400):
        mine, others = addresses_of(a), addresses_of(b)
        begin, end = overlap.extent(a)
        assert (a.pointer + begin, a.pointer + end) == (min(mine), max(mine) + 4)
        shares = overlap.overlap(a, b)
        assert shares == bool({*mine} & {*others})
        with mock.patch.object(overlap, "_OVERLAP_WORK", 1):
            too_long += overlap.overlap(a, b) > shares
        if len({*mine}) < len(mine):
            assert overlap.overlaps_itself(a)
        shared, itself = shared + shares, itself + overlap.overlaps_itself(a)
    assert 50 < shared < 350 and 50 < itself < 350
    assert too_long > 0  # what takes too long to find out counts as shared
    assert not overlap.overlaps_itself(SimpleNamespace(shape=(1, 3), strides=(0, 4)))


@pytest.mark.parametrize("how", ["ascending", "last row first", "all axes descending"])
@pytest.mark.parametrize("of", ["q", "out"])
def test_a_kept_call_refuses_an_out_that_shares_memory(gpu, kept, how, of):
    """``out`` moves past q in steps of 16 bytes; either of them runs backwards in memory."""
    reversals = {"ascending": np.s_[...], "last row first": np.s_[..., ::-1, :],
                 "all axes descending": np.s_[:, ::-1, ::-1]}  # fmt: skip
    shape, size = (2, 2, NQ, D), 4 * NQ * D
    flat = aligned((5 * size,), values=0.0)
    k = on_gpu(np.zeros((2, 1, NK, D), np.float32))

    def placed(start, name):
        values = flat[start : start + size].reshape(shape)
        return Array(values[reversals[how]] if name == of else values)

    q = placed(2 * size, "q")
    fa_numba.flash_attention_2(q, k, k, out=placed(0, "out"))
    (first,) = kept
    with mock.patch.object(launch_cache, "run_and_keep", side_effect=AssertionError):
        for start in range(0, 4 * size + 1, 4):
            out = placed(start, "out")
            gpu.launches.clear()
            if size < start < 3 * size:
                with pytest.raises(
                    ValueError, match="out must not share memory with q; pass an array with"
                ):
                    fa_numba.flash_attention_2(q, k, k, out=out)
                assert not gpu.launches
            else:
                assert fa_numba.flash_attention_2(q, k, k, out=out) is out
                assert len(gpu.launches) == 1
    assert [*kept] == [first]


def test_a_read_only_out_is_refused(gpu, kept):
    for kind, library in (("interface", Array), ("dlpack", Dlpack)):
        arrays = FORWARD.without("out").made(kind)
        for read_only in (True, False, True):
            out = library(aligned(SHAPES["q"]), read_only=read_only)
            if read_only:
                with pytest.raises(ValueError, match="out must be writable, got a read-only array"):
                    FORWARD.run(arrays | {"out": out})
            else:
                assert FORWARD.run(arrays | {"out": out})[0] is out
    assert len(gpu.launches) == 2 and len(kept) == 1


# --- GPUs ------------------------------------------------------------------------------------


def everywhere(call, gpu, library="interface"):
    """The call with arrays of GPU ``gpu``."""
    return call.changed(list(call.arrays), gpu=gpu).made(library)


def reached(function):
    """The instructions that a kernel or a device function calls, by way of others too."""
    found, seen, waiting = set(), set(), [function]
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        named = inspect.getclosurevars(function)
        taken = kernel_cache._attributes_taken(function.__code__)
        for name, value in (named.nonlocals | named.globals).items():
            inside = [value]
            if name in taken and kernel_cache._is_namespace(value):
                inside = [getattr(value, attribute) for attribute in taken[name]]
            for x in inside:
                if isinstance(x, kernel_cache._Intrinsic):
                    found.add(x)
                elif isinstance(x, kernel_cache.DeviceFunction):
                    waiting.append(x.py_func)
    return found


@pytest.mark.parametrize(
    "options", [{}, {"algorithm": "fa1", "query_splits": 2}], ids=["dq", "dk and dv"]
)
def test_a_kernel_adds_two_at_once_where_its_gpu_can(gpu, kept, options):
    """``red.v2`` is an instruction of compute capability 9.0: not of GPU 1, which has 8.0."""
    call = call_of("q", "k", "v", "out", "dout", "lse", backward=True, **options)
    call = call.changed("q k v out dout", dtype="float16")
    for ordinal in (0, 1, 0, 1):
        gpu.launched.clear()
        call.run(everywhere(call, ordinal))
        used = set().union(*(reached(kernel.function) for kernel in gpu.launched))
        assert used & {add_pair, add_pair_vector} == {(add_pair_vector, add_pair)[ordinal]}
    assert len(kept) == 2
    keys = {kernel_cache.key_of(kernel, (9, 0)) for kernel, *_ in gpu.loaded}
    assert len(keys) == len({kernel for kernel, *_ in gpu.loaded})


@pytest.mark.parametrize("library", ["interface", "torch", "dlpack"])
def test_a_call_runs_on_the_gpu_of_its_arrays(gpu, torch, library):
    """Whichever is the current one; that is so again when the call returns."""
    torch.current = {0: 5, 1: 6}
    gpu.streams = {5: 0, 6: 1}
    for plain in (FORWARD, BACKWARD):
        for ordinal, current in ((1, 0), (0, 0), (1, 0), (0, 1), (1, 1)):
            gpu.log.clear()
            gpu.context = CONTEXT + current
            arrays = everywhere(plain, ordinal, library)
            results = plain.run(arrays)
            assert {step[-1] for step in gpu.log} == {ordinal}
            assert {owner_of(address(x)) for x in results} == {ordinal}
            assert gpu.context == CONTEXT + current
    if library == "dlpack":  # what is done on other streams is waited for on the default one
        assert all(asked == 1 for x in arrays.values() for asked in x.asked)


def test_parts_are_merged_and_blocks_made_on_one_gpu(gpu):
    """And in no more blocks than a grid has places for."""
    near, far = (Array(aligned((40,), gpu=n)) for n in range(2))
    with pytest.raises(
        ValueError, match=r"far in mask_mod, .* device of near \(GPU 0\), got GPU 1"
    ):
        fa_numba.create_block_mask(
            lambda b, h, i, j: near[i] > far[j], 1, 1, 40, 40, tiles=Tiles(16, 16)
        )
    x, lse = (on_gpu(np.zeros(n, np.float32)) for n in ((1, 2, 5, 8), (1, 2, 5)))
    far = Array(aligned((1, 2, 5), gpu=1))
    with pytest.raises(
        ValueError, match=r"lses\[1\] must be on the device of outputs\[0\] \(GPU 0\), got GPU 1"
    ):
        fa_numba.merge([x, x], [lse, far])
    x, lse = (on_gpu(np.zeros((1, 65536, 1, 1)[:n], np.float32)) for n in (4, 3))
    with pytest.raises(
        ValueError, match=r"heads of outputs\[0\] must be at most 65535 .*got 65536"
    ):
        fa_numba.merge([x, x], [lse, lse])
    assert not gpu.launches


def test_the_lists_of_blocks_are_on_the_gpu_before_a_kernel_reads_them(gpu, monkeypatch):
    with devices.using("emulator"):
        mask = fa_numba.create_block_mask(lambda b, h, i, j: i > j, 1, 1, 40, 40)
    steps = []
    monkeypatch.setattr(devices, "to_gpu", lambda x: steps.append("copy") or on_gpu(x))
    monkeypatch.setattr(devices, "synchronize", lambda: steps.append("wait"))
    mask.lists.at(0)
    assert steps == 3 * ["copy"] + ["wait"]


# --- streams ---------------------------------------------------------------------------------


def streams_of(gpu):
    """The streams that launches, fills and the workspace were asked for on."""
    kinds = {"launch": 3, "fill": 4, "take": 2, "free": 2}
    return [step[kinds[step[0]]] for step in gpu.log if step[0] in kinds]


# A call with a fill, workspace and three launches
MANY = replace(BACKWARD.changed("q k v out dout", dtype="float16"))


def test_the_stream_is_the_current_one_of_the_arrays_gpu(gpu, torch):
    gpu.streams = {5: 0, 6: 1, 7: 1, 8: 1}
    for ordinal, current, given, want in (
        (1, {0: 5, 1: 6}, None, 6),
        (1, {0: 5, 1: 7}, None, 7),
        (1, {0: 5, 1: 0}, None, 0),
        (0, {0: 5, 1: 7}, None, 5),
        (1, {0: 5, 1: 6}, 8, 8),
        (1, {0: 5, 1: 6}, SimpleNamespace(cuda_stream=8), 8),
        (1, {0: 5, 1: 6}, SimpleNamespace(ptr=8), 8),
        (1, {0: 5, 1: 6}, SimpleNamespace(handle=8), 8),
        (1, {0: 5, 1: 6}, SimpleNamespace(__cuda_stream__=lambda: (0, 8)), 8),
    ):
        torch.current = current
        gpu.log.clear()
        MANY.having(stream=given).run(everywhere(MANY, ordinal, "torch"))
        assert streams_of(gpu) == 6 * [want]


def test_a_mask_is_converted_on_the_stream_of_its_gpu(gpu, torch):
    """torch makes 0 and -inf of a mask of True and False, on the call's stream."""
    gpu.streams = {5: 0, 6: 1, 8: 1}
    torch.current = {0: 5, 1: 6}
    for stream in (8, SimpleNamespace(cuda_stream=8), None):
        for _ in range(2):
            torch.entered.clear()
            arrays = everywhere(call_of("q", "k", "v"), 1, "torch")
            gpu.log.clear()
            mask = Tensor.of(half_shown(1))
            fa_numba.flash_attention_2(*arrays.values(), attn_mask=mask, stream=stream)
            assert torch.entered == ([] if stream is None else [(8, 1)])
            assert streams_of(gpu) == [6 if stream is None else 8] * 3
            added = gpu.given[-1]["bias"]
            assert (added[..., 0] == 0).all() and (added[..., 1:] == -np.inf).all()


def half_shown(gpu=0):
    """A mask that shows the first column alone."""
    values = aligned((NQ, NK), "bool", gpu=gpu) if gpu is not None else np.zeros((NQ, NK), bool)
    values[:, 0] = True
    return values


@pytest.mark.parametrize("imported", [True, False])
def test_masks_of_other_libraries_need_no_torch(gpu, torch, monkeypatch, imported):
    """On the GPU of their arrays, or in host memory."""
    gpu.streams = {6: 1, 8: 0}
    if not imported:
        monkeypatch.delitem(sys.modules, "torch")
    there = everywhere(call_of("q", "k", "v"), 1).values()
    here = [np.zeros(SHAPES[n], np.float32) for n in "qkv"]
    cases = [(there, Array(half_shown(1)), 6), (here, half_shown(None), 8)]
    if imported:
        hides = np.where(half_shown(None), 0, -np.inf).astype(np.float16)
        masks = (Tensor.of(x) for x in (half_shown(None), hides))
        cases += [([Tensor.of(x) for x in here], mask, 8) for mask in masks]
    for arrays, mask, stream in cases:
        fa_numba.flash_attention_2(*arrays, attn_mask=mask, stream=stream)
        added = gpu.given[-1]["bias"]
        assert (added[..., 0] == 0).all() and (added[..., 1:] == -np.inf).all()
        assert gpu.launches[-1][2] == stream
    assert not torch.entered


def test_cupys_stream_is_that_of_the_arrays_gpu(gpu, cupy):
    gpu.streams = {5: 0, 6: 1, 7: 1}
    for ordinal, current, want in ((1, {0: 5, 1: 6}, 6), (1, {0: 5, 1: 7}, 7), (0, {0: 5}, 5)):
        cupy.current = current
        gpu.log.clear()
        call = MANY.changed(list(MANY.arrays), gpu=ordinal)
        arrays = {name: cupy.ndarray(x.values()) for name, x in call.arrays.items()}
        results = MANY.run(arrays)
        assert all(type(x) is cupy.ndarray and owner_of(address(x)) == ordinal for x in results)
        assert streams_of(gpu) == 6 * [want]
    assert {type(x) for x in MANY.run(MANY.made("interface"))} == {Array}


def test_what_writes_an_input_on_another_stream_is_waited_for(gpu):
    for _ in range(2):
        gpu.log.clear()
        streams = {"q": None, "k": 3, "v": 1}
        given = [Array(FORWARD.arrays[n].values(), stream=x) for n, x in streams.items()]
        fa_numba.flash_attention_2(*given)
        waits = [step[1] for step in gpu.log if step[0] == "wait"]
        assert {*waits} == {1, 3} and gpu.log[len(waits)][0] == "take"
        assert streams_of(gpu) == [0, 0, 0]


# --- order -----------------------------------------------------------------------------------


def test_memory_is_taken_filled_used_and_freed_in_this_order(gpu):
    """Sums that blocks share start from 0, roundings of them come last."""
    call = call_of("q", "k", "v", "out", "dout", "lse", backward=True, algorithm="fa1")
    call = call.changed("q k v out dout", dtype="float16").having(query_splits=2)
    for _ in range(2):
        gpu.log.clear()
        call.run(call.made("interface"))
        what = [step[1].name if step[0] == "launch" else step[0] for step in gpu.log]
        assert what == ["take", "fill", "fill", "fa1_backward", "round_rows", "round_rows", "free"]
        taken, freed = gpu.log[0][1], gpu.log[-1][1]
        for _, pointer, value, size, *_ in gpu.log[1:3]:
            assert value == 0 and size == 4 * 2 * NK * D
            assert (pointer - freed) % 256 == 0 and freed <= pointer <= freed + taken - size
        sums = [step[1] for step in gpu.log[1:3]]
        assert abs(sums[1] - sums[0]) >= size
        rounded = [given["A"].ctypes.data for given in gpu.given[-2:]]
        main = gpu.given[-3]
        assert sums == rounded == [main["dK"].ctypes.data, main["dV"].ctypes.data]


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_pages_of_the_host_are_copied_back_after_an_append(gpu, monkeypatch, dtype):
    names = ("k_pages", "v_pages")
    pages = {n: np.zeros((1, 1, 16, 16), numpy_dtype(dtype)) for n in names}
    if dtype == "float8_e4m3fn":
        pages |= {n: np.ones((1, 1), np.float32) for n in ("k_scale", "v_scale")}
    new = {n: np.ones((1, 1, 2, 16), np.float32) for n in ("k_new", "v_new")}
    written = []
    monkeypatch.setattr(devices, "to_host", lambda array, back, stream: written.append(back))
    fa_numba.append_kv(**pages, **new, block_table=[[0]], kv_lens=[3])
    assert {x.ctypes.data for x in written} == {x.ctypes.data for x in pages.values()}


@pytest.mark.parametrize("dtype", ["float32", "uint8"])  # the bits of e4m3 are in uint8
def test_new_rows_are_on_the_device_of_the_pages(gpu, dtype):
    stored = np.zeros((1, 1, 16, 16), dtype)
    pages = {n: on_gpu(stored) for n in ("k_pages", "v_pages")}
    if dtype == "uint8":
        pages |= {n: on_gpu(np.ones((1, 1), np.float32)) for n in ("k_scale", "v_scale")}
    new = {n: on_gpu(np.ones((1, 1, 2, 16), np.float32), gpu=1) for n in ("k_new", "v_new")}
    with pytest.raises(ValueError, match="must be on the device of k_pages"):
        fa_numba.append_kv(**pages, **new, block_table=[[0]], kv_lens=[3])
    assert not gpu.log


@pytest.mark.parametrize(
    "function",
    [
        *("cuKernelSetAttribute", "cuTensorMapEncodeTiled", "cuTensorMapReplaceAddress"),
        *("cuMemAllocFromPoolAsync", "cuMemsetD8Async", "cuLaunchKernel", "cuMemFreeAsync"),
    ],
)
def test_an_error_of_each_function_of_the_driver_is_raised(gpu, kept, monkeypatch, function):
    driver, error = launch_record.driver, launch_record.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY

    def failing(*given, free=gpu.cuMemFreeAsync):
        if function == "cuMemFreeAsync":
            free(*given)
        return error, 0

    monkeypatch.setattr(driver, function, failing)
    q, k, v = (on_gpu(np.zeros((1, 1, 130, 64), np.float16)) for _ in range(3))
    with pytest.raises(RuntimeError, match="the (CUDA )?driver .*OUT_OF_MEMORY$"):
        fa_numba.attention(q, k, v, unit="wgmma", kv_splits=2)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_splits_leave_their_sums_to_the_merge(gpu, kept, dtype):
    """A call over splits is kept as another is, its workspace taken anew for each."""
    call = call_of("q", "k", "v", "out").changed("q k v out", dtype=dtype)
    unit = "simt" if dtype == "float32" else "mma"
    call = call.having(kv_splits=3, return_lse=False, algorithm="fa2", unit=unit)
    for _ in range(2):
        gpu.log.clear()
        gpu.given.clear()
        call.run(call.made("interface"))
        what = [step[1].name if step[0] == "launch" else step[0] for step in gpu.log]
        assert what == ["take", "fa2_forward", "merge_splits", "free"] and len(kept) == 1
        taken, freed = gpu.log[0][1], gpu.log[-1][1]
        forward, merge = gpu.given
        heads = 1 if dtype == "float32" else 2  # in the rows of a tile
        for name, last in (("A", (D,)), ("l", ()), ("m", ())):
            mine = forward[name]
            assert mine.ctypes.data == merge[name].ctypes.data
            assert freed <= mine.ctypes.data <= freed + taken - mine.nbytes
            assert mine.shape == (3, 2, 2 // heads, NQ * heads, *last)


def _with_functions(x, table):
    functions = {
        "score_mod": lambda s, b, h, i, j: s * x + table[i],
        "mask_mod": lambda b, h, i, j: i >= j or table[i] > x,
    }
    return call_of("q", "k", "v", "out", **functions)


def test_calls_of_functions_are_kept_by_their_code_and_what_they_capture(gpu, kept):
    """An array by what it is, wherever it lies; a number by its value."""

    def table(rows=NQ):
        return Array(aligned((rows,), "float32"))

    cases = [_with_functions(x, table()) for x in (2.0, 3.0, 2)]
    wanted = [as_first(gpu, call, call.made("interface")) for call in cases]
    for call, want in zip(cases, wanted, strict=True):
        assert asked(gpu, call, call.made("interface")) == want
    assert len(kept) == len(cases) and len({str(want[0]) for want in wanted}) == len(cases)
    other = table()
    with mock.patch.object(launch_cache, "run_and_keep") as planned:
        call = _with_functions(2.0, other)
        assert asked(gpu, call, call.made("interface")) == wanted[0]
    assert not planned.called and str(address(other)) in str(gpu.launches[-1])
    asked(gpu, call := _with_functions(2.0, table(NQ + 1)), call.made("interface"))
    assert len(kept) == len(cases) + 1
    asked(gpu, call := _with_functions(2.0, np.zeros(NQ, np.float32)), call.made("interface"))
    assert len(kept) == len(cases) + 1
