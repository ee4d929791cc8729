"""Measures bandwidth and latency of each memory level, and draws rooflines with our kernels.

The memory levels are DRAM, L2 and shared memory, as in the FlashAttention paper's Fig. 1 left.
Kernels that only read give the bandwidths. The bandwidth of global memory is measured over the size
of the array that a kernel reads repeatedly. The latencies are measured by pointer chasing, in which
each read begins when the read before it has ended. Matrix products by torch give the peak speed.
The attention kernels are the kernels on CUDA cores in fp32, and on mma in fp16. The FLOPs, the
measured bytes and the time of a kernel give the position of the kernel below the roofs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fa_numba import device, io_model
from fa_numba.problem import Problem

from .lab.measure import bandwidth, latency, peers, variants
from .lab.measure.series import LABELS, columns, query_splits
from .lab.measure.timing import SECONDS, Timing, attempt, number
from .lab.measure.workloads import fa2_setting
from .lab.record import Bench, Options, Row, published_numbers, select, values
from .lab.show import style, tables

NAME = "memory_hierarchy"
NEEDS = ("GPU",)
TAKES = ()
PROTOCOL = (
    f"bandwidths: reads of {bandwidth.CHUNK} bytes, {bandwidth.BYTES // 2**30} GiB a run, of which "
    "the footprint is what is read again and again; L2 is not flushed; matrix products: torch, "
    f"{bandwidth.MATMUL_SIZE} cubed, fp32 without TF32; their rows have the sizes of the run's "
    "first attention call; latencies: chains of elements that are "
    f"{latency.LINE} bytes apart in random order, {latency.STEPS} dependent reads by one warp, as "
    "the difference of two runs; footprints larger than L2 are read with L2 flushed before each "
    "run; the time of a read includes the time to compute its address"
)

SEQLEN, QUICK_SEQLEN, HEAD_DIM = 2048, 512, 64
UNITS = {"simt": "float32", "mma": "float16"}
DTYPE_NAMES = {"float32": "fp32, CUDA cores", "float16": "fp16, tensor cores (mma)"}
MIB = 2**20
FOOTPRINTS = tuple(n * MIB for n in (8, 16, 24, 32, 40, 48, 56, 64, 80, 128, 256, 1024, 4096))
QUICK_FOOTPRINTS = (16 * MIB, 1024 * MIB)
REPEATS, QUICK_REPEATS = 10, 3
GLOBAL, SHARED, MATMUL = "read-global", "read-shared", "matmul"
CHASE_GLOBAL, CHASE_SHARED = "chase-global", "chase-shared"
KIB = 2**10
# Footprints of pointer chasing, in KiB.
CHASED = (16, 32, 64, 128, 192, 256, 512, *(1024 * n for n in (1, 2, 4, 8, 16, 32, 48, 64, 96)))
CHASED += (128 * 1024, 256 * 1024, 1024 * 1024)
QUICK_CHASED = (16, 4 * 1024, 256 * 1024)
DRAM_KIB = 128 * 1024  # a footprint of at least twice the L2 of today's GPUs
# What an article says: "~ns" for SRAM and "~100 ns" for HBM.
SAID_NS = {"shared": 1.0, "DRAM": 100.0}


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Yield bandwidths, latencies, speeds of matrix products, and numbers of attention kernels.

    The numbers of an attention kernel are its time and its bytes.
    """
    N = QUICK_SEQLEN if options.quick else SEQLEN
    problems = [fa2_setting(N, HEAD_DIM, dtype=dtype) for dtype in UNITS.values()]
    yield from _ceilings(problems[0], options, bench)
    multiprocessors = bench.describe["multiprocessors"]
    for passes in ("fwd", "bwd"):
        work = [(p, configurations(p, passes, multiprocessors)) for p in problems]
        yield from variants.measure(NAME, work, bench, {}, seconds=SECONDS)


def configurations(problem: Problem, passes: str, multiprocessors: int) -> list[variants.Variant]:
    """Return the calls of a pass: standard attention, FA-1, FA-1 with query splits, and FA-2.

    The call with query splits is left out in the backward pass, and if one thread block per head is
    best.
    """
    unit = next(unit for unit, dtype in UNITS.items() if dtype == problem.dtype)
    names = [f"{algorithm}-{unit}" for algorithm in ("standard", "fa1", "fa2")]
    found = [variants.Variant(name, passes=passes) for name in names]
    splits = query_splits(problem, multiprocessors, names[1])
    if passes == "fwd" and splits > 1:
        found.insert(2, variants.splits_of(names[1], splits))
    return found


def _ceilings(problem: Problem, options: Options, bench: Bench) -> Iterator[Row]:
    """Yield bandwidths, latencies and sizes of the memories, and the speeds of matrix products.

    The columns with sizes contain the sizes of `problem`.
    """
    footprints = QUICK_FOOTPRINTS if options.quick else FOOTPRINTS
    repeats = QUICK_REPEATS if options.quick else REPEATS
    about = dict(bench.describe or {})

    def row(series: str, speed: Timing | None, why: str, place: str = "", **fields: Any) -> Row:
        note = "; ".join(part for part in (place, why) if part)
        common = columns(NAME, series, problem, bench.machine, note=note, **fields)
        return Row(**number(speed), **common)

    memory = {"metric": "bandwidth", "unit": "TB/s"}
    X = bandwidth.ones(max(footprints))
    for footprint in bench.each(footprints, "reading global memory"):
        speed, why = attempt(bandwidth.measure_global, X, footprint, repeats)
        yield row(GLOBAL, speed, why, f"{footprint // MIB} MiB", **memory)
    del X
    speed, why = attempt(bandwidth.measure_shared, about["multiprocessors"], repeats)
    yield row(SHARED, speed, why, **memory)
    waiting = {"metric": "latency", "unit": "ns"}
    for size in bench.each(QUICK_CHASED if options.quick else CHASED, "pointer chasing"):
        bytes_of_l2 = about["l2_bytes"]
        took, why = attempt(latency.measure_global, KIB * size, repeats, bytes_of_l2)
        yield row(CHASE_GLOBAL, took, why, f"{size} KiB", **waiting)
    took, why = attempt(latency.measure_shared, repeats)
    yield row(CHASE_SHARED, took, why, **waiting)
    if peers.available():
        for dtype in bench.each(list(UNITS.values()), "matrix products"):
            speed, why = attempt(bandwidth.measure_matmul, dtype, repeats)
            yield row(MATMUL, speed, why, dtype=dtype, metric="speed", unit="TFLOP/s")
        peers.release()
    else:
        bench.say("  no torch with CUDA here: matrix products are not measured")
    for series, value in (
        (SHARED, about["shared_bytes"] * about["multiprocessors"]),
        ("l2", about["l2_bytes"]),
        (GLOBAL, memory_bytes()),
    ):
        common = columns(NAME, series, problem, bench.machine)
        yield Row(metric="capacity", unit="bytes", value=value, **common)


def memory_bytes() -> int:
    """Return the size of the GPU's memory in bytes."""
    return int(device.cuda.current_context().get_memory_info()[1])


def footprint(row: Row) -> int:
    """Return the size in bytes of the array that a row's kernel reads repeatedly."""
    return int(row.place.removesuffix(" MiB")) * MIB


def curve(rows: Sequence[Row]) -> dict[int, Row]:
    """Return the rows with the bandwidth of global memory, as {bytes of the array: row}."""
    found = select(rows, series=GLOBAL, metric="bandwidth")
    return {footprint(row): row for row in sorted(found, key=footprint)}


def capacities(rows: Sequence[Row]) -> dict[str, float]:
    """Return the size in bytes of "shared" (of all multiprocessors together), "L2" and "DRAM"."""
    names = {SHARED: "shared", "l2": "L2", GLOBAL: "DRAM"}
    return {names[s]: size for s, size in values(rows, "series", metric="capacity").items()}


def bandwidths(rows: Sequence[Row]) -> dict[str, float]:
    """Return the measured bandwidths as {memory: TB/s}; memory is "shared", "L2" or "DRAM".

    The bandwidth of L2 is the largest bandwidth of arrays up to half the size of L2. The bandwidth
    of DRAM is the bandwidth of the largest array, which must have at least twice the size of L2.
    """
    found = values(rows, "series", metric="bandwidth")
    result = {"shared": found[SHARED]} if SHARED in found else {}
    over, l2 = curve(rows), capacities(rows).get("L2")
    if l2:
        inside = [row.number for size, row in over.items() if 2 * size <= l2]
        beyond = [row.number for size, row in over.items() if size >= 2 * l2]
        result |= {"L2": max(inside)} if inside else {}
        result |= {"DRAM": beyond[-1]} if beyond else {}
    return result


def chased(rows: Sequence[Row]) -> dict[int, float]:
    """Return the latencies of reads of global memory as {bytes of the array: ns}."""
    found = [row for row in select(rows, series=CHASE_GLOBAL) if not row.failed]
    sizes = {KIB * int(row.place.removesuffix(" KiB")): row.number for row in found}
    return dict(sorted(sizes.items()))


def latencies(rows: Sequence[Row]) -> dict[str, tuple[float, int]]:
    """Return the latency of each memory, as {memory: (ns, size of the array in bytes)}.

    | memory | array |
    |---|---|
    | "shared" | an array in shared memory |
    | "L1" | the smallest array in global memory |
    | "L2" | the largest array of at most a quarter of L2 |
    | "DRAM" | the array of DRAM_KIB, or the smallest larger one that is at least twice L2 |
    """
    found: dict[str, tuple[float, int]] = {}
    for row in select(rows, series=CHASE_SHARED):
        if not row.failed:
            found["shared"] = row.number, latency.SHARED_BYTES
    over, l2 = chased(rows), capacities(rows).get("L2")
    if not over or not l2:
        return found
    sizes = {
        "L1": [size for size in over if size <= 32 * KIB],
        "L2": [size for size in reversed(over) if MIB <= size <= l2 / 4],
        "DRAM": [size for size in over if size >= max(2 * l2, KIB * DRAM_KIB)],
    }
    return found | {name: (over[of[0]], of[0]) for name, of in sizes.items() if of}


def products(rows: Sequence[Row]) -> dict[str, float]:
    """Return the speed of torch's matrix products as {dtype: TFLOP/s}."""
    return values(rows, "dtype", series=MATMUL, metric="speed")


Place = tuple[str, str, str]  # series, pass, dtype


def points(rows: Sequence[Row]) -> dict[Place, dict[str, float]]:
    """Return the speed and the FLOPs per byte of each call, by (series, pass, dtype).

    | key | value |
    |---|---|
    | "speed" | TFLOP/s |
    | "L2", "DRAM" | FLOPs per measured byte |
    | "model" | FLOPs per byte that the kernel accesses |
    """
    names = {"l2": "L2", "dram": "DRAM", "model": "model"}
    found: dict[Place, dict[str, float]] = {}
    for problem, mine in variants.problems_of(rows).items():
        for row in mine:
            if row.failed or row.series not in LABELS:
                continue
            of = found.setdefault((row.series, row.pass_, row.dtype), {})
            if row.metric == "speed":
                of["speed"] = row.number
            elif row.metric == "traffic":
                of[names[row.source]] = io_model.flops(problem, row.pass_) / row.number
    return found


def paper() -> dict[tuple[str, str], float]:
    """Return the numbers of an A100 that FlashAttention's papers print.

    | key | number |
    |---|---|
    | (memory, "bandwidth"), such as ("SRAM", "bandwidth") | TB/s |
    | (memory, "capacity") | bytes |
    | (dtype, "peak"), such as ("float16", "peak") | TFLOP/s |
    """
    lines = published_numbers.lookup(paper="fa1", item="Fig. 1 left")
    lines += published_numbers.lookup(paper="fa2", item="Section 3.1")
    return {(line["method"], line["metric"]): float(line["value"]) for line in lines}


def draw(rows: Sequence[Row]) -> Any:
    """Draw the bandwidths, the latencies if there are any, and the rooflines.

    Return None without rows.
    """
    found, over = points(rows), curve(rows)
    if not found and not over:
        return None
    if chased(rows):
        figure, grid = style.new(2, 2, 8.6)
        _latency(grid[0, 1], rows)
        axes, rooflines = grid, grid[1]
    else:
        figure, axes = style.new(1, 3, 5.6, width_ratios=(0.8, 1, 1))
        rooflines = axes[0, 1:]
    _bandwidth(axes[0, 0], rows)
    for ax, dtype in zip(rooflines, UNITS.values(), strict=True):
        _roofline(ax, rows, {at: of for at, of in found.items() if at[2] == dtype}, dtype)
    style.legend(figure, list(style.handles(axes).values()), _message(found), 5, ABOUT)
    return figure


ABOUT = (
    "The title is about forward passes. Large marks: per byte of DRAM. Small marks: per byte of L2."
    "\n"
    "Horizontal roof: torch's matrix product. Sloping roofs: bandwidth times FLOP per byte."
)


def _message(found: Mapping[Place, Mapping[str, float]]) -> str:
    ratios = []
    for (series, pass_, dtype), of in found.items():
        two = found.get((series.replace("fa1", "fa2"), pass_, dtype), {})
        if series.startswith("fa1") and pass_ == "fwd" and "DRAM" in of and "DRAM" in two:
            ratios.append(two["DRAM"] / of["DRAM"])
    if not ratios:
        return "Bandwidths, and what bounds the kernels"
    times = tables.between(ratios)
    return f"Per byte of DRAM, FA-2 computes {times} times FA-1's FLOPs"


ROOFS = {"shared": "shared memory"}


def _bandwidth(ax: Any, rows: Sequence[Row]) -> None:
    over, sizes = curve(rows), capacities(rows)
    ax.set_title("bandwidth of reading")
    if not over:
        style.empty(ax, "not recorded yet")
        return
    points = {size / MIB: row.number for size, row in over.items()}
    style.line(ax, points, ls="-", marker="o", ms=4, color="#333333")
    beside: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9}
    if shared := bandwidths(rows).get("shared"):
        ax.axhline(shared, color="#333333", ls=":")
        place = {"xycoords": ax.get_yaxis_transform(), "ha": "right"}
        ax.annotate(f"shared memory: {shared:.3g} TB/s", (0.98, shared), (0, 3), **place, **beside)
    if "L2" in sizes:
        at, place = sizes["L2"] / MIB, {"xycoords": ax.get_xaxis_transform()}
        ax.axvline(at, color="#999999", lw=0.8)
        ax.annotate("size of L2", (at, 0.06), (3, 0), **place, **beside)
    style.log(ax.xaxis, 2)
    style.log(ax.yaxis)
    ax.set(xlabel="size of the array (MiB)", ylabel="bandwidth (TB/s)")


def _latency(ax: Any, rows: Sequence[Row]) -> None:
    over, sizes = chased(rows), capacities(rows)
    ax.set_title("latency of a read that waits for the read before")
    points = {size / KIB: ns for size, ns in over.items()}
    style.line(ax, points, ls="-", marker="o", ms=4, color="#333333")
    beside: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9}
    if "shared" in (found := latencies(rows)):
        ns, place = found["shared"][0], {"xycoords": ax.get_yaxis_transform(), "ha": "right"}
        ax.axhline(ns, color="#333333", ls=":")
        ax.annotate(f"shared memory: {ns:.3g} ns", (0.98, ns), (0, 3), **place, **beside)
    if "L2" in sizes:
        at, place = sizes["L2"] / KIB, {"xycoords": ax.get_xaxis_transform(), "ha": "right"}
        ax.axvline(at, color="#999999", lw=0.8)
        ax.annotate("size of L2", (at, 0.92), (-3, 0), **place, **beside)
    style.log(ax.xaxis, 2)
    style.log(ax.yaxis)
    ticks = [KIB * 16**n for n in range(8) if KIB * 16**n in over] or sorted(over)[:1]
    ax.set_xticks([size / KIB for size in ticks], [in_words(size) for size in ticks])
    ax.set(xlabel="size of the array", ylabel="latency (ns)")


def _roofline(
    ax: Any, rows: Sequence[Row], found: Mapping[Place, Mapping[str, float]], dtype: str
) -> None:
    speeds, peak = bandwidths(rows), products(rows).get(dtype)
    shown = {place: of for place, of in found.items() if {"speed", "DRAM", "L2"} <= of.keys()}
    ax.set_title(f"roofline, {DTYPE_NAMES[dtype]}")
    if not shown or not peak:
        style.empty(ax, "not recorded yet")
        return
    for (series, pass_, _), of in sorted(shown.items(), key=lambda x: (x[0][0], x[0][1] == "bwd")):
        name = f"{LABELS[series].split(' (')[0]}, {'backward' if pass_ == 'bwd' else 'forward'}"
        ends, color = {of["DRAM"]: of["speed"], of["L2"]: of["speed"]}, style.COLOURS[series]
        style.line(ax, ends, color=color, lw=0.9, zorder=1)
        look = {"ls": "", "mew": 0, "alpha": 1 if pass_ == "fwd" else 0.4}
        for level, size, label in (("DRAM", 8, name), ("L2", 4.5, None)):
            style.line(ax, {of[level]: of["speed"]}, series, ms=size, label=label, **look)
    every = [of[level] for of in shown.values() for level in ("DRAM", "L2")]
    low, high = min(every) / 2, max(every) * 3
    for level, ls in (("DRAM", "-"), ("L2", "--"), ("shared", ":")):
        if level in speeds:  # roof: min(bandwidth x FLOP per byte, peak)
            ridge = min(max(low, peak / speeds[level]), high)
            roof = {x: min(speeds[level] * x, peak) for x in (low, ridge, high)}
            label = f"roof of {ROOFS.get(level, level)}"
            style.line(ax, roof, color="#333333", ls=ls, lw=1.3, zorder=0.5, label=label)
    style.log(ax.xaxis)
    style.log(ax.yaxis)
    lowest = min(of["speed"] for of in shown.values())
    ax.set(xlim=(low, high), ylim=(lowest / 1.8, 1.5 * peak), ylabel="speed (TFLOP/s)")
    ax.set_xlabel("FLOP per byte")
    _names(ax, shown)


def _names(ax: Any, shown: Mapping[Place, Mapping[str, float]]) -> None:
    """Write the name of each kernel next to its mark in a roofline.

    The figure has two marks for each kernel. The name is next to the large mark, whose x is FLOPs
    per byte of DRAM. The names of standard attention are to the right of the marks. For any other
    series, the name is above the mark of the faster pass, and below the mark of the slower pass.
    """
    for (series, pass_, dtype), of in shown.items():
        other = shown.get((series, "fwd" if pass_ == "bwd" else "bwd", dtype), {})
        faster = of["speed"] >= other.get("speed", 0)
        name = f"{LABELS[series].split(' ')[0]}, {'backward' if pass_ == 'bwd' else 'forward'}"
        if series.startswith("standard"):  # both marks are close together
            shift, look = (8, 3 if faster else -3), {"ha": "left", "va": "center"}
        else:
            shift = (0, 6 if faster else -6)
            look = {"ha": "center", "va": "bottom" if faster else "top"}
        at = of["DRAM"], of["speed"]
        ax.annotate(name, at, shift, textcoords="offset points", fontsize=8.5, **look)


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of bandwidths and sizes of the memories, or None without bandwidths."""
    speeds, sizes, peaks, known = bandwidths(rows), capacities(rows), products(rows), paper()
    if not speeds:
        return None
    lines = []
    for level, printed in (("shared", "SRAM"), ("L2", ""), ("DRAM", "HBM")):
        theirs = known.get((printed, "bandwidth"))
        ridges = {dtype: peak / speeds[level] for dtype, peak in peaks.items() if level in speeds}
        lines.append(
            [
                {"shared": "shared memory", "DRAM": "DRAM (HBM)"}.get(level, level),
                tables.number(speeds, level, ".3g"),
                _size(sizes.get(level)),
                *(tables.number(ridges, dtype, ".0f") for dtype in UNITS.values()),
                tables.MISSING if theirs is None else f"{theirs:g}",
                _size(known.get((printed, "capacity"))),
                tables.MISSING if theirs is None else f"{known['float16', 'peak'] / theirs:.0f}",
            ]
        )
    header = ["memory", "bandwidth, TB/s", "size", "FLOP/byte at the fp32 roof"]
    header += ["FLOP/byte at the fp16 roof", "published A100, bandwidth, TB/s"]
    header += ["published A100, size", "published A100, FLOP/byte at the fp16 roof"]
    return tables.of(_said(speeds, sizes, peaks), header, lines)


def _said(speeds: dict[str, float], sizes: dict[str, float], peaks: dict[str, float]) -> str:
    parts = [
        f"In {dtype}, torch's matrix product reaches {peak:.0f} TFLOP/s."
        for dtype, peak in peaks.items()
    ]
    if {"shared", "DRAM"} <= speeds.keys() & sizes.keys():
        faster, smaller = speeds["shared"] / speeds["DRAM"], sizes["DRAM"] / sizes["shared"]
        by = f"{faster:.1f} times as fast as DRAM. DRAM is {smaller:.0f} times as large"
        parts.append(f"Shared memory is {by} as the shared memory of all multiprocessors together.")
    what = (
        "The column *bandwidth* contains the median bandwidth of a memory for reads of 16 bytes. "
        "A column *FLOP/byte at the roof* contains the speed of torch's matrix product / the "
        "bandwidth of a memory. A kernel with fewer FLOP per byte than *FLOP/byte at the roof* is "
        "limited by the bandwidth of the memory, not by the speed of computing."
    )
    return " ".join([what, *parts])


def _size(size: float | None) -> str:
    if size is None:
        return tables.MISSING
    return f"{size / 1e9:.0f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def in_words(size: int) -> str:
    """Return a number of bytes in KiB, MiB or GiB, such as "16 KiB"."""
    unit = max(0, min(2, (size.bit_length() - 11) // 10))
    return f"{size // (KIB << 10 * unit)} {('KiB', 'MiB', 'GiB')[unit]}"


def latency_table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the latencies of the memories, or None without latencies."""
    found, speeds = latencies(rows), bandwidths(rows)
    if not found:
        return None
    names = {"shared": "shared memory", "DRAM": "DRAM (HBM)"}
    lines = []
    for level in (name for name in ("shared", "L1", "L2", "DRAM") if name in found):
        ns, size = found[level]
        array = in_words(size)
        cells = [names.get(level, level), f"{ns:.3g}", array, tables.number(SAID_NS, level, "g")]
        over = f"{ns / found['shared'][0]:.1f}" if "shared" in found else tables.MISSING
        # TB/s x ns = 1000 bytes.
        flying = f"{speeds[level] * ns:.0f}" if level in speeds else tables.MISSING
        lines.append([*cells, over, flying])
    header = ["memory", "latency, ns", "array", "said by an article, ns", "latency / shared memory"]
    header += ["bandwidth x latency, kB"]
    caption = (
        "The table of latencies contains the median time of a read that must wait for the read "
        "before it. The time includes the time to compute the address of the read. The reads are "
        f"{latency.LINE} bytes apart, in random order, in an array of the size in the column "
        "*array*. L1 and shared memory belong to one multiprocessor, and are the same physical "
        "memory. The column *bandwidth x latency* says how many kB of reads must be under way at "
        "the same time in the complete GPU to reach the bandwidth of the memory."
    )
    return tables.of(caption, header, lines)


def roofline(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the measured forward kernels, with the limit of each kernel's speed."""
    found, speeds, peaks = points(rows), bandwidths(rows), products(rows)
    lines = []
    for (series, pass_, dtype), of in found.items():
        if pass_ != "fwd" or "speed" not in of:
            continue
        levels = [level for level in ("DRAM", "L2") if level in of and level in speeds]
        roofs: dict[str, float] = {level: speeds[level] * of[level] for level in levels}
        if dtype in peaks:
            roofs["matrix product"] = peaks[dtype]
        lowest = min(roofs, key=lambda name: roofs[name], default="")
        share = f"{of['speed'] / roofs[lowest]:.2f} of {lowest}" if lowest else tables.MISSING
        cells = [tables.number(of, name, ".0f") for name in ("model", "L2", "DRAM")]
        name = DTYPE_NAMES[dtype].split(",")[0]
        lines.append([LABELS[series], name, *cells, f"{of['speed']:.1f}", share])
    header = ["kernel", "dtype", "FLOP / byte accessed", "FLOP / byte of L2", "FLOP / byte of DRAM"]
    header += ["TFLOP/s", "speed / lowest roof"]
    caption = (
        f"The table of roofs is about forward kernels at N={SEQLEN}, d={HEAD_DIM} and 16k tokens. "
        "A roof is an upper limit of a kernel's speed. The roof of a memory is the bandwidth of "
        "the memory x the kernel's FLOP per byte. The speed of torch's matrix product is another "
        "roof, for all kernels. The last column of the table of roofs contains the kernel's speed "
        "/ the kernel's lowest roof, and names the lowest roof."
    )
    return tables.of(caption, header, lines)


TABLES = {"memory_hierarchy-latency": latency_table, "memory_hierarchy-roofline": roofline}
