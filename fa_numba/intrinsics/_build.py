"""Helpers of all intrinsics: addresses of array elements, inline PTX, links to emulations.

The functions generate LLVM IR when Numba compiles a kernel. `context` and `builder` are objects of
Numba's code generation. `ty` and names that end in `_ty` are Numba types. "Signature and code" of
an intrinsic are what Numba needs to compile a call: the types of the arguments and of the result,
and a function that generates the instructions.
"""

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
# Letters for operands in LLVM's constraints, by LLVM type. Pointers have the letter "l".
_LETTERS = {"i32": "r", "float": "f", "i64": "l"}


def emulated_by(emulation):
    """Return a decorator that makes `emulation` the emulation of an intrinsic.

    The emulator calls `emulation` instead of the intrinsic, with the same arguments.
    """

    def attach(intrinsic):
        intrinsic.emulation = emulation
        return intrinsic

    return attach


def is_float32_array(ty, ndim):
    """Return whether a Numba type is an array of float32 with `ndim` axes."""
    return _is_array(ty, ndim, types.float32)


def is_half_array(ty, ndim):
    """Return whether a Numba type is an array of uint16 with `ndim` axes.

    Such an array contains the bits of 16-bit floats, float16 or bfloat16.
    """
    return _is_array(ty, ndim, types.uint16)


def _is_array(ty, ndim, element):
    """Return whether a Numba type is an array of `element` with `ndim` axes."""
    return isinstance(ty, types.Array) and ty.ndim == ndim and ty.dtype == element


def to_i32(context, builder, value, ty):
    """Return an integer value of the Numba type `ty` as an int32."""
    return context.cast(builder, value, ty, types.int32)


def shared_pointer(context, builder, array_ty, array, index, index_ty):
    """Return an LLVM pointer to element `index` of a 1-D shared array (address space 3).

    If the index has 64 bits, the compiler can put a constant part of the index into the
    instruction's offset. If the index has 32 bits, the compiler cannot, because a 32-bit sum may
    wrap around.
    """
    data = context.make_array(array_ty)(context, builder, array).data
    base = builder.addrspacecast(data, data.type.pointee.as_pointer(SHARED))
    wide = index_ty.bitwidth == 64
    return builder.gep(base, [index if wide else to_i32(context, builder, index, index_ty)])


def shared_address(context, builder, array_ty, array, index, index_ty):
    """Return the 32-bit address of element `index` of a 1-D shared array."""
    data = context.make_array(array_ty)(context, builder, array).data
    base = builder.ptrtoint(builder.addrspacecast(data, data.type.pointee.as_pointer(SHARED)), I32)
    place = to_i32(context, builder, index, index_ty)
    return builder.add(base, builder.mul(place, I32(array_ty.dtype.bitwidth // 8)))


def global_pointer(context, builder, array_ty, array, *places, contiguous=False):
    """Return an LLVM pointer to an element of an array with any strides (address space 1).

    `places` contains two values for each axis: the index of the element, and the Numba type of the
    index. If `contiguous` is true, the last axis must be contiguous. The address is then computed
    without a multiplication by the stride of this axis.
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
    builder,
    text,
    args=(),
    results=None,
    *,
    out="=",
    tied=0,
    memory=True,
    side_effect=True,
    convergent=False,
):
    """Insert inline PTX into the code, and return its results.

    In `text`, the operands $0, $1, ... are first the results, and then `args`.

    Parameters
    ----------
    builder : IRBuilder
        LLVM builder.
    text : str
        The PTX.
    args : sequence of LLVM values
        Operands that the PTX reads.
    results : None, LLVM type or list of LLVM types
        Types of the results. For a list, the returned value is a list, too.
    out : {"=", "=&"}
        "=&" if the PTX writes a result before it has read all of `args`.
    tied : int
        The last `tied` of `args` use the same registers as the results.
    memory : bool
        Whether the compiler must keep the order of the PTX and of all accesses to memory.
    side_effect : bool
        Whether the compiler must keep the PTX where it is. If False, the compiler may remove or
        move the PTX, or execute it less often.
    convergent : bool
        Whether several threads must execute the PTX together. If so, the compiler does not move the
        PTX into a branch.
    """
    several = isinstance(results, list)
    types_given = results if several else [results] * (results is not None)
    result = ir.LiteralStructType(results) if several else results or ir.VoidType()
    letters = [_LETTERS.get(str(x.type), "l") for x in args[: len(args) - tied]]
    constraints = [out + _LETTERS[str(ty)] for ty in types_given] + letters
    constraints += [*map(str, range(tied)), *["~{memory}"] * memory]
    code = ir.FunctionType(result, [x.type for x in args])
    asm = ir.InlineAsm(code, text, ",".join(constraints), side_effect=side_effect)
    made = builder.call(asm, args, attrs=("convergent",) if convergent else ())
    return [builder.extract_value(made, n) for n in range(len(results))] if several else made


def of_registers(text, ty, *given, returns=None, side_effect=False):
    """Return signature and code of an intrinsic whose PTX uses registers only, and no memory.

    `text` is the PTX. `given` are the Numba types of the arguments of the call. Each of them must
    be `ty`, otherwise this function returns None. `returns` is the Numba type of the result. None
    means that the result has the type `ty`. `side_effect` is described in `ptx`.
    """
    if any(x != ty for x in given):
        return None
    returns = ty if returns is None else returns
    several = isinstance(returns, types.containers.UniTuple)
    one = F32 if (returns.dtype if several else returns) == types.float32 else I32
    made = [one] * returns.count if several else one

    def codegen(context, builder, signature, args):
        found = ptx(builder, text, args, made, memory=False, side_effect=side_effect)
        return context.make_tuple(builder, returns, found) if isinstance(found, list) else found

    return returns(*given), codegen


def at_global(text, element, array, row, col, *values, contiguous=True):
    """Return signature and code of an intrinsic whose PTX accesses array[row, col].

    The array is in global memory. `element` is the Numba type that its elements must have. In the
    PTX `text`, $0 is the address of the element, and $1, $2, ... are `values`.

    If `text` begins with ``@p``, the last of `values` must be a bool. Instructions with the prefix
    ``@p`` are then executed only if this bool is true. `contiguous` is described in
    `global_pointer`.
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
    """Return the code of an instruction without operands.

    For GPUs with a compute capability below `since`, the code is empty.
    """

    def codegen(context, builder, signature, args):
        if compiles_for(since):
            ptx(builder, instruction)

    return codegen


def compiles_for(capability):
    """Return whether Numba is compiling for a GPU of at least this compute capability.

    If Numba is not compiling for a GPU, the result is True.
    """
    flags = ConfigStack.top_or_none()
    return flags is None or flags.compute_capability[:2] >= capability


def guarded(instructions, condition):
    """Return PTX whose instructions marked ``@p`` are executed only under a condition.

    `condition` is the name of an operand, such as "$3". The condition is true if the operand is not
    0.
    """
    return f"{{.reg .pred p; setp.ne.u32 p, {condition}, 0; {instructions}}}"


def _pointer(context, builder, array_ty, space, args, places):
    """Return a pointer to an element of a shared or global array.

    The first of `args` is the array, and the others are the indices of the element. `places` are
    the Numba types of the indices.
    """
    if space == SHARED:
        return shared_pointer(context, builder, array_ty, args[0], args[1], places[0])
    pairs = [x for pair in zip(args[1:], places, strict=False) for x in pair]
    return global_pointer(context, builder, array_ty, args[0], *pairs, contiguous=True)


def _fits(array, places, space, element):
    """Return whether an array and its indices have the types that an access needs.

    `places` are the Numba types of the indices, and `space` is SHARED or GLOBAL.
    """
    integers = space == GLOBAL or all(isinstance(ty, types.Integer) for ty in places)
    return integers and _is_array(array, len(places), element)


def vector_load(array, *places, space, element, vector, returns):
    """Return signature and code of a load of neighbouring elements in one access.

        array     Numba type of the array
        places    Numba types of the indices of the first element
        space     SHARED or GLOBAL: the memory that contains the array
        element   Numba type that the elements must have
        vector    LLVM type of the access
        returns   Numba type of the result: a tuple or a number

    If `array` is not an array of `element` with one index in `places` for each axis, the result is
    None.
    """
    if not _fits(array, places, space, element):
        return None

    def codegen(context, builder, signature, args):
        pointer = builder.bitcast(
            _pointer(context, builder, array, space, args, places), vector.as_pointer(space)
        )
        found = builder.load(pointer, align=_bytes(vector))
        if not isinstance(returns, types.containers.UniTuple):
            return found
        lanes = [builder.extract_element(found, I32(n)) for n in range(returns.count)]
        return context.make_tuple(builder, returns, lanes)

    return returns(array, *places), codegen


def vector_store(array, *places, space, element, vector, values):
    """Return signature and code of a store of neighbouring elements in one access.

    The arguments are those of `vector_load`. `values` are the Numba types of the stored values.
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
    """Return the size in bytes of an LLVM type: int32 or float, or a vector of them."""
    return 4 * getattr(vector, "count", 1)


def words_of(halves):
    """Return pairs of 16-bit elements as 32-bit words. Emulations call this function.

    The element with the lower index is in the lower half of the word.
    """
    return tuple(low | high << 16 for low, high in zip(halves[::2], halves[1::2], strict=True))


def halves_of(words):
    """Return the 16-bit elements of 32-bit words. Emulations call this function.

    The lower half of a word comes first.
    """
    return tuple(half for word in words for half in (word & 0xFFFF, word >> 16))


def words_of_bytes(elements):
    """Return groups of four 8-bit elements as 32-bit words. Emulations call this function.

    The element with the lowest index is in the lowest byte of the word.
    """
    return words_of(tuple(a | b << 8 for a, b in zip(elements[::2], elements[1::2], strict=True)))


def bytes_of(words):
    """Return the 8-bit elements of 32-bit words. Emulations call this function.

    The lowest byte of a word comes first.
    """
    return tuple(word >> shift & 0xFF for word in words for shift in (0, 8, 16, 24))
