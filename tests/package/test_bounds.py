"""What bounds a plan on a GPU: data sheets, occupancy, the rule for L2, against the recordings."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import fa_numba
from experiments.lab.measure.series import by_planes
from fa_numba import Tiles, bounds
from fa_numba import device as devices
from fa_numba.bounds import cache, occupancy
from fa_numba.device import assembling

DATA = Path(__file__).resolve().parents[2] / "figures" / "data"
H200 = bounds.DEVICES["H200"]
# Experiments whose recorded calls are as their rows say.
RECORDED = ("loop_order", "io_vs_seqlen", "speed", "speed_fp16", "speed_backward")


def recorded(source, metric):
    """(row, its plan on the recorded GPU, that GPU) for all rows of our kernels that have a value,
    but those by planes.
    """
    for path in (path for name in RECORDED for path in (DATA / name).glob("nvidia-*.csv")):
        gpu = bounds.DEVICES[path.stem.split("-")[1].upper()]
        with open(path) as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            wanted = (row["source"], row["metric"]) == (source, metric) and row["value"]
            ours = row["series"].startswith(("fa1-", "fa2-", "standard-"))
            ours = ours and not by_planes(row["series"])
            if wanted and row["pass"] != "fwd+bwd" and ours:
                yield row, planned(row, gpu), gpu


def planned(row, gpu):
    q, k = (
        tuple(int(row[n]) for n in ("batch", f"heads_{x}", f"seqlen_{x}", "head_dim")) for x in "qk"
    )
    algorithm, unit, *_ = row["series"].split("-")
    own = {"deterministic": True} if row["series"].endswith("deterministic") else {}
    splits = re.match(r"query_splits=(\d+)", row["note"])
    if splits:
        own["query_splits"] = int(splits[1])
    with gpu.planning():
        return fa_numba.plan(
            q,
            k,
            algorithm=algorithm,
            unit=unit,
            dtype=row["dtype"],
            causal=row["causal"] == "true",
            passes=row["pass"],
            tiles=Tiles(int(row["Br"]), int(row["Bc"])),
            **own,
        )


def small(algorithm="fa2", N=64, **options):
    return fa_numba.plan((1, 1, N, 16), (1, 1, N, 16), algorithm=algorithm, **options)


# Those of 99 KiB of shared memory a block.
CARDS = ["A10G", "L4", "RTX 3060", "RTX 3090", "RTX 4090", "RTX 5090"]
# Of all that is tried here the one call whose smallest tiles do not fit them.
NO_ROOM = ("fa1", "bwd", "float16", 256)

# --- data sheets -----------------------------------------------------------------------------


def test_the_data_sheets():
    assert list(bounds.DEVICES) == ["A100", "H100", "H200", "B200", *CARDS, "T4"]
    for device in bounds.DEVICES.values():
        assert device.block_shared_bytes <= device.shared_bytes < device.l2_bytes
        assert device.source.startswith("NVIDIA") and device.fp32 < device.fp16
        assert device.capability >= devices.MIN_COMPUTE_CAPABILITY
    assert H200.block_shared_bytes == devices.EMULATED_SHARED_BYTES


# FMA lanes of a multiprocessor by compute capability, and boost clocks in GHz as published.
LANES = {(7, 5): 64, (8, 0): 64}
BOOST = {
    **{"A100": 1.41, "H100": 1.98, "H200": 1.98, "B200": 1.965, "A10G": 1.71, "L4": 2.04},
    **{"RTX 3060": 1.777, "RTX 3090": 1.695, "RTX 4090": 2.52, "RTX 5090": 2.407, "T4": 1.59},
}


@pytest.mark.parametrize("name", bounds.DEVICES)
def test_the_fp32_peak_is_that_of_the_multiprocessors(name):
    """Two operations a lane and clock: a peak of a card's sibling with fewer units is none."""
    device = bounds.DEVICES[name]
    lanes = device.multiprocessors * LANES.get(device.capability, 128)
    assert device.fp32 == pytest.approx(2 * lanes * BOOST[name] * 1e9, rel=0.01)


def test_the_h200_is_the_recorded_one():
    """What the driver said of it."""
    about = json.loads((DATA / "loop_order" / "nvidia-h200.json").read_text())
    found = about.get("runs", [about])[0]["device"]
    assert found["name"] == H200.driver_name
    assert found["multiprocessors"] == H200.multiprocessors
    assert found["shared_bytes"] == H200.block_shared_bytes
    assert found["l2_bytes"] == H200.l2_bytes


@pytest.mark.parametrize("name", ["rtx 4090", "RTX4090", "nvidia geforce rtx 4090", "rtx-4090"])
def test_a_gpu_goes_by_its_name(name):
    assert bounds.named(name) is bounds.DEVICES["RTX 4090"]


def test_an_unknown_gpu_is_refused():
    with pytest.raises(
        ValueError,
        match=r"^the name of the GPU must be one of A100, .*, got 'V100'; did you mean 'H100'\?$",
    ):
        bounds.named("V100")
    said = "^the name of the GPU must be one of A100, H100, .*, got 0$"
    with pytest.raises(ValueError, match=said), bounds.as_gpu(0):
        pass


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("algorithm", ["standard", "fa1", "fa2"])
@pytest.mark.parametrize("passes", ["fwd", "bwd"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_plans_fit_the_gpu_they_are_made_for(dtype, algorithm, passes, d):
    shape = (1, 2, 1000, d)
    facts = {"algorithm": algorithm, "dtype": dtype, "passes": passes}
    before = fa_numba.plan(shape, shape, **facts).tiles
    for device in bounds.DEVICES.values():
        if device.capability < (8, 0) and dtype == "float16":
            continue
        with device.planning():
            if device.name in CARDS and (algorithm, passes, dtype, d) == NO_ROOM:
                with pytest.raises(
                    ValueError, match="tiles must fit in 101376 bytes of .*got 117760 bytes for"
                ):
                    fa_numba.plan(shape, shape, **facts)
                continue
            plan = fa_numba.plan(shape, shape, **facts)
            assert devices.shared_bytes_limit() == device.block_shared_bytes
            assert plan.request.capability == device.capability
        assert all(k.shared_bytes <= device.block_shared_bytes for k in plan.kernels)
        found = bounds.expected(plan, device)
        assert all(1 <= blocks.least <= blocks.most for blocks in found.occupancies)
        assert found.bound in ("compute", "L2", "DRAM", "latency")
    assert fa_numba.plan(shape, shape, **facts).tiles == before


def test_the_gpu_that_is_here(monkeypatch):
    found = dict(name="NVIDIA H200", multiprocessors=131, shared_bytes=1000, l2_bytes=5)
    limits = dict(shared_bytes=1, registers=2, threads=3, blocks=4)
    monkeypatch.setattr(devices, "on_gpu", lambda: True)
    monkeypatch.setattr(devices, "describe", lambda: found)
    monkeypatch.setattr(devices, "limits", lambda: limits)
    monkeypatch.setattr(devices, "compute_capability", lambda: (9, 0))
    device = bounds.here()
    assert (device.name, device.multiprocessors, device.l2_bytes) == ("H200", 131, 5)
    assert (device.shared_bytes, device.registers, device.threads, device.blocks) == (1, 2, 3, 4)
    assert (device.dram, device.fp16, device.present) == (H200.dram, H200.fp16, True)
    found["name"] = "Other"
    device = bounds.here()
    assert (device.name, device.dram, device.fp16, device.fp32) == ("Other", None, None, None)
    assert "no data sheet" in device.source
    enough = replace(device, shared_bytes=1 << 20, threads=2048, registers=65536, blocks=32)
    monkeypatch.undo()
    assert bounds.expected(small(), replace(enough, present=False)).bound == "unknown"


# --- occupancy -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "threads, shared, registers, blocks, limit",
    [
        (256, 0, 64, 4, "registers"),  # 2048 registers a warp, 8 warps a scheduler
        (128, 0, 255, 2, "registers"),
        (128, 0, 168, 3, "registers"),  # 5376 registers a warp, 3 warps a scheduler
        (1024, 0, 32, 2, "threads"),
        (32, 0, 16, 32, "blocks"),
        (128, 55296, 128, 4, "shared memory"),
        (256, 232448, 64, 1, "shared memory"),
    ],
)
def test_blocks_of_a_multiprocessor(threads, shared, registers, blocks, limit):
    kernel = SimpleNamespace(threads=threads, shared_bytes=shared, min_blocks=1)
    found = occupancy(H200, kernel, registers)
    assert (found.least, found.most, found.limit) == (blocks, blocks, limit)
    assert str(found) == str(blocks)


def test_registers_come_from_a_compile_alone(monkeypatch):
    (kernel,) = small().launched
    logs = []

    def assembled(kernel, capability):
        logs.append(capability)
        return "", "ptxas info    : Used 96 registers, used 1 barriers"

    monkeypatch.setattr(assembling, "assembled", assembled)
    assert assembling.registers_of(kernel, (8, 0)) is None and logs == []
    assert assembling.registers_of(kernel, (8, 0), compiling=True) == 96 and logs == [(8, 0)]
    found = bounds.expected(small(), H200, compiling=True)
    assert found.registers == (96,) and found.occupancies[0].limit != ""
    assert bounds.expected(small(), H200).registers == (None,)
    monkeypatch.setattr(assembling, "assembled", lambda *_: ("", "nothing"))
    with pytest.raises(
        RuntimeError, match="number of registers of kernel fa2_forward is unknown: .* 'nothing'$"
    ):
        assembling.registers_of(kernel, (8, 0), compiling=True)


@pytest.mark.parametrize(
    "here, stored, compiling, registers",
    [
        ((8, 0), True, False, 77),  # of the code on disk
        ((8, 0), False, False, None),
        ((8, 0), False, True, 77),
        ((9, 0), True, False, None),
        ((9, 0), True, True, 96),
        (None, True, False, None),
    ],
)
def test_registers_on_the_current_gpu_are_those_of_its_code(
    monkeypatch, here, stored, compiling, registers
):
    kernel = SimpleNamespace(
        compiled=lambda: SimpleNamespace(attributes=SimpleNamespace(num_regs=77))
    )
    monkeypatch.setattr(assembling.select, "on_gpu", lambda: here is not None)
    monkeypatch.setattr(assembling.select, "current_ordinal", lambda: 1)
    monkeypatch.setattr(assembling.select, "capability_of", lambda ordinal: here)
    kept = (b"", "") if stored else None
    monkeypatch.setattr(assembling.kernel_cache, "read", lambda *_: kept)
    monkeypatch.setattr(assembling, "assembled", lambda *_: ("", "Used 96 registers"))
    assert assembling.registers_of(kernel, (8, 0), compiling=compiling) == registers


@pytest.mark.gpu
def test_the_driver_counts_as_many_blocks():
    """With the registers of the compiled kernels, on the GPU that is here."""
    device, shape = bounds.here(), (1, 2, 512, 64)
    for algorithm, dtype, passes in (
        *(("fa1", "float16", "fwd"), ("fa2", "float16", "fwd"), ("fa2", "float32", "fwd")),
        *(("standard", "float16", "fwd"), ("fa2", "float16", "bwd")),
    ):
        plan = fa_numba.plan(shape, shape, algorithm=algorithm, dtype=dtype, passes=passes)
        found = bounds.expected(plan, device, compiling=True)
        for kernel, blocks, registers in zip(
            plan.launched, found.occupancies, found.registers, strict=True
        ):
            compiled = kernel.compiled()
            wanted = compiled.occupancy.max_active_blocks_per_multiprocessor(
                kernel.threads, kernel.shared_bytes
            )
            assert registers == compiled.attributes.num_regs
            assert blocks.least == blocks.most == wanted, kernel.name


@pytest.mark.gpu
def test_the_data_sheet_of_the_gpu_that_is_here():
    device = bounds.here()
    sheet = bounds.DEVICES.get(device.name)
    if sheet is None:
        pytest.skip(f"{device.name} has no data sheet")
    for name in ("capability", "multiprocessors", "block_shared_bytes", "shared_bytes"):
        assert getattr(device, name) == getattr(sheet, name), name
    for name in ("registers", "threads", "blocks", "l2_bytes"):
        assert getattr(device, name) == getattr(sheet, name), name


# --- what is expected ------------------------------------------------------------------------


def test_times_by_hand():
    """Each of the three times can be the longest; latency is compute on few multiprocessors."""
    plan = small(N=256, tiles=Tiles(64, 64))
    device = replace(H200, multiprocessors=4, l2=1e9, dram=1e9, fp32=1e9, l2_bytes=1 << 30)
    found = bounds.expected(plan, device)
    accessed, once = plan.accesses.bytes, 4 * 4 * 256 * 16 + 4 * 256  # Q K V O, L
    assert found.flops == plan.flops == 4 * 256 * 256 * 16
    assert (found.busy, found.dram.bytes, found.dram.served) == (1.0, once, True)
    assert found.compute == pytest.approx(plan.flops / 1e9)
    assert found.l2 == pytest.approx(accessed / 1e9)
    assert found.memory == pytest.approx(once / 1e9)
    assert (found.bound, found.floor) == ("compute", found.compute)
    for name, change, bound in (
        ("l2", {"l2": 1e7}, "L2"),
        ("memory", {"dram": 1e6}, "DRAM"),
        ("compute", {"multiprocessors": 16}, "latency"),
    ):
        other = bounds.expected(plan, replace(device, **change))
        assert (other.bound, other.floor) == (bound, getattr(other, name))
    unknown = bounds.expected(plan, replace(device, l2=None))
    assert unknown.l2 is None and unknown.bound == "compute"


@pytest.mark.parametrize(
    ("heads", "chunk", "in_step", "at_work"), [(64, 16, 16, 9), (16, 16, 16, 9), (8, 1, 16, 8)]
)
def test_where_heads_take_turns_their_chunks_go_over_the_rows(heads, chunk, in_step, at_work):
    """Of a causal backward pass on Hopper a chunk of each head's column tiles goes before the next:
    what is in step shares Q, dO, the sums of dQ, L and D.
    """
    shape = (1, heads, 8192, 128)
    with H200.planning():
        plan = fa_numba.plan(shape, shape, dtype="float16", passes="bwd", causal=True)
    assert plan.decided.spec.chunk_tiles == chunk
    once, row = 8192 * 128, 4 * 8192
    head = 2 * once * 2 + 4 * once + 2 * row  # Q and dO, A in float32, L and D
    found = cache.dram(plan, H200, 132)
    assert (found.again, found.served) == (at_work * head, False)
    again, accesses = {"Q", "dO", "A", "L", "D"}, plan.accesses
    shared = replace(
        accesses,
        loads={x: n // in_step for x, n in accesses.loads.items() if x in again},
        stores={x: n // in_step for x, n in accesses.stores.items() if x in again},
    )
    rest = heads * once * 2 * 6  # K, V and O, dK, dV and dQ
    assert found.bytes == pytest.approx(shared.bytes + rest, rel=0.01)


def is_near_half_of_l2(found, gpu):
    """Where the rule says that the truth lies between its two answers."""
    return 0.85 < found.again / (cache.KEPT * gpu.l2_bytes) < 1.3


def test_the_rule_for_l2_is_what_the_counters_read():
    """The measured DRAM bytes differ from the rule's by a factor of at most 1.2, and on wgmma 1.36.

    On wgmma, thread blocks compute row tiles of several heads. If the bytes that are read again
    fill about half of L2, the measured bytes lie between the rule's numbers with and without L2.
    """
    seen = set()
    for row, plan, gpu in recorded("dram", "traffic"):
        found = bounds.expected(plan, gpu).dram
        close = is_near_half_of_l2(found, gpu)
        far = 1.36 if "wgmma" in row["series"] else 1.2
        least = bounds.expected(plan, replace(gpu, l2_bytes=1 << 40)).dram.bytes
        most = plan.accesses.bytes if close else far * found.bytes
        assert (least if close else found.bytes) / far <= float(row["value"]) <= most, row
        seen.add((plan.algorithm, found.served, close))
    assert {("fa1", False, False), ("fa2", True, False), ("standard", False, False)} <= seen


def test_no_recorded_call_took_less():
    """No recorded time is below the bound of `bounds.expected`.

    If the bytes that are read again fill about half of L2, the bound with an unlimited L2 counts.
    """
    compared = 0
    for row, plan, gpu in recorded("measured", "time"):
        found = bounds.expected(plan, gpu)
        if is_near_half_of_l2(found.dram, gpu):
            found = bounds.expected(plan, replace(gpu, l2_bytes=1 << 40))
        assert float(row["value"]) >= 1e3 * found.floor, row
        compared += 1
    assert compared > 100
