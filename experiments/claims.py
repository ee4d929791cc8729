"""Checks claims about FlashAttention in settings that no other experiment measures.

On the emulator, the accesses of each array are counted. The emulator also gives the error of one
call over all keys, and the error of results that were merged from one call per page of keys. On a
GPU, the bytes, the time and the executed multiplications and additions of forward calls are
measured, for example with 32 heads at N=8192, d=128 in fp16. The peak memory of one head at
N=131072 is measured too.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device, reference
from fa_numba.problem import Problem

from .beside import layers
from .lab.measure import calls, peers, variants
from .lab.measure.series import LABELS, algorithm, call, columns, plan, query_splits, unit
from .lab.measure.timing import SECONDS, attempt
from .lab.measure.workloads import SEED, Inputs, fa2_setting, one_head
from .lab.record import EMULATOR, MODEL, Bench, Options, Row
from .lab.show import style, tables

NAME = "claims"
TAKES = ()
PROTOCOL = "memory: peak of what one call allocates"

SIMT = ("standard-simt", "fa1-simt", "fa2-simt")
COUNTED_SEQLEN, COUNTED_DIM, COUNTED_TILE = 128, 64, 32
DROPOUT = 0.1
# The forward call "fp16, T=8192, h=32, d=128", and the GB that articles claim for the call.
LAYER = Problem(1, 32, 32, 8192, 8192, 128, dtype="float16")
QUICK_LAYER = Problem(1, 4, 4, 1024, 1024, 128, dtype="float16")
CLAIMED_GB = {"standard-mma": (17.4, 17.8), "fa2-mma": (0.27, 0.27)}
MMA = ("standard-mma", "fa1-mma", "fa1-mma-splits", "fa2-mma")
LONG, QUICK_LONG = 131072, 8192
# Lengths of complete layers. Series of layers -> whether attention is fused.
LAYER_SEQLENS = tuple(1 << n for n in range(7, 13))
LAYERS = {"layer-unfused": False, "layer-fused": True}
PAGE, PAGES = 32, 5
OPERATIONS = {
    name: f"smsp__sass_thread_inst_executed_op_{name}_pred_on.sum"
    for name in ("ffma", "fmul", "fadd")
}


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield the numbers that the claims need.

    They are the accesses of each array, by closed forms and counted on the emulator, and errors of
    merged results. On a GPU, bytes, times and peak memory are measured too.
    """
    problems = [one_head(COUNTED_SEQLEN, COUNTED_DIM, mask) for mask in (False, True)]
    cases = [(problem, series, 0.0) for problem in problems for series in SIMT]
    cases += [(problems[0], series, DROPOUT) for series in SIMT[1:]]
    for case in cases:
        yield from _model(*case)
    for model in layers.MODELS:
        for N in LAYER_SEQLENS:
            yield from _layer_of(model, N)
    work: list[tuple[Any, ...]] = [(_count, *case) for case in cases]
    work += [(_paged, series, COUNTED_DIM) for series in ("fa1-simt", "fa2-simt", "fa2-mma")]
    yield from bench.counted(work, "counting on the emulator", lambda run, *case: run(*case))
    if bench.machine is None:
        return
    yield from _layers(options, bench)
    yield from _long(options, bench)


def _options(dropout: float = 0.0) -> dict[str, Any]:
    given: dict[str, Any] = {"tiles": fa_numba.Tiles(COUNTED_TILE, COUNTED_TILE)}
    return given | ({"dropout_p": dropout, "seed": SEED} if dropout else {})


def _model(problem: Problem, series: str, dropout: float) -> Iterator[Row]:
    if not dropout:  # the model ignores dropout, because dropout makes no accesses
        accesses = plan(series, problem, **_options()).accesses
        yield from _by_array(problem, series, dropout, accesses, MODEL)


def _layer_of(model: layers.Model, N: int) -> Iterator[Row]:
    for series, fused in LAYERS.items():
        for part, (flops, traffic) in layers.work(model, N, fused).items():
            note = f"{model.name}: {part}"
            common = columns(NAME, series, model.problem(N), MODEL, note=note)
            yield Row(metric="flops", unit="FLOP", value=flops, **common)
            yield Row(metric="traffic", unit="bytes", value=traffic, **common)


def _count(problem: Problem, series: str, dropout: float) -> Iterator[Row]:
    arrays = Inputs()(problem)
    with fa_numba.count_accesses() as counts:
        call(series, problem, *arrays, **_options(dropout))()
    yield from _by_array(problem, series, dropout, counts, EMULATOR)


def _by_array(
    problem: Problem, series: str, dropout: float, accesses: Any, machine: str
) -> Iterator[Row]:
    common = columns(NAME, series, problem, machine, _options()["tiles"])
    for metric in ("loads", "stores"):
        for array, elements in sorted(getattr(accesses, metric).items()):
            note = f"{array}, dropout" if dropout else array
            yield Row(metric=metric, unit="elements", value=elements, note=note, **common)


def _paged(series: str, head_dim: int) -> Iterator[Row]:
    dtype = "float32" if unit(series) == "simt" else "float16"
    problem = Problem(1, 2, 2, PAGE, PAGE * PAGES, head_dim, dtype=dtype)
    q, k, v = (x.astype(dtype) for x in Inputs()(problem))
    exact = reference.attention(*(x.astype(np.float64) for x in (q, k, v)), scale=problem.scale)
    options: dict[str, Any] = {"algorithm": algorithm(series), "unit": unit(series)}
    with fa_numba.count_accesses():
        whole = fa_numba.attention(q, k, v, **options)
        pages = [
            slice(n * PAGE, (n + 1) * PAGE) for n in np.random.default_rng(SEED).permutation(PAGES)
        ]
        parts = [
            fa_numba.attention(q, k[:, :, at], v[:, :, at], return_lse=True, **options)
            for at in pages
        ]
    for place, out in (("whole", whole), (f"{PAGES} pages", merged(parts))):
        common = columns(NAME, series, problem, EMULATOR, source="measured", note=place)
        error = float(reference.relative_error(np.asarray(out, np.float64), exact))
        yield Row(metric="error", unit="1", value=error, **common)


def merged(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return O over all keys, in float64, from the results (O, L) over parts of the keys.

    The weight of part n is e^(L_n - L), where L is the logsumexp over all keys.
    """
    lse = np.stack([np.asarray(L, np.float64) for _, L in parts])
    weights = np.exp(lse - np.logaddexp.reduce(lse, axis=0))
    return sum(
        w[..., None] * np.asarray(o, np.float64) for w, (o, _) in zip(weights, parts, strict=True)
    )


def _layers(options: Options, bench: Bench) -> Iterator[Row]:
    layer = QUICK_LAYER if options.quick else LAYER
    few = fa2_setting(512 if options.quick else 1024, 64)
    splits = query_splits(layer, bench.describe["multiprocessors"], "fa1-mma")
    compared = [
        variants.splits_of("fa1-mma", splits) if "splits" in name else variants.Variant(name)
        for name in MMA
    ]
    work = [(layer, compared), (few, [variants.Variant(name) for name in SIMT])]
    yield from variants.measure(NAME, work, bench, OPERATIONS, seconds=SECONDS)


def _long(options: Options, bench: Bench) -> Iterator[Row]:
    problem = one_head(QUICK_LONG if options.quick else LONG, 128, dtype="float16")
    arrays = peers.on_device(Inputs()(problem), problem.dtype)
    for series in ("standard-mma", "fa1-mma", "fa2-mma"):
        run = call(series, problem, *arrays)
        taken, failure = attempt(calls.workspace_bytes, run)
        common = columns(NAME, series, problem, bench.machine, note=failure)
        mebibytes = None if taken is None else taken / 2**20
        yield Row(metric="memory", unit="MiB", value=mebibytes, **common)
        device.release_memory()


def _layer_rows(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """Return the rows with the bytes of the forward call LAYER, as {(series, source): row}.

    LAYER is a problem in fp16 with 32 heads at N=8192 and d=128. A quick run measures a smaller
    problem instead.
    """
    wanted = [r for r in rows if r.metric == "traffic" and r.dtype == "float16"]
    wanted = [r for r in wanted if r.series not in LAYERS]
    return {(r.series, r.source): r for r in wanted if r.value is not None}


_SOURCES = {"model": "accesses (model)", "l2": "L2 (measured)", "dram": "DRAM (measured)"}


def draw(rows: Sequence[Row]) -> Any:
    """Draw the bytes of one forward call, by closed forms and by hardware counters.

    The call is in fp16, with 32 heads at N=8192 and d=128 (LAYER). Return None without rows.
    """
    found, shown = _layer_rows(rows), []
    for name in MMA:
        for source, label in _SOURCES.items():
            if row := found.get((name, source)):
                gb, claimed = row.number / 1e9, CLAIMED_GB.get(name, ())[-1:]
                text = f"{gb:.3g}"
                if claimed and source == "dram" and row.seqlen_q == LAYER.seqlen_q:
                    text += f" (claimed {claimed[0]:g})"
                shown.append((f"{LABELS[name]}, {label}", gb, style.COLOURS[name], text))
    if not shown:
        return None
    layer = next(iter(found.values()))
    figure, ((ax,),) = style.new(1, 1, 4.2)
    style.bars(ax, shown)
    of_fa2, *_ = CLAIMED_GB["fa2-mma"]
    message = f"FA-2's claimed {of_fa2:g} GB are DRAM bytes, not accesses"
    what = f"forward, fp16, {layer.heads_q} heads, N={layer.seqlen_q}, d={layer.head_dim}"
    ax.set_xlabel("bytes of one call (GB)")
    figure.suptitle(f"{message}\n{what}", fontsize=12)
    return figure


def layer(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the bytes of one forward call, or None without rows.

    The call is in fp16, with 32 heads at N=8192 and d=128 (LAYER). The table also contains the
    bytes that articles claim.
    """
    found = _layer_rows(rows)
    lines = []
    for name in MMA:
        cells = [found.get((name, source)) for source in ("model", "l2", "dram")]
        if any(cells):
            claimed = " to ".join(dict.fromkeys(f"{gb:g}" for gb in CLAIMED_GB.get(name, ())))
            numbers = [tables.cell(row, lambda v: f"{v / 1e9:.3g}") for row in cells]
            lines.append([LABELS[name], claimed or tables.MISSING, *numbers])
    if not lines:
        return None
    header = ["algorithm", "claimed, GB", "accessed, GB", "L2, GB", "DRAM, GB"]
    layer = next(iter(found.values()))
    caption = (
        "The table of claimed bytes contains the bytes of one forward call in fp16 with "
        f"{layer.heads_q} heads, N={layer.seqlen_q} and d={layer.head_dim}. The column *claimed* "
        "contains byte counts that articles on FlashAttention claim. The column *accessed* "
        "contains the bytes that the kernels load and store."
    )
    return tables.of(caption, header, lines)


def model_of(row: Row) -> str:
    """Return the name of the model that the note of a row of a complete layer names."""
    return row.place.partition(":")[0]


def part_of(row: Row) -> str:
    """Return the part of a layer that the row is about, such as "attention".

    The row's note names the part.
    """
    return row.place.partition(": ")[2]


def intensities(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the FLOPs per byte of complete layers, or None without rows."""
    sums: dict[tuple[str, int, str, str, str], float] = {}
    for row in rows:
        if row.series in LAYERS:
            for part in (part_of(row), "layer"):
                at = model_of(row), row.seqlen_k, row.series, part, row.metric
                sums[at] = sums.get(at, 0.0) + row.number
    lines = []
    for model in layers.MODELS:
        for N in sorted({at[1] for at in sums if at[0] == model.name}):
            shown = [("projections", True), ("FFN", True), ("attention", False),
                     ("attention", True), ("layer", False), ("layer", True)]  # fmt: skip
            cells = []
            for part, fused in shown:
                series = "layer-fused" if fused else "layer-unfused"
                flops, traffic = (
                    sums[model.name, N, series, part, metric] for metric in ("flops", "traffic")
                )
                cells.append(f"{flops / traffic:.3g}")
            lines.append([model.name, str(N), *cells])
    header = ["model", "N", "projections", "FFN", "attention, unfused", "attention, fused"]
    header += ["layer, unfused", "layer, fused"]
    caption = (
        "The table of layers contains FLOP per byte of the layers of transformer models in fp16, "
        "for one sequence, by closed forms. A layer has four projections, attention and a "
        "feed-forward network (FFN). In the table of layers, each matrix product reads its inputs "
        "and weights once, and writes its result once. Unfused attention also writes and reads S "
        "and P. A step of decoding computes one token, with N - 1 tokens in the K/V cache."
    )
    return tables.of(caption, header, lines)


# The page's table `claims` contains the verdicts; see experiments.verdicts.claims.
TABLES = {"claims_layer": layer, "claims_models": intensities}
