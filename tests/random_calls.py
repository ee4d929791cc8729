"""Random calls held against float64: python tests/random_calls.py [--device gpu] [--seconds S]

A kind of call (pass, algorithm, unit, dtype, head dimension, options, tiles) follows from the seed
and its number, and is called at several lengths, so that a kernel compiled once is used often. The
calls are those of the tests: between guard bands, counts equal to the closed form on the emulator,
results within the bounds that float64 and the unfused computation give. What fails is printed with
its number; `--only NUMBER` makes it again. Each kind is told on stderr as it
begins. Exits with 1 where one failed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import fresh_memory
import helpers
import numpy as np
import rooms  # noqa: F401
from backward_helpers import WAYS, as_plan, asks_for_dcaptured, check_gradients, with_dlse
from helpers import ALGORITHMS, ml_dtypes, numpy_dtype
from options_helpers import DRAWS, inputs
from test_precision import SPLIT
from test_prefix import LIES, call_of
from test_prefix import check as check_prefix
from test_prefix import plan_of as plan_with_prefix

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices
from fa_numba.host import placement

UNITS = ("simt", "mma", "wgmma")
HEAD_DIMS = (8, 24, 32, 40, 64, 64, 72, 80, 96, 128, 128, 136, 192, 256)
LENGTHS = (1, 2, 5, 16, 17, 63, 64, 65, 100, 128, 129, 150, 192, 200, 257)
LONG = (300, 512, 777, 1025)  # on a GPU
HALVES = ("float16", "float16", "bfloat16")[: 3 if ml_dtypes else 2]
ROWS, COLUMNS = (16, 32, 64, 128, 192), (16, 32, 48, 64, 80, 96, 112, 128, 160)
# Block masks go with tiles that are chosen.
OPTIONS = tuple(name for name in DRAWS if name != "block_mask")


def draw_scale(rng: np.random.Generator, shape: tuple[int, ...], tiles: Tiles) -> dict[str, float]:
    """Return a scale, among them 0 and a negative one."""
    return {"scale": float(rng.choice([0.0, -0.5, 0.1, 0.5]))}


def draw_attn_mask(
    rng: np.random.Generator, shape: tuple[int, ...], tiles: Tiles
) -> dict[str, np.ndarray]:
    """Return a mask, or numbers to add to the scores. Some axes are broadcast."""
    B, Hq, _, Nq, Nk, _ = shape
    sizes = [n if rng.random() < 0.7 else 1 for n in (B, Hq, Nq, Nk)]
    if rng.random() < 0.5:
        return {"attn_mask": rng.random(sizes) < 0.7}
    return {"attn_mask": rng.standard_normal(sizes, np.float32)}


def draw_score_mod_grad(
    rng: np.random.Generator, shape: tuple[int, ...], tiles: Tiles
) -> dict[str, Callable]:
    """Return a function of the score and the derivative of the function."""
    cap = float(rng.uniform(1, 4))
    return {
        "score_mod": lambda s, b, h, i, j: cap * math.tanh(s / cap),
        "score_mod_grad": lambda s, b, h, i, j: 1 - math.tanh(s / cap) ** 2,
    }


def draw_check_table(
    rng: np.random.Generator, shape: tuple[int, ...], tiles: Tiles
) -> dict[str, bool]:
    """Return whether a block table is checked."""
    return {"check_table": bool(rng.random() < 0.5)}


# Options that only these calls draw, each in a tenth of the kinds.
MORE_DRAWS = {
    "scale": draw_scale,
    "attn_mask": draw_attn_mask,
    "score_mod_grad": draw_score_mod_grad,
    "check_table": draw_check_table,
}


# What no plan can be made of or the emulator finds too large, and what float64 says is wrong.
REFUSED, WRONG = "refused", "wrong"


@dataclass(frozen=True)
class Kind:
    """What is compiled: everything of a call but its lengths, batch and values."""

    passes: str
    way: str
    dtype: str
    head_dim: int
    group: int
    options: tuple[str, ...]
    chosen: dict[str, Any]
    dlse: bool
    prefix: str = ""  # of fa2 forward, how the arrays of a call with one lie
    head_dim_v: int | None = None

    def drawn(self, rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, Any]:
        """The options of a call of this shape (B, Hq, Hk, Nq, Nk, d)."""
        given = dict(self.chosen)
        for name in self.options:
            draw = draw_created if name == "created" else (DRAWS | MORE_DRAWS)[name]
            given |= draw(rng, shape, given.get("tiles", Tiles(64, 64)))
        return given


def draw_created(
    rng: np.random.Generator, shape: tuple[int, ...], tiles: Tiles
) -> dict[str, fa_numba.BlockMask]:
    """What ``create_block_mask`` makes: of a function that any call might have, or of one alike in
    all batch entries, or in all heads too.
    """
    B, Hq, _, Nq, Nk, _ = shape
    far, head = rng.integers([-Nk, 0], [Nq + Nk + 1, Hq]).tolist()
    of = [
        (B, Hq, DRAWS["mask_mod"](rng, shape, tiles)["mask_mod"]),
        (1, 1, lambda b, h, i, j: i + far >= j),
        (1, Hq, lambda b, h, i, j: h != head or abs(i - j) * 2 < far),
    ]
    batch, heads, function = of[rng.integers(3)]
    size = [{"tiles": tiles}, {}, {"block_size": (24, 40)}][rng.integers(3)]
    made = fa_numba.create_block_mask(function, batch, heads, Nq, Nk, **size)
    return {"block_mask": made}


def kind_of(seed: int, number: int) -> Kind:
    rng = np.random.default_rng([seed, number])

    def one(values: Sequence) -> Any:
        return values[rng.integers(len(values))]

    unit = one((*UNITS, "wgmma", "auto"))
    passes, group = one(("fwd", "bwd")), one((1, 1, 2, 4))
    way = one(("fa2", "fa2", *(WAYS if passes == "bwd" else ALGORITHMS)))
    chosen: dict[str, Any] = {} if unit == "auto" else {"unit": unit}
    if rng.random() < 0.5:
        stages = one((1, 2, 3, 4)) if (way, passes, unit) == ("fa2", "fwd", "wgmma") else 1
        chosen["tiles"] = Tiles(one(ROWS), one(COLUMNS), stages=stages)
    if way == "fa1":
        chosen["query_splits"] = one((1, 1, 2))
    elif way == "fa2" and passes == "fwd":
        chosen["kv_splits"] = one(("auto", "auto", 2, 3))
    elif unit == "wgmma" and passes == "bwd" and way != "standard":
        chosen["group_splits"] = one((1, group, "auto"))
    options = {name for name in OPTIONS if rng.random() < 0.2}
    if "tiles" in chosen and rng.random() < 0.2:  # which its blocks have
        options.add("block_mask")
    if "packed" in options:
        options.discard("lengths")
    if "tiles" in chosen and rng.random() < 0.2:  # which have a mask_mod
        options = options - {"block_mask", "mask_mod"} | {"created"}
    dtype = "float32" if unit == "simt" else one(HALVES)
    if "bias" in options and (passes, unit) == ("bwd", "wgmma"):
        chosen["return_dbias"] = False  # mma's
    d, dlse = one(HEAD_DIMS), passes == "bwd" and rng.random() < 0.3
    prefix = ""
    if (passes, way) == ("fwd", "fa2") and rng.random() < 0.3:
        prefix, options = one(LIES), options & {"causal", "softcap"}
    d_v = one(HEAD_DIMS) if rng.random() < 0.25 else None
    planes = way == "fa2" or (way, passes) == ("fa1", "fwd")
    if planes and unit == "simt" and rng.random() < 0.5:
        on = "wgmma" if rng.random() < 0.4 else "mma"
        chosen |= {"unit": on, "precision": one(SPLIT)}
    options |= more_options(rng, options, prefix)
    return Kind(passes, way, dtype, d, group, tuple(sorted(options)), chosen, dlse, prefix, d_v)


def more_options(rng: np.random.Generator, options: set[str], prefix: str) -> set[str]:
    """Return names from MORE_DRAWS that go with these options."""
    more = {name for name in MORE_DRAWS if rng.random() < 0.1}
    if not prefix.endswith("pages"):
        more.discard("check_table")
    if prefix:
        more &= {"scale", "check_table"}
    if "bias" in options:
        more.discard("attn_mask")
    if "score_mod" in options:
        more.discard("score_mod_grad")
    return more


def call(kind: Kind, seed: list[int], device: str) -> str:
    """One call of a kind; the unit that it ran on. Raises AssertionError where it is wrong."""
    rng = np.random.default_rng(seed)
    fresh_memory.begin(repr(seed))
    lengths = (*LENGTHS, *LONG) if device == "gpu" else LENGTHS
    Nq, Nk = rng.choice(lengths, 2).tolist()
    heads, batch = rng.integers(1, 3, 2).tolist()
    shape = (batch, kind.group * heads, heads, Nq, Nk, kind.head_dim)
    if kind.prefix:
        return call_with_prefix(kind, rng, shape, device)
    with devices.using(device):
        given = kind.drawn(rng, shape)
    arrays, options = inputs(shape, given, d_v=kind.head_dim_v)
    arrays = [x.astype(numpy_dtype(kind.dtype)) for x in arrays]
    if kind.dlse:
        options = with_dlse(arrays, options)
    if kind.passes == "bwd":
        asks = asks_for_dcaptured(kind.way, *arrays[1:3], options)
        options["return_dcaptured"] = asks and rng.random() < 0.7
    algorithm, own = WAYS[kind.way] if kind.passes == "bwd" else (kind.way, {})
    told = {"dtype": kind.dtype, "passes": kind.passes, "algorithm": algorithm, **own}
    try:
        with devices.using(device):
            shapes = [x.shape for x in arrays[1:]]
            planned = fa_numba.plan(*shapes, **told, **as_plan(options))
            placement.check_size(planned)
    except ValueError as error:
        out = np.zeros((*arrays[1].shape[:-1], arrays[3].shape[-1]), arrays[1].dtype)
        lse = np.zeros(out.shape[:-1] if out.ndim == 4 else out.shape[1::-1], np.float32)
        saved = (out, lse) if kind.passes == "bwd" else ()
        function = fa_numba.attention_backward if saved else fa_numba.attention
        given = {"algorithm": algorithm, **own, **options}
        return refused(device, error, function, *arrays[not saved :], *saved, **given)
    if kind.passes == "bwd":
        check_gradients(device, kind.way, *arrays, **options)
    else:
        helpers.check(device, algorithm, *arrays[1:], **options)
    return planned.unit


def refused(device: str, error: ValueError, function: Callable, *arrays: Any, **given: Any) -> str:
    """REFUSED, where the call says what its plan says, and before anything runs."""
    with devices.using(device), mock.patch.object(devices, "launch", None):
        try:
            function(*arrays, **given)
        except ValueError as own:
            if str(own) == str(error):
                return REFUSED
            raise AssertionError(
                f"refused with {str(own)!r}, its plan with {str(error)!r}"
            ) from own
    raise AssertionError(f"not refused, but its plan: {error}")


def call_with_prefix(
    kind: Kind, rng: np.random.Generator, shape: tuple[int, ...], device: str
) -> str:
    """``call`` where the sequences share a prefix."""
    options, lens = kind.drawn(rng, shape), rng.integers(0, np.add(shape[3:5], 1), (shape[0], 2))
    lens[0] = shape[3:5]
    if kind.prefix.startswith("packed") or rng.random() < 0.3:
        options["q_lens"] = lens[:, 0].tolist()
    if kind.prefix != "bhnd" or rng.random() < 0.5:
        options["kv_lens"] = lens[:, 1].tolist()
    shape += () if kind.head_dim_v is None else (kind.head_dim_v,)
    facts = kind.dtype, shape, int(rng.choice(LENGTHS)), kind.prefix, options
    arrays, prefix, given, _ = call_of(*facts)
    try:
        with devices.using(device):
            planned = plan_with_prefix(arrays, prefix, given)
            placement.check_size(planned)
    except ValueError as error:
        return refused(device, error, fa_numba.flash_attention_2, *arrays, **prefix, **given)
    return check_prefix(device, *facts).unit


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=("emulator", "gpu"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=4, help="calls of a kind")
    parser.add_argument("--first", type=int, default=0, help="the first kind's number")
    parser.add_argument("--only", type=int, help="the one kind's number")
    given = parser.parse_args(arguments)
    device = given.device or ("gpu" if devices.gpu_available() else "emulator")
    end = time.monotonic() + given.seconds
    numbers = itertools.count(given.first) if given.only is None else [given.only]
    found: Counter[str] = Counter()
    kinds = 0
    for number in numbers:
        kind = kind_of(given.seed, number)
        kinds += 1
        print(f"--seed {given.seed} --only {number}: {kind}", file=sys.stderr, flush=True)
        for n in range(given.each):
            if given.only is None and n and time.monotonic() > end:  # compiling takes seconds
                break
            try:
                found[call(kind, [given.seed, number, n], device)] += 1
            except Exception as error:
                found[WRONG] += 1
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                print(f"--seed {given.seed} --only {number}, call {n}: {kind}: {text}", flush=True)
        if time.monotonic() > end:
            break
    units = ", ".join(f"{found[u]} on {u}" for u in UNITS if found[u])
    calls = found.total() - found[REFUSED]
    told = f"({units}), {found[REFUSED]} refused, {found[WRONG]} wrong"
    print(f"{device}: {calls} calls of {kinds} kinds {told}")
    return int(found[WRONG] > 0)


if __name__ == "__main__":
    sys.exit(main())
