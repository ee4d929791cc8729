"""For each of the claims C1 to C37, our quantity and what the claim says about it.

The texts of the claims are in questions.csv. Some claims contradict each other.
"""

import math
from functools import partial
from operator import attrgetter
from typing import Any

from experiments import claims as measured
from experiments import decode, memory_hierarchy, numerics, runtime_memory
from experiments.lab.measure import peers
from experiments.lab.record import Row
from fa_numba import io_model
from fa_numba.problem import Problem

from .evidence import Quantity, rows
from .paper_figures import AT, DRAM, FASTER_FA1, MEMORIES, MODEL, SOFTMAXES, TIMES

from .paper_figures import divisor, exponents, memory, softmax_over_online, speed, training  # isort: skip
from .questions import Pair, Pairs, declared, table
from .rule import Bounds

N, D, TILE = measured.COUNTED_SEQLEN, 64, measured.COUNTED_TILE
TILES = N // TILE
# With a causal mask, torch's unfused attention hides scores in two ways: in a pass over S, or in
# the softmax.
UNFUSED = (peers.UNFUSED, peers.UNFUSED_MASKED)
FLASH = {"FA-1": "fa1-simt", "FA-2": "fa2-simt"}
# Maps each loop order to its series in fp16. FA-1 has two grids. The faster one is used.
IN_FP16: dict[str, str | tuple[str, ...]] = {"FA-1": FASTER_FA1, "FA-2": "fa2-mma"}
MORE, LESS, TWICE = Bounds(1, math.inf), Bounds(0, 1), Bounds(2, math.inf)


def counted(series: str, note: str | tuple[str, ...], metric: Any = ("loads", "stores"),
            causal: bool = False, per: float = 1, **more: Any) -> Quantity:  # fmt: skip
    """Return how many elements of an array a series loads or stores, counted on the emulator.

    `note` names the array or several arrays. `metric` is "loads", "stores" or both. The number is
    divided by `per`, for example by the number of elements of a tile.
    """
    return rows(measured.NAME, series=series, source="counted", metric=metric, note=note,
                causal=causal, head_dim=D, value=lambda row: row.number / per, **more)  # fmt: skip


def round_trips(series: str) -> Quantity:
    """Return the number of elements of S, P and O that are stored, in units of complete arrays.

    An array of which every element is stored once counts as 1. The numbers of the three arrays are
    added up.
    """
    return rows(measured.NAME, series=series, source="counted", metric="stores", causal=False,
                head_dim=D, note=("S", "P", "O"),
                value=lambda row: row.number / N / (N if row.note in "SP" else D))  # fmt: skip


def tiles(series: str, array: str, causal: bool = False) -> Pair:
    """Return two numbers of tiles to compare: ours and a claim's.

    Our number says how many tiles of an array a series loads. It is counted on the emulator.
    """
    seen = counted(series, array, "loads", causal, TILE * D)
    return seen, TILES * (TILES + 1) / 2 if causal else float(TILES**2)


def layer(series: str) -> Quantity:
    """Return the GB that a series moves to and from DRAM, for the attention layer of claim C8."""
    return rows(measured.NAME, series=series, source="dram", metric="traffic", dtype="float16",
                seqlen_q=measured.LAYER.seqlen_q, value=lambda row: row.number / 1e9)  # fmt: skip


GB_OF_P = rows(measured.NAME, series="standard-mma", source="dram", metric="traffic",
               dtype="float16", seqlen_q=measured.LAYER.seqlen_q,
               value=lambda row: 2e-9 * row.heads_q * row.seqlen_q**2)  # fmt: skip
ONCE = 8e-9 * measured.LAYER.heads_q * measured.LAYER.seqlen_q * measured.LAYER.head_dim
STANDARD = {"standard": (layer("standard-mma"), Bounds(17.35, 17.85))}


def near(said: float) -> Bounds:
    """Return the numbers whose nearest power of ten is `said`, such as 32 to 316 for 100."""
    return Bounds(said / math.sqrt(10), said * math.sqrt(10))


def errors(*inputs: str) -> Pairs:
    """Return the largest error of each loop order in fp32, and the error that claim C2 allows.

    `inputs` are kinds of inputs, such as "normal" for inputs from N(0, 1).
    """
    return {
        order: (rows("numerics", "head_dim", "place", "seqlen_q", series=series, dtype="float32",
                     metric="max_error", place=inputs, source="measured"),
                Bounds(0, near(1e-5).high))
        for order, series in FLASH.items()
    }  # fmt: skip


def dropped(series: str) -> Quantity:
    """Return the accesses that dropout adds, divided by the elements of an N x N mask."""
    arrays = ("Q", "K", "V", "O", "L", "l", "m")
    marked = tuple(f"{name}, dropout" for name in (*arrays, "mask"))
    return counted(series, marked, per=N * N) - counted(series, arrays, per=N * N)


def flops(row: Row) -> float:
    """Return the FLOPs of the problem and the pass of a row."""
    sizes = row.batch, row.heads_q, row.heads_k, row.seqlen_q, row.seqlen_k, row.head_dim
    return io_model.flops(Problem(*sizes, causal=row.causal), row.pass_)


def intensity(experiment: str, *by: str, source: str, **fields: Any) -> Quantity:
    """Return the FLOPs per byte of an experiment's calls.

    There is one number for each combination of values in the columns `by`, such as "seqlen_q".
    `source` says which bytes are counted, such as "dram". `fields` are columns that select rows.
    """
    of = partial(rows, experiment, *by, source=source, metric="traffic", **fields)
    return of(value=flops) / of()


BALANCE = rows("memory_hierarchy", metric="speed", series="matmul", dtype="float16") / memory(
    "bandwidth", **DRAM
)


def growth(series: str, source: str) -> Quantity:
    """Return how the FLOPs per byte of a series grow with the sequence length.

    Each number is the FLOPs per byte at one sequence length, divided by the FLOPs per byte at the
    next shorter sequence length. `source` says which bytes are counted, such as "dram".
    """
    at = ("head_dim", "seqlen_q")
    return intensity("io_vs_seqlen", *at, source=source, series=series, unit="bytes").steps()


def wide_over_narrow(order: str, wide: int = 128, narrow: int = 64, **how: Any) -> Quantity:
    """Return a number of calls in fp16 at d=`wide`, divided by the same number at d=`narrow`.

    `order` is "FA-1" or "FA-2". Of several grids, the grid with the smaller number counts. The rows
    are rows of times. The number is the time, unless `how` contains the entry "value": a
    function that computes another number from a row, such as the tile size. Other entries of `how`
    are columns that select rows, such as `pass_`.
    """
    calls = partial(rows, "speed_fp16", "causal", "seqlen_q", series=IN_FP16[order],
                    metric="time", fold=min, **how)  # fmt: skip
    return calls(head_dim=wide) / calls(head_dim=narrow)


def over_blocks(series: str, **fields: Any) -> Quantity:
    """Return numbers of the experiment `block_size` at N=1024, by head dimension and block size.

    For FA-1 the block size is Bc, and Br is 64. For FA-2 the block size is Br, and Bc is 64. Block
    sizes without a measured time are left out. `fields` select the rows.
    """
    fixed, varied = ("Br", "Bc") if series.startswith("fa1") else ("Bc", "Br")
    given: dict[str, Any] = {fixed: 64, "seqlen_q": 1024}
    of = partial(rows, "block_size", "head_dim", varied, series=series, fold=max, **given)
    return of(**fields).only(of(**TIMES))


def reading(least: float, below: float = math.inf) -> Quantity:
    """Return the time of our fastest call with one query row / the time to read K and V once.

    The time to read K and V is their number of bytes / the measured bandwidth of a kernel that only
    reads. K/V caches are included if they have at least 16384 keys, at least `least` bytes and
    fewer than `below` bytes.
    """

    def long_cache(batch: int, heads_q: int, heads_k: int, d: int, keys: int) -> bool:
        return keys >= 16384 and least <= 4 * batch * heads_k * keys * d < below

    by = ("batch", "heads_q", "heads_k", "head_dim", "seqlen_k")
    calls = partial(rows, decode.NAME, *by, series=decode.OURS, seqlen_q=1, **TIMES)
    read = rows(
        decode.NAME, series=decode.READ, metric="bandwidth", value=lambda row: row.number * 1e9
    )
    needed = calls(fold=max, value=lambda row: float(decode.cache_bytes(row))) / read
    return (calls(fold=min) / needed).where(long_cache)


def merged(series: str, dtype: str) -> Pair:
    """Return a ratio of errors, and the bounds of the ratio that the claim allows.

    The numerator is the error of results that were merged over pages. The denominator is the error
    of one call over all keys.
    """
    error = partial(rows, measured.NAME, series=series, metric="error", dtype=dtype,
                    seqlen_q=measured.PAGE)  # fmt: skip
    return error(note=f"{measured.PAGES} pages") / error(note="whole"), Bounds(0, 1.1)


def long_context(series: str) -> Quantity:
    """Return the peak memory of a series in MiB, at the long sequence of claim C24."""
    return rows(measured.NAME, series=series, metric="memory", seqlen_q=measured.LONG)


def at_1024(series: str, **fields: Any) -> Quantity:
    """Return numbers of a series in float32 at N=1024, from the experiment `claims`.

    `fields` are columns that select rows, such as `metric`.
    """
    return rows(measured.NAME, series=series, dtype="float32", seqlen_q=1024, **fields)


def executed(series: str, pass_: str) -> Quantity:
    """Return the executed FLOPs of a series at N=1024 in one pass, by hardware counters.

    A multiply-add counts as two FLOPs.
    """
    return at_1024(series, pass_=pass_, metric=tuple(measured.OPERATIONS),
                   value=lambda row: (1 + (row.metric == "ffma")) * row.number)  # fmt: skip


def traffic_over(series: str, *dims: int) -> Quantity:
    """Return the DRAM bytes of standard attention / the DRAM bytes of a series, forward in fp32.

    `dims` are head dimensions. There is one number for each head dimension and sequence length.
    """
    of = partial(rows, "io_vs_seqlen", "head_dim", "seqlen_q", source="dram", metric="traffic",
                 head_dim=dims)  # fmt: skip
    return of(series="standard-simt") / of(series=series)


def gain(fused: str | tuple[str, ...], pass_: str) -> Quantity:
    """Return the speed of a fused series / the speed of torch's unfused attention.

    If there are several fused series, the fastest series counts. With a causal mask, the faster way
    to hide scores counts.
    """
    return speed(fused, pass_) / speed(UNFUSED, pass_)


def won(lengths: str, *orders: str, batches: tuple[int, ...] = (1, 16)) -> Pairs:
    """Return ratios of times, unfused / fused attention, and the bounds that claim C9 allows.

    `orders` are loop orders: "FA-1" or "FA-2". FA-2 includes torch's fused kernels. FA-1 has the
    grid of the paper, with one thread block per batch entry and head. `batches` are batch sizes.
    All calls have 8 heads.

    | `lengths` | sequence lengths | ratios that the claim allows |
    |---|---|---|
    | "short" | below 1024 | at most 1.15: no gain |
    | "long" | from 2048 on | at least 1: a gain |

    The claim says nothing about lengths from 1024 to 2047.
    """
    by = ("dtype", "head_dim", "batch", "pass_", "seqlen_q")
    times = partial(rows, "crossover", *by, causal=False, batch=batches, **TIMES)
    low, high, said = (0, 1023, Bounds(0, 1.15)) if lengths == "short" else (2048, math.inf, MORE)
    ours = "standard-mma", "standard-simt"
    compared: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    if "FA-1" in orders:
        compared["our standard / FA-1"] = ours, ("fa1-mma", "fa1-simt")
    if "FA-2" in orders:
        compared["our standard / FA-2"] = ours, ("fa2-mma", "fa2-simt")
        compared["torch's unfused / fused"] = ("torch-unfused",), ("torch-fa2", "torch-efficient")
    return {
        label: ((times(series=standard) / times(series=fused)).where(
            lambda *at: low <= at[-1] <= high), said)
        for label, (standard, fused) in compared.items()
    }  # fmt: skip


def over(causal: bool, *orders: str) -> Pairs:
    """Return a fused speed / standard attention's speed, and the range that claim C10 gives for it.

    The speeds are those of long sequences in fp16. `orders` are loop orders: "FA-1" or "FA-2".
    FA-1 has its faster grid. Standard attention is torch's attention, with the faster way to hide
    scores, and our standard attention.
    """
    calls = partial(rows, "speed_fp16", "pass_", *AT, metric="speed", pass_=("fwd", "fwd+bwd"),
                    seqlen_q=(4096, 8192, 16384), head_dim=(64, 128), causal=causal,
                    fold=max)  # fmt: skip
    standards = {"torch's unfused": UNFUSED, "our standard": "standard-mma"}
    return {f"{order} / {label}": (
        calls(series=IN_FP16[order]) / calls(series=standard), Bounds(2, 4))
            for order in orders for label, standard in standards.items()}  # fmt: skip


def longest(experiment: str, *series: str, **fields: Any) -> Quantity:
    """Return the length of the longest sequence that was timed with one of the series.

    The times are rows of an experiment. `fields` are columns that select rows.
    """
    return rows(experiment, series=series, metric="time", fold=max,
                value=lambda row: float(row.seqlen_q), **fields)  # fmt: skip


def accesses(series: str) -> Quantity:
    """Return the accesses of a series by closed forms, by head dimension and sequence length."""
    return rows("io_vs_seqlen", "head_dim", "seqlen_q", series=series, **MODEL)


def growth_of_accesses(order: str) -> Quantity:
    """Return how accesses grow when the sequence length doubles: accesses at N / accesses at N/2.

    The accesses are closed forms. `order` is "FA-1" or "FA-2". The ratios are by head dimension and
    N. The outer loop of FA-1 runs over tiles of Bc keys. The outer loop of FA-2 runs over tiles of
    Br rows. The result contains the lengths N with more than one tile of the outer loop.
    """
    series, of = FLASH[order], attrgetter("Bc" if order == "FA-1" else "Br")
    tile = rows("io_vs_seqlen", "head_dim", "seqlen_q", series=series, fold=max,
                value=lambda row: float(row.seqlen_q <= of(row)), **MODEL)  # fmt: skip
    return accesses(series).steps().only(tile.equal(0.0))


def layers(series: str, part: str, metric: str) -> Quantity:
    """Return the FLOPs or bytes of a part of a transformer layer, by model and sequence length.

    `part` is one of LAYER_PARTS, such as "attention", or "layer" for the complete layer. `metric`
    is "flops" or "traffic" (bytes). The models are ENCODERS, which compute all tokens at once.
    """
    parts = LAYER_PARTS if part == "layer" else (part,)
    notes = tuple(f"{name}: {each}" for name in ENCODERS for each in parts)
    return rows(measured.NAME, measured.model_of, "seqlen_k", series=series, source="model",
                metric=metric, place=notes)  # fmt: skip


def flop_per_byte(series: str, part: str) -> Quantity:
    """Return the FLOPs per byte of a part of a transformer layer, by model and sequence length."""
    return layers(series, part, "flops") / layers(series, part, "traffic")


def between(series: str, first: int, last: int) -> Quantity:
    """Return the FLOPs per byte of a complete layer at N=last / at N=first, for each model."""
    return flop_per_byte(series, "layer").where(lambda _, N: N in (first, last)).over(0)


def decoding() -> Quantity:
    """Return the FLOPs per byte of a complete layer of GPT-2 in a step of decoding, by length."""
    notes = tuple(f"GPT-2, decoding: {part}" for part in LAYER_PARTS)
    of = partial(rows, measured.NAME, "seqlen_k", series="layer-unfused", place=notes,
                 source="model")  # fmt: skip
    return of(metric="flops") / of(metric="traffic")


def accessed_at_128(fused: str) -> Quantity:
    """Return the bytes of standard attention / the bytes of a fused series, forward, at N=128."""
    of = partial(rows, "crossover", "dtype", "head_dim", "batch", metric="traffic", seqlen_q=128,
                 pass_="fwd", source="model")  # fmt: skip
    unit = {"simt": "float32", "mma": "float16"}[fused.partition("-")[2]]
    standard = fused.replace(fused.partition("-")[0], "standard")
    return of(series=standard, dtype=unit) / of(series=fused, dtype=unit)


def gain_of_unit(experiment: str, unit: str, order: str) -> Quantity:
    """Return the speed of FA-1 or FA-2 / the speed of our standard attention, forward.

    `unit` is "simt" or "mma". `order` is "FA-1" or "FA-2". FA-1 has its faster grid.
    """
    of = partial(rows, experiment, "head_dim", "causal", "seqlen_q", metric="speed", pass_="fwd",
                 head_dim=(64, 128), fold=max)  # fmt: skip
    fused = (f"fa1-{unit}", f"fa1-{unit}-splits") if order == "FA-1" else f"fa2-{unit}"
    return of(series=fused) / of(series=f"standard-{unit}")


def beside_products(unit: str) -> Quantity:
    """Return a ratio of operations other than matrix products: those of FA-1 / those of FA-2.

    The operations are those of the forward pass on one unit, by closed forms. FA-1 has query
    splits. Both loop orders have equal tiles.
    """
    of = partial(rows, "loop_cost", "head_dim", metric="beside_products", pass_="fwd")
    return of(series=f"fa1-{unit}-splits") / of(series=f"fa2-{unit}-fa1-tiles")


def in_regime(order: str, pass_: str, *lengths: int, wide: bool | None = None) -> Pairs:
    """Return a speed on mma / the speed of torch's unfused attention, and the ratio of claim C36.

    The speeds are in fp16. `order` is "FA-1" or "FA-2". FA-1 has its faster grid. Only the sequence
    lengths `lengths` are included. If `wide` is True, only the sizes at which FA-1 gains least are
    included: d=128 without a mask, and d=256. If it is False, only the other sizes are included.
    """
    found = gain(IN_FP16[order], pass_).where(
        lambda d, causal, N: N in lengths and wide in (None, d > 128 or d > 64 and not causal)
    )
    return {f"{order} / torch's unfused": (found, TWICE)}


def short_prefill(series: str) -> Quantity:
    """Return the time of torch's unfused attention / a fused time, forward in fp16, N up to 512."""
    times = partial(rows, "crossover", "head_dim", "batch", "seqlen_q", dtype="float16",
                    pass_="fwd", causal=False, **TIMES)  # fmt: skip
    ratio = times(series="torch-unfused") / times(series=series)
    return ratio.where(lambda d, batch, N: N <= 512)


def latency(level: str) -> Quantity:
    """Return the measured latency of a memory in ns: "shared" or "DRAM"."""
    if level == "shared":
        return memory("latency", series=memory_hierarchy.CHASE_SHARED)
    place = f"{memory_hierarchy.DRAM_KIB} KiB"
    return memory("latency", series=memory_hierarchy.CHASE_GLOBAL, place=place)


def full_over_causal(order: str) -> Quantity:
    """Return the time of a call without a mask / the time of the same call with a causal mask.

    `order` is "FA-1" or "FA-2". The calls are all fp16 calls that were timed with and
    without a causal mask. If a call was timed with several grids, the shortest time is used.
    """
    times = partial(rows, "speed_fp16", "pass_", "head_dim", "seqlen_q", series=IN_FP16[order],
                    pass_=("fwd", "bwd"), fold=min, **TIMES)  # fmt: skip
    return times(causal=False) / times(causal=True)


# Experiments with FLOPs per DRAM byte. Their GPU must be that of `BALANCE`.
ROOFLINES = ("memory_hierarchy", measured.NAME)
PASSES = {"forward": "fwd", "backward": "bwd"}
ENCODERS, LAYER_PARTS = ("BERT-base", "BERT-large", "GPT-2"), ("projections", "attention", "FFN")
MIB = 2.0**20
CACHES = {
    "below 64 MiB": (0, decode.LARGE_BYTES),
    "64 to 256 MiB": (decode.LARGE_BYTES, 256 * MIB),
    "256 MiB to 1 GiB": (256 * MIB, 1024 * MIB),
    "1 GiB or more": (1024 * MIB,),
}


def smaller_blocks(pass_: str, *orders: str, wide: int = 128, narrow: int = 64) -> Pairs:
    """Return the area of the fastest block at d=`wide` / at d=`narrow`, and claim C19's bounds.

    `orders` are loop orders: "FA-1" or "FA-2".
    """
    area = partial(wide_over_narrow, wide=wide, narrow=narrow, pass_=pass_,
                   value=lambda row: float(row.Br * row.Bc))  # fmt: skip
    return {f"{order}, block area at d={wide} / at d={narrow}": (area(order), Bounds(0, 0.99))
            for order in orders}  # fmt: skip


def more_time(pass_: str, *orders: str, wide: int = 128, narrow: int = 64) -> Pairs:
    """Return the time of a call at d=`wide` / at d=`narrow`, and the bounds of claim C19.

    `orders` are loop orders: "FA-1" or "FA-2". FA-1 has its faster grid.
    """
    return {f"{order}, time at d={wide} / at d={narrow}": (
        wide_over_narrow(order, wide, narrow, pass_=pass_), Bounds(1.01, math.inf))
            for order in orders}  # fmt: skip


IN_ORDERS: dict[str, Pairs] = {}
for order, series in FLASH.items():
    half = series.replace("simt", "mma")
    IN_ORDERS |= {
        f"C3, {order}": {"standard": (round_trips("standard-simt"), 3.0),
                         order: (round_trips(series), 1.0)},
        f"C5, {order}": {f"{order}, GB": (layer(half), ONCE)},
        f"C8, {order}": {"P, GB": (GB_OF_P, 4.3), **STANDARD, order: (layer(half), 0.27),
                         f"standard / {order}": (layer("standard-mma") / layer(half), 65.0)},
        f"C19, time, backward, {order}": more_time("bwd", order),
        f"C27, {order}": {f"{order} at 2N / at N": (growth(series, "dram"), Bounds(1.15, math.inf)),
                          "standard at 2N / at N": (
                              growth("standard-simt", "dram"), Bounds(1 / 1.15, 1.15))},
        f"C29, {order}": {name: (over_blocks(name, source="dram").over(0), 1.0)
                          for name in (series, half)},
        f"C35, {order}": {"gain in fp32 on CUDA cores / gain in fp16 on tensor cores": (
            gain_of_unit("speed", "simt", order) / gain_of_unit("speed_fp16", "mma", order), LESS)},
    }  # fmt: skip
PAIRS: dict[str, Pairs] = IN_ORDERS | {
    "C1": {"share of equal elements": (
        rows("numerics", "place", "seqlen_q", series="softmax-online", metric="identical",
             dtype="float32", source="measured"), 1.0)},
    "C2, normal": errors(numerics.NORMAL),
    "C2, outliers": errors(numerics.OUTLIERS, numerics.LARGE),
    "C3, N x N": {order: (counted(series, ("S", "P"), per=N * N, none=0.0), 0.0)
                  for order, series in FLASH.items()},
    "C4": {"elements": (accesses("standard-simt"), lambda d, N: 4.0 * N * (d + N))},
    "C6": exponents("fwd"),
    "C7": {f"{order} at 2N / at N": (growth_of_accesses(order), 2.0) for order in FLASH},
    "C9, short": won("short", *FLASH),
    **{f"C9, long, FA-1, {8 * batch} heads": won("long", "FA-1", batches=(batch,))
       for batch in (1, 16)},
    "C9, long, FA-2": won("long", "FA-2"),
    "C10, no mask, FA-1": over(False, "FA-1"),
    "C10, no mask, FA-2": over(False, "FA-2"),
    "C10, causal": over(True, *FLASH),
    "C11": SOFTMAXES,
    "C12": {"standard": (counted("standard-simt", ("S", "P"), "loads", per=N * N), 2.0),
            "FA-1": (counted("fa1-simt", "Q", "loads", per=N * D * TILES), 1.0),
            "FA-2": (counted("fa2-simt", "K", "loads", per=N * D * TILES), 1.0)},
    "C13": {name: (MEMORIES[name], said)
            for name, said in (("times faster", 6.0), ("times smaller", 4000.0))},
    **{key: {
        f"{label}, {experiment}": (
            intensity(experiment, "pass_", source="dram", series=series, dtype="float16",
                      pass_=passes) / BALANCE, LESS)
        for experiment in of}
       for key, label, series, passes, of in (
           ("C14, standard", "standard", "standard-mma", ("fwd", "bwd"), ROOFLINES),
           ("C14, FA-1, forward", "FA-1", "fa1-mma", "fwd", ROOFLINES),
           ("C14, FA-1, backward", "FA-1", "fa1-mma", "bwd", ROOFLINES[:1]),
           ("C14, FA-2", "FA-2", "fa2-mma", ("fwd", "bwd"), ROOFLINES))},
    "C15": {"writes of O, K/V outer": (counted("fa1-simt", "O", "stores", per=N * D), float(TILES)),
            "reads of O, K/V outer": (counted("fa1-simt", "O", "loads", per=N * D), TILES - 1.0),
            "writes of O, Q outer": (counted("fa2-simt", "O", "stores", per=N * D), 1.0)},
    "C16": {"FA-1, tiles": tiles("fa1-simt", "Q", causal=True),
            "FA-2, tiles": tiles("fa2-simt", "K", causal=True)},
    "C16, time": {f"{order}, not causal / causal": (full_over_causal(order), Bounds(1.7, 1.8))
                  for order in FLASH},
    "C17": {f"{order} at 2N / at N": (
        training(series.replace("simt", "mma"), "plain", "memory", pass_="fwd+bwd").steps(), 2.0)
        for order, series in FLASH.items()},
    "C18": {f"{order}: additional accesses / N²": (dropped(series), 0.0)
            for order, series in FLASH.items()},
    **{f"C19, blocks, forward, FA-1, {d}": smaller_blocks("fwd", "FA-1", wide=d, narrow=d // 2)
       for d in (128, 256)},
    "C19, blocks, forward, FA-2": {
        **smaller_blocks("fwd", "FA-2"),
        **smaller_blocks("fwd", "FA-2", wide=256, narrow=128),
    },
    "C19, blocks, backward": smaller_blocks("bwd", *FLASH),
    **{f"C19, time, forward, {wide}": more_time("fwd", *FLASH, wide=wide, narrow=wide // 2)
       for wide in (128, 256)},
    "C20": {f"{series}, block doubled": (
        over_blocks(series, source="model", unit="bytes").steps(), Bounds(0, 0.99))
            for series in ("fa1-simt", "fa1-mma", "fa2-simt", "fa2-mma")},
    **{f"C21, {part}": {"our fastest time / time to read K and V": (reading(*size), 1.0)}
       for part, size in CACHES.items()},
    "C22": {"elements that differ": (
        rows("paged", "series", "place", source="counted", metric="difference"), 0.0),
        **{f"{series}: error of merged pages / error of one call": merged(series, dtype)
           for series, dtype in (("fa1-simt", "float32"), ("fa2-simt", "float32"),
                                 ("fa2-mma", "float16"))}},
    "C23": {"FA-1": tiles("fa1-simt", "Q"), "FA-2": tiles("fa2-simt", "K")},
    "C24": {"standard, MiB": (long_context("standard-mma"), Bounds(25e9 / 2**20, 35e9 / 2**20)),
            **{f"{order} / standard": (long_context(series) / long_context("standard-mma"),
                                    Bounds(0, 0.01))
               for order, series in (("FA-1", "fa1-mma"), ("FA-2", "fa2-mma"))}},
    **{f"C25, FLOPs, {what}": {f"{order} / standard": (
        executed(series, pass_) / executed("standard-simt", pass_), Bounds(1, 1.15))
        for order, series in FLASH.items()} for what, pass_ in PASSES.items()},
    **{f"C25, traffic, {order}{part}": {f"standard / {order}": (
        traffic_over(FLASH[order], *dims), TWICE)}
       for order, part, dims in (("FA-1", ", d=64", (64,)), ("FA-1", ", d=128", (128,)),
                                 ("FA-2", "", (64, 128)))},
    "C26, ours": {"safe / online": (softmax_over_online("softmax-safe"), 2.5)},
    "C26, torch's": {"torch's / online": (softmax_over_online("torch-softmax"), 2.5)},
    "C26, inside": {f"{label} / online": (
        rows("online_softmax", "seqlen_q", series=f"unfused-{name}", **TIMES)
        / rows("online_softmax", "seqlen_q", series="unfused-online", **TIMES), 2.5)
        for label, name in (("safe", "safe"), ("torch's", "torch"))},
    "C27, accesses": {
        **{f"{order} at 2N / at N": (growth(series, "model"), Bounds(1.15, math.inf))
           for order, series in FLASH.items()},
        "standard at 2N / at N": (growth("standard-simt", "model"), Bounds(1 / 1.15, 1.15))},
    "C28": {f"{label}, gain backward / gain forward": (
        gain(series, "bwd") / gain(series, "fwd"), MORE)
            for label, series in (("our FA-1", FASTER_FA1), ("our FA-2", "fa2-mma"),
                                  ("torch's FA-2", "torch-fa2"))},
    "C30, standard": {"longest N: standard": (
        longest("runtime_memory", "torch-unfused", "standard-mma", pass_="fwd+bwd",
                place=(runtime_memory.PLAIN, runtime_memory.ALONE)), 4096.0)},
    "C30, FA-1": {
        "longest N: FA-1": (longest("runtime_memory", "fa1-mma", pass_="fwd+bwd", place="plain"),
                            Bounds(2**20, math.inf))},
    "C30, FA-2": {
        "longest N: FA-2": (longest("runtime_memory", "fa2-mma", "fa2-auto", pass_="fwd+bwd",
                                    place="plain"), Bounds(2**20, math.inf)),
        "FA-2, two GPUs": (longest("ring", "ring-kv"), Bounds(2**20, math.inf))},
    "C31, operations": {f"{unit}, K/V outer / Q outer": (beside_products(unit), TWICE)
                        for unit in ("simt", "mma", "wgmma")},
    "C31, statistics": {"accesses to l, m and L, K/V outer / Q outer": (
        counted("fa1-simt", ("l", "m")) / counted("fa2-simt", "L"), TWICE)},
    "C32, DRAM": {f"standard / {order}": (
        rows("crossover", "dtype", source="dram", metric="traffic", seqlen_q=128,
             series="standard-simt")
        / rows("crossover", "dtype", source="dram", metric="traffic", seqlen_q=128, series=series),
        Bounds(1 / 1.15, 1.15)) for order, series in FLASH.items()},
    "C32, accesses": {f"standard / {order}, {dtype}": (
        accessed_at_128(series.replace("simt", unit)), Bounds(1 / 1.15, 1.15))
        for order, series in FLASH.items() for unit, dtype in (("simt", "fp32"), ("mma", "fp16"))},
    "C33, layer": {
        "N=512 / N=128": (between("layer-unfused", 128, 512), Bounds(1.15, math.inf)),
        "N=4096 / N=512": (between("layer-unfused", 512, 4096), Bounds(0, 1 / 1.15))},
    "C33, layer, fused": {
        "N=512 / N=128": (between("layer-fused", 128, 512), Bounds(1.15, math.inf)),
        "N=4096 / N=512": (between("layer-fused", 512, 4096), Bounds(0, 1 / 1.15))},
    **{f"C33, parts, {name}": {"attention / FFN": (
        flop_per_byte(f"layer-{name}", "attention") / flop_per_byte(f"layer-{name}", "FFN"), LESS)}
       for name in ("unfused", "fused")},
    "C33, decoding": {"FLOP per byte": (decoding(), LESS)},
    "C34": {"P of all heads / shared memory": (
        rows("io_vs_seqlen", "head_dim", "seqlen_q", series="standard-simt", source="dram",
             value=lambda row: 4.0 * row.batch * row.heads_q * row.seqlen_q**2)
        / memory("capacity", series="read-shared"), 1000.0)},
    "C36, short prefill": {
        f"torch's unfused / {label}": (short_prefill(series), Bounds(0, 1.15))
        for label, series in (("our FA-1", "fa1-mma"), ("torch's FA-2", "torch-fa2"))},
    "C36, long prefill, FA-2": in_regime("FA-2", "fwd", 4096, 8192, 16384),
    **{f"C36, long prefill, FA-1, {part}": in_regime("FA-1", "fwd", 4096, 8192, 16384, wide=wide)
       for part, wide in (("gains", False), ("rest", True))},
    **{f"C36, training, {part}": {
        label: pair for order in FLASH for label, pair in
        in_regime(order, "fwd+bwd", 1024, 2048, 4096, wide=wide).items()}
       for part, wide in (("gains", False), ("rest", True))},
    **{f"C37, {name}": {f"{name}, ns": (latency(level), near(said))}
       for name, level, said in (("SRAM", "shared", 1.0), ("HBM", "DRAM", 100.0))},
}  # fmt: skip
BESIDE: dict[str, Pairs] = {
    "C3, N x N": {"standard": (counted("standard-simt", ("S", "P"), per=N * N), 4.0)},
    "C5, FA-1": STANDARD,
    "C5, FA-2": STANDARD,
    "C16": {"FA-1, all": tiles("fa1-simt", "Q"), "FA-2, all": tiles("fa2-simt", "K")},
    "C23": {"causal": tiles("fa2-simt", "K", causal=True)},
}
# Claim C10 is from the abstract of FA-2's paper. Figure 7 of the paper gives PyTorch's speed on an
# H100.
CONTROL = {key: divisor("fa2", "Fig. 7", "PyTorch", "fwd+bwd", "torch-unfused")
           for key in ("C10, no mask, FA-1", "C10, no mask, FA-2", "C10, causal")}  # fmt: skip
QUESTIONS = declared(PAIRS, BESIDE, CONTROL)
TABLE = table(QUESTIONS, "claim", "claims")
