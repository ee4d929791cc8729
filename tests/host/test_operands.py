"""Operands: arrays of a caller, the advice for a dtype that is not allowed, alignment."""

from types import SimpleNamespace

import numpy as np
import pytest

from fa_numba.dtypes import E4M3
from fa_numba.host import arrays, binding
from fa_numba.host.arrays import CAPTURED, HOST, MASKS, UNSCALED, operand

DTYPES = ("bool", "int8", "int32", "int64", "uint8", "float16", "float32", "float64", ">f4", ">i4")
OTHERS = ("complex64", "<U1", "datetime64[s]", "object")


@pytest.mark.parametrize("allowed", [("float32",), MASKS, CAPTURED, ("int32",), UNSCALED], ids=str)
@pytest.mark.parametrize("name", ["x", "x in score_mod, a lambda,", "out"])
@pytest.mark.parametrize("dtype", [*DTYPES, *OTHERS])
def test_the_advice_for_a_wrong_dtype_converts_the_array(dtype, name, allowed):
    """The last words of the message are code, which is run."""
    x = np.zeros(3, dtype)
    if dtype in allowed:
        assert operand(name, x, allowed).dtype == dtype
        return
    with pytest.raises(TypeError) as refused:
        operand(name, x, allowed)
    said, _, advice = str(refused.value).partition("; ")
    assert said.startswith(f"{name} must ") and said.endswith(f"got {arrays._name(x.dtype)}")
    integer = np.issubdtype(x.dtype, np.integer)
    known = dtype in DTYPES and dtype != ">i4"
    if name == "out" or not known:
        assert not advice
        return
    code = advice.removeprefix("convert it with ").removeprefix("if its values are 0 and 1, pass ")
    made = eval(code, {"x": x, "np": np})
    assert made.dtype.name in allowed
    as_mask = integer and allowed == MASKS
    assert (made.dtype == bool) == as_mask or allowed == ("bool",)
    assert (made.dtype == np.int32) == (integer and "int32" in allowed or allowed == ("int32",))


@pytest.mark.parametrize("name", ["x", "out"])
@pytest.mark.parametrize("allowed", [("float32",), ("float32", "float16")])
def test_out_has_the_dtype_of_the_inputs_if_they_decide_it(name, allowed):
    with pytest.raises(TypeError) as refused:
        arrays.check_dtype(name, "int32", "dlpack", allowed)
    wanted = "must be float32 or float16" if len(allowed) > 1 else "must be float32"
    if name == "out" and len(allowed) == 1:
        wanted = "must have the dtype of the inputs (float32)"
    assert str(refused.value) == f"{name} {wanted}, got int32"


@pytest.mark.parametrize("library", ["numpy", "torch", "cupy", "jax", "interface", "dlpack"])
def test_the_advice_is_code_of_the_arrays_library(library):
    advice = arrays._conversion("x", "float64", library, ("float32",))
    convert = {"numpy": "x.astype(np.float32)", "torch": "x.to(torch.float32)"}
    convert |= {"cupy": "x.astype(cupy.float32)", "jax": "x.astype(jnp.float32)"}
    assert advice == (f"; convert it with {convert[library]}" if library in convert else "")
    for dtype in ("bfloat16", "float16", "bool", "int64", "uint8", "<f2", ">f8"):
        assert arrays._conversion("x", dtype, library, ("float32",)) == advice
    for dtype in ("complex64", "<U1", "void", "object", ">i4"):
        assert arrays._conversion("x", dtype, library, ("float32",)) == ""
    assert arrays._conversion("x", E4M3.name, library, ("float32",)).startswith(
        "; float8_e4m3fn is"
    )


def test_copies_on_a_gpu_are_aligned(monkeypatch):
    """Arrays of the host are copied there if a GPU runs the call."""
    near, far = (SimpleNamespace(aligned=x) for x in (True, False))
    for on_gpu in (False, True):
        monkeypatch.setattr(arrays.device, "on_gpu", lambda on_gpu=on_gpu: on_gpu)
        for ordinal in (HOST, 0):
            first = SimpleNamespace(ordinal=ordinal)
            assert arrays.all_aligned([near, near], first)
            assert arrays.all_aligned([near, far], first) == (on_gpu and ordinal == HOST)


@pytest.mark.parametrize("of_result", ["", "float32", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_out_has_the_dtype_of_the_result(dtype, of_result):
    """Which is that of the inputs if the call does not name another one."""
    x = operand("x", np.zeros(3, np.float32))
    out = np.zeros(3, dtype)
    if dtype == (of_result or "float32"):
        assert arrays.operand_of_out(out, (3,), x, [x], of_result).host is out
        return
    with pytest.raises(TypeError, match="^out must "):
        arrays.operand_of_out(out, (3,), x, [x], of_result)


@pytest.mark.parametrize("name", binding.ARRAYS)
def test_a_number_is_a_scale_and_no_other_array(name):
    if name in binding.SCALES:
        assert binding.Binding.of({name: 2.0}) is not None
        return
    with pytest.raises(TypeError, match=f"^{name} must be "):
        binding.Binding.of({name: 2.0})


@pytest.mark.parametrize("name", ["q", "out"])
@pytest.mark.parametrize("value", [[1.0], (1.0,), 1.0, None])
def test_what_is_no_array_is_refused(name, value):
    """A list can be converted, unless a call writes to it."""
    with pytest.raises(TypeError, match=f"^{name} must be a NumPy array, torch tensor") as refused:
        operand(name, value)
    advice = f"; convert it with np.asarray({name})"
    assert (advice in str(refused.value)) == (isinstance(value, list) and name != "out")
