"""A warpgroup's products, `wgmma`: descriptors, swizzles and fragments decoded by the words of the
PTX manual, element by element, against the emulation of the same call.
"""

import re

import numpy as np
import pytest
import test_ptx
import test_ptx_statements
from llvmlite import ir
from mutants import modules_of
from numba.core import types
from ptx_machine import F32, I32, Machine, bits, floats, from_e4m3, from_half
from test_mbarriers import launch
from test_warpgroup import make_product, random

from fa_numba import emulator
from fa_numba.intrinsics import warpgroup

ROW = 4  # bytes of a register
C_AT, A_AT, LOCAL = 1 << 18, 1 << 19, 1024  # of memory; bytes of a thread's registers
LANE = np.arange(128)
WARP, G, T = LANE // 32, LANE % 32 // 4, LANE % 4


def column(code, first, size):
    return int(code) >> first & (1 << size) - 1


class Warpgroup(Machine):
    """128 lanes, and products that are done when they begin but have to be fenced and committed."""

    def __init__(self, change=None):
        super().__init__(128, change, 1 << 20)
        self.fenced, self.begun = False, 0

    def step(self, name, given, where):
        if name == "add.s64":
            self.registers[given[0]] = self.get(given[1]) + int(given[2])
        elif name == "wgmma.fence.sync.aligned":
            self.fenced = True
        elif name == "wgmma.commit_group.sync.aligned":
            assert self.begun, "a group without a product"
            self.begun = 0
        elif name == "wgmma.wait_group.sync.aligned":
            self.does.append(("wait_products", int(given[0])))
        elif name.startswith("wgmma.mma_async"):
            assert self.fenced, "registers that no fence has ordered"
            self.begun += 1
            self.product(name, given)
        else:
            super().step(name, given, where)

    def operand(self, descriptor, rows, across, kind):
        """(rows, 16), or 32 e4m3: "Matrix descriptor" and "Strides" of "Asynchronous warpgroup
        level matrix shared memory layout"; a row of the layout has ``chunks`` of 16 bytes.
        """
        (code,) = set(self.get(descriptor).tolist())
        start, leading, stride = (16 * column(code, at, 14) for at in (0, 16, 32))
        assert column(code, 49, 3) == 0, "a pattern that begins elsewhere than its address says"
        swizzle = column(code, 62, 2)
        assert swizzle, "no swizzle: a layout that no kernel has"
        chunks = 16 >> swizzle
        row, k = np.arange(rows)[:, None], np.arange(16)
        if across:
            run = 8 * chunks
            at = row % run * 2 + row // run * leading + k % 8 * 16 * chunks + k // 8 * stride
        else:
            at = row % 8 * 16 * chunks + row // 8 * stride + k * 2
        at = at + start
        at ^= (at >> 7) % chunks << 4
        if kind == "e4m3":
            return from_e4m3(self.memory[np.stack([at, at + 1], -1)]).reshape(rows, 32)
        return from_half(self.memory[at] | self.memory[at + 1].astype(np.int64) << 8, kind)

    def product(self, name, given):
        n, terms, kind = re.fullmatch(
            r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\w+)\.\3", name
        ).groups()
        assert int(terms) == (32 if kind == "e4m3" else 16)
        n, several = int(n), [re.findall(r"[^{}\s,]+", text) for text in given]
        words = several[1] if len(several[1]) == 4 else None
        adds, scale_a, scale_b, *across = (int(x) for x in given[3:])
        if kind == "e4m3":  # no modes of transposition
            assert not across
            across = [0] * (1 if words else 2)
        assert adds in (0, 1) and len(several[0]) == n // 2
        B = self.operand(given[2], n, across.pop(), kind)
        if words and kind == "e4m3":
            A = np.empty((64, 32))
            for i in range(16):  # "Register Fragments": columns 4 t + i % 4, and 16 more from 8 on
                byte = self.get(words[i // 4]) >> 8 * (i % 4) & 0xFF
                at = 16 * WARP + G + 8 * (i // 4 % 2), 4 * T + i % 4 + 16 * (i // 8)
                A[at] = from_e4m3(byte.astype(np.uint8))
        elif words:
            A = np.empty((64, 16))
            for i in range(8):
                word = self.get(words[i // 2]) >> 16 * (i % 2) & 0xFFFF
                A[16 * WARP + G + 8 * (i in (2, 3, 6, 7)), 2 * T + i % 2 + 8 * (i > 3)] = from_half(
                    word, kind
                )
        else:
            A = self.operand(given[1], 64, across.pop(), kind)
        assert not across
        made = scale_a * scale_b * (A.astype(np.float64) @ B.astype(np.float64).T)
        for i, register in enumerate(several[0]):
            here = made[16 * WARP + G + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * T + i % 2]
            here = here + floats(self.get(register)) if adds else here
            self.put(register, bits(here))


# name: kind, A in registers
MULTIPLY = {
    f"multiply_{where}{kind}": (kind, bool(where))
    for kind in ("f16", "bf16", "e4m3")
    for where in ("", "registers_")
}
# n, steps, across, panel rows of A and B, adds
SETTINGS = [
    (8, 1, (0, 0), (64, 8), 0),
    (64, 4, (0, 0), (64, 64), 1),
    (96, 8, (0, 0), (72, 104), 0),
    (40, 2, (1, 0), (32, 40), 1),
    (136, 3, (0, 1), (64, 48), 0),
    (256, 5, (1, 1), (80, 88), 1),
]


def compare(name, setting, change=None, group=0):
    """Registers that the code of ``group`` gives, and those of the kernel on the emulator."""
    kind, of_registers = MULTIPLY[name]
    n, steps, across, rows, adds = setting
    if of_registers:
        across = (0, across[1])
    M, K, rng = n // 2, 16 * steps, np.random.default_rng(n)
    sizes = [
        -(-count // 64) * panel * 64
        for count, panel in zip(((64, K)[1 - across[0]], (n, K)[1 - across[1]]), rows, strict=True)
    ]
    sizes[0] = -(-sizes[0] // 512) * 512  # panels begin at multiples of 1024 bytes
    A, B = random(2 * sizes[0], kind=kind)[0], random(sizes[1], kind=kind, seed=1)[0]
    words = random(4 * steps, 256, 2, kind=kind, seed=2)[0].view(np.uint32)[..., 0]
    C = rng.standard_normal((M, 256)).astype(np.float32)
    if kind == "e4m3":
        C = np.rint(4 * C) / np.float32(4.0)

    machine = Warpgroup(change)
    raw = np.concatenate([A, B]).view(np.uint8)
    machine.memory[: raw.size] = raw
    mine = LANE + 128 * group
    for at, values in ((C_AT, C), (A_AT, words)):
        for e, row in enumerate(values):
            machine.write(at + LOCAL * LANE + ROW * e, row[mine])
    halves = types.Array(types.uint16, 1, "C")

    def registers(at, ty):
        return machine.array(at + LOCAL * LANE, ty, (ROW,))

    sA, sB = (machine.array(at, ir.IntType(16), (2,)) for at in (0, 2 * A.size))
    literal = types.literal
    right = [(halves, sB), (types.int32, machine.value(0))]
    right += [(literal(x), None) for x in (rows[1], across[1], steps, adds)]
    given = [(types.Array(types.float32, 1, "C"), registers(C_AT, F32)), (literal(n), None)]
    if of_registers:
        given += [(types.Array(types.uint32, 1, "C"), registers(A_AT, I32)), (literal(0), None)]
    else:
        first = machine.value(sizes[0] * group)
        given += [(halves, sA), (types.int32, first), (literal(rows[0]), None)]
        given += [(literal(across[0]), None)]
    kinds, values = zip(*given, *right, strict=True)
    signature, code = getattr(warpgroup, name)._defn(None, *kinds)
    code(machine, machine, signature, values)
    assert machine.begun == 0, "products that no group has"
    assert not change or machine.changed, "the fault is in no text"

    kernel = make_product(n, steps, kind, across, rows, adds, of_registers)
    expected = C.copy()
    launch(kernel, 256, A, B, words, expected)
    found = np.array([floats(machine.read(C_AT + LOCAL * LANE + ROW * e)) for e in range(M)])
    np.testing.assert_allclose(found, expected[:, mine], rtol=0, atol=1e-4)


CALLS = [
    (name, setting)
    for name, (kind, _) in MULTIPLY.items()
    for setting in SETTINGS
    if kind != "e4m3" or not any(setting[2])
]


@pytest.mark.parametrize("name, setting", CALLS, ids=str)
def test_a_product_is_that_of_its_emulation(name, setting):
    compare(name, setting, group=setting[0] % 16 // 8)


ALL = SETTINGS[-1]
TEXTS = [
    ("multiply_f16", SETTINGS[1], "1, 1, 0, 0;", "-1, 1, 0, 0;"),
    ("multiply_f16", SETTINGS[1], "1, 1, 0, 0;", "1, -1, 0, 0;"),
    ("multiply_f16", SETTINGS[1], "b, 1,", "b, 0,"),
    ("multiply_f16", SETTINGS[0], "b, 0,", "b, 1,"),
    ("multiply_f16", SETTINGS[3], "1, 0;", "0, 1;"),
    ("multiply_f16", ALL, "{$0, $1", "{$1, $0"),
    ("multiply_f16", ALL, "$1, $2, $3", "$2, $1, $3"),
    ("multiply_f16", ALL, "f16.f16", "bf16.bf16"),
    ("multiply_bf16", ALL, "bf16.bf16", "f16.f16"),
    ("multiply_f16", ALL, "add.s64 a", "add.s64 b"),
    ("multiply_f16", ALL, "wgmma.fence.sync.aligned;", ""),
    ("multiply_f16", ALL, "wgmma.commit_group.sync.aligned;", ""),
    ("multiply_registers_f16", SETTINGS[0], "{$4, $5", "{$5, $4"),
    ("multiply_e4m3", SETTINGS[1], "k32", "k16"),
    ("multiply_e4m3", SETTINGS[1], "add.s64 a", "add.s64 b"),
    ("multiply_registers_e4m3", SETTINGS[0], "{$4, $5", "{$5, $4"),
    ("multiply_registers_bf16", SETTINGS[0], "{$4, $5, $6", "{$4, $6, $5"),
]


def assert_noticed(*args):
    with pytest.raises(AssertionError) as caught:
        compare(*args)
    assert "the fault is in no text" not in str(caught.value)


@pytest.mark.parametrize("name, setting, old, new", TEXTS)
def test_another_text_is_noticed(name, setting, old, new):
    assert_noticed(name, setting, (old, new))


def places_in_order(n):
    return list(range(n // 2))


DOWN = ("panels of 32", "swizzle of 64 bytes")  # faults of operands that lie along the sum
CODE = {
    "swizzle of 64 bytes": ("_SWIZZLE_128", 2 << 62),
    "no swizzle": ("_SWIZZLE_128", 0),
    "groups of four rows": ("_GROUP_BYTES", 512),
    "steps of eight": ("STEP", 8),
    "panels of 32": ("PANEL", 32),
    "rows of 64 bytes": ("ROW_BYTES", 64),
    "registers in order": ("_places", places_in_order),
    "no panels": ("_descriptor", lambda *args, f=warpgroup._descriptor: f(*args[:2], 16)),
    "an address in bytes": (
        "_descriptor",
        lambda builder, at, panel, f=warpgroup._descriptor: f(
            builder, builder.mul(at, I32(16)), panel
        ),
    ),
    "operands exchanged": (
        "_step",
        lambda k, rows, across, f=warpgroup._step: f(k, rows, 1 - across),
    ),
}


@pytest.mark.parametrize("fault", CODE)
def test_another_descriptor_is_noticed(fault, monkeypatch):
    monkeypatch.setattr(warpgroup, *CODE[fault])
    assert_noticed("multiply_f16", SETTINGS[2] if fault in DOWN else ALL)


# --- waiting ----------------------------------------------------------------------------------


class Waits:
    def __init__(self):
        self.does = []

    def wait_products(self, rC, count, pending):
        self.does.append(("wait_products", pending))


def compare_waits(change, monkeypatch, left_out=0):
    machine, calls, count = Warpgroup(change), Waits(), 24
    monkeypatch.setattr(emulator, "current", lambda: calls)
    rC = machine.array(C_AT + LOCAL * LANE, F32, (ROW,))
    floating = types.Array(types.float32, 1, "C")
    kinds = (floating, types.literal(count - left_out), types.literal(1))
    signature, code = warpgroup.wait_products._defn(None, *kinds)
    code(machine, machine, signature, (rC, None, None))
    warpgroup.wait_products.emulation(None, count, 1)
    assert machine.does == calls.does
    assert set(machine.registers) == {f"${e}" for e in range(count)}, "not all go through the wait"


def test_a_wait_for_products_is_that_of_its_emulation(monkeypatch):
    compare_waits(None, monkeypatch)


@pytest.mark.parametrize(
    "change, left_out", [(("1;", "0;"), 0), (("wait", "commit"), 0), (None, 1)]
)
def test_another_wait_is_noticed(change, left_out, monkeypatch):
    with pytest.raises(AssertionError):
        compare_waits(change, monkeypatch, left_out)


# --- all of them ------------------------------------------------------------------------------


def test_no_intrinsic_is_left_out():
    every = {
        name
        for module in modules_of("fa_numba.intrinsics")
        for name, value in vars(__import__(module, fromlist=["_"])).items()
        if hasattr(value, "emulation")
    }
    held = [*test_ptx.CASES, *test_ptx.TILES, "lies_in_pairs", *test_ptx_statements.CASES]
    assert every == {*held, *MULTIPLY, "wait_products"}
