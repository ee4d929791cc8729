"""PTX that waits, signals, fences or copies boxes: decoded into the emulation's call of the same
meaning, by the words of the PTX manual, and held against the call that the emulation makes.
"""

import pytest
from llvmlite import ir
from numba.core import types
from ptx_machine import I64, Machine

from fa_numba import emulator
from fa_numba.intrinsics import async_copy, barriers, bulk_copy, mbarrier, warpgroup

FENCED, SEEN = ("fenced",), ("fence_mbarriers",)
LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.tile.bulk_group"
ADD = "cp.reduce.async.bulk.tensor.{}d.global.shared::cta.add.tile.bulk_group"
TRY = "mbarrier.try_wait.parity.shared::cta.b64"
# instruction: what the emulation does, given the instruction's operands
MEANS = {
    "cp.async.commit_group": lambda: [("async_commit",)],
    "cp.async.wait_group": lambda n: [("async_wait", n)],
    "cp.async.bulk.commit_group": lambda: [("commit_boxes",)],
    "cp.async.bulk.wait_group.read": lambda n: [("wait_boxes", False, n)],
    "cp.async.bulk.wait_group": lambda n: [("wait_boxes", True, n)],
    "fence.proxy.async.shared::cta": lambda: [FENCED, SEEN],
    "fence.mbarrier_init.release.cluster": lambda: [SEEN],
    "bar.sync": lambda name, n: [("named_barrier", "sync_named", name, n, True)],
    "bar.arrive": lambda name, n: [("named_barrier", "arrive_named", name, n, False)],
    "mbarrier.init.shared::cta.b64": lambda bar, n: [("init_mbarrier", bar, n)],
    "mbarrier.arrive.shared::cta.b64": lambda _, bar, n=1: [("arrive_mbarrier", bar, 0, n)],
    "mbarrier.arrive.expect_tx.shared::cta.b64": lambda _, bar, size: [
        ("arrive_mbarrier", bar, size, 1)
    ],
    "setmaxnreg.inc.sync.aligned.u32": lambda n: [("set_registers", n, "take_registers")],
    "setmaxnreg.dec.sync.aligned.u32": lambda n: [("set_registers", n, "give_registers")],
}
for axes in (4, 5):
    MEANS[LOAD.format(axes)] = lambda to, box, bar: [("load_box", to, box, bar)]
    MEANS[STORE.format(axes)] = lambda box, source: [("store_box", box, source, False)]
    MEANS[ADD.format(axes)] = lambda box, source: [("store_box", box, source, True)]


class Decoder(Machine):
    def operand(self, text):
        """A number; of a tensor map and coordinates, both, the outermost coordinate first."""
        if "{" in text:
            where, _, coordinates = text.strip("[]").partition(", {")
            inwards = [self.operand(x.strip()) for x in coordinates.strip("}").split(",")]
            return (self.operand(where), *reversed(inwards))
        return text if text == "_" else int(self.address(text)[0])

    def step(self, name, given, where):
        if name == TRY:  # false while the phase lasts: here at the first try
            self.tries = getattr(self, "tries", 0) + 1
            self.registers[given[0]] = self.value(self.tries > 1).x
            self.waits = ("wait_mbarrier", *map(self.operand, given[1:]))
        elif name == "bra":
            self.again = where.any()
        elif name in MEANS:
            self.does += MEANS[name](*map(self.operand, given))
        else:
            super().step(name, given, where)

    def run(self, text):
        self.again = False
        super().run(text)
        if self.again:
            self.run(text)
        elif getattr(self, "waits", None):
            assert self.tries == 2, "goes on before the phase has ended, or never"
            self.does.append(self.waits)


def place(array, index):
    return array + 8 * index


class Calls:
    """What the emulation calls, in the terms of ``MEANS``: addresses of arrays of 8 bytes."""

    def __init__(self):
        self.does = []

    first_lane, of_lane = staticmethod(lambda: 0), staticmethod(lambda value, lane: value)

    def __getattr__(self, name):
        return lambda *args: self.does.append((name, *args))

    def wait_boxes(self, written):
        self.does.append(("wait_boxes", written, 0))

    def init_mbarrier(self, array, index, count):
        self.does.append(("init_mbarrier", place(array, index), count))

    def arrive_mbarrier(self, array, index, size=0):
        self.does.append(("arrive_mbarrier", place(array, index), size, 1))

    def wait_mbarrier(self, array, index, parity):
        self.does.append(("wait_mbarrier", place(array, index), parity))

    def load_box(self, to, index, src, at, array, bar):
        self.does.append(("load_box", place(to, index), (src, *at), place(array, bar)))

    def store_box(self, dst, at, src, index, adds=False):
        self.does.append(("store_box", (dst, *at), place(src, index), adds))


AT4, AT5 = (3, 5, 7, 11), (3, 5, 7, 11, 13)
A, M = "array", "map"
# name: module and operands; of "array" the address 1024, of a map its own
CASES = {
    "commit_async": (async_copy, ()),
    "wait_async": (async_copy, ()),
    "commit_boxes": (bulk_copy, ()),
    "wait_boxes_read": (bulk_copy, ()),
    "wait_boxes": (bulk_copy, ()),
    "fence_async_proxy": (bulk_copy, ()),
    "fence_mbarrier_init": (mbarrier, ()),
    "sync_named": (barriers, (3, 96)),
    "arrive_named": (barriers, (5, 64)),
    "init_mbarrier": (mbarrier, (A, 2, 128)),
    "arrive_mbarrier": (mbarrier, (A, 3)),
    "expect_bytes": (mbarrier, (A, 1, 4096)),
    "wait_mbarrier": (mbarrier, (A, 1, 1)),
    "load_box": (bulk_copy, (A, 4, M, *AT4, A, 2)),
    "load_box_5d": (bulk_copy, (A, 4, M, *AT5, A, 2)),
    "store_box": (bulk_copy, (M, *AT4, A, 6)),
    "store_box_5d": (bulk_copy, (M, *AT5, A, 6)),
    "add_box": (bulk_copy, (M, *AT4, A, 6)),
    "take_registers": (warpgroup, (240,)),
    "give_registers": (warpgroup, (24,)),
}


def compare(name, change, monkeypatch):
    module, given = CASES[name]
    machine, calls = Decoder(change=change), Calls()
    monkeypatch.setattr(emulator, "current", lambda: calls)
    monkeypatch.setattr(bulk_copy, "_map_address", lambda context, builder, ty, value: value)
    arrays = types.Array(types.uint64, 1, "C")
    kinds, values = [], []
    for x in given:
        if x == A:
            kinds.append(arrays)
            values.append(machine.array(1024, ir.IntType(64), (8,)))
        else:
            literal = module is warpgroup
            kinds.append(types.literal(x) if literal else types.int32)
            values.append(machine.value(9999, I64) if x == M else machine.value(x))
    intrinsic = getattr(module, name)
    signature, code = intrinsic._defn(None, *kinds)
    code(machine, machine, signature, values)
    intrinsic.emulation(*({A: 1024, M: 9999}.get(x, x) for x in given))
    assert not change or machine.changed, "the fault is in no text"
    assert machine.does == calls.does


@pytest.mark.parametrize("name", CASES)
def test_text_and_emulation_mean_the_same(name, monkeypatch):
    compare(name, None, monkeypatch)


FAULTS = [
    ("wait_async", "0;", "1;"),
    ("wait_boxes", "0;", "1;"),
    ("wait_boxes_read", ".read", ""),
    ("fence_async_proxy", "shared::cta", "global"),
    ("fence_mbarrier_init", "fence.mbarrier_init.release.cluster;", ""),
    ("sync_named", "$0, $1", "$1, $0"),
    ("sync_named", "sync", "arrive"),
    ("arrive_mbarrier", "[$0]", "[$0], 2"),
    ("expect_bytes", ".expect_tx", ""),
    ("wait_mbarrier", "@!p", "@p"),
    ("wait_mbarrier", "$1", "0"),
    ("load_box", "$2, $3, $4, $5", "$5, $4, $3, $2"),
    ("load_box_5d", "[$7]", "[$0]"),
    ("store_box", "$1, $2, $3, $4", "$4, $3, $2, $1"),
    ("add_box", ".add", ".min"),
    ("take_registers", "inc", "dec"),
]


@pytest.mark.parametrize("name, old, new", FAULTS)
def test_another_meaning_is_noticed(name, old, new, monkeypatch):
    with pytest.raises((AssertionError, NotImplementedError, TypeError)) as caught:
        compare(name, (old, new), monkeypatch)
    assert "the fault is in no text" not in str(caught.value)


ORDERED = [
    (name, lost) for name in ("load_box", "wait_mbarrier") for lost in ("memory", "side_effect")
]
ORDERED += [(name, "convergent") for name in ("sync_named", "give_registers")]
ORDERED += [(name, "memory") for name in ("sync_named", "arrive_named", "give_registers")]


@pytest.mark.parametrize("name, lost", ORDERED)
def test_an_instruction_that_may_move_is_noticed(name, lost, monkeypatch):
    module = CASES[name][0]
    ptx = module.ptx
    monkeypatch.setattr(module, "ptx", lambda *args, **rest: ptx(*args, **rest | {lost: False}))
    with pytest.raises(AssertionError, match="may be"):
        compare(name, None, monkeypatch)
