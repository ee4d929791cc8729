"""A stand-in for the package numba_cuda_mlir.

The real dialects write MLIR operations. The dialects of the stand-in compute with numbers instead.

A value of the stand-in has a type and a number (a pointer: its address; a vector or a structure: a
tuple). `done` lists each access to memory and each inline instruction. A load returns the addresses
of the elements that it loads, so that a test can tell which element arrived where.
"""

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import numba.cuda
from numba.core import types
from numba.core.targetconfig import ConfigStack

SHARED = 1 << 16  # address of the shared memory that a launch gives to the kernel
done: list[tuple] = []


class Value:
    """A value of MLIR: its type and its number."""

    def __init__(self, type_, number):
        self.type, self.number = type_, number

    @property
    def result(self):
        return self


def array(address, shape, strides):
    """An array (a memref), whose strides are in elements."""
    return Value("memref", (address, shape, strides))


class Lowering:
    """The compiler's lowering of a kernel whose variables have these values, by name."""

    def __init__(self, **values):
        self.values = values

    def load_var(self, name):
        return self.values[name]

    def store_var(self, name, value):
        self.values[name] = value

    def mlir_convert(self, value, type_):
        return Value(type_, value.number)

    def _get_shared_memory_base(self):
        return array(SHARED, (0,), (1,))

    def _build_memref_descriptor(self, memory, shape, strides):
        return array(memory.number, tuple(shape), tuple(strides))


def _two(function):
    return lambda a, b: Value(a.type, function(a.number, b.number))


def _same(type_, value):
    return Value(type_, value.number)


def _widened(type_, value):
    assert _bits(type_) > _bits(value.type)
    return Value(type_, value.number % (1 << _bits(value.type)))


def _widened_with_sign(type_, value):
    assert _bits(type_) > _bits(value.type)
    return Value(type_, value.number)


def _cut(type_, value):
    assert _bits(type_) < _bits(value.type)
    return Value(type_, value.number % (1 << _bits(type_)))


def _bits(type_):
    return int(type_[1:])


def _element(base_type, base, indices, which, element, _):
    assert base_type == base.type and which == [-(1 << 31)] * len(indices)
    (index,) = indices
    return Value(base.type, base.number + index.number * _bytes(element))


def _bytes(type_):
    return int(type_[1:]) // 8 if isinstance(type_, str) else type_[0] * _bytes(type_[1])


def _load(type_, pointer, alignment=None):
    done.append(("load", type_, pointer.number, alignment))
    if isinstance(type_, str):
        return Value(type_, pointer.number)
    count, element = type_
    return Value(type_, tuple(pointer.number + n * _bytes(element) for n in range(count)))


def _store(value, pointer, alignment=None):
    done.append(("store", value.number, pointer.number, alignment))


def _asm(type_, operands, text, constraints, **how):
    numbers = [x.number for x in operands]
    done.append(("asm", type_, numbers, text, constraints, how))
    results = tuple(range(len(type_))) if isinstance(type_, tuple) else 7
    return SimpleNamespace(result=Value(type_, results), type=type_, number=results)


def _inserted(vector, value, n):
    numbers = [*vector.number]
    numbers[n.number] = value.number
    return Value(vector.type, tuple(numbers))


def _metadata(memory):
    address, shape, strides = memory.number
    return [Value("index", x) for x in (address, 0, *shape, *strides)]


ARITH = SimpleNamespace(
    constant=Value,
    addi=_two(lambda a, b: a + b),
    muli=_two(lambda a, b: a * b),
    andi=_two(lambda a, b: a & b),
    ori=_two(lambda a, b: a | b),
    cmpi=lambda order, a, b: Value("i1", int((a.number != b.number) == bool(order))),
    extui=_widened,
    extsi=_widened_with_sign,
    trunci=_cut,
    index_cast=_same,
)
LLVM = SimpleNamespace(
    PointerType=SimpleNamespace(get=lambda space=0: f"p{space}"),
    StructType=SimpleNamespace(get_literal=tuple),
    UndefOp=lambda type_: Value(type_, (None,) * type_[0]),
    addrspacecast=_same,
    ptrtoint=_same,
    getelementptr=_element,
    load=_load,
    store=_store,
    extractelement=lambda vector, n: Value(vector.type[1], vector.number[n.number]),
    insertelement=_inserted,
    extractvalue=lambda type_, value, at: Value(type_, value.number[at[0]]),
    inline_asm=_asm,
)
MLIR = SimpleNamespace(
    IntegerType=SimpleNamespace(get_signless=lambda width: f"i{width}"),
    F32Type=SimpleNamespace(get=lambda: "f32"),
    VectorType=SimpleNamespace(get=lambda counts, type_: (*counts, type_)),
    IntegerAttr=SimpleNamespace(get=lambda type_, number: number),
    FloatAttr=SimpleNamespace(get=lambda type_, number: number),
    ShapedType=SimpleNamespace(get_dynamic_size=lambda: "?"),
    StridedLayoutAttr=SimpleNamespace(get=lambda *of: of),
    MemRefType=SimpleNamespace(get=lambda *of: of),
)


class Extending:
    """What is registered counts when the registries have been refreshed."""

    def __init__(self):
        self.waiting, self.known, self.lowered = [], [], {}

    def intrinsic(self, function):
        self.waiting.append(function)
        return function

    def lower_builtin(self, record, *_):
        def attach(make):
            self.waiting.append(record)
            self.lowered[record] = make
            return make

        return attach

    def refresh_registries(self):
        self.known += self.waiting
        self.waiting.clear()


@contextlib.contextmanager
def installed():
    """Numba-cuda-mlir is this stand-in inside the context; yield its modules."""
    lock = contextlib.nullcontext()
    made = SimpleNamespace(
        compiled=[], text="", extending=Extending(), tools=SimpleNamespace(_cached_cc=None)
    )

    def compile_(function, signature, **how):
        capability = ConfigStack.top_or_none().compute_capability
        made.compiled.append((function, signature, how, capability))
        return made.text, None

    def jit(**options):
        return lambda function: (options, function)

    memory = SimpleNamespace(memref_data_pointer=lambda x: Value("p0", x.number[0]))
    cast = SimpleNamespace(unrealized_conversion_cast=lambda types_, values: values[0])
    nothing = SimpleNamespace()
    names = {
        "": {
            "compiler": SimpleNamespace(compile=compile_),
            "tools": made.tools,
            "cuda": SimpleNamespace(jit=jit),
            "extending": made.extending,
            "lowering_utilities": memory,
        },
        ".numba_cuda": {"types": types, "target": numba.cuda.target},
        ".numba_cuda.types": vars(numba.types),
        ".numba_cuda.core": vars(numba.cuda.core),
        ".numba_cuda.core.compiler_lock": {"global_compiler_lock": lock},
        "._mlir": {"ir": MLIR},
        "._mlir.dialects": {"arith": ARITH, "builtin": cast, "llvm": LLVM, "memref": nothing},
    }
    nothing.extract_strided_metadata = _metadata
    modules = {}
    for name, values in names.items():
        module = modules[f"numba_cuda_mlir{name}"] = ModuleType(f"numba_cuda_mlir{name}")
        vars(module).update({k: v for k, v in values.items() if not k.startswith("__")})
    with mock.patch.dict(sys.modules, modules):
        yield made
