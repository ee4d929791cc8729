"""The four panels of explore.html: their texts, and the functions that compute their answers.

The page is a file that works without a server. In the reader's browser, scripts in the folder
`explore_page` compute the answers of the first three panels. The scripts are a translation of this
module's functions to JavaScript. Tests compare the scripts' answers with this module's answers. The
answers of the last panel, the plans, are stored in the page.

`explore_server` can serve the page too. The server then computes the plans. It also computes the
answers of the first panel for masks that a reader types.
"""

import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

import fa_numba
from fa_numba import algorithms, bounds, device, io_model
from fa_numba.bounds.roofline import PRODUCTS
from fa_numba.choices.tiles import paper_rule
from fa_numba.commands import trace as worked
from fa_numba.dtypes import DTYPES
from fa_numba.problem import Problem
from fa_numba.typing import Algorithm

from ..lab.measure.moves import Trace, passes, steps
from ..lab.measure.workloads import Inputs
from . import traced_calls, typed_mask
from .panels import Answer, Axis, Panel
from .walk import by_row_tile, walk

ORDERS: tuple[tuple[Algorithm, str], ...] = (
    ("fa1", "FA-1 (K/V outer)"),
    ("fa2", "FA-2 (Q outer)"),
)
ALGORITHMS: tuple[tuple[Algorithm, str], ...] = (("standard", "standard attention"), *ORDERS)
YES_NO = ("no", "yes")
MOST_SCORES = 64


def text_of(algorithm: str) -> list[tuple[str, list[int]]]:
    """Return the source text of a forward algorithm in `fa_numba.algorithms`, line by line.

    Each item is (source line, numbers of the lines of the paper's algorithm that it implements).
    The functions in `algorithms` can report their steps to a function `watch`. The source lines
    that call `watch` are left out.
    """
    source = inspect.getsource(getattr(algorithms, f"{algorithm}_forward")).splitlines()
    first = next(
        n for n, line in enumerate(source) if re.match(r" +# (Alg\. 1 line 2|In gl)", line)
    )
    found: list[tuple[str, list[int]]] = []
    lines: list[int] = []
    watching: int | None = None
    for line in source[first:]:
        indent = len(line) - len(line.lstrip())
        if watching is not None and line.strip() and indent <= watching:
            watching = None
        if line.strip().startswith("if watch"):
            watching = indent
        if watching is not None:
            continue
        named = re.match(r" +# Alg\. 1 lines? ([\d, ]+)", line)
        if named:
            lines = [int(n) for n in re.findall(r"\d+", named[1])]
        elif not line.strip():
            lines = []
        found.append((line[4:], lines))
    return found


# --- both orders, step by step -----------------------------------------------------------------


def order(trace: Trace, plan_bytes: int) -> Answer:
    """Return what the first panel of the page shows for one loop order.

    The answer contains the steps of the trace, bytes, tiles and thread blocks. `plan_bytes` is the
    number of bytes by the closed form.
    """

    def moved(arrays: str, kind: str) -> int:
        return sum(move.bytes for move in trace.select(tuple(arrays), kind))

    return {
        **steps(trace),
        "total": trace.bytes,
        "model": plan_bytes,
        "inputs": moved("QKV", "load"),
        "again": moved("Olm", "load"),
        "written": moved("OlmL", "store"),
        "visited": len({(v.i, v.j) for v in passes(trace).visits}),
        "blocks": len(trace.blocks),
    }


def orders(
    N: int, d: int, Br: int, Bc: int, causal: str, window: int, unit: str, mask: str = ""
) -> Answer:
    """Return the first panel's answer: the traces of both loop orders, and the numbers of tiles.

    The arguments are the inputs of the panel, which the reader of the page chooses. `causal` is
    "yes" or "no". `window` is the number of columns that a row sees on either side, or 0 for all.
    If `mask` is not empty, the reader typed a mask, and the emulator makes the traces. Raise
    ValueError if the mask is not allowed, or if the emulator would take long.
    """
    found: Answer = {"Tr": -(-N // Br), "Tc": -(-N // Bc)}
    problem = traced_calls.problem_of(N, d, causal == "yes", window, unit)
    for name, _ in ORDERS:
        series = f"{name}-{unit}"
        if mask.strip():
            trace, accesses = _masked(series, problem, fa_numba.Tiles(Br, Bc), mask)
        else:
            trace = walk(series, problem.dtype, N, d, Br, Bc, causal == "yes", window)
            accesses = getattr(io_model, name)(problem, SimpleNamespace(Br=Br, Bc=Bc))
        found |= {f"{name}.{key}": value for key, value in order(trace, accesses.bytes).items()}
        found |= {f"{name}.{key}": value for key, value in largest(accesses, problem).items()}
    return found


def _masked(
    series: str, problem: Problem, sizes: fa_numba.Tiles, mask: str
) -> tuple[Trace, io_model.Accesses]:
    """Return the emulator's trace of a call with a typed mask, and the accesses of its plan."""
    traced_calls.check(problem.seqlen_q, problem.head_dim, sizes.Br, sizes.Bc)
    blocks = typed_mask.blocks_of(mask, problem.seqlen_q, sizes)
    trace = traced_calls.trace(Inputs(), series, problem, sizes, blocks)
    return by_row_tile(trace), traced_calls.planned(series, problem, sizes, blocks).accesses


WINDOW = "window, columns on each side (0: off)"
CAUSAL = "causal mask"
ORDERS_PANEL = Panel(
    name="orders",
    title="Both loop orders, side by side",
    question="Why did FlashAttention-2 exchange the two loops?",
    sentence="For each tile of K and V, FA-1 loads and stores O, l and m of all rows. FA-2 keeps "
    "O, l and m of a tile of Q on the chip, and different tiles of Q can run at the same time.",
    axes={
        "N": Axis("N, sequence length", tuple(range(16, 513, 16)), 1, 512, first=256),
        "d": Axis("d, head dimension", tuple(range(16, 257, 16)), 1, 256, first=64),
        "Br": Axis("Br, rows of a Q tile", tuple(range(16, 257, 16)), 16, 256, first=64),
        "Bc": Axis("Bc, rows of a K or V tile", tuple(range(16, 257, 16)), 16, 256, first=64),
        "window": Axis(WINDOW, tuple(range(0, 257, 8)), 0, 512, first=0),
        "causal": Axis(CAUSAL, YES_NO),
        "unit": Axis("dtype", ("simt", "mma"), first="mma", words={
            "simt": "float32 (CUDA cores)", "mma": "float16 (tensor cores)"}),
    },
    answer=orders,
    columns=ORDERS,
    rows=(
        ("total", "bytes moved", "bytes"),
        ("inputs", "loads of Q, K and V", "bytes"),
        ("again", "loads of O, l and m", "bytes"),
        ("written", "stores of O, l, m and L", "bytes"),
        ("visited", "tiles of S computed", "count"),
        ("blocks", "thread blocks", "count"),
    ),
    note="The panel shows the forward pass of one head. S = Q Kᵀ are the scores. m is the largest "
    "score of a row so far, l is the sum of the exponentials, and L = m + log l. K2 is tile 2 of "
    "K. A step moves one tile, or O, l and m of one row tile together. At each step, both sides "
    "have moved about the same number of bytes. The thread blocks of FA-2 run at the same time on "
    "a GPU; the page shows them one after the other, in the order of the loop in the code. FA-1's "
    "kernel loads the next tile of Q before it stores O of this one. In float16, FA-1 keeps O in "
    "memory as a float32 sum until the last pass. With a window, FA-1 first stores O = 0, l = 0 "
    "and m = -inf for all rows.",
)  # fmt: skip


# --- the softmax of one row --------------------------------------------------------------------


@cache
def examples() -> dict[str, worked.Rows]:
    """Return the examples of ``python -m fa_numba trace``, and two further examples, by name."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, 32, 8))
    large = [3.0, 1.0, 98.0, 4.0, 97.0, 1.0, 3.0, 1.0]
    return worked.examples() | {
        "random": worked.Rows("32 random keys (standard normal), d = 8", Q[:1], K, V, 8, None),
        "large": _row_of(large, "scores for which e^x overflows in float32"),
    }


def _row_of(scores: list[float], title: str) -> worked.Rows:
    """Return an example in which one row has the given scores.

    V is the identity matrix, so that O is the softmax of the scores.
    """
    one, every = np.ones((1, len(scores))), np.eye(len(scores))
    return worked.Rows(f"{title}; V is the unit matrix", one, np.diag(scores), every, 4, 1.0)


def softmax(example: str, block: int, scores: str) -> Answer:
    """Return the second panel's answer: the softmax of one row, tile by tile and as a vector.

    `block` is the number of keys of a tile. If `block` is 0, the tile size of the example is used.
    If there are fewer keys than `block`, one tile contains all keys. `scores` is the text that a
    reader typed for the example "own". The answer contains the steps of both loop orders, and the
    results of the naive, safe and online softmax.
    """
    rows = own_scores(scores) if example == "own" else examples()[example]
    Q, K, V = rows.Q[:1], rows.K, rows.V
    block = min(block or rows.block, len(K))
    found: Answer = {"title": rows.title, "keys": len(K), "block": block}
    for name, forward in (("fa1", algorithms.fa1_forward), ("fa2", algorithms.fa2_forward)):
        seen: list[Any] = []
        out: Any = forward(Q, K, V, Br=1, Bc=block, scale=rows.scale, watch=seen.append)
        found[f"{name}.steps"] = [
            {
                "j": step.j,
                "keys": [step.columns.start, step.columns.stop],
                **{what: step.on_chip[at][0] for what, at in
                   (("S", "Sij"), ("P", "Pij"), ("m", "mi"), ("l", "li"), ("factor", "factor"),
                    ("O", "Oi"))},
                "moved": sum(np.size(x) for each in (step.read, step.written)
                             for at, x in each.items() if at in ("Oi", "li", "mi")),
            }
            for step in seen
        ]  # fmt: skip
        found[f"{name}.O"] = out[0][0]
    S = tuple(float(x) for step in found["fa2.steps"] for x in step["S"])
    for name in ("naive", "safe", "online"):
        P = _in_float32(S, name)
        found[f"{name}.P"] = P
        found[f"{name}.nan"] = int(np.isnan(P).sum())
        found[f"{name}.accesses"] = io_model.softmax(1, len(S), name).total
    return found


def constants() -> dict[str, Any]:
    """Return the examples and texts that the page's script needs, as plain JSON values."""
    rows = {
        name: {
            "title": each.title,
            # rounded, because the last digit depends on the machine
            "scores": np.round(each.Q[0] @ each.K.T * scale_of(each), 12).tolist(),
            "V": each.V.tolist(),
            "block": each.block,
        }
        for name, each in examples().items()
    }
    return {"examples": rows, "reasons": REASONS}


def scale_of(rows: worked.Rows) -> float:
    """Return the factor by which an example multiplies the scores."""
    return 1 / math.sqrt(rows.Q.shape[1]) if rows.scale is None else rows.scale


@lru_cache(64)
def _in_float32(scores: tuple[float, ...], name: str) -> np.ndarray:
    """Return the softmax of scores in float32, computed on the emulator by the named algorithm."""
    with device.using("emulator"), np.errstate(all="ignore"):
        return fa_numba.softmax(np.array([scores], np.float32), algorithm=name)[0]


def own_scores(text: str) -> worked.Rows:
    """Return the example with the scores that a reader typed.

    Raise ValueError if a score is not a number or too large, or if there are too many scores.
    """
    parts = text.replace(",", " ").split()
    if not 1 <= len(parts) <= MOST_SCORES:
        raise ValueError(f"scores must have from 1 to {MOST_SCORES} numbers, got {len(parts)}")
    values = []
    for part in parts:
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not abs(value) <= 1e4:
            raise ValueError(f"each score must be a number from -10000 to 10000, got {part!r}")
        values.append(value)
    return _row_of(values, "your scores")


SOFTMAX = Panel(
    name="softmax",
    title="Online softmax, tile by tile",
    question="How can a softmax be computed before all of its scores are known?",
    sentence="Keep the largest score so far, m, and the sum of the exponentials, l. When m grows, "
    "multiply the earlier results by the factor e^(old m - new m).",
    axes={
        "example": Axis("scores of one row", ("1", "2", "3", "random", "large"), words={
            "1": "8 keys, d = 4", "2": "3 1 2 4 5 1 3 1", "3": "1 2 3 4",
            "random": "32 random keys, d = 8", "large": "large scores: e^x overflows",
            "own": "your own scores"}),
        "block": Axis("keys in a tile (0: as in the example)", tuple(range(17)), 0, MOST_SCORES),
        "scores": Axis("your own scores", ("3 1 2 4 5 1 3 1",), text=True),
    },
    answer=softmax,
    columns=tuple((name, f"{name} softmax") for name in ("naive", "safe", "online")),
    rows=(("accesses", "elements loaded and stored", "count"),
          ("nan", "results that are not a number (NaN)", "count"),
          ("P", "softmax in float32", "words")),
    note="FA-1 divides O by l in every pass, because O goes back to memory. FA-2 divides once, at "
    "the end. FA-1 computes P relative to the largest score of its own tile; FA-2 relative to m. "
    "The last table is for the softmax of this row alone, as a vector in global memory. The naive "
    "softmax does not subtract m. The safe softmax reads the scores once more to find m.",
)  # fmt: skip


# --- a calculator of memory traffic ------------------------------------------------------------

# Groups of arrays that the page shows as one bar.
GROUPS = {
    "fwd": {"Q": ("Q",), "K and V": ("K", "V"), "O": ("O", "A"), "l, m and L": ("l", "m", "L"),
            "S and P": ("S", "P")},
    "bwd": {"Q, O, dQ and dO": ("Q", "O", "dQ", "dO", "A"),
            "K, V, dK and dV": ("K", "V", "dK", "dV"), "L and D": ("L", "D"),
            "S, P, dS and dP": ("S", "P", "dS", "dP")},
}  # fmt: skip
# The reason why an algorithm moves many bytes of a group of arrays.
REASONS = {
    "fwd": {
        "standard": {"S and P": "S and P have N x N elements each, and are stored and loaded again",
                     "K and V": "K and V are loaded for each row tile (Tr = {Tr})"},
        "fa1": {"O": "O is moved in each pass over the rows (Tc = {Tc} passes)",
                "Q": "Q is loaded in each pass over the rows (Tc = {Tc} passes)",
                "l, m and L": "l and m are moved in each pass over the rows (Tc = {Tc} passes)"},
        "fa2": {"K and V": "K and V are loaded for each row tile (Tr = {Tr})"},
    },
    "bwd": {
        "standard": {"S, P, dS and dP": "these N x N matrices are stored and loaded again",
                     "K, V, dK and dV": "K and V are loaded for each row tile (Tr = {Tr})",
                     "Q, O, dQ and dO": "Q and dO are loaded for each column tile (Tc = {Tc})"},
        "fa1": {"Q, O, dQ and dO": "they are moved in each pass over the rows (Tc = {Tc} passes)"},
        "fa2": {"Q, O, dQ and dO": "Q and dO are loaded for each column tile (Tc = {Tc}), "
                                   "and dQ is added up in memory"},
    },
}  # fmt: skip


def parts(accesses: io_model.Accesses, passes: str) -> dict[str, int]:
    """Return the bytes of loads and stores of each group of arrays, as {group: bytes}.

    `passes` is "fwd" or "bwd". The groups of a pass are in GROUPS, such as "K and V".
    """

    def bytes_of(names: tuple[str, ...]) -> int:
        loads, stores = (
            {name: n for name, n in counts.items() if name in names}
            for counts in (accesses.loads, accesses.stores)
        )
        return replace(accesses, loads=loads, stores=stores).bytes

    return {group: bytes_of(names) for group, names in GROUPS[passes].items()}


def largest(accesses: io_model.Accesses, problem: Problem, passes: str = "fwd") -> Answer:
    """Return the group of arrays with the most bytes, and its share of all bytes in percent."""
    found = parts(accesses, passes)
    group = max(found, key=found.__getitem__)
    return {"largest": group, "share": 100 * found[group] / accesses.bytes}


def tile_sizes(M: int, d: int, element: int) -> tuple[int, int]:
    """Return the tile sizes (Br, Bc) that line 1 of FA-1's Algorithm 1 gives.

    `M` is the on-chip memory in KiB, and `d` is the head dimension. `element` is the number of
    bytes of an element.
    """
    return paper_rule(M * 1024 // element, d)


def traffic(
    N: int, batch: int, heads: int, d: int, dtype: str, passes: str, causal: str, window: int,
    tiles: str, M: int, Br: int, Bc: int,
) -> Answer:  # fmt: skip
    """Return the third panel's answer: tiles, FLOPs, workspace and accesses of each algorithm.

    All numbers are closed forms. The arguments are the inputs of the panel, which the reader
    chooses. `passes` is "fwd" or "bwd". `M` is the on-chip memory in KiB. If `tiles` is "rule", the
    tile sizes follow from `M`, and the arguments `Br` and `Bc` are not used.
    """
    element = DTYPES[dtype].bytes
    if tiles == "rule":
        Br, Bc = tile_sizes(M, d, element)
    sides = (window, window) if window else (-1, -1)
    problem = Problem(
        batch, heads, heads, N, N, d, dtype=dtype, causal=causal == "yes", window=sides
    )
    sizes, suffix = SimpleNamespace(Br=Br, Bc=Bc), {"fwd": "", "bwd": "_backward"}[passes]
    found: Answer = {
        "Br": Br,
        "Bc": Bc,
        "Tr": -(-N // Br),
        "Tc": -(-N // Bc),
        "held": 2 * (Br + Bc) * d * element,
        "flops": io_model.flops(problem, passes),
    }
    for name, _ in ALGORITHMS:
        visited = io_model.tiles_visited(name, problem, sizes, passes=passes)
        accesses = getattr(io_model, f"{name}{suffix}")(problem, sizes)
        one = {
            "bytes": accesses.bytes,
            "loads": accesses.total_loads,
            "stores": accesses.total_stores,
            "visited": visited,
            "flops": 2 * PRODUCTS[passes] * visited * Br * Bc * d,
            "workspace": io_model.workspace(name, problem, passes=passes),
            "parts": list(parts(accesses, passes).values()),
            **largest(accesses, problem, passes),
        }
        found |= {f"{name}.{key}": value for key, value in one.items()}
    return found


_LENGTHS = tuple(n for k in range(7, 20) for n in (1 << k, 3 << (k - 1))) + (1 << 20,)
_TILE_ROWS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512, 768, 1024)
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
TRAFFIC = Panel(
    name="traffic",
    title="Memory traffic calculator",
    question="How many bytes does each algorithm move, and which matrix causes most of them?",
    sentence="Standard attention stores and loads the N x N matrices S and P. FA-1 loads and "
    "stores O for each column tile. FA-2 loads K and V for each row tile. Larger tiles move fewer "
    "bytes.",
    axes={
        "N": Axis("N, sequence length", _LENGTHS, 1, 1 << 20, first=4096),
        "batch": Axis("batch", _COUNTS, 1, 4096),
        "heads": Axis("heads", _COUNTS, 1, 4096, first=16),
        "d": Axis("d, head dimension", tuple(range(8, 257, 8)), 1, 256, first=64),
        "dtype": Axis("dtype", ("float16", "bfloat16", "float32")),
        "passes": Axis("pass", ("fwd", "bwd"), words={"fwd": "forward", "bwd": "backward"}),
        "causal": Axis(CAUSAL, YES_NO),
        "window": Axis(WINDOW, (0, *_LENGTHS), 0, 1 << 20, first=0),
        "tiles": Axis("tile sizes", ("own", "rule"), words={
            "own": "Br and Bc as set here", "rule": "from the on-chip memory"}),
        "Br": Axis("Br, rows of a Q tile", _TILE_ROWS, 1, 1024, first=128),
        "Bc": Axis("Bc, rows of a K or V tile", _TILE_ROWS, 1, 1024, first=64),
        "M": Axis("on-chip memory, KiB", (16, 32, 48, 64, 96, 100, 128, 164, 192, 228, 256),
                  1, 1024, first=228),
    },
    answer=traffic,
    columns=ALGORITHMS,
    rows=(
        ("bytes", "bytes loaded and stored", "bytes"),
        ("loads", "elements loaded", "count"),
        ("stores", "elements stored", "count"),
        ("visited", "tiles of S computed", "count"),
        ("flops", "FLOPs of these tiles", "count"),
        ("workspace", "additional memory (workspace)", "bytes"),
    ),
    note="S = Q Kᵀ are the scores, and P = softmax(S). The numbers are the loads and stores of "
    "global memory by the kernels of this package, in closed form. A cache may serve some of the "
    "loads. Tile sizes 'from the on-chip memory' follow the rule of FA-1's paper: Bc = ceil(M / "
    "4d) and Br = min(Bc, d), for M elements of on-chip memory. Any tile size is allowed here. "
    "The next panel shows tiles that fit a GPU.",
)  # fmt: skip


# --- the plan of a call on a GPU ---------------------------------------------------------------

UNIT_WORDS = {
    "simt": "simt: CUDA cores",
    "mma": "mma: tensor cores",
    "wgmma": "wgmma: Hopper's tensor cores",
}


# (pattern of a part of `Plan.why`, the text that the page shows instead)
PLAIN_WORDS = (
    (r"the newest unit that takes (\w+) and suits the call", r"the newest unit of this GPU for \1"),
    (r"not (\w+): ", r"\1 is not used, because "),
    (r"GPUs of compute capability [\d.]+ do not have it", "this GPU does not have it"),
    (r"its kernels do not support the \w+ pass of algorithm 'standard'",
     "it has no kernels of standard attention"),
    (r"'auto' uses it only for fa2 or float32 in planes, with warp_partition='rows'",
     "FA-1 uses it only if the call names it"),
    (r"the fastest tiles measured on a GPU of compute capability 9.0 \(tuned.csv\)",
     "the fastest of several sizes, measured on an H200"),
    (r"tiles.csv has ([\d x]+) for head_dim <= (\d+)(?:, case '[^']*')? "
     r"\((.*?)(?: \(\w{7}\))?\)(?=;|$)",
     r"\1 is the choice for d up to \2 (\3)"),
    (r"\(([\w ]+): (timed by hand|python -m experiments tune[^);]*)", r"(measured on \1"),
    (r"\(ptxas: no register spills\)", "(all values fit the registers)"),
    (r" \(ptxas\)", ""),
    (r"arXiv 2307.08691", "the paper of FA-2"),
    (r"arXiv 2205.14135", "the paper of FA-1"),
    (r"three need (\d+) rounds of ([\d.]+) time units, two need (\d+) rounds of 1",
     r"with three, the tiles take \1 rounds of \2 time units; with two, \3 rounds of 1 unit"),
    (r"Hopper's backward kernels support", "the backward kernels for Hopper support"),
)  # fmt: skip
BOUND_WORDS = {
    "compute": "computing",
    "L2": "bandwidth of the L2 cache",
    "DRAM": "bandwidth of DRAM",
    "latency": "too few thread blocks for all multiprocessors",
}


def plans(
    gpu: str, N: int, batch: int, heads: int, d: int, dtype: str, passes: str, causal: str
) -> Answer:
    """Return the last panel's answer: the plan of each algorithm on a GPU.

    The answer also contains the shortest possible time of each plan, and what limits this time.
    """
    found: Answer = {}
    sheet, shape = bounds.DEVICES[gpu], (batch, heads, N, d)
    options: dict[str, Any] = {"dtype": dtype, "passes": passes, "causal": causal == "yes"}
    for name, _ in ALGORITHMS:
        try:
            with sheet.planning():
                plan = fa_numba.plan(shape, shape, algorithm=name, **options)
            one = dict(_plan(plan, sheet))
        except ValueError as error:
            one = {"refused": str(error)}
        found |= {f"{name}.{key}": value for key, value in one.items()}
    return found


def _plan(plan: fa_numba.Plan, gpu: bounds.Device) -> Iterator[tuple[str, Any]]:
    """Yield the facts of one plan that the last panel shows, as (key, value)."""
    expected = bounds.expected(plan, gpu)
    # The kernel with the most shared memory computes the matrix products.
    both = zip(plan.kernels, expected.occupancies, strict=True)
    kernel, blocks = max(both, key=lambda each: each[0].shared_bytes)
    yield "bytes", plan.accesses.bytes
    yield "dram", expected.dram.bytes
    yield "served", "yes" if expected.dram.served else "no"
    yield "workspace", plan.workspace_bytes
    yield "floor", None if expected.floor is None else 1e6 * expected.floor
    yield "bound", BOUND_WORDS.get(expected.bound, expected.bound)
    yield "unit", UNIT_WORDS[plan.unit]
    yield "why_unit", in_plain_words(plan.why["unit"])
    yield "tiles", f"{plan.tiles.Br} x {plan.tiles.Bc}"
    yield "why_tiles", in_plain_words(plan.why.get("tiles"))
    yield "grid", " x ".join(map(str, kernel.grid))
    yield "splits", max(plan.kv_splits, plan.group_splits)
    yield "threads", kernel.threads
    yield "shared", kernel.shared_bytes
    yield "blocks", f"{blocks} (limited by {blocks.limit})"
    yield "busy", 100 * expected.busy


def in_plain_words(why: str | None) -> str | None:
    """Return a reason from `Plan.why` in the words of the page; None if there is no reason."""
    if why is None:
        return None
    for pattern, words in PLAIN_WORDS:
        why = re.sub(pattern, words, why)
    return why


PLAN = Panel(
    name="plan",
    title="Plan of a call on a GPU",
    question="What does this package run on a GPU, and how long does it take at least?",
    sentence="The plan chooses the unit, the tiles and the number of thread blocks for the GPU. "
    "Data that stays in the L2 cache is not read from DRAM again.",
    axes={
        "gpu": Axis(
            "GPU", ("A100", "H100", "H200", "RTX 4090"), first="H200",
            words={name: name for name in bounds.DEVICES},
        ),
        "N": Axis("N, sequence length", (512, 2048, 4096, 8192, 32768), 1, 1 << 20, first=8192),
        "batch": Axis("batch", (1, 8), 1, 4096),
        "heads": Axis("heads", (8, 64), 1, 4096),
        "d": Axis("d, head dimension", (64, 128), 1, 256),
        "dtype": Axis("dtype", ("float16", "float32")),
        "passes": Axis("pass", ("fwd", "bwd"), words={"fwd": "forward", "bwd": "backward"}),
        "causal": Axis(CAUSAL, YES_NO),
    },
    answer=plans,
    columns=ALGORITHMS,
    rows=(
        ("bytes", "bytes loaded and stored", "bytes"),
        ("dram", "bytes that reach DRAM, estimated", "bytes"),
        ("served", "the L2 cache serves repeated loads", "words"),
        ("workspace", "additional memory (workspace)", "bytes"),
        ("floor", "shortest possible time, µs", "number"),
        ("bound", "what limits this time", "words"),
        ("unit", "unit that multiplies matrices", "words"),
        ("why_unit", "why this unit", "words"),
        ("tiles", "tiles, Br x Bc", "words"),
        ("why_tiles", "why these tiles", "words"),
        ("grid", "grid of thread blocks", "words"),
        ("splits", "thread blocks that share the work of a tile", "count"),
        ("threads", "threads of a thread block", "count"),
        ("shared", "shared memory of a thread block", "bytes"),
        ("blocks", "thread blocks that a multiprocessor holds", "words"),
        ("busy", "multiprocessors that have work, %", "number"),
    ),
    note="Nothing in this panel is measured. The bytes are closed forms, the bytes that reach DRAM "
    "follow a rule of thumb, and the times follow from data sheets. A unit is a kind of "
    "instruction that multiplies matrices. On Hopper (H100, H200) some warpgroups load tiles, and "
    "the others, called consumers, compute. This panel has the listed values only: "
    "python -m fa_numba plan explains the plan of any call.",
)  # fmt: skip
