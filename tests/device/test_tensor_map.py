"""What NVVM is told about the tensor maps among a kernel's arguments."""

import re
from types import SimpleNamespace

import pytest
from llvmlite import ir
from numba import types

from fa_numba.device import tensor_map
from fa_numba.device.tensor_map import _MAP, MapModel, MapType

INTEGER, MAP = ir.IntType(32), _MAP.as_pointer()
OTHER = INTEGER.as_pointer()


@pytest.mark.parametrize(
    "arguments", [(MAP, MAP), (MAP, OTHER, MAP, INTEGER), (MAP, INTEGER, OTHER, MAP, MAP)]
)
def test_a_tensor_map_is_a_constant_of_the_grid_by_value(arguments):
    """The first argument holds a kernel's result. Numba removes it, and so the others move."""
    function = ir.Function(
        ir.Module(), ir.FunctionType(ir.VoidType(), (OTHER, *arguments)), "kernel"
    )
    builder = ir.IRBuilder(function.append_basic_block())
    model = MapModel(None, MapType())
    for _ in range(2):  # the second time changes nothing
        for argument in function.args:
            if argument.type == MAP:
                assert model.from_argument(builder, argument) is argument
    text = str(function.module)
    places = [n for n, ty in enumerate(arguments, 1) if ty is MAP]
    head = re.search(r"define void .*", text)[0]
    for argument in function.args:
        marked = re.search(rf"( byval  align 64)? %\"{re.escape(argument.name)}\"", head)[1]
        assert bool(marked) is (argument.type == MAP)
    listed = ", ".join(f"i32 {n}" for n in places)
    (positions,) = re.findall(rf"^!(\d+) = !{{ {listed} }}$", text, re.MULTILINE)
    kernel = re.escape(str(function.type))
    (of_kernel,) = re.findall(
        rf'^!(\d+) = !{{ {kernel} @"kernel", !"grid_constant", !{positions} }}$', text, re.MULTILINE
    )
    assert re.findall(r"^!nvvm.annotations = .*", text, re.MULTILINE) == [
        f"!nvvm.annotations = !{{ !{of_kernel} }}"
    ]


@pytest.mark.parametrize("ends", [False, True])
def test_a_kernels_argument_has_the_map_the_shape_and_the_steps(ends, monkeypatch):
    made, ty = [], SimpleNamespace(ndim=4, ends=ends)
    monkeypatch.setattr(tensor_map.StructModel, "__init__", lambda *given: made.append(given))
    tensor_map.TiledModel("manager", ty)
    ((_, manager, of, members),) = made
    integers = [("shape", types.UniTuple(types.int64, 4))]
    integers += [("steps", types.UniTuple(types.int64, 3))] * ends
    assert (manager, of) == ("manager", ty) and members[1:] == integers
    assert members[0][0] == "map" and isinstance(members[0][1], tensor_map.MapType)
