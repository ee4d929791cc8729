"""Every option of attention is drawn at random, explained in the option reference, and has a case
in both loop orders. An option that is added without one of these fails a test here.
"""

import importlib
import inspect
import re
from pathlib import Path

import numpy as np
import random_calls
import test_calls
import test_e4m3
from options_helpers import SMALL
from test_prefix import call_of

from fa_numba import AttentionOptions

PAGE = Path(__file__).resolve().parents[2] / "fa_numba" / "options.md"
OPTIONS = tuple(AttentionOptions.__annotations__)
SHAPE = (2, 2, 1, 11, 21, 8)  # B, Hq, Hk, Nq, Nk, d
# Each loop order: its name as an argument, and its function.
ORDERS = {"fa1": "\"fa1\"|'fa1'|flash_attention_1", "fa2": "\"fa2\"|'fa2'|flash_attention_2"}
# Options that the tables of test_calls do not have: a test with cases of the option.
ELSEWHERE = {
    "score_mod_grad": "test_mods.test_a_derivative_may_be_given",
    "attn_mask": "test_inputs.test_a_boolean_mask_is_a_bias_of_minus_infinity",
    "layout": "test_inputs.test_a_layout_changes_where_axes_lie_and_nothing_else",
    "precision": "test_precision.test_results_and_counts",
    "block_table": "test_pages.test_sequences_share_the_pages_of_a_prefix",
    **dict.fromkeys(test_e4m3.OPTIONS, "test_e4m3.test_results_and_counts"),
    "check_table": "test_append_kv.test_integers_on_a_gpu_are_read_when_they_are_to_be_checked",
}
# K and V in pages are read by the loop order "Q outer" only: test_pages tests that FA-1 refuses.
OF_FA2 = {"block_table", "check_table"}


def drawn():
    """Return the names of the options that the random calls give."""
    rng, names = np.random.default_rng(0), set()
    kinds = [random_calls.kind_of(0, number) for number in range(400)]
    for kind in kinds:
        names |= kind.chosen.keys()
    for name in {name for kind in kinds for name in kind.options} - {"created"}:
        draw = (random_calls.DRAWS | random_calls.MORE_DRAWS)[name]
        for _ in range(8):  # one draw of lengths is of queries, or of keys, or of both
            names |= draw(rng, SHAPE, SMALL).keys()
    names |= {x for number in range(40) for x in test_e4m3.random_call(0, number)[-1]}
    for lies in {kind.prefix for kind in kinds} - {""}:
        names |= call_of("float32", SHAPE, 5, lies, {})[2].keys()
    return names


def without_draw(options):
    return set(options) - drawn()


def without_entry(options):
    titles = re.findall(r"^#+ (.+)$", PAGE.read_text("utf-8"), re.M)
    return set(options) - {name for title in titles for name in re.findall(r"\w+", title)}


def without_case(options):
    """Return (option, loop order) for each option without a case in a loop order."""
    B, Hq, _, Nq, Nk, _ = SHAPE
    tables = [*test_calls.alone(B, Hq, Nq, Nk, SMALL).values()]
    tables += [given for _, given in test_calls.CALLS.values()]
    named = {name for given in tables for name in given}
    in_tables = {order for _, order in test_calls.WAYS}
    missing = {(name, order) for name in options for order in ORDERS}
    missing -= {(name, order) for name in named for order in in_tables}
    missing -= {(name, "fa1") for name in OF_FA2}
    for name, test in ELSEWHERE.items():
        module, _, function = test.partition(".")
        function = getattr(importlib.import_module(module), function)
        cases = [mark.args for mark in getattr(function, "pytestmark", ()) if mark.args]
        text = f"{inspect.getsource(function)} {cases}"
        if re.search(rf"\b{name}\b", text):
            missing -= {(name, x) for x, words in ORDERS.items() if re.search(words, text)}
    return missing


def test_every_option_has_a_random_draw():
    """Add a function to DRAWS in options_helpers, or to MORE_DRAWS in random_calls."""
    assert without_draw(OPTIONS) == set()


def test_every_option_has_an_entry_in_the_option_reference():
    assert without_entry(OPTIONS) == set()


def test_every_option_has_a_case_in_both_loop_orders():
    """Add a case to `alone` in test_calls, or a test to ELSEWHERE."""
    assert without_case(OPTIONS) == set()


def test_an_option_without_any_of_them_is_found():
    new = ["softcap", "colour"]
    assert without_draw(new) == without_entry(new) == {"colour"}
    assert without_case(new) == {("colour", "fa1"), ("colour", "fa2")}
