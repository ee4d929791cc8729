"""Random functions of a caller, with every syntax that is allowed, against float64.

Values and derivatives of what kernels execute are compared with the function itself. Derivatives
are compared with differences of the fourth order, away from kinks and steps. Python executes the
texts of most functions; the emulator executes a few on each unit.

FA_NUMBA_DRAWS=10 draws ten times as many functions. The tests marked slow run the other order of
each unit on the emulator.
"""

import itertools
import math
import os
import random

import numpy as np
import pytest
import random_functions
from backward_helpers import check_gradients, random_gradients
from random_functions import BATCH, COLUMNS, HEADS, ROWS, Executed, differences, exact, plain

import fa_numba
from fa_numba import Tiles

MORE = float(os.environ.get("FA_NUMBA_DRAWS", "1"))
VALUES = random_functions.captured_values()
BEYOND = ((1000, 2000), (2000, 1000), (12, 20), (15, 0), (0, 25))
LARGE = 1e6  # above, a difference quotient says nothing


def seeds(count):
    return range(round(count * MORE))


def close(found, wanted, error=0.0):
    return abs(found - wanted) <= error + 1e-9 * (1 + abs(wanted))


def places_of(rng, count):
    """Return places (score, b, h, i, j)."""
    return [
        (
            rng.uniform(-2.5, 2.5),
            rng.randrange(BATCH),
            rng.randrange(HEADS),
            rng.randrange(ROWS),
            rng.randrange(COLUMNS),
        )
        for _ in range(count)
    ]


def value_at(function, place):
    """Return the value, and None where Python raises or it is too large."""
    try:
        value = function(*place)
    except (ArithmeticError, ValueError):
        return None
    return value if abs(value) < LARGE else None


def check_score_mod(seed, count=4, text_of=None):
    """Compare what kernels have of the function of this seed with the function itself.

    Return how many values, and how many slopes by the score and by elements, could be compared.
    """
    text = text_of(seed) if text_of else random_functions.text_of("score_mod", seed)
    function = random_functions.function_of(text, VALUES)
    executed, itself = Executed("score_mod", function), exact(function, plain(VALUES))
    mod, rng = executed.mod, random.Random(seed)
    scale, unit = rng.choice([1.0, 0.25]), rng.choice([1.0, math.log2(math.e)])
    value, slope = (executed.of_score(x, scale, unit) for x in (mod.value, mod.slope))
    both = executed.of_score(mod.both, scale, unit)
    places = places_of(rng, count)
    values = slopes = 0
    for place in places:
        wanted = value_at(itself, place)
        if wanted is None:
            continue
        values += 1
        found = value(*place), both(*place)[0]
        assert all(close(x, wanted * unit) for x in found), (text, place, found, wanted * unit)
        by_differences = differences(lambda step, p=place: itself(p[0] + step, *p[1:]))
        if by_differences is None:
            continue
        slopes += 1
        found, (wanted, error) = (slope(*place), both(*place)[1]), by_differences
        assert all(close(x, wanted, error) for x in found), (text, place, found, wanted)
        assert not mod.adds or close(1.0, wanted, error), (text, place)
    if not mod.inside:  # it is called for rows and columns beyond the matrix
        for i, j in BEYOND:
            value(places[0][0], 1, 2, i, j), slope(places[0][0], 1, 2, i, j)
    elements = check_gradients_of_arrays(text, function, executed, rng) if mod.gradient else 0
    return values, slopes, elements


def check_gradients_of_arrays(text, function, executed, rng):
    """Compare the gradients of a sum of results by the elements that the function reads."""
    b, h = rng.randrange(BATCH), rng.randrange(HEADS)
    places = [(s, rng.uniform(-1, 1), b, h, i, j) for s, _, _, i, j in places_of(rng, 5)]
    places.sort(key=lambda place: place[4])  # neighbours, whose elements are the same ones at times
    values = plain(VALUES)
    itself = exact(function, values)
    arrays = [name for name, x in VALUES.items() if getattr(x, "dtype", None) == np.float32]
    read = {name: values[name].read for name in arrays}
    for s, _, *place in places:
        if value_at(itself, (s, *place)) is None:
            return 0
    found, compared = executed.gradients(places), 0
    for name in arrays:
        for element in [*read[name]]:

            def total(step, name=name, element=element):
                values[name].changed = {element: step}
                return sum(ds * itself(s, *place) for s, ds, *place in places)

            by_differences = differences(total)
            values[name].changed = {}
            if by_differences is None:
                continue
            compared += 1
            wanted, error = by_differences
            assert close(found[name][element], wanted, error), (text, places, name, element)
    unread = [(name, x) for name, x in found.items() if not read[name] and x.any()]
    assert not unread, (text, unread)
    return compared


def check_mask_mod(seed):
    """Compare a mask with the function of this seed at every place of a tile."""
    text = random_functions.text_of("mask_mod", seed)
    function = random_functions.function_of(text, VALUES)
    executed, itself = Executed("mask_mod", function), exact(function, plain(VALUES))
    mask = executed.mask()
    for place in itertools.product([0, 1], [0, 2], range(0, ROWS, 2), range(0, COLUMNS, 2)):
        wanted = value_at(itself, place)
        if wanted is not None:
            assert bool(mask(*place)) is bool(wanted) is mask(*place), (text, place)
    if not executed.mod.inside:
        for place in BEYOND:
            mask(1, 2, *place)


def test_values_and_slopes_and_gradients_of_arrays():
    made = np.array([check_score_mod(seed) for seed in seeds(56)])
    values, slopes, elements = made.sum(axis=0) / len(made)
    assert values > 3.5 and slopes > 3 and elements > 1, (values, slopes, elements)


def test_products_with_shared_factors():
    for seed in seeds(40):
        check_score_mod(seed, 2, random_functions.product_text_of)


def test_masks():
    for seed in seeds(20):
        check_mask_mod(seed)


def check_steady(seed):
    """Check that a slope which is said to be finite for every finite score is finite."""
    text = random_functions.bounded_text_of(seed)
    executed = Executed("score_mod", random_functions.function_of(text, LARGE_VALUES), single=True)
    if executed.mod.steady:
        slope = executed.of_score(executed.mod.slope, np.float32(1), np.float32(1))
        slopes = [slope(s, 0, 0, i, 1) for s in EXTREME for i in (0, 2)]
        assert np.isfinite(slopes).all(), (text, slopes)
    return executed.mod.steady


LARGEST = np.finfo(np.float32).max
EXTREME = np.float32([-LARGEST, -1e20, -1.0, 0.0, 1e-30, 2.0, 1e15, LARGEST])
LARGE_VALUES = VALUES | {"big": 1e9, "huge": np.float32([LARGEST, 0.0, -LARGEST])}


def test_slopes_that_are_finite_for_every_finite_score():
    with np.errstate(all="ignore"):
        steady = [check_steady(seed) for seed in seeds(70)]
    assert 0.1 < np.mean(steady) < 0.9, np.mean(steady)


# --- on the emulator -----------------------------------------------------------------------------


TILES = {"simt": Tiles(8, 16), "mma": Tiles(16, 16), "wgmma": None}


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("unit", ["simt", "mma", "wgmma"])
@pytest.mark.parametrize("way", ["fa1", "fa2"])
def test_on_the_emulator(way, unit):
    """A smooth function and a mask, in both passes; on `mma` and `wgmma` in float16."""
    for seed in seeds(1):
        check_emulated(way, unit, 10 * seed + len(unit) + (way == "fa2"))


def check_emulated(way, unit, seed):
    text = random_functions.text_of("score_mod", f"emulated {seed}", 2, True, smooth=True)
    mask = random_functions.text_of("mask_mod", f"emulated {seed}", depth=2)
    score_mod, mask_mod = (random_functions.function_of(x, VALUES) for x in (text, mask))
    arrays = random_gradients(BATCH, 2, 1, ROWS, COLUMNS, 8)
    if unit != "simt":
        arrays = [x.astype(np.float16) for x in arrays]
    options = {"unit": unit, "score_mod": score_mod}
    if TILES[unit]:
        options["tiles"] = TILES[unit]
    if TILES[unit] and seed % 2:
        shape = BATCH, 2, ROWS, COLUMNS
        options["block_mask"] = fa_numba.create_block_mask(mask_mod, *shape, tiles=TILES[unit])
        del options["tiles"]
    else:
        options["mask_mod"] = mask_mod
    check_gradients("emulator", way, *arrays, **options)
