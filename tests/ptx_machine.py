"""Runs an intrinsic's code without a GPU: it is the builder to which the code is given, and its
inline PTX is interpreted by the words of the PTX manual, every register an array over lanes.
"""

import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba.core import types

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
SIZES = {"float": 4, "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}

# Instructions that touch registers alone, and those that a compiler may not put on two paths.
OF_REGISTERS = ("", "ex2", "lg2", "max", "min", "mov", "setp", "shl", "and", "add", "sub", "cvt")
OF_REGISTERS += ("mma", "prmt")
OF_WARPS = ("bar", "setmaxnreg", "wgmma")


class Value:
    def __init__(self, ty, x, parts=None):
        self.type, self.x, self.parts = ty, x, parts


class Machine:
    """Builder and context at once. ``memory`` is one of bytes; ``does`` gets, in order, what
    instructions do beside registers and memory.
    """

    def __init__(self, lanes=32, change=None, size=1 << 18):
        self.lanes, self.change, self.changed = lanes, change, False
        self.memory = np.zeros(size, np.uint8)
        self.does = []

    # --- LLVM -------------------------------------------------------------------------------

    def value(self, x, ty=I32):
        x = x.constant if isinstance(x, ir.Constant) else getattr(x, "x", x)
        if isinstance(x, int) and x >= 1 << 63:
            x -= 1 << 64
        return Value(ty, np.broadcast_to(np.asarray(x), (self.lanes,)))

    def array(self, address, element, strides):
        """An array's value at an address, or one of each lane, with strides in bytes."""
        data = self.value(address, element.as_pointer())
        places = Value(ir.LiteralStructType([I64] * len(strides)), None)
        places.parts = [self.value(s, I64) for s in strides]
        return SimpleNamespace(data=data, strides=places)

    def make_array(self, ty):
        made = SimpleNamespace()
        made._getvalue = lambda: made
        return lambda context, builder, value=made: value

    def populate_array(self, array, **fields):
        vars(array).update(fields)

    def get_constant(self, ty, x):
        return self.value(x, I64)

    def make_tuple(self, builder, ty, values):
        return Value(ty, None, list(values))

    def cast(self, builder, value, old, new):
        return self.value(value, I64 if new == types.int64 else I32)

    def addrspacecast(self, value, ty, name=""):
        return self.value(value, ty)

    bitcast = ptrtoint = zext = addrspacecast

    def gep(self, pointer, places, inbounds=False):
        step = self.value(places[-1]).x * SIZES[str(pointer.type.pointee)]
        return Value(pointer.type, pointer.x + step)

    def add(self, a, b):
        return Value(a.type, self.value(a).x + self.value(b).x)

    def mul(self, a, b):
        return Value(a.type, self.value(a).x * self.value(b).x)

    def and_(self, a, b):
        return Value(a.type, self.value(a).x & self.value(b).x)

    def or_(self, a, b):
        return Value(a.type, self.value(a).x | self.value(b).x)

    def lshr(self, a, b):
        return Value(a.type, self.value(a).x >> self.value(b).x)

    def icmp_unsigned(self, sign, a, b):
        assert sign == "=="
        return Value(ir.IntType(1), self.value(a).x == self.value(b).x)

    def extract_value(self, value, n):
        return value.parts[n]

    def extract_element(self, value, n):
        return value.parts[n.constant]

    def insert_element(self, vector, value, n):
        return self.insert_value(vector, value, n.constant)

    def insert_value(self, several, value, n):
        parts = list(getattr(several, "parts", None) or [None] * several.type.count)
        parts[n] = value
        return Value(several.type, None, parts)

    def load(self, pointer, align=None):
        ty = pointer.type.pointee
        if isinstance(ty, ir.VectorType):
            at = range(ty.count)
            return Value(ty, None, [Value(ty.element, self.read(pointer.x + 4 * n)) for n in at])
        return Value(ty, self.read(pointer.x))

    def store(self, value, pointer, align=None):
        for n, part in enumerate(value.parts or [value]):
            self.write(pointer.x + 4 * n, part.x)

    def call(self, asm, args, attrs=()):
        text = asm.asm
        if self.change:
            text = text.replace(*self.change)
            self.changed |= text != asm.asm
        constraints = [c for c in asm.constraint.split(",") if c and c[0] != "~"]
        outs = sum(c[0] == "=" for c in constraints)
        self.orders = "~{memory}" in asm.constraint and asm.side_effect
        self.meets = "convergent" in attrs
        self.registers = {}
        for n, (constraint, arg) in enumerate(zip(constraints[outs:], args, strict=True)):
            place = int(constraint) if constraint.isdigit() else outs + n
            x = arg.x
            self.registers[f"${place}"] = bits(x) if x.dtype.kind == "f" else x
        self.run(text)
        made = [Value(None, self.registers.get(f"${n}")) for n in range(outs)]
        single = outs == 1 and not isinstance(asm.function_type.return_type, ir.LiteralStructType)
        return made[0] if single else Value(None, None, made)

    # --- memory: words of 32 bits, of the lanes where ``where`` --------------------------------

    def read(self, at, size=4):
        found = self.memory[np.asarray(at)[:, None] + np.arange(size)]
        return np.ascontiguousarray(found).view(f"<u{size}")[:, 0].astype(np.int64)

    def write(self, at, words, where=None):
        words = bits(words) if words.dtype.kind == "f" else words
        raw = np.ascontiguousarray(words.astype(np.uint32)).view(np.uint8).reshape(-1, 4)
        where = np.ones(self.lanes, bool) if where is None else where
        self.memory[(np.asarray(at)[:, None] + np.arange(4))[where]] = raw[where]

    # --- PTX --------------------------------------------------------------------------------

    def run(self, text):
        text = re.sub(r"^\{(.*)\}$", r"\1", text.strip())
        lines = [line.strip() for line in text.split(";") if line.strip()]
        for line in lines:
            where = np.ones(self.lanes, bool)
            line = re.sub(r"^\w+: ", "", line)
            guard = re.match(r"@(!?)(\w+) ", line)
            if guard:
                where = self.registers[guard[2]] ^ (guard[1] == "!")
                line = line[guard.end() :]
            name, _, rest = line.partition(" ")
            first = name.split(".")[0]
            assert first in OF_REGISTERS or self.orders, f"{name} may be moved or left out"
            assert first not in OF_WARPS or self.meets, f"{name} may be parted from its warp"
            if name != ".reg":
                given = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
                self.step(name, given, where)

    def get(self, name):
        found = self.registers.get(name)
        number = name.lstrip("-")[0].isdigit()
        assert number or found is not None, f"{name} is read, nobody has written it"
        return self.value(int(name, 0)).x if found is None else found

    def put(self, name, value):
        self.registers[name] = value & 0xFFFFFFFF

    def address(self, text):
        name, _, offset = text.strip("[]").partition("+")
        return self.get(name) + int(offset or 0)

    def step(self, name, given, where):
        first, *rest = name.split(".")
        several = [re.findall(r"[^{}\s,]+", text) for text in given]
        if rest[-1:] == ["u16x2"]:
            a, b = ([self.get(x) >> shift & 0xFFFF for shift in (0, 16)] for x in given[1:])
            function = {"max": np.maximum, "min": np.minimum, "add": np.add}[first]
            low, high = (function(*pair) & 0xFFFF for pair in zip(a, b, strict=True))
            self.put(given[0], high << 16 | low)
        elif name == "prmt.b32":
            a, b, selector = map(self.get, given[1:])
            chosen = [selector >> 4 * n & 15 for n in range(4)]
            assert all((n < 8).all() for n in chosen)  # no byte of copies of a sign
            made = ((b << 32 | a) >> 8 * n & 0xFF for n in chosen)
            self.put(given[0], sum(byte << 8 * n for n, byte in enumerate(made)))
        elif first in ("ex2", "lg2", "max", "min"):
            function = {"ex2": np.exp2, "lg2": np.log2, "max": np.fmax, "min": np.fmin}[first]
            with np.errstate(all="ignore"):
                made = function(*(floats(self.get(x)) for x in given[1:]))
                tiny = first == "ex2" and "ftz" in rest
                made = np.where((made < 2.0**-126) & tiny, np.float32(0), made)
            self.put(given[0], bits(made))
        elif first == "setp":
            compared = {"ne": np.not_equal, "eq": np.equal, "gt": np.greater}[rest[0]]
            assert rest[1] in ("u32", "s32")
            self.registers[given[0]] = compared(self.get(given[1]), self.get(given[2]))
        elif name == "selp.b32":
            self.put(given[0], np.where(self.get(given[3]), self.get(given[1]), self.get(given[2])))
        elif name == "mov.b32" and len(several[0]) == 2:
            word = self.get(given[1])
            self.registers.update(zip(several[0], (word & 0xFFFF, word >> 16), strict=True))
        elif name == "mov.b32" and len(several[1]) == 2:
            low, high = map(self.get, several[1])
            self.put(given[0], high << 16 | low)
        elif name in ("mov.b32", "mov.f32"):
            text = given[1]
            x = self.value(int(text[2:], 16)).x if text[:2] == "0f" else self.get(text)
            self.put(given[0], x)
        elif name in ("shl.b32", "and.b32"):
            a, b = self.get(given[1]), self.get(given[2])
            self.put(given[0], a << b if first == "shl" else a & b)
        elif name == "sub.s32":
            self.put(given[0], self.get(given[1]) - self.get(given[2]))
        elif name == "cvt.f32.f16":
            self.put(given[0], bits(self.get(given[1]).astype(np.uint16).view(np.float16)))
        elif name in ("cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32"):
            # "For f16x2: d's upper half is of a, its lower half of b."
            high, low = (to_half(self.get(x), rest[1][:-2]) for x in given[1:])
            self.put(given[0], high << 16 | low)
        elif name == "cvt.rn.satfinite.e4m3x2.f32":
            # "For e4m3x2: d's upper 8 bits are of a, its lower 8 bits of b."
            high, low = (to_e4m3(self.get(x)) for x in given[1:])
            self.put(given[0], high << 8 | low)
        elif name == "cvt.rn.f16x2.e4m3x2":
            word = self.get(given[1])
            low, high = (to_half(bits(from_e4m3(word >> n & 0xFF)), "f16") for n in (0, 8))
            self.put(given[0], high << 16 | low)
        elif name in ("cvt.rn.relu.f16x2.f32", "cvt.rn.relu.bf16x2.f32"):
            # "Clamps negative results to 0; a NaN result is the canonical one."
            halves = (to_half(self.get(x), rest[2][:-2]) for x in given[1:])
            high, low = (np.where((h >= 0x8000) & (h != 0x7FFF), 0, h) for h in halves)
            self.put(given[0], high << 16 | low)
        elif name.startswith(("ld.global", "st.global", "st.shared")):
            at, parts = self.address(given[first == "ld"]), several[first == "st"]
            assert len(parts) == (int(rest[1][1:]) if rest[1][0] == "v" else 1)
            for n, part in enumerate(parts):
                if first == "st":
                    self.write(at + 4 * n, self.get(part), where)
                else:
                    found = np.where(where, self.read(at + 4 * n), self.get(part))
                    self.put(part, found)
        elif name.startswith("red.global.add") and rest[-1] == "f32":
            assert len(several[1]) == (int(rest[2][1:]) if rest[2][0] == "v" else 1)
            for n, part in enumerate(several[1]):
                for lane in np.flatnonzero(where):
                    place = self.memory[self.address(given[0])[lane] + 4 * n :][:4]
                    place.view(np.float32)[0] += floats(self.get(part))[lane]
        elif name in ("cp.async.ca.shared.global", "cp.async.cg.shared.global"):
            size = int(given[2])
            assert size in ((16,) if rest[1] == "cg" else (4, 8, 16))
            target, source, count = self.address(given[0]), self.address(given[1]), given[3]
            for lane, read in enumerate(self.get(count)):
                made = np.zeros(size, np.uint8)
                made[:read] = self.memory[source[lane] :][:read]
                self.memory[target[lane] :][:size] = made
        elif first == "ldmatrix":
            assert rest[:4] == ["sync", "aligned", "m8n8", "x4"] and len(several[0]) == 4
            at = self.address(given[1])
            lane = np.arange(32)
            for m, part in enumerate(several[0]):
                rows = [self.memory[a : a + 16].view(np.uint16) for a in at[8 * m : 8 * m + 8]]
                tile = np.array(rows).astype(np.int64)
                tile = tile.T if "trans" in rest else tile
                i, j = lane // 4, lane % 4 * 2
                self.put(part, tile[i, j] | tile[i, j + 1] << 16)
        elif first == "stmatrix":
            assert rest == ["sync", "aligned", "m8n8", "x4", "shared", "b16"]
            at = self.address(given[0])
            for m, part in enumerate(several[1]):
                words = self.get(part).reshape(8, 4)
                for row, a in enumerate(at[8 * m : 8 * m + 8]):
                    self.memory[a : a + 16].view(np.uint32)[:] = words[row]
        elif name == "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32":
            target, source, size = self.address(given[0]), self.address(given[1]), given[2]
            for lane, count in enumerate(self.get(size)):
                values = self.memory[source[lane] :][:count].view(np.float32)
                self.memory[target[lane] :][:count].view(np.float32)[:] += values
        elif first == "mma":
            self.mma(rest, several)
        else:
            raise NotImplementedError(name)

    def mma(self, rest, several):
        """Fragments by the manual's formulas, element by element."""
        assert rest[:5] == ["sync", "aligned", "m16n8k16", "row", "col"]
        assert rest[5] == rest[8] == "f32" and rest[6] == rest[7]
        A, B, C = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        g, t = np.arange(32) // 4, np.arange(32) % 4

        def half(names, i):
            return from_half(self.get(names[i // 2]) >> 16 * (i % 2) & 0xFFFF, rest[6])

        for i in range(8):
            row = g + 8 * (i in (2, 3, 6, 7))
            A[row, t * 2 + (i & 1) + 8 * (i >= 4)] = half(several[1], i)
        for i in range(4):
            B[t * 2 + (i & 1) + 8 * (i >= 2), g] = half(several[2], i)
        for i in range(4):
            C[g + 8 * (i >= 2), t * 2 + (i & 1)] = floats(self.get(several[3][i]))
        D = (A @ B + C).astype(np.float32)
        for i in range(4):
            self.put(several[0][i], bits(D[g + 8 * (i >= 2), t * 2 + (i & 1)]))


def bits(x):
    return np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.int64)


def floats(x):
    return np.ascontiguousarray(x).astype(np.uint32).view(np.float32)


def to_half(x, kind):
    with np.errstate(over="ignore"):
        half = floats(x).astype(np.float16).view(np.uint16).astype(np.int64)
    half = half if kind == "f16" else x + 0x7FFF + (x >> 16 & 1) >> 16
    return np.where(np.isnan(floats(x)), 0x7FFF, half)


def to_e4m3(x):
    """Bits of e4m3, by another library; what is too large is the largest number."""
    near = np.clip(floats(x), -448.0, 448.0).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(floats(x)), 0x7F, near).astype(np.int64)


def from_e4m3(x):
    return x.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def from_half(x, kind):
    return x.astype(np.uint16).view(np.float16) if kind == "f16" else floats(x << 16)
