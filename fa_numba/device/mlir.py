"""Compiles kernels with numba-cuda-mlir, if the variable ``FA_NUMBA_COMPILER`` is ``mlir``.

Kernels, parts and intrinsics are written for numba-cuda. This module makes copies of a kernel and
of all functions that it calls. In the copies, names of numba-cuda (types, ``cuda``, device
functions) are replaced by the names of numba-cuda-mlir, called "the other compiler" here. For
numba-cuda, an intrinsic writes LLVM code by calling llvmlite's builder. For the other compiler, it
calls a builder with equal methods, which writes equal code in the LLVM dialect of MLIR. Kernels
with a type that only numba-cuda knows, such as a tensor map, raise NotImplementedError.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.targetconfig import ConfigStack
from numba.cuda.extending import _Intrinsic

from fa_numba.device import front_end
from fa_numba.device.front_end import inference, inlining, variables
from fa_numba.device.front_end.replacing import Replacement, replaced
from fa_numba.device.function import DeviceFunction

VARIABLE = "FA_NUMBA_COMPILER"
_COMPILERS = ("numba-cuda", "mlir")
_PACKAGE = "numba_cuda_mlir.numba_cuda"
# The modules of the package ``front_end`` whose replacements the other compiler can use.
_FRONT_END = (inlining, variables, inference)
_I64, _SHARED = ir.IntType(64), 3
_DYNAMIC = -(1 << 31)  # marks an index of getelementptr that is not a constant


@functools.cache
def chosen() -> bool:
    """Return whether this process compiles kernels with numba-cuda-mlir.

    Raise ValueError if the environment variable is neither "numba-cuda" nor "mlir".
    """
    named = os.environ.get(VARIABLE) or _COMPILERS[0]
    if named not in _COMPILERS:
        raise ValueError(
            f"the environment variable {VARIABLE} must be {' or '.join(map(repr, _COMPILERS))}, "
            f"got {named!r}"
        )
    return named == "mlir"


def ptx_of(kernel: Any, capability: tuple[int, int]) -> bytes:
    """Return the PTX of a kernel for a GPU of this compute capability.

    The GPU need not be in this machine. Raise ImportError if numba-cuda-mlir is not installed, and
    NotImplementedError for a kernel with a type that numba-cuda-mlir does not know.
    """
    try:
        from numba_cuda_mlir import compiler, tools
    except ImportError as error:
        raise ImportError(
            f"the compiler chosen by {VARIABLE}='mlir' is not installed. Install the extra mlir: "
            f"pip install '.[cu13,mlir]' ({error})"
        ) from error
    made = _renamed(kernel.function)
    result, *arguments = map(_there, (types.void, *kernel.argument_types))
    bounds = kernel.threads, kernel.min_blocks
    with (
        _without_repeats(),
        ConfigStack().enter(SimpleNamespace(compute_capability=capability)),
    ):
        tools._cached_cc = capability  # otherwise the driver would be asked
        ptx, _ = compiler.compile(
            made, result(*arguments), device=False, abi="numba", output="ptx", launch_bounds=bounds
        )
    text = ptx if isinstance(ptx, bytes) else ptx.encode()
    found = re.search(rb"\s*\.shared( \.align \d+ \.b8 __dynamic_shmem__0);", text)
    if found is None:
        return text
    # The compiler declares dynamic shared memory as an array without elements. The assembler would
    # turn this array into static memory, in addition to the dynamic memory of the launch.
    dynamic = b".extern .shared" + found[1] + b"[];\n\n.visible .entry"
    return text.replace(found[0], b"").replace(b".visible .entry", dynamic, 1)


@contextlib.contextmanager
def _without_repeats() -> Iterator[None]:
    """Make numba-cuda-mlir compile faster inside the context.

    Slow functions of its front end are replaced, as ``_replacements`` lists. Python's garbage
    collector is off. Other threads that compile wait until the context ends.
    """
    from numba_cuda_mlir.numba_cuda.core.compiler_lock import global_compiler_lock

    replacing, collecting = replaced(_replacements()), front_end.without_garbage_collection()
    with global_compiler_lock, replacing, collecting:
        yield


@functools.cache
def _replacements() -> tuple[Replacement, ...]:
    """Return faster functions that replace functions of numba-cuda-mlir's front end.

    numba-cuda-mlir contains a copy of numba-cuda's modules. The replacements that ``front_end``
    makes for numba-cuda are therefore made for the copy too. Only the modules ``_FRONT_END`` of
    ``front_end`` are used. The module ``lowering`` is left out, because numba-cuda-mlir lowers to
    MLIR.
    """
    found: list[Replacement] = []
    for module in _FRONT_END:
        file = str(module.__file__)
        source = Path(file).read_text(encoding="utf-8")
        made = ModuleType(f"{module.__name__} of {_PACKAGE}")
        for name in ("numba.cuda", "numba"):
            source = source.replace(f"from {name}.", f"from {_PACKAGE}.")
            source = source.replace(f"from {name} import", f"from {_PACKAGE} import")
        exec(compile(source, file, "exec"), vars(made))
        found += made.REPLACED
    return tuple(found)


def array_words(array: Any, address: Any) -> tuple:
    """Return the words of an array argument that a kernel compiled by numba-cuda-mlir expects.

    The words are the address, the address again, an offset of 0, the shape, and the strides in
    elements.
    """
    steps = (stride // array.itemsize for stride in array.strides)
    return (address, address, *map(ctypes.c_int64, (0, *array.shape, *steps)))


# --- names: names of numba-cuda in a kernel become names of the other compiler -----------------


def _translated(ty: Any, to: Any, here: Any) -> Any:
    """Return the type in the module ``to`` that corresponds to the type ``ty`` in ``here``.

    One of the two modules contains the types of numba-cuda, the other one the types of
    numba-cuda-mlir. Raise NotImplementedError if ``to`` has no such type.
    """
    if ty == here.none:
        return to.none
    if isinstance(ty, here.IntegerLiteral):
        return to.literal(ty.literal_value)
    if isinstance(ty, here.Boolean):
        return to.boolean
    if isinstance(ty, here.Number):
        return getattr(to, ty.name)
    if isinstance(ty, here.Array):
        return to.Array(_translated(ty.dtype, to, here), ty.ndim, ty.layout)
    if isinstance(ty, here.NamedTuple):
        _of_record(ty.instance_class)
        return to.NamedTuple([_translated(x, to, here) for x in ty.types], ty.instance_class)
    if isinstance(ty, here.UniTuple):
        return to.UniTuple(_translated(ty.dtype, to, here), ty.count)
    raise NotImplementedError(
        f"the compiler chosen by {VARIABLE}='mlir' cannot compile kernels with {ty}. Pass "
        "unit='mma' or unit='simt', or unset the variable"
    )


def _there(ty: Any) -> Any:
    from numba_cuda_mlir.numba_cuda import types as others

    return _translated(ty, others, types)


def _here(ty: Any) -> Any:
    from numba_cuda_mlir.numba_cuda import types as others

    return _translated(ty, types, others)


@functools.cache
def _renamed(function: FunctionType) -> FunctionType:
    """Return a copy of a function in which names of numba-cuda refer to numba-cuda-mlir."""
    code = function.__code__
    found = {
        name: function.__globals__[name] for name in code.co_names if name in function.__globals__
    }
    names = {"__builtins__": __builtins__, "__name__": function.__module__}
    names |= {name: _value(value) for name, value in found.items()}
    cells = tuple(CellType(_value(cell.cell_contents)) for cell in function.__closure__ or ())
    made = FunctionType(code, names, function.__name__, function.__defaults__, cells)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def _value(value: Any) -> Any:
    if isinstance(value, types.Type):
        return _there(value)
    if isinstance(value, DeviceFunction):
        return _device_function(value)
    if isinstance(value, _Intrinsic):
        return _intrinsic(value)
    if isinstance(value, ModuleType):
        return _module(value)
    if isinstance(value, type) and hasattr(value, "_fields"):
        _of_record(value)
    return value


@functools.cache
def _device_function(function: DeviceFunction) -> Any:
    from numba_cuda_mlir import cuda

    return cuda.jit(**function.targetoptions)(_renamed(function.py_func))


@functools.cache
def _module(module: ModuleType) -> ModuleType:
    from numba_cuda_mlir import cuda

    if module.__name__ == "numba.cuda":
        return cuda
    ours = module.__name__.split(".")[0] == "fa_numba"
    return _Renamed(module) if ours else module


class _Renamed(ModuleType):
    """A copy of a module of fa_numba, in which names of numba-cuda refer to numba-cuda-mlir."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = _value(getattr(self._module, name))
        setattr(self, name, value)
        return value


@functools.cache
def _of_record(record: type) -> None:
    """Register a class of named tuples, so that kernels by numba-cuda-mlir can create such tuples.

    numba-cuda-mlir treats named tuples as plain tuples.
    """
    from numba_cuda_mlir import extending
    from numba_cuda_mlir.numba_cuda import types as others

    @extending.lower_builtin(record, others.VarArg(others.Any))
    def make(lowering: Any, target: Any, args: Any, named: Any) -> None:
        given = [*args, *dict(named).values()]
        lowering.store_var(target, tuple(map(lowering.load_var, given)))

    extending.refresh_registries()


@functools.cache
def _intrinsic(intrinsic: _Intrinsic) -> Any:
    from numba_cuda_mlir import extending

    @functools.wraps(intrinsic._defn)
    def typed(typing: Any, *args: Any) -> Any:
        found = intrinsic._defn(typing, *map(_here, args))
        if found is None:
            return None
        signature, codegen = found

        def lower(lowering: Any, target: Any, variables: Any, named: Any) -> None:
            builder = _Builder(lowering)
            given = [
                builder.value_of(*pair) for pair in zip(variables, signature.args, strict=True)
            ]
            made = codegen(_Context(), builder, signature, given)
            lanes = tuple(x.made for x in made) if isinstance(made, tuple) else None
            lowering.store_var(target, lanes or getattr(made, "made", None))

        return _there(signature.return_type)(*map(_there, signature.args)), lower

    made = extending.intrinsic(typed)
    extending.refresh_registries()
    return made


# --- code: a builder with llvmlite's methods, for intrinsics, that writes MLIR ---------------


class _Value:
    """A value in MLIR, together with llvmlite's type of the value.

    ``made`` is the MLIR value, or a list of MLIR values.
    """

    def __init__(self, made: Any, ty: Any) -> None:
        self.made, self.type = made, ty


class _Context:
    """An object that replaces Numba's target context, with the methods that intrinsics call."""

    def make_array(self, ty: Any) -> Callable[..., Any]:
        def made(context: Any, builder: _Builder, value: Any = None) -> Any:
            return _Array(builder, ty, value)

        return made

    def populate_array(self, array: _Array, data: Any, shape: Any, **_: Any) -> None:
        array.place(data, shape.made)

    def get_constant(self, ty: Any, value: int) -> ir.Constant:
        return ir.Constant(_I64, value)

    def make_tuple(self, builder: Any, ty: Any, lanes: Any) -> tuple:
        return tuple(lanes)

    def cast(self, builder: _Builder, value: Any, source: Any, to: Any) -> Any:
        narrow, wide = sorted((value.type.width, to.bitwidth))
        if narrow == wide:
            return value
        widen = "extsi" if source.signed else "extui"
        how = widen if wide == to.bitwidth else "trunci"
        return builder.convert(how, value, ir.IntType(to.bitwidth))


class _Array:
    """An object that replaces Numba's array structure, which intrinsics read or create.

    ``data`` is the pointer to the elements, and ``strides`` are in bytes.
    """

    def __init__(self, builder: _Builder, ty: Any, value: Any) -> None:
        self._builder, self._element = builder, _llvm(ty.dtype)
        self._item = ty.dtype.bitwidth // 8
        if value is not None:
            from numba_cuda_mlir import lowering_utilities

            self._value, self._ndim = value.made, ty.ndim
            memory = lowering_utilities.memref_data_pointer(value.made)
            self.data = _Value(memory, self._element.as_pointer())

    @property
    def strides(self) -> Any:
        about = self._builder.memref.extract_strided_metadata(self._value)[2 + self._ndim :]
        item = ir.Constant(_I64, self._item)
        wide = [self._builder.convert("index_cast", _Value(x, None), _I64) for x in about]
        made = [self._builder.mul(x, item) for x in wide]
        return _Value(made, ir.LiteralStructType([_I64] * self._ndim))

    def place(self, data: Any, shape: Any) -> None:
        (length,) = shape
        made = self._builder.one_axis(data.made, length.constant, self._element)
        self._made = _Value(made, None)

    def _getvalue(self) -> Any:
        return self._made


def _llvm(ty: Any) -> Any:
    """Return llvmlite's type for a Numba type. Return None for types other than numbers."""
    if isinstance(ty, types.Boolean):
        return ir.IntType(1)
    width: Any = getattr(ty, "bitwidth", 0)
    if isinstance(ty, types.Integer):
        return ir.IntType(width)
    return ir.FloatType() if ty == types.float32 else None


class _Builder:
    """An object that replaces llvmlite's builder, with the methods that intrinsics call.

    The methods write MLIR instead of LLVM code.
    """

    def __init__(self, lowering: Any) -> None:
        from numba_cuda_mlir._mlir import ir as mlir
        from numba_cuda_mlir._mlir.dialects import arith, builtin, llvm, memref

        self.lowering, self.mlir, self.memref = lowering, mlir, memref
        self.arith, self.builtin, self.llvm = arith, builtin, llvm
        self.module = ir.Module()  # used only for the name of dynamic shared memory

    def type_of(self, ty: Any) -> Any:
        if isinstance(ty, ir.IntType):
            return self.mlir.IntegerType.get_signless(ty.width)
        if isinstance(ty, ir.FloatType):
            return self.mlir.F32Type.get()
        if isinstance(ty, ir.PointerType):
            return self.llvm.PointerType.get(ty.addrspace)
        if isinstance(ty, ir.VectorType):
            return self.mlir.VectorType.get([ty.count], self.type_of(ty.element))
        return self.llvm.StructType.get_literal(list(map(self.type_of, ty.elements)))

    def value_of(self, variable: Any, ty: Any) -> Any:
        """Return the value of a kernel's variable as a ``_Value``, or as a constant of llvmlite.

        ``ty`` is the Numba type of the variable. The result is a constant of llvmlite if the
        variable is a number that the compiler knows.
        """
        value, wanted = self.lowering.load_var(variable), _llvm(ty)
        if isinstance(value, (int, float)):
            return ir.Constant(wanted, value)
        if isinstance(wanted, ir.IntType):
            value = self.lowering.mlir_convert(value, self.type_of(wanted))
        return _Value(value, wanted)

    def given(self, value: Any) -> Any:
        """Return the MLIR value of a ``_Value``, of a constant, or of dynamic shared memory."""
        if isinstance(value, _Value):
            return value.made
        ty = self.type_of(value.type) if isinstance(value, ir.Constant) else None
        if isinstance(value, ir.GlobalVariable):
            from numba_cuda_mlir import lowering_utilities

            shared = self.lowering._get_shared_memory_base()
            generic = lowering_utilities.memref_data_pointer(shared)
            return self.llvm.addrspacecast(self.llvm.PointerType.get(_SHARED), generic)
        if isinstance(value.type, ir.VectorType):  # a vector whose elements are not set yet
            return self.llvm.UndefOp(ty).result
        if isinstance(value.type, ir.IntType):
            return self.arith.constant(ty, self.mlir.IntegerAttr.get(ty, int(value.constant)))
        return self.arith.constant(ty, self.mlir.FloatAttr.get(ty, float(value.constant)))

    def one_axis(self, memory: Any, length: int, element: Any) -> Any:
        """Return a 1-D array (an MLIR memref) that begins at the generic pointer ``memory``.

        ``length`` is the number of elements, and ``element`` is llvmlite's type of an element.
        """
        described = self.lowering._build_memref_descriptor(memory, [length], [1])
        unknown = self.mlir.ShapedType.get_dynamic_size()
        layout = self.mlir.StridedLayoutAttr.get(unknown, [unknown])
        ty = self.mlir.MemRefType.get([unknown], self.type_of(element), layout)
        return self.builtin.unrealized_conversion_cast([ty], [described])

    def convert(self, how: str, value: Any, ty: Any) -> _Value:
        return _Value(getattr(self.arith, how)(self.type_of(ty), self.given(value)), ty)

    def _two(self, how: str, a: Any, b: Any) -> _Value:
        return _Value(getattr(self.arith, how)(self.given(a), self.given(b)), a.type)

    add = functools.partialmethod(_two, "addi")
    mul = functools.partialmethod(_two, "muli")
    and_ = functools.partialmethod(_two, "andi")
    or_ = functools.partialmethod(_two, "ori")
    zext = functools.partialmethod(convert, "extui")

    def icmp_unsigned(self, operator: str, a: Any, b: Any) -> _Value:
        order = {"==": 0, "!=": 1}[operator]
        return _Value(self.arith.cmpi(order, self.given(a), self.given(b)), ir.IntType(1))

    def ptrtoint(self, pointer: Any, ty: Any) -> _Value:
        return _Value(self.llvm.ptrtoint(self.type_of(ty), self.given(pointer)), ty)

    def addrspacecast(self, pointer: Any, ty: Any, _: str = "") -> _Value:
        return _Value(self.llvm.addrspacecast(self.type_of(ty), self.given(pointer)), ty)

    def bitcast(self, pointer: Any, ty: Any) -> _Value:
        return _Value(self.given(pointer), ty)  # pointers of MLIR have no type of element

    def gep(self, pointer: Any, places: Any, inbounds: bool = False) -> _Value:
        pointee, base = pointer.type.pointee, self.given(pointer)
        if isinstance(pointee, ir.ArrayType):
            pointee, places = pointee.element, places[1:]
        at, which = [self.given(x) for x in places], [_DYNAMIC] * len(places)
        made = self.llvm.getelementptr(base.type, base, at, which, self.type_of(pointee), None)
        return _Value(made, pointee.as_pointer(pointer.type.addrspace))

    def load(self, pointer: Any, align: int | None = None) -> _Value:
        ty = pointer.type.pointee
        return _Value(self.llvm.load(self.type_of(ty), self.given(pointer), alignment=align), ty)

    def store(self, value: Any, pointer: Any, align: int | None = None) -> None:
        self.llvm.store(self.given(value), self.given(pointer), alignment=align)

    def extract_element(self, vector: Any, n: Any) -> _Value:
        made = self.llvm.extractelement(self.given(vector), self.given(n))
        return _Value(made, vector.type.element)

    def insert_element(self, vector: Any, value: Any, n: Any) -> _Value:
        made = self.llvm.insertelement(self.given(vector), self.given(value), self.given(n))
        return _Value(made, vector.type)

    def extract_value(self, several: Any, n: int) -> _Value:
        if isinstance(several.made, list):
            return several.made[n]
        ty = several.type.elements[n]
        return _Value(self.llvm.extractvalue(self.type_of(ty), several.made, [n]), ty)

    def insert_value(self, several: Any, value: Any, n: int) -> _Value:
        return _Value([*getattr(several, "made", []), value], several.type)

    def call(self, asm: ir.InlineAsm, args: Any, attrs: Any = ()) -> _Value:
        nothing = isinstance(asm.type, ir.VoidType)
        made = self.llvm.inline_asm(
            None if nothing else self.type_of(asm.type),
            list(map(self.given, args)),
            asm.asm,
            asm.constraint,
            has_side_effects=asm.side_effect,
            is_align_stack=False,
            asm_dialect=0,
        )
        return _Value(None if nothing else getattr(made, "result", made), asm.type)
