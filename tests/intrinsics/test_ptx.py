"""Each intrinsic's PTX, interpreted, against its emulation: a machine without a GPU notices when
they part. ``FAULTS`` are planted in the text, and each is noticed.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from llvmlite import ir
from numba.core import types
from ptx_machine import F32, I32, I64, Machine, floats, from_half

from fa_numba import emulator
from fa_numba.intrinsics import (
    _build,
    arithmetic,
    async_copy,
    bulk_copy,
    float8,
    global_memory,
    halfwords,
    matrix,
    mbarrier,
    reduction,
    shared,
)

F, U, B = types.float32, types.uint32, types.boolean
I8, I16 = ir.IntType(8), ir.IntType(16)
SOURCE, TARGET, PITCH = 4096, 65536, 512  # bytes; a row of a global array


# Where an array begins, its element's and its axes' bytes: shared ones, of float32 and of 16 bits,
# and global ones.
ARRAYS = {
    "S": (TARGET, 4, (4,)),
    "s": (TARGET, 2, (2,)),
    "F": (SOURCE, 4, (PITCH, 4)),
    "H": (SOURCE, 2, (PITCH, 2)),
    "T": (SOURCE, 2, (3 * PITCH, PITCH, 2)),
    "G": (SOURCE, 4, (PITCH,)),
    "Y": (SOURCE, 1, (PITCH, 1)),
}
ELEMENTS = {1: (types.uint8, I8), 2: (types.uint16, I16), 4: (types.float32, F32)}
# Ties of float16 and bfloat16 and their neighbours, what overflows them, subnormals of all three.
EDGES = [1 + n * 2.0**-11 for n in (1, 3, -1)] + [1 + n * 2.0**-8 for n in (1, 3, 5)]
EDGES += [65504, 65519, 65520, 3.4e38, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 6e-8, 1e-40, 0.0, 1.0]
EDGES = np.array([*EDGES, *(-x for x in EDGES[:12]), np.inf, -np.inf, np.nan], np.float32)


class Memory:
    """An array of the emulation, of all lanes: ``size`` bytes an element, from ``start`` on."""

    def __init__(self, memory, start, size, strides):
        kind = {1: np.uint8, 2: np.uint16, 4: np.float32}[size]
        self.flat, self.strides = memory[start:].view(kind), [s // size for s in strides]

    def place(self, index):
        index = index if isinstance(index, tuple) else (index,)
        return sum(x * stride for x, stride in zip(index, self.strides, strict=True))

    def load(self, index, width, pairs=True):
        found = [self.flat[self.place(index) + n] for n in range(width)]
        return tuple(x if x.dtype.kind == "f" else x.astype(np.int64) for x in found)

    def store(self, index, values):
        for n, value in enumerate(values):
            self.flat[self.place(index) + n] = value

    def add(self, index, *values):
        for n, value in enumerate(values):
            np.add.at(self.flat, self.place(index) + n, value)


class Local(dict):
    put = dict.__setitem__


def under(where, call, *args):
    """``call`` of all lanes; where it stores or adds, of those that ``where`` says."""
    if call.__name__ == "load":
        return call(*args)
    keep = [i for i in range(32) if where[i]]

    def of(x):
        if isinstance(x, tuple):
            return tuple(map(of, x))
        return x[keep] if isinstance(x, np.ndarray) else x

    return call(*map(of, args))


def async_copy_(dst, index, src, place, width, count):
    for lane in range(32):
        at = src.place(tuple(p[lane] for p in place))
        some = np.arange(width) < count[lane]
        dst.flat[index[lane] : index[lane] + width] = np.where(some, src.flat[at : at + width], 0)


def add_bulk_(array, row, col, src, index, count):
    for lane in range(32):
        at = array.place((row[lane], col[lane]))
        array.flat[at : at + count[lane]] += src.flat[index[lane] : index[lane] + count[lane]]


def collective(operation, mask, values, resolve):
    found = resolve([value.reshape(1, 32) for value in values], None, mask)
    return tuple(value.reshape(32) for value in found)


STAND_IN = SimpleNamespace(
    add_bulk=add_bulk_,
    collective=collective,
    instruction=lambda *_: None,
    whole_warps=lambda: True,
    under=under,
    async_copy=async_copy_,
)


def one_nan(words, name):
    """The emulation may have any NaN where the instruction has 0x7FFF."""
    if not name.startswith("pack_") or name == "pack_e4m3":
        return words
    halves, kind = [words >> shift & 0xFFFF for shift in (16, 0)], name.rpartition("_")[2]
    high, low = (np.where(np.isnan(from_half(h, kind)), 0x7FFF, h) for h in halves)
    return high << 16 | low


def compare(module, name, given, change, monkeypatch):
    """The intrinsic's code on the machine and its emulation on the same memory and operands."""
    monkeypatch.setattr(emulator, "current", lambda: STAND_IN)
    rng = np.random.default_rng(7)
    machine = Machine(change=change)
    halves = rng.standard_normal(1 << 17).astype(np.float16).view(np.uint8)
    floating = rng.standard_normal(1 << 16).astype(np.float32).view(np.uint8)
    machine.memory[:] = floating if given.startswith("f|") else halves
    memory = machine.memory.copy()
    kinds, values, operands, local = [], [], [], None
    row = np.arange(32)
    for letter in given.rpartition("|")[2]:
        x, ty = None, I32
        if letter in ARRAYS:
            start, size, strides = ARRAYS[letter]
            kind, element = ELEMENTS[size]
            kinds.append(types.Array(kind, len(strides), "C" if strides == (size,) else "A"))
            values.append(machine.array(start, element, strides))
            operands.append(Memory(memory, start, size, strides))
            continue
        if letter == "C":
            local = Local({n: rng.standard_normal(32).astype(np.float32) for n in range(4)})
            at = 200000 + 64 * row
            for n, x in local.items():
                machine.write(at + 4 * n, x)
            kinds.append(types.Array(types.float32, 1, "C"))
            values.append(machine.array(at, F32, (4,)))
            operands.append(local)
            continue
        if letter in "02":
            x, kind = int(letter), types.int32
        elif letter == "x":
            x, kind, ty = rng.standard_normal(32).astype(np.float32) + 2, types.float32, F32
        elif letter == "X":
            x, kind, ty = np.roll(EDGES, 11 * len(values)), types.float32, F32
        elif letter == "w":
            pair = rng.standard_normal((32, 2)).astype(np.float16)
            x, kind = pair.view(np.uint32)[:, 0].astype(np.int64), types.uint32
        elif letter in "uU":  # two small numbers, or such with the other sign
            pair = row // (1, 4, 16)[len(values)] % 4
            pair = np.array((pair, pair[::-1])) * (1 if letter == "u" else -1) & 0xFFFF
            x, kind = pair[1] << 16 | pair[0], types.uint32
        elif letter == "p":  # the numbers of four bytes
            x, kind = sum((row * (n + 1) + n) % 8 << 4 * n for n in range(4)), types.uint32
        elif letter == "b":
            x, kind, ty = row % 3 == 0, types.boolean, ir.IntType(1)
        elif letter in "rh":  # a row, and a head
            x, kind = row if letter == "r" else row % 3, types.uint32
        elif letter in "ci":  # a column, and an index of shared memory: multiples of eight
            x, kind = row * 7 % 32 * 8 * (1 if letter == "i" else 0) + 8, types.uint32
        elif letter == "B":  # bytes
            x, kind, ty = row * 7 % 32 * 16, types.int64, ir.IntType(64)
        else:  # elements to copy
            x, kind = row % (int(letter) if letter.isdigit() else 2), types.int32
        kinds.append(kind)
        values.append(machine.value(x, ty))
        operands.append(x)
    intrinsic = getattr(module, name)
    signature, code = intrinsic._defn(None, *kinds)
    made = code(machine, machine, signature, values)
    expected = intrinsic.emulation(*operands)
    if change:
        assert machine.changed, "the fault is in no text"
    if local is not None:
        made = [Machine.read(machine, 200000 + 64 * row + 4 * n) for n in range(4)]
        made, expected = list(map(floats, made)), [local[n] for n in range(4)]
        machine.memory[200000:204096] = memory[200000:204096] = 0
    elif made is not None:
        made = [part.x for part in made.parts or [made]]
        expected = expected if isinstance(expected, (tuple, list)) else [expected]
    for got, wanted in zip(made or [], expected or [], strict=True):
        wanted = np.asarray(wanted)
        if wanted.dtype.kind == "f":
            got = got if got.dtype.kind == "f" else floats(got)
            np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)
        else:
            assert np.array_equal(got, one_nan(wanted, name))
    assert np.array_equal(machine.memory, memory)


# name: module and operands (the letters of ``compare``; "f|": memory of float32)
CASES = {
    "exp2": (arithmetic, "X"),
    "log2": (arithmetic, "X"),
    "maximum": (arithmetic, "XX"),
    "inverse_power": (arithmetic, "x"),
    "opaque": (arithmetic, "w"),
    "as_float": (arithmetic, "w"),
    "as_word": (arithmetic, "x"),
    "larger_halves": (halfwords, "uuU"),
    "permute_bytes": (halfwords, "wwp"),
    "pack_f16": (matrix, "XX"),
    "pack_bf16": (matrix, "XX"),
    "pack_positive_f16": (matrix, "XX"),
    "pack_positive_bf16": (matrix, "XX"),
    "unpack_f16": (matrix, "w"),
    "unpack_bf16": (matrix, "w"),
    "pack_e4m3": (float8, "XXXX"),
    "unpack_e4m3": (float8, "w"),
    "widen_e4m3": (float8, "w"),
    "ldmatrix": (matrix, "si"),
    "ldmatrix_transposed": (matrix, "si"),
    "stmatrix": (matrix, "siwwww"),
    "add_bulk": (bulk_copy, "f|FrcSi5"),
    "mma_f16": (matrix, "C02wwwwww"),
    "mma_bf16": (matrix, "C02wwwwww"),
    "read_pair": (global_memory, "f|Frcb"),
    "write_pair": (global_memory, "f|Frcxxb"),
    "write8": (global_memory, "Hrcwwwwb"),
    "read4": (global_memory, "f|Frc"),
    "write4": (global_memory, "f|Frcxxxx"),
    "read2": (global_memory, "Hrc"),
    "write2": (global_memory, "Hrcw"),
    "read8": (global_memory, "Hrc"),
    "read16": (global_memory, "Yrc"),
    "write16": (global_memory, "Yrcwwwwb"),
    "add_global": (reduction, "f|Frcx"),
    "add_pair": (reduction, "f|Frcxxb"),
    "add_pair_vector": (reduction, "f|Frcxxb"),
    "add_four_vector": (reduction, "f|Frcxxxx"),
    "load4": (shared, "f|Si"),
    "load_pair": (shared, "f|Si"),
    "store_pair": (shared, "f|Sixx"),
    "load4_at_byte": (shared, "f|SB"),
    "load8": (shared, "si"),
    "store4": (shared, "f|Sixxxx"),
    "store8": (shared, "siwwww"),
    "load2": (shared, "si"),
    "store2": (shared, "siw"),
    "copy4_async": (async_copy, "f|SiFrc5"),
    "copy1_async": (async_copy, "f|SiFrcn"),
    "copy8_async": (async_copy, "siHrc9"),
    "copy8_of_head_async": (async_copy, "siTrhc9"),
    "copy_value_async": (async_copy, "f|SiGrn"),
}


@pytest.mark.parametrize("name", CASES)
def test_text_and_emulation_agree(name, monkeypatch):
    module, given = CASES[name]
    compare(module, name, given, None, monkeypatch)


FAULTS = [
    ("exp2", "ex2", "lg2"),
    ("log2", "lg2", "ex2"),
    ("maximum", "max", "min"),
    ("maximum", "$1, $2", "$1, $1"),
    ("larger_halves", "max", "min"),
    ("larger_halves", "min", "max"),
    ("larger_halves", "0x10001", "0x00001"),
    ("larger_halves", "0x10001", "0x20001"),
    ("larger_halves", "$2; add", "$1; add"),
    ("larger_halves", "t, t, $3", "t, t, $2"),
    ("permute_bytes", "$1, $2", "$2, $1"),
    ("inverse_power", "0x7f800000", "0x7fc00000"),
    ("inverse_power", "0x7f000000", "0x7f800000"),
    ("pack_f16", "$2, $1", "$1, $2"),
    ("pack_bf16", "$2, $1", "$1, $2"),
    ("pack_positive_f16", ".relu", ""),
    ("pack_positive_bf16", "$2, $1", "$1, $2"),
    ("unpack_f16", "{l, h}", "{h, l}"),
    ("unpack_bf16", "0xffff0000", "0x0000ffff"),
    ("pack_e4m3", "$2, $1", "$1, $2"),
    ("pack_e4m3", "{l, h}", "{h, l}"),
    ("unpack_e4m3", "{a, b}, l", "{b, a}, l"),
    ("widen_e4m3", "{l, h}", "{h, l}"),
    ("ldmatrix", "$0,$1,$2,$3", "$0,$2,$1,$3"),
    ("ldmatrix", "x4.", "x4.trans."),
    ("ldmatrix_transposed", ".trans", ""),
    ("stmatrix", "{$1,$2,$3,$4}", "{$1,$3,$2,$4}"),
    ("stmatrix", "x4.", "x4.trans."),
    ("add_bulk", ".add", ".min"),
    ("add_bulk", "[$0], [$1]", "[$1], [$0]"),
    ("mma_f16", "$4,$5,$6,$7", "$4,$6,$5,$7"),
    ("mma_f16", "$8,$9", "$9,$8"),
    ("mma_bf16", "bf16", "f16"),
    ("read_pair", "@p", "@!p"),
    ("read_pair", "{$0, $1}", "{$1, $0}"),
    ("write_pair", "@p", "@!p"),
    ("write8", "setp.ne", "setp.eq"),
    ("write8", "$1, $2", "$2, $1"),
    ("write16", "$3, $4", "$4, $3"),
    ("add_pair", "+4", "+8"),
    ("add_pair_vector", "@p", "@!p"),
    ("add_four_vector", "$2, $3", "$3, $2"),
    ("copy4_async", "16, $2", "16, 16"),
    ("copy1_async", "4, $2", "4, 4"),
    ("copy8_async", "16, $2", "16, 16"),
    ("copy8_of_head_async", "[$1]", "[$0]"),
    ("copy_value_async", "4, $2", "4, 4"),
]


@pytest.mark.parametrize("name, old, new", FAULTS)
def test_another_text_is_noticed(name, old, new, monkeypatch):
    module, given = CASES[name]
    with pytest.raises((AssertionError, NotImplementedError)) as caught:
        compare(module, name, given, (old, new), monkeypatch)
    assert "the fault is in no text" not in str(caught.value)


# --- copies before there was cp.async ---------------------------------------------------------

THROUGH_REGISTERS = ("copy4_async", "copy1_async", "copy_value_async")
REGISTER_FAULTS = [
    ("copy4_async", "{x0, x1, x2, x3}, [$1]", "{x1, x0, x2, x3}, [$1]"),
    ("copy4_async", "[$1+8]", "[$1+4]"),
    ("copy4_async", "rest, 1", "rest, 2"),
    ("copy4_async", "0, $2, p", "$2, 0, p"),
    ("copy4_async", "mov.b32 x3, 0", "mov.b32 x3, 1"),
    ("copy1_async", "setp.gt.s32 p, rest, 0", "setp.eq.s32 p, rest, 0"),
    ("copy_value_async", "[$0]", "[$0+4]"),
]


def of_sm_75(monkeypatch):
    flags = SimpleNamespace(compute_capability=(7, 5))
    monkeypatch.setattr(_build.ConfigStack, "top_or_none", lambda: flags)


@pytest.mark.parametrize("name", THROUGH_REGISTERS)
def test_a_copy_through_registers_is_the_asynchronous_one(name, monkeypatch):
    of_sm_75(monkeypatch)
    test_text_and_emulation_agree(name, monkeypatch)


@pytest.mark.parametrize("name, old, new", REGISTER_FAULTS)
def test_another_copy_through_registers_is_noticed(name, old, new, monkeypatch):
    of_sm_75(monkeypatch)
    test_another_text_is_noticed(name, old, new, monkeypatch)


@pytest.mark.parametrize("name", ["commit_async", "wait_async"])
def test_before_cp_async_there_is_nothing_to_wait_for(name, monkeypatch):
    of_sm_75(monkeypatch)
    _, code = getattr(async_copy, name)._defn(None)
    code(None, None, None, ())  # no builder is asked for an instruction


# --- arrays: no PTX, but addresses ------------------------------------------------------------


def tile_of(offset, length, dtype="uint64"):
    size = np.dtype(dtype).itemsize
    return offset * size, length, size


TILES = {
    "shared_tile": shared,
    "half_tile": shared,
    "index_tile": shared,
    "mbarrier_tile": mbarrier,
}


def compare_tile(name, offset, known, monkeypatch):
    calls = SimpleNamespace(shared_tile=tile_of, mbarrier_tile=tile_of)
    monkeypatch.setattr(emulator, "current", lambda: calls)
    machine, intrinsic = Machine(lanes=1), getattr(TILES[name], name)
    bytes_ = machine.value(0, ir.IntType(8).as_pointer(3))
    machine.module = SimpleNamespace(globals={shared._SYMBOL: bytes_})
    kinds = types.literal(offset) if known else types.int32, types.literal(40)
    signature, code = intrinsic._defn(None, *kinds)
    made = code(machine, machine, signature, (machine.value(offset), None))
    got = [made.data, *made.shape.parts, *made.strides.parts]
    assert tuple(int(value.x[0]) for value in got) == intrinsic.emulation(offset, 40)
    assert made.itemsize.x == signature.return_type.dtype.bitwidth // 8 == int(got[-1].x[0])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", TILES)
def test_a_tile_begins_where_its_emulation_says(name, known, monkeypatch):
    compare_tile(name, 16, known, monkeypatch)


@pytest.mark.parametrize(
    "strides", [(64, 32, 8, 4), (64, 32, 12, 4), (4, 32, 8, 4), (64, 32, 8, 8)]
)
@pytest.mark.parametrize("first", [0, 4, 16])
def test_lies_in_pairs_is_its_emulation(strides, first):
    intrinsic, machine = global_memory.lies_in_pairs, Machine(lanes=1)
    signature, code = intrinsic._defn(None, types.Array(F, 4, "A"))
    array = machine.array(machine.value(1024 + first, I64), F32, strides)
    made = code(machine, machine, signature, [array])
    seen = SimpleNamespace(itemsize=4, strides=strides, first_byte=first)
    assert bool(made.x[0]) == intrinsic.emulation(seen)
