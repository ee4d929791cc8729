"""What every intrinsic needs: addresses from Numba arrays, and the link to its emulation."""

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.targetconfig import ConfigStack

I32 = ir.IntType(32)
F32 = ir.FloatType()
FLOAT2_TUPLE = types.containers.UniTuple(types.float32, 2)
FLOAT2 = ir.VectorType(F32, 2)
FLOAT4 = ir.VectorType(F32, 4)
INT4 = ir.VectorType(I32, 4)
FLOAT4_TUPLE = types.containers.UniTuple(types.float32, 4)
WORDS = types.containers.UniTuple(types.uint32, 4)
SHARED = 3
GLOBAL = 1
_LETTERS = {"i32": "r", "float": "f", "i64": "l"}  # of registers, in constraints; pointers' is l


def emulated_by(emulation):
    """Attach the Python function that the emulator calls in place of the intrinsic."""

    def attach(intrinsic):
        intrinsic.emulation = emulation
        return intrinsic

    return attach


def is_float32_array(ty, ndim):
    return _is_array(ty, ndim, types.float32)


def is_half_array(ty, ndim):
    """Whether an array of 16-bit floats: their bits, as uint16, whatever their format."""
    return _is_array(ty, ndim, types.uint16)


def _is_array(ty, ndim, element):
    return isinstance(ty, types.Array) and ty.ndim == ndim and ty.dtype == element


def to_i32(context, builder, value, ty):
    return context.cast(builder, value, ty, types.int32)


def shared_pointer(context, builder, array_ty, array, index, index_ty):
    """Pointer (address space 3) to element ``index`` of a 1-D shared array.

    The constant part of a 64-bit index becomes the instruction's offset; a 32-bit sum may wrap.
    """
    data = context.make_array(array_ty)(context, builder, array).data
    base = builder.addrspacecast(data, data.type.pointee.as_pointer(SHARED))
    wide = index_ty.bitwidth == 64
    return builder.gep(base, [index if wide else to_i32(context, builder, index, index_ty)])


def shared_address(context, builder, array_ty, array, index, index_ty):
    """The address of element ``index`` of a 1-D shared array: 32 bits, whose sums may wrap."""
    data = context.make_array(array_ty)(context, builder, array).data
    base = builder.ptrtoint(builder.addrspacecast(data, data.type.pointee.as_pointer(SHARED)), I32)
    place = to_i32(context, builder, index, index_ty)
    return builder.add(base, builder.mul(place, I32(array_ty.dtype.bitwidth // 8)))


def global_pointer(context, builder, array_ty, array, *places, contiguous=False):
    """Pointer (address space 1) to an element of an array with any strides.

    ``places`` are an index and its type for every axis; with ``contiguous`` the last axis has no
    gaps, which saves its multiplication.
    """
    view = context.make_array(array_ty)(context, builder, array)
    strides = cgutils.unpack_tuple(builder, view.strides)
    if contiguous:
        strides[-1] = strides[-1].type(array_ty.dtype.bitwidth // 8)
    offset = None
    for index, ty, stride in zip(places[::2], places[1::2], strides, strict=True):
        wide = context.cast(builder, index, ty, types.int64)
        step = builder.mul(wide, stride)
        offset = step if offset is None else builder.add(offset, step)
    data = builder.bitcast(view.data, ir.IntType(8).as_pointer())
    element = view.data.type.pointee
    generic = builder.bitcast(builder.gep(data, [offset]), element.as_pointer())
    return builder.addrspacecast(generic, element.as_pointer(GLOBAL))


def ptx(
    builder, text, args=(), gives=None, *, out="=", tied=0, memory=True, stays=True, meets=False
):
    """Inline PTX, whose operands $0, $1, ... are what it gives and then ``args``.

    ``gives`` is None, a type of LLVM's or a list of them, for a list of values; ``out`` is how they
    are written, "=&" where that is before ``args`` are read. The last ``tied`` of ``args`` are in
    the registers of as many results. Nothing that touches ``memory`` moves past it; it is made as
    often as it stands there if it ``stays``, and ``meets`` says that threads come to it together.
    """
    several = isinstance(gives, list)
    types_given = gives if several else [gives] * (gives is not None)
    result = ir.LiteralStructType(gives) if several else gives or ir.VoidType()
    letters = [_LETTERS.get(str(x.type), "l") for x in args[: len(args) - tied]]
    constraints = [out + _LETTERS[str(ty)] for ty in types_given] + letters
    constraints += [*map(str, range(tied)), *["~{memory}"] * memory]
    code = ir.FunctionType(result, [x.type for x in args])
    asm = ir.InlineAsm(code, text, ",".join(constraints), side_effect=stays)
    made = builder.call(asm, args, attrs=("convergent",) if meets else ())
    return [builder.extract_value(made, n) for n in range(len(gives))] if several else made


def of_registers(text, ty, *given, gives=None, stays=False):
    """The signature and code of PTX of registers alone, all ``given`` of one Numba type."""
    if any(x != ty for x in given):
        return None
    gives = ty if gives is None else gives
    made = [F32, F32] if gives == FLOAT2_TUPLE else F32 if gives == types.float32 else I32

    def codegen(context, builder, signature, args):
        found = ptx(builder, text, args, made, memory=False, stays=stays)
        return context.make_tuple(builder, gives, found) if isinstance(found, list) else found

    return gives(*given), codegen


def at_global(text, element, array, row, col, *values, contiguous=True):
    """The signature and code of PTX with the address of array[row, col] as $0 and ``values`` as $1,
    ...; of instructions marked ``@p`` the last one is the condition.
    """
    if not _is_array(array, 2, element):
        return None
    conditional = text.startswith("@p")
    if conditional:
        if not isinstance(values[-1], types.Boolean):
            return None
        text = guarded(text, f"${len(values)}")

    def codegen(context, builder, signature, args):
        place = (args[1], row, args[2], col)
        pointer = global_pointer(context, builder, array, args[0], *place, contiguous=contiguous)
        given = [*args[3:-1], builder.zext(args[-1], I32)] if conditional else args[3:]
        ptx(builder, text, [pointer, *given])

    return types.void(array, row, col, *values), codegen


def statement(instruction, since=(0, 0)):
    """The code of an instruction without operands; none for GPUs before ``since``."""

    def codegen(context, builder, signature, args):
        if compiles_for(since):
            ptx(builder, instruction)

    return codegen


def compiles_for(capability):
    """Whether Numba compiles now for a GPU of this compute capability or a later one."""
    flags = ConfigStack.top_or_none()
    return flags is None or flags.compute_capability[:2] >= capability


def guarded(instructions, condition):
    """PTX whose instructions marked ``@p`` take place if the operand ``condition`` is not 0."""
    return f"{{.reg .pred p; setp.ne.u32 p, {condition}, 0; {instructions}}}"


def _pointer(context, builder, array_ty, space, args, places):
    """Pointer to the element at ``places`` of a shared or global array, the first of ``args``."""
    if space == SHARED:
        return shared_pointer(context, builder, array_ty, args[0], args[1], places[0])
    pairs = [x for pair in zip(args[1:], places, strict=False) for x in pair]
    return global_pointer(context, builder, array_ty, args[0], *pairs, contiguous=True)


def _fits(array, places, space, element):
    integers = space == GLOBAL or all(isinstance(ty, types.Integer) for ty in places)
    return integers and _is_array(array, len(places), element)


def vector_load(array, *places, space, element, vector, gives):
    """The signature and code of a load of ``vector``, a type of LLVM's, from ``places`` on of an
    array of ``element`` in shared or global memory, as ``gives``: a tuple, or one number.
    """
    if not _fits(array, places, space, element):
        return None

    def codegen(context, builder, signature, args):
        pointer = builder.bitcast(
            _pointer(context, builder, array, space, args, places), vector.as_pointer(space)
        )
        found = builder.load(pointer, align=_bytes(vector))
        if not isinstance(gives, types.containers.UniTuple):
            return found
        lanes = [builder.extract_element(found, I32(n)) for n in range(gives.count)]
        return context.make_tuple(builder, gives, lanes)

    return gives(array, *places), codegen


def vector_store(array, *places, space, element, vector, values):
    """The signature and code of a store of ``vector`` from ``places`` on, as of ``vector_load``;
    ``values`` are the types of its elements, or of one number.
    """
    if not _fits(array, places, space, element):
        return None

    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, array, space, args, places)
        found = args[1 + len(places)]
        if len(values) > 1:
            found = ir.Constant(vector, ir.Undefined)
            for n, lane in enumerate(args[1 + len(places) :]):
                found = builder.insert_element(found, lane, I32(n))
        builder.store(
            found, builder.bitcast(pointer, vector.as_pointer(space)), align=_bytes(vector)
        )

    return types.void(array, *places, *values), codegen


def _bytes(vector):
    return 4 * getattr(vector, "count", 1)


def words_of(halves):
    """Emulation: pairs of 16-bit elements as words, the lower index in the lower half."""
    return tuple(low | high << 16 for low, high in zip(halves[::2], halves[1::2], strict=True))


def halves_of(words):
    """Emulation: the 16-bit elements of words."""
    return tuple(half for word in words for half in (word & 0xFFFF, word >> 16))
