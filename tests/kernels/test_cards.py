"""What is chosen for each architecture compiles there within its limits and without spills."""

import pytest
from offline import CAPABILITY, compiled
from test_compile import plan_of, registers, spills_of

import fa_numba
from fa_numba import bounds, device
from fa_numba.device import kernel_cache
from fa_numba.kernels.simt.rows import make_row_sums
from fa_numba.options import Features

# architecture -> a GPU with its limits
CARDS = {
    "sm_75": "T4",
    "sm_86": "RTX 3090",
    "sm_89": "L4",
    "sm_100": "B200",
    "sm_103": "B200",
    "sm_120": "RTX 5090",
}
NO_ROOM = ("fa1", "bwd", "float16", 256)  # in 99 KiB
QUICK = [("sm_75", "fa2", "fwd", "float32", 64)]
ALL = [
    (arch, algorithm, passes, dtype, d)
    for arch in CARDS
    for algorithm in ("fa1", "fa2", *["standard"] * (arch == "sm_75"))
    for passes in ("fwd", "bwd")
    for dtype in ("float32", "float16", "bfloat16")
    if arch != "sm_75" or dtype == "float32"
    for d in ((32, 64, 96, 128, 160, 192, 256) if dtype != "bfloat16" else (64, 128))
]


@pytest.mark.parametrize(
    "arch, algorithm, passes, dtype, d",
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in ALL],
)
def test_a_default_plan_compiles_within_its_limits(arch, algorithm, passes, dtype, d):
    card, shape = bounds.named(CARDS[arch]), (2, 8, 4096, d)
    case, how = (algorithm, passes, dtype, d), {"passes": passes, "dtype": dtype}
    with device.planning_for(CAPABILITY[arch], card.block_shared_bytes, card.multiprocessors):
        if case == NO_ROOM and card.block_shared_bytes < 100 * 1024:
            with pytest.raises(ValueError, match="tiles must fit in .* bytes of shared memory"):
                fa_numba.plan(shape, shape, algorithm=algorithm, **how)
            return
        kernels = fa_numba.plan(shape, shape, algorithm=algorithm, **how).launched
    spilled = []
    for kernel in kernels:
        ptx, log = compiled(kernel, arch)
        target = "sm_90" if CAPABILITY[arch] > (9, 0) else arch
        assert f".target {target}\n" in ptx and ".f64" not in ptx
        assert arch != "sm_75" or "cp.async" not in ptx
        assert kernel.shared_bytes <= card.block_shared_bytes
        assert kernel.min_blocks * kernel.threads <= card.threads
        assert registers(log) * kernel.threads * kernel.min_blocks <= card.registers
        found = list(map(int, spills_of(log)))
        spilled += [found] if any(found) else []
    spills = arch in ("sm_86", "sm_89") and case == ("fa1", "bwd", "float32", 256)
    assert spilled == [[8, 8, 8]] * spills


EVERY = ("causal", "window", "softcap", "dropout", "bias", "alibi", "packed", "kv_lens")
EVERY += ("unaligned",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm, passes, option",
    [
        *((a, p, x) for a in ("fa1", "fa2", "standard") for p in ("fwd", "bwd") for x in EVERY),
        *(("fa1", passes, "splits") for passes in ("fwd", "bwd")),
        *(("fa2", "fwd", option) for option in ("kv_splits", "sparse")),
        *(("fa2", "bwd", option) for option in ("deterministic", "dbias")),
    ],
)
def test_every_option_compiles_without_cp_async(algorithm, passes, option):
    for kernel in plan_of("sm_75", 64, option, algorithm=algorithm, passes=passes).launched:
        ptx, log = compiled(kernel, "sm_75")
        assert "cp.async" not in ptx and ".local" not in ptx
        spills = "48" if (algorithm, passes, option) == ("fa1", "fwd", "window") else "0"
        assert spills_of(log) == [spills] * 3, (kernel.name, log)


@pytest.mark.parametrize("capability", [(10, 0), (12, 0)])
def test_what_runs_on_newer_gpus_is_their_code(capability, monkeypatch):
    """An ELF file whose flags name the architecture, with the kernel under its name."""
    monkeypatch.setenv(kernel_cache.VARIABLE, "")
    kernel = make_row_sums(64, 64, False, Features())
    cubin, name = kernel.built(capability)
    assert cubin[:4] == b"\x7fELF" and cubin[49] == 10 * capability[0] + capability[1]
    assert "row_sums" in name and name.encode() + b"\0" in cubin
