"""numba-cuda-mlir in numba-cuda's place: the same kernels, the same work, an ABI of its own."""

import ctypes
import re
import sys
from types import SimpleNamespace

import pytest
from llvmlite import ir
from numba import types
from offline import CAPABILITY, from_source
from test_compile import plan_of, registers, spills_of

import fa_numba
from fa_numba.device import DeviceArray, LaunchRecord, kernel_cache, launch_record, linking, mlir

# What a kernel is made of, which each compiler gives as often; sums of products on CUDA cores too.
WORK = ("ld.shared.v4", "cp.async.c", "ex2.approx", "bar.sync", "mma.sync")
# Bytes of stack, of spill stores and of spill loads.
SPILLED = {
    ("fa2", "fwd", "float16", 64, ()): ("16", "20", "16"),
    ("standard", "bwd", "float16", 64, ()): ("16", "16", "16"),
}
TWINS = [("fa1", "fwd", "float32", 64, ()), ("fa2", "fwd", "float32", 64, ())]
OPTIONS = ("causal", "window", "softcap", "dropout", "bias", "alibi", "packed", "kv_lens")
OTHERS = [
    (algorithm, passes, dtype, 64, options)
    for algorithm in ("fa1", "fa2", "standard")
    for passes in ("fwd", "bwd")
    for dtype in ("float32", "float16")
    for options in [(), *[(x,) for x in OPTIONS if (passes, dtype) == ("fwd", "float32")]]
]
OTHERS += [
    (x, "fwd", "float32", d, ()) for x in ("fa1", "fa2") for d in (32, 96, 128, 160, 192, 256)
]
OTHERS += [
    ("fa2", "fwd", "float32", 64, ("kv_splits",)),
    ("fa2", "fwd", "float32", 64, ("sparse",)),
]
OTHERS += [("fa1", "fwd", "float32", 64, ("splits",)), ("fa2", "bwd", "float32", 64, ("dbias",))]


@pytest.fixture
def named(monkeypatch):
    """Sets the setting, which a process otherwise reads once."""

    def name(compiler):
        monkeypatch.setenv(mlir.VARIABLE, compiler)
        mlir.chosen.cache_clear()

    yield name
    mlir.chosen.cache_clear()


@pytest.fixture
def by_mlir(named):
    pytest.importorskip("numba_cuda_mlir", reason="the extra mlir is not installed")
    named("mlir")


def kernels(algorithm="fa2", passes="fwd", dtype="float32", d=64, options=(), arch="sm_90a"):
    unit = "simt" if dtype == "float32" else "mma"
    how = {"algorithm": algorithm, "passes": passes, "dtype": dtype, "unit": unit}
    return plan_of(arch, d, *options, **how).launched


def test_another_name_is_refused(named):
    named("nvcc")
    with pytest.raises(ValueError, match="COMPILER must be 'numba-cuda' or 'mlir', got 'nvcc'"):
        mlir.chosen()
    named("")
    assert not mlir.chosen()


def test_what_is_not_installed_is_named(named, monkeypatch):
    named("mlir")
    monkeypatch.setitem(sys.modules, "numba_cuda_mlir", None)
    with pytest.raises(
        ImportError, match=r"FA_NUMBA_COMPILER='mlir' is not installed.* '.\[cu13,mlir\]'"
    ):
        from_source(kernels()[0], "sm_90a")


def test_a_kernel_of_the_one_is_not_kept_for_the_other(named):
    (kernel,), found = kernels(), set()
    for compiler in ("mlir", "numba-cuda"):
        named(compiler)
        found.add(kernel_cache.key_of(kernel, (9, 0)))
    assert len(found) == 2


def test_an_array_is_its_memory_and_strides_in_elements(monkeypatch):
    """A slot's address is one word, which the kernel finds twice."""
    monkeypatch.setattr(mlir, "chosen", lambda: True)
    recording = LaunchRecord()
    array = DeviceArray(64, (2, 3), (24, 8), itemsize=4, slot=0)
    words = recording._words(types.Array(types.float32, 2, "A"), array)
    assert words[0] is words[1]
    (word,) = recording._varying.values()
    assert word is words[0]
    assert [x.value for x in words[2:]] == [0, 2, 3, 6, 2]


def argument(ty):
    if isinstance(ty, types.NamedTuple):
        return ty.instance_class(*map(argument, ty.types))
    if isinstance(ty, types.Array):
        return DeviceArray(256, ty.ndim * (1,), ty.ndim * (4,))
    return 1


@pytest.mark.parametrize("options", [(), ("dropout", "bias", "kv_lens")], ids=["plain", "options"])
def test_a_launch_gives_each_parameter_its_bytes(by_mlir, monkeypatch, options):
    given = {}

    def launched(*how):
        given["addresses"] = how[-2]
        return (launch_record.driver.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(launch_record.driver, "cuLaunchKernel", launched)
    (kernel,) = kernels(options=options)
    recording = LaunchRecord()
    args = tuple(map(argument, kernel.argument_types))
    recording.launch(kernel, SimpleNamespace(handle=1), (1,), args)
    words = recording._used[2]
    ptx, _ = from_source(kernel, "sm_90a")
    entry = ptx[ptx.index(".entry") : ptx.index("{")]
    bits = [int(n) for n in re.findall(r"\.param \.[a-z](\d+)", entry)]
    assert [8 * ctypes.sizeof(word) for word in words] == bits


@pytest.mark.parametrize(
    "case",
    [*TWINS, *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS if x not in TWINS)],
    ids=str,
)
def test_kernels_compile_to_the_same_work(case, by_mlir, named):
    """No float64, no local memory, no spills; no static shared memory beside the launch's."""
    spilled = set()
    for kernel in dict.fromkeys(kernels(*case)):
        named("mlir")
        ptx, log = from_source(kernel, "sm_90a")
        assert ".f64" not in ptx and ".local" not in ptx
        spilled.add(tuple(spills_of(log)[:3]))
        assert registers(log) * kernel.threads * kernel.min_blocks <= 64 * 1024
        assert re.search(r"^\s*\.shared", ptx, re.MULTILINE) is None
        assert f".maxntid {kernel.threads}" in ptx
        named("numba-cuda")
        other, _ = from_source(kernel, "sm_90a")
        same = [*WORK, *["fma.rn.f32"] * (case[2] == "float32")]
        assert {x: ptx.count(x) for x in same} == {x: other.count(x) for x in same}
    assert spilled - {("0",) * 3} == {SPILLED[case]} if case in SPILLED else spilled == {("0",) * 3}


@pytest.mark.parametrize("arch", ["sm_75", pytest.param("sm_120", marks=pytest.mark.slow)])
def test_other_architectures(arch, by_mlir):
    (kernel,) = kernels(arch="sm_75")
    ptx, cubin, _ = linking.ptx_and_cubin(kernel, CAPABILITY[arch])
    assert arch != "sm_75" or ".target sm_75" in ptx and "cp.async" not in ptx
    assert cubin[:4] == b"\x7fELF" and f".entry {linking.entry_of(cubin)}(" in ptx


def test_what_it_is_not_given_is_refused(by_mlir):
    """Hopper's maps of arrays."""
    shape, how = (1, 1, 512, 64), {"algorithm": "fa2", "unit": "wgmma", "dtype": "float16"}
    (kernel, *_) = fa_numba.plan(shape, shape, **how).launched
    with pytest.raises(NotImplementedError, match="cannot compile kernels with Tiled.* unit='mma'"):
        from_source(kernel, "sm_90a")


def test_loads_and_stores_have_the_alignment_that_is_given():
    """Also where numba-cuda-mlir is not installed."""
    made = []
    builder = object.__new__(mlir._Builder)
    builder.mlir = SimpleNamespace(F32Type=SimpleNamespace(get=lambda: "float"))
    builder.llvm = SimpleNamespace(
        load=lambda ty, at, alignment: made.append(("load", ty, at, alignment)) or "value",
        store=lambda value, at, alignment: made.append(("store", value, at, alignment)),
    )
    pointer = mlir._Value("pointer", ir.FloatType().as_pointer())
    for align in (16, None):
        builder.store(builder.load(pointer, align=align), pointer, align=align)
    assert made == [
        (*what, "pointer", align)
        for align in (16, None)
        for what in (("load", "float"), ("store", "value"))
    ]
