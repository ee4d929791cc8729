"""numba-cuda-mlir in numba-cuda's place: the same kernels, the same work, an ABI of its own."""

import collections
import ctypes
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import stand_in_mlir
from llvmlite import ir
from numba import cuda, types
from offline import CAPABILITY, from_source
from test_compile import plan_of, registers, spills_of

import fa_numba
from fa_numba.device import DeviceArray, LaunchRecord, kernel_cache, launch_record, linking, mlir
from fa_numba.device.front_end import inference, inlining, variables
from fa_numba.intrinsics import arithmetic, barriers, global_memory, matrix, shared
from fa_numba.parts import division

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


# --- without numba-cuda-mlir: with a stand-in that computes with numbers ------------------------


@pytest.fixture
def stand_in(named):
    made = [mlir._replacements, mlir._renamed, mlir._device_function, mlir._module]
    made += [mlir._of_record, mlir._intrinsic]

    def forget():
        for each in made:
            each.cache_clear()

    named("mlir")
    forget()
    with stand_in_mlir.installed() as found:
        yield found
    forget()


Pair = collections.namedtuple("Pair", ["a", "b"])
TYPES = [
    types.none, types.literal(3), types.boolean, types.int32, types.uint64, types.float32,
    types.Array(types.uint16, 2, "A"), types.UniTuple(types.float32, 4),
    types.NamedTuple([types.int32, types.UniTuple(types.boolean, 2)], Pair),
]  # fmt: skip


@pytest.mark.parametrize("ty", TYPES, ids=str)
def test_a_type_has_the_same_type_there(ty, stand_in):
    """The stand-in's types are Numba's. The type of a named tuple can be made in a kernel."""
    assert mlir._there(ty) == ty == mlir._here(ty)
    assert stand_in.extending.known == [Pair] * isinstance(ty, types.NamedTuple)
    with pytest.raises(NotImplementedError, match="cannot compile kernels with unicode"):
        mlir._there(types.UniTuple(types.unicode_type, 2))


def test_a_named_tuple_is_a_tuple_there(stand_in):
    mlir._of_record(Pair)
    made = stand_in_mlir.Lowering(x=1, y=2)
    stand_in.extending.lowered[Pair](made, "pair", ["x"], {"b": "y"})
    assert made.values["pair"] == (1, 2) and stand_in.extending.known == [Pair]


def enclosing(inner):
    tile, pair, number = types.int32, Pair, 4

    def function(x, y=3):
        return inner(x) + tile(number) + arithmetic.exp2(cuda.threadIdx.x) + pair(np.pi, y).b

    return function


def test_a_copy_of_a_function_has_the_names_of_the_other_compiler(stand_in, monkeypatch):
    inner = division.floor_divide
    function = enclosing(inner)
    made = mlir._renamed(function)
    assert made.__code__ is function.__code__ and made.__defaults__ == (3,)
    assert made.__name__ == "function" and made.__qualname__ == function.__qualname__
    assert made.__module__ == made.__globals__["__name__"] == __name__
    names = {"__builtins__", "__name__", "arithmetic", "cuda", "np"}
    assert made.__globals__.keys() == names and made.__globals__["np"] is np
    assert made.__globals__["cuda"] is sys.modules["numba_cuda_mlir"].cuda
    copied = made.__globals__["arithmetic"]
    assert copied is not arithmetic and copied.__name__ == arithmetic.__name__
    assert copied.math is vars(copied)["math"] is arithmetic.math
    assert copied.exp2 is vars(copied)["exp2"] is mlir._intrinsic(arithmetic.exp2)
    values = [cell.cell_contents for cell in made.__closure__]
    cells = dict(zip(made.__code__.co_freevars, values, strict=True))
    options, of_inner = cells.pop("inner")
    assert cells == {"tile": types.int32, "pair": Pair, "number": 4}
    assert options == inner.targetoptions and of_inner.__code__ is inner.py_func.__code__
    assert {Pair, arithmetic.exp2._defn} <= {
        getattr(x, "__wrapped__", x) for x in stand_in.extending.known
    }
    assert mlir._renamed(kernels).__closure__ in ((), None)
    assert mlir._value(int) is int and mlir._value("_fields") == "_fields"
    assert mlir._value(Pair(1, 2)) == Pair(1, 2)
    assert {int, Pair(1, 2)}.isdisjoint(stand_in.extending.known)


def test_the_front_end_is_replaced_there_as_here(stand_in):
    """The stand-in's modules are Numba's."""
    here = [x for module in (inlining, variables, inference) for x in module.REPLACED]
    there = mlir._replacements()
    assert [(owner, name) for owner, name, _ in there] == [(owner, name) for owner, name, _ in here]
    assert not {make for *_, make in there} & {make for *_, make in here}


DYNAMIC = b"\t.shared .align 16 .b8 __dynamic_shmem__0;\n"


@pytest.mark.parametrize("kind", [bytes, bytes.decode])
def test_dynamic_shared_memory_is_the_launchs(stand_in, kind):
    (kernel,), function = kernels(), None
    stand_in.text = kind(b"// head\n" + DYNAMIC + b".visible .entry x()\n.visible .entry y()\n")
    dynamic = b".extern .shared .align 16 .b8 __dynamic_shmem__0[];\n\n"
    want = b"// head\n" + dynamic + b".visible .entry x()\n.visible .entry y()\n"
    assert mlir.ptx_of(kernel, (8, 6)) == want
    stand_in.text = kind(b".visible .entry x()")
    assert mlir.ptx_of(kernel, (9, 0)) == b".visible .entry x()"
    first, second = stand_in.compiled
    assert [capability for *_, capability in (first, second)] == [(8, 6), (9, 0)]
    function, signature, how, _ = first
    assert function is mlir._renamed(kernel.function)
    assert signature == types.void(*kernel.argument_types)
    bounds = (kernel.threads, kernel.min_blocks)
    assert how == dict(device=False, abi="numba", output="ptx", launch_bounds=bounds)
    assert stand_in.tools._cached_cc == (9, 0)


def number(ty, value):
    """A variable's type, and its value there. A literal has the value of its type."""
    known = isinstance(ty, types.Literal)
    return ty, ty.literal_value if known else stand_in_mlir.Value(str(mlir._llvm(ty)), value)


I32, I64, U32, F32 = types.int32, types.int64, types.uint32, types.float32
ROW = types.Array(F32, 1, "C"), stand_in_mlir.array(1000, (64,), (1,))
HALVES = types.Array(types.uint16, 1, "C"), stand_in_mlir.array(1000, (64,), (1,))
COLUMNS = types.Array(types.uint16, 2, "A"), stand_in_mlir.array(1000, (8, 8), (20, 1))
MATRIX = types.Array(F32, 2, "A"), stand_in_mlir.array(1000, (8, 8), (20, 1))


X = [number(F32, x) for x in (0.5, 1.5, 2.5, 3.5)]
ASM = {"is_align_stack": False, "asm_dialect": 0, "has_side_effects": True}
# intrinsic, its arguments, its result, and what it does
WRITTEN = [
    (shared.load4, [ROW, number(I32, 8)], (1032, 1036, 1040, 1044),
     [("load", (4, "f32"), 1032, 16)]),
    (shared.load4, [ROW, number(I64, 8)], (1032, 1036, 1040, 1044),
     [("load", (4, "f32"), 1032, 16)]),
    (shared.load2, [HALVES, number(U32, 6)], 1012, [("load", "i32", 1012, 4)]),
    (shared.store4, [ROW, number(types.literal(4), 4), *X], None,
     [("store", (0.5, 1.5, 2.5, 3.5), 1016, 16)]),
    (shared.shared_tile, [number(types.literal(8), 8), number(types.literal(16), 16)],
     (stand_in_mlir.SHARED + 32, (16,), (1,)), []),
    (shared.half_tile, [number(I32, 8), number(types.literal(16), 16)],
     (stand_in_mlir.SHARED + 16, (16,), (1,)), []),
    (global_memory.write_pair,
     [MATRIX, number(I32, 3), number(I64, 2), *X[:2], number(types.boolean, 1)], None,
     [("asm", None, [1248, 0.5, 1.5, 1],
       "{.reg .pred p; setp.ne.u32 p, $3, 0; @p st.global.v2.f32 [$0], {$1, $2};}",
       "l,f,f,r,~{memory}", ASM)]),
    (global_memory.write2, [COLUMNS, number(I32, -3), number(U32, 2), number(U32, 9)], None,
     [("store", 9, 884, 4)]),
    (arithmetic.exp2, [number(F32, 3.0)], 7,
     [("asm", "f32", [3.0], "ex2.approx.ftz.f32 $0, $1;", "=f,f", ASM | {"has_side_effects": 0})]),
    (barriers.sync_named, [number(types.literal(3), 3), number(I32, 64)], None,
     [("asm", None, [64], "bar.sync 3, $0;", "r,~{memory}", ASM)]),
    *((matrix.ldmatrix, [HALVES, number(ty, 8)], (0, 1, 2, 3),
       [("asm", ("i32",) * 4, [1016],
         "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];",
         "=r,=r,=r,=r,r,~{memory}", ASM)]) for ty in (I32, U32, I64, types.literal(8))),
    (shared.load4, [ROW, number(I32, -8)], (968, 972, 976, 980), [("load", (4, "f32"), 968, 16)]),
    *((global_memory.lies_in_pairs,
       [(types.Array(F32, 4, "A"), stand_in_mlir.array(address, (2, 2, 2, 2), strides))],
       int(pairs), [])
      for address, strides, pairs in [
          (1000, (8, 4, 2, 1), True), (1004, (8, 4, 2, 1), False), (1000, (8, 4, 2, 2), False),
          (1000, (8, 4, 3, 1), False), (1000, (9, 4, 2, 1), False),
      ]),
]  # fmt: skip


@pytest.mark.parametrize("intrinsic, given, result, does", WRITTEN, ids=range(len(WRITTEN)))
def test_an_intrinsic_writes_the_same_accesses_there(intrinsic, given, result, does, stand_in):
    signature, lower = mlir._intrinsic(intrinsic)(None, *(ty for ty, _ in given))
    assert stand_in.extending.known == [mlir._intrinsic(intrinsic)]
    assert signature.args == tuple(ty for ty, _ in given)
    made = stand_in_mlir.Lowering(**{f"x{n}": value for n, (_, value) in enumerate(given)})
    stand_in_mlir.done.clear()
    lower(made, "result", [f"x{n}" for n in range(len(given))], {})
    found = made.values["result"]
    several = isinstance(found, tuple)
    assert (tuple(x.number for x in found) if several else found and found.number) == result
    assert stand_in_mlir.done == does
    assert mlir._intrinsic(intrinsic)(None, *[types.complex64] * len(given)) is None
