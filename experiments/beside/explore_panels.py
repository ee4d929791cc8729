"""What the page's panels answer. Every number is from the package's own functions."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache, partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np

import fa_numba
from experiments import explore
from fa_numba import algorithms, bounds, device, io_model
from fa_numba.bounds.roofline import PRODUCTS
from fa_numba.commands import trace as worked

from ..lab.measure.moves import Trace, passes, steps
from . import typed_mask
from .panels import Answer, Axis, Panel

ORDERS = (("fa1", "FA-1 (K/V outer)"), ("fa2", "FA-2 (Q outer)"))
ALGORITHMS = (("standard", "standard attention"), *ORDERS)
YES_NO = ("no", "yes")
MOST_SCORES = 64


def text_of(algorithm: str) -> list[tuple[str, list[int]]]:
    """Return the lines of an algorithm in NumPy, each with the paper's lines that it carries out.

    The statements that call `watch` are left out.
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


def order(trace: Trace, plan: fa_numba.Plan) -> Answer:
    """Return the answer for one loop order: steps, bytes, tiles and grid."""

    def moved(arrays: str, kind: str) -> int:
        return sum(move.bytes for move in trace.select(tuple(arrays), kind))

    return {
        **steps(trace),
        "total": trace.bytes,
        "model": plan.accesses.bytes,
        "inputs": moved("QKV", "load"),
        "again": moved("Olm", "load"),
        "written": moved("OlmL", "store"),
        "visited": len({(v.i, v.j) for v in passes(trace).visits}),
        "grid": " x ".join(map(str, max(plan.kernels, key=attrgetter("shared_bytes")).grid)),
    }


def orders(
    traces: Callable[..., Mapping[str, Trace]], N: int, d: int, Br: int, Bc: int,
    causal: str, window: int, unit: str, mask: str = "",
) -> Answer:  # fmt: skip
    """Return the answer of the first panel: both traces, and the numbers of tiles."""
    found: Answer = {"Tr": -(-N // Br), "Tc": -(-N // Bc)}
    problem, tiles = explore.problem_of(N, d, causal == "yes", window, unit), fa_numba.Tiles(Br, Bc)
    blocks, typed = typed_mask.blocks_of(mask, N, tiles), (mask,) if mask else ()
    for name, trace in traces(N, d, Br, Bc, causal, window, unit, *typed).items():
        one = order(trace, explore.planned(f"{name}-{unit}", problem, tiles, blocks))
        found |= {f"{name}.{key}": value for key, value in one.items()}
    return found


def orders_panel(traces: Callable[..., Mapping[str, Trace]], baked: Mapping[str, Any]) -> Panel:
    """Return the first panel.

    `traces` returns the traces of a state, or raises ValueError. `baked` has the values of each
    input for which the page has answers.
    """
    return Panel(
        name="orders",
        title="Both orders, side by side",
        question="Why did FlashAttention-2 exchange the two loops?",
        sentence="With K and V outside, every pass reads and writes O, l and m of all rows. "
        "With Q outside, O, l and m stay on the chip, and O is written once.",
        axes={
            "N": Axis("N, rows of Q, K and V", baked["N"], 1, 512),
            "d": Axis("d, head dimension", baked["d"], 1, 256),
            "Br": Axis("Br, rows of Q per tile", baked["Br"], 16, 256),
            "Bc": Axis("Bc, rows of K and V per tile", baked["Bc"], 16, 256),
            "causal": Axis("causal mask", YES_NO),
            "window": Axis("window, columns on either side (0: none)", baked["window"], 0, 512),
            "unit": Axis("unit", ("simt", "mma", "wgmma"),
                         words={"simt": "CUDA cores, fp32", "mma": "tensor cores (mma), fp16",
                                "wgmma": "Hopper's tensor cores (wgmma), fp16"}),
        },
        answer=partial(orders, traces),
        columns=ORDERS,
        rows=(
            ("total", "bytes moved, in the trace"),
            ("model", "bytes moved, by the closed form"),
            ("inputs", "bytes of Q, K and V loaded"),
            ("again", "bytes of O, l and m loaded again"),
            ("written", "bytes of O, l, m and L stored"),
            ("visited", "tiles of S visited"),
            ("grid", "grid, thread blocks"),
        ),
        note="The call has one head and was traced on the emulator. The emulator runs one thread "
        "block after the other; on a GPU, the blocks of a grid run at the same time. A step shows "
        "both orders at about the same number of moved bytes. In fp16, FA-1 stores O as a float32 "
        "sum between its passes. On Hopper's tensor cores, a row tile has 64, 128 or 192 rows, and "
        "FA-1 loads ahead: two tiles each of Q, K and V are then on the chip.",
    )  # fmt: skip


@cache
def examples() -> dict[str, worked.Rows]:
    """Return the worked examples of ``python -m fa_numba trace``, and two more."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, 32, 8))
    large = [3.0, 1.0, 98.0, 4.0, 97.0, 1.0, 3.0, 1.0]
    return worked.examples() | {
        "random": worked.Rows("32 random keys (standard normal), d = 8", Q[:1], K, V, 8, None),
        "large": _row_of(large, "scores for which e^x overflows in float32"),
    }


def _row_of(scores: list[float], title: str) -> worked.Rows:
    """Return an example with given scores.

    V is the unit matrix, so that O is the softmax of the scores.
    """
    one, every = np.ones((1, len(scores))), np.eye(len(scores))
    return worked.Rows(f"{title}; V is the unit matrix", one, np.diag(scores), every, 4, 1.0)


def softmax(example: str, block: int, scores: str) -> Answer:
    """Return one row's steps by both loop orders, and its softmax by three algorithms."""
    rows = own_scores(scores) if example == "own" else examples()[example]
    Q, K, V = rows.Q[:1], rows.K, rows.V
    block = block or rows.block
    if block > len(K):
        raise ValueError(f"block must be from 1 to {len(K)}, the number of keys, got {block}")
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


@lru_cache(64)
def _in_float32(scores: tuple[float, ...], name: str) -> np.ndarray:
    """Return the softmax of scores in float32, by the emulator."""
    with device.using("emulator"), np.errstate(all="ignore"):
        return fa_numba.softmax(np.array([scores], np.float32), algorithm=name)[0]


def own_scores(text: str) -> worked.Rows:
    """Return an example with the scores that a reader typed.

    Raise ValueError if they are not allowed.
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
    title="Online softmax, row by row",
    question="How can a softmax be computed before all of its scores are known?",
    sentence="Keep the largest score so far, m, and the sum l. When m grows, multiply the earlier "
    "results by e^(old m - new m).",
    axes={
        "example": Axis("row of scores", ("1", "2", "3", "random", "large"), words={
            "1": "worked example 1: four dimensions", "2": "worked example 2: 3 1 2 4 | 5 1 3 1",
            "3": "worked example 3: 1 2 | 3 4", "random": "32 random keys, d = 8",
            "large": "large scores: naive softmax overflows", "own": "your own scores"}),
        "block": Axis("keys per tile, 0: as in the example", (0, 1, 2, 4), 0, MOST_SCORES),
        "scores": Axis("your scores", ("3 1 2 4 5 1 3 1",), text=True),
    },
    answer=softmax,
    columns=tuple((name, f"{name} softmax") for name in ("naive", "safe", "online")),
    rows=(("accesses", "accesses to global memory, elements"),
          ("nan", "elements of the result that are NaN"), ("P", "softmax in float32")),
    note="FA-1 divides O by l in every pass, because O leaves the chip. FA-2 keeps O undivided and "
    "divides once, at the end. P of FA-1 is relative to the largest score of its own tile. The "
    "steps are computed by algorithms.py in float64. The three softmaxes run on the emulator in "
    "float32.",
)  # fmt: skip


def tiles(n: int, d: int, Br: int, Bc: int, causal: str, window: int) -> Answer:
    """Return tiles, FLOPs, workspace and accesses of each algorithm, in closed form."""
    problem = explore.problem_of(n, d, causal == "yes", window, "mma")
    sizes = SimpleNamespace(Br=Br, Bc=Bc)
    found: Answer = {}
    for name, _ in ALGORITHMS:
        visited = io_model.tiles_visited(name, problem, sizes)
        accesses = getattr(io_model, name)(problem, sizes)
        one = {
            "visited": visited,
            "flops": 2 * PRODUCTS["fwd"] * visited * Br * Bc * d,
            "workspace": io_model.workspace(name, problem),
            "loads": accesses.total_loads,
            "stores": accesses.total_stores,
            "bytes": accesses.bytes,
        }
        found |= {f"{name}.{key}": value for key, value in one.items()}
    return found | {
        "all": -(-n // Br) * -(-n // Bc),
        "scores": n * n,
        "flops": io_model.flops(problem),
    }


TILES = Panel(
    name="tiles",
    title="Tile estimator",
    question="How many tiles does a call have, and what does skipping save?",
    sentence="S is cut into tiles. FA-1 and FA-2 never visit a tile that the mask hides "
    "completely. Standard attention stores every element of S.",
    axes={
        "n": Axis(
            "N, rows of Q, K and V", (512, 1024, 2048, 4096, 8192, 16384), 1, 1 << 20, first=4096
        ),
        "d": Axis("d, head dimension", (64, 128), 1, 256),
        "Br": Axis("Br, rows of Q per tile", (32, 64, 128, 256), 1, 1024, first=128),
        "Bc": Axis("Bc, rows of K and V per tile", (32, 64, 128, 256), 1, 1024, first=64),
        "causal": Axis("causal mask", YES_NO),
        "window": Axis("window, columns on either side (0: none)", (0, 256, 1024), 0, 1 << 20),
    },
    answer=tiles,
    columns=ALGORITHMS,
    rows=(
        ("visited", "tiles of S visited"),
        ("flops", "FLOPs of these tiles"),
        ("workspace", "workspace, bytes"),
        ("loads", "elements loaded"),
        ("stores", "elements stored"),
        ("bytes", "bytes accessed"),
    ),
    note="One head, forward, 16 bits. All numbers are exact closed forms. Every tile size is "
    "allowed, also if it fits on no GPU. The next panel shows tiles that fit.",
)


def plans(
    gpu: str, T: int, batch: int, heads: int, d: int, dtype: str, passes: str, causal: str
) -> Answer:
    """Return the plan of each algorithm on a GPU, and lower limits of the plan's time."""
    found: Answer = {}
    sheet, shape = bounds.DEVICES[gpu], (batch, heads, T, d)
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
    """Yield the facts of a plan by key."""
    expected = bounds.expected(plan, gpu)
    # Of the kernel with the largest tiles, which has the products.
    both = zip(plan.kernels, expected.occupancies, strict=True)
    kernel, blocks = max(both, key=lambda each: each[0].shared_bytes)
    yield "unit", plan.unit
    yield "tiles", f"{plan.tiles.Br} x {plan.tiles.Bc}"
    yield "grid", " x ".join(map(str, kernel.grid))
    yield "splits", max(plan.kv_splits, plan.group_splits)
    yield "threads", kernel.threads
    yield "shared", kernel.shared_bytes
    yield "blocks", str(blocks)
    yield "limit", blocks.limit
    yield "busy", 100 * expected.busy
    yield "bytes", plan.accesses.bytes
    yield "dram", expected.dram.bytes
    yield "served", "yes" if expected.dram.served else "no"
    yield "workspace", plan.workspace_bytes
    yield "floor", None if expected.floor is None else 1e6 * expected.floor
    yield "bound", expected.bound
    for what in ("unit", "tiles", "kv_splits", "group_splits"):
        yield f"why_{what}", plan.why.get(what)


PLAN = Panel(
    name="plan",
    title="Plan and traffic on your GPU",
    question="What would run on your GPU, how many bytes would it move, and why?",
    sentence="The plan chooses the unit, the tiles and the grid for the GPU. Data that stays in "
    "the L2 cache is not read from DRAM again.",
    axes={
        "gpu": Axis(
            "GPU", ("A100", "H100", "H200", "RTX 4090"), first="H200",
            words={name: name for name in bounds.DEVICES},
        ),
        "T": Axis("N, sequence length", (512, 2048, 8192, 32768), 1, 1 << 20, first=8192),
        "batch": Axis("batch", (1, 8), 1, 4096),
        "heads": Axis("heads", (8, 64), 1, 4096),
        "d": Axis("d, head dimension", (64, 128), 1, 256),
        "dtype": Axis("dtype", ("float16", "float32")),
        "passes": Axis("pass", ("fwd", "bwd"), words={"fwd": "forward", "bwd": "backward"}),
        "causal": Axis("causal mask", YES_NO),
    },
    answer=plans,
    columns=ALGORITHMS,
    rows=(
        ("bytes", "bytes accessed in global memory"),
        ("dram", "DRAM bytes, estimated"),
        ("served", "data that is read again fits into half of L2"),
        ("workspace", "workspace, bytes"),
        ("floor", "shortest possible time, µs"),
        ("bound", "what limits this time"),
        ("unit", "unit"),
        ("tiles", "tiles, Br x Bc"),
        ("grid", "grid, thread blocks"),
        ("splits", "key splits or group splits"),
        ("threads", "threads per thread block"),
        ("shared", "shared memory per thread block, bytes"),
        ("blocks", "thread blocks per multiprocessor"),
        ("limit", "what limits them"),
        ("busy", "busy multiprocessors, %"),
        ("why_unit", "why this unit"),
        ("why_tiles", "why these tiles"),
        ("why_kv_splits", "why these key splits (forward)"),
        ("why_group_splits", "why these group splits (backward)"),
    ),
    note="Nothing in this panel is measured. Accesses are exact closed forms. DRAM bytes follow a "
    "rule of thumb. Times follow from data sheets.",
)  # fmt: skip
