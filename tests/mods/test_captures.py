"""Numbers that are computed from captured numbers before a launch."""

import math
import warnings

from fa_numba.mods.captures import made_of


def test_a_number_that_is_infinite_shows_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made_of("float32(1.0) / options.score_mod_0", "score_mod", [0.0]) == math.inf
