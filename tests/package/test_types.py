"""The signatures of public functions: one definition of each option, and what `help` shows.

`make lint` runs mypy over .ci/user_calls.py, which has right and wrong calls.
"""

import inspect
import re
from typing import get_args, get_overloads

import pytest

import fa_numba
from fa_numba import checks, ops, reference, typing
from fa_numba.choices import requests, units
from fa_numba.dtypes import PRECISIONS
from fa_numba.io_model import ALGORITHMS
from fa_numba.options import NAMES, AttentionOptions, PlanOptions

FORWARD = {
    "fa2": fa_numba.flash_attention_2,
    "fa1": fa_numba.flash_attention_1,
    "standard": fa_numba.standard_attention,
}
BACKWARD = {name: getattr(fa_numba, f"{f.__name__}_backward") for name, f in FORWARD.items()}
PUBLIC = [*FORWARD.values(), *BACKWARD.values(), fa_numba.attention, fa_numba.attention_backward]
PUBLIC += [fa_numba.plan, reference.attention, reference.attention_backward, reference.unfused]


def own(function):
    """The parameters of a signature besides the options, by name."""
    found = inspect.signature(function).parameters
    return {name: (p.annotation, p.default) for name, p in found.items() if name not in NAMES}


@pytest.mark.parametrize("function", PUBLIC)
def test_a_signature_has_each_option_with_its_type_and_default(function):
    found = inspect.signature(function).parameters
    options = PlanOptions if function is fa_numba.plan else AttentionOptions
    for name in NAMES:
        kind = options.__annotations__[name].__forward_arg__
        assert (found[name].annotation, found[name].default) == (kind, None)
        assert found[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert all(p.annotation is not p.empty for p in found.values())
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("function", PUBLIC)
def test_a_docstring_describes_the_parameters_of_the_signature(function):
    section = re.split(r"^[A-Z][\w ]*\n-{3,}$", inspect.getdoc(function), flags=re.M)[1]
    listed = re.findall(r"^(\w+) : ", section, re.M)
    assert sorted(listed) == sorted(inspect.signature(function).parameters)


@pytest.mark.parametrize("function", [*FORWARD.values(), reference.attention, reference.unfused])
def test_the_overloads_of_a_function_differ_in_return_lse_alone(function):
    hidden = function.__signature__
    del function.__signature__
    try:
        *fixed, last = (dict(inspect.signature(f).parameters) for f in get_overloads(function))
        assert last == dict(inspect.signature(function).parameters)
    finally:
        function.__signature__ = hidden
    for parameters, value in zip(fixed, ("Literal[False]", "Literal[True]"), strict=True):
        assert parameters.pop("return_lse").annotation == value
        assert parameters == {name: p for name, p in last.items() if name != "return_lse"}


@pytest.mark.parametrize(
    "function, others",
    [(fa_numba.attention, FORWARD), (fa_numba.attention_backward, BACKWARD)],
)
def test_attention_has_the_arguments_of_all_algorithms(function, others):
    wanted = {}
    for other in others.values():
        for name, parameter in own(other).items():
            assert wanted.setdefault(name, parameter) == parameter
    assert own(function) == wanted | {"algorithm": ("Algorithm", "fa2")}
    for each in get_overloads(function):
        assert {*inspect.signature(each).parameters} - {"options"} == own(function).keys()


def test_the_options_of_a_plan_are_those_of_attention_with_shapes_for_arrays():
    attention, plan = AttentionOptions.__annotations__, PlanOptions.__annotations__
    assert list(plan) == list(attention) == list(NAMES)
    differ = {n for n in NAMES if plan[n].__forward_arg__ != attention[n].__forward_arg__}
    scales = {"q_scale", "k_scale", "v_scale"}
    assert differ == {"bias", "attn_mask", "alibi_slopes", "sinks", "block_table"} | scales


def test_types_list_the_names_that_calls_take():
    for kind, names in (
        (typing.Algorithm, ALGORITHMS),
        (typing.UnitName, ("auto", *units.UNITS)),
        (typing.Passes, requests.PASSES),
        (typing.WarpPartition, requests.PARTITIONS),
        (typing.Layout, checks.LAYOUTS),
        (typing.Precision, PRECISIONS),
    ):
        assert sorted(get_args(kind)) == sorted(names)


def test_a_call_does_not_look_at_the_signature(monkeypatch):
    monkeypatch.setattr(inspect, "signature", None)
    monkeypatch.setattr(ops, "call_attention", lambda choices, arrays, options, *_: options)
    assert fa_numba.attention(1, 2, 3, causal=True, is_causal=True) == {
        "causal": True, "is_causal": True,
    }  # fmt: skip
