"""Faults planted in the host's source: each must fail the test that is named with it.

A mutant is one module with one piece of its text replaced. Its functions get the code of those of
the changed text, wherever they were imported; tests of a stand-in for the GPU's driver then judge
keys, addresses, streams and order, in milliseconds each.
"""

import contextlib
import inspect
import re
import types
from dataclasses import dataclass

import pytest
import test_kernel_cache
import test_launch_cache
import test_recorded_launches as recorded
import test_torch_stand_in as on_torch
from stand_in_device import (
    Array,
    Dlpack,
    no_calls_kept,
    no_cupy_but_its_names,
    no_gpu_but_its_driver,
)
from stand_in_torch import SOURCE, fa_numba_torch, no_torch_but_its_names

from fa_numba.choices import requests, units
from fa_numba.device import kernel, kernel_cache, launch_record, launching, select
from fa_numba.host import (
    arrays,
    binding,
    calls,
    execution,
    launch_cache,
    overlap,
    placement,
    planning,
)

# --- the machinery ---------------------------------------------------------------------------


def replaced(text, needle, replacement):
    assert text.count(needle) == 1, f"{needle!r} stands {text.count(needle)} times in the source"
    return text.replace(needle, replacement)


def functions_of(module):
    """The functions of a module and of its classes by name, those behind decorators too."""
    classes = [x for x in vars(module).values() if isinstance(x, type)]
    found = {}
    for value in (x for scope in (module, *classes) for x in vars(scope).values()):
        value = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
            found[value.__qualname__] = value
    return found


def codes_of(code):
    """The code of the functions in a module's code, by the functions' names."""
    found = {}
    for inner in (x for x in code.co_consts if isinstance(x, types.CodeType)):
        found[inner.co_qualname] = inner
        if not inner.co_flags & inspect.CO_NEWLOCALS:  # a class's body
            found |= codes_of(inner)
    return found


@contextlib.contextmanager
def planted(module, needle, replacement):
    """Everything inside runs with one piece of the module's text replaced, in its functions."""
    text = replaced(inspect.getsource(module), needle, replacement)
    codes = codes_of(compile(text, f"<mutant of {module.__name__}>", "exec"))
    functions = {n: f for n, f in functions_of(module).items() if n in codes}
    before = {name: function.__code__ for name, function in functions.items()}
    changed = [name for name, code in before.items() if _text(code) != _text(codes[name])]
    assert changed, "the replacement changes no function"
    planning.planned.cache_clear()
    try:
        for name in changed:
            functions[name].__code__ = codes[name]
        yield changed
    finally:
        for name in changed:
            functions[name].__code__ = before[name]
        planning.planned.cache_clear()


def _text(code):
    """What a function does, wherever its lines stand."""
    consts = (_text(x) if isinstance(x, types.CodeType) else repr(x) for x in code.co_consts)
    return code.co_code, tuple(consts), code.co_names, code.co_varnames


@contextlib.contextmanager
def run_of(test, attention_text=None, **given):
    """A function that runs ``test`` with what its fixtures would give."""
    names = inspect.signature(test).parameters
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        made = {"kept": enter(no_calls_kept())}
        if {"gpu", "torch", "cupy", "attention"} & names.keys():
            made["gpu"] = enter(no_gpu_but_its_driver((9, 0), (8, 0)))
            made["gpu"].runs = False
        if {"torch", "attention"} & names.keys():
            made["torch"] = enter(no_torch_but_its_names(made["gpu"]))
            made["attention"] = fa_numba_torch(attention_text).attention
        if "cupy" in names:
            made["cupy"] = enter(no_cupy_but_its_names(made["gpu"]))
        if "monkeypatch" in names:
            made["monkeypatch"] = enter(pytest.MonkeyPatch.context())
        yield lambda: test(**{name: made[name] for name in names if name in made}, **given)


@dataclass(frozen=True, eq=False)
class Killer:
    """A test, and the parameters that it is run with."""

    test: object
    given: dict

    @property
    def title(self):
        values = [x for x in self.given.values() if isinstance(x, str)]
        return f"{self.test.__name__}{values or ''}"


_killers: dict[str, Killer] = {}


def killer(test, **given):
    return _killers.setdefault(repr((test, given)), Killer(test, given))


@dataclass(frozen=True, eq=False)
class Mutant:
    module: object
    title: str
    needle: str
    replacement: str
    killer: Killer

    @property
    def place(self):
        return "torch" if self.module is None else self.module.__name__.split(".", 1)[1]


# --- the tests that kill ---------------------------------------------------------------------


KEPT = {
    library: killer(
        recorded.test_a_kept_call_asks_what_a_first_one_does,
        plain=recorded.FORWARD,
        library=library,
    )
    for library in ("interface", "torch")
}
_rows = {"shape": (2, 2, 5, 8), "dtype": "float32", "wide": False}
_aligned = recorded.test_aligned_rows_start_at_16_byte_addresses
DENSE = (320, 160, 32, 4)
START = killer(_aligned, **_rows, strides=DENSE, offset=8)
STRIDE = killer(_aligned, **_rows, strides=(400, 200, 40, 4), offset=0)
STEP = killer(_aligned, **_rows, strides=(640, 320, 64, 8), offset=0)
ONLY = killer(
    _aligned, shape=(1, 2, 5, 8), strides=(328, 160, 32, 4), offset=0, dtype="float32", wide=True
)
HALF = killer(
    _aligned, shape=(2, 2, 5, 8), strides=(160, 80, 16, 2), offset=0, dtype="float16", wide=True
)
_one = recorded.test_one_unaligned_array_makes_the_kernel_one_for_all
ONE_FORWARD = killer(_one, plain=recorded.FORWARD, dtype="float32")
ONE_BACKWARD = killer(_one, plain=recorded.BACKWARD, dtype="float16")
CHUNKS = killer(recorded.test_a_head_dimension_of_no_whole_chunks_is_unaligned)
READ_ONLY = killer(recorded.test_a_read_only_out_is_refused)
EXTENT = killer(recorded.test_extents_and_overlaps_are_those_of_the_elements)
SHARED = {
    of: killer(
        recorded.test_a_kept_call_refuses_an_out_that_shares_memory, of=of, how="last row first"
    )
    for of in ("q", "out")
}
LAYOUT = {
    library: killer(
        recorded.test_kernels_get_arrays_as_the_caller_has_them,
        plain=recorded.FORWARD,
        layout="bnhd",
        library=library,
    )
    for library in ("interface", "dlpack")
}
DENSE_ROWS = {
    library.__name__: killer(
        recorded.test_strides_that_are_left_out_are_those_of_dense_rows, library=library
    )
    for library in (Array, Dlpack)
}
JAX = killer(recorded.test_jax_arrays_are_read_when_ready_and_made_when_done)
SMALL_GPU = killer(recorded.test_small_arrays_are_kept_for_each_gpu)
SMALL_SHAPE = killer(recorded.test_small_arrays_of_equal_bytes_differ_in_their_shape)
VECTOR = killer(recorded.test_a_kernel_adds_two_at_once_where_its_gpu_can, options={})
LOADED = killer(recorded.test_a_kernel_is_loaded_once_on_each_gpu)
PLACE = {
    x: killer(recorded.test_a_call_runs_on_the_gpu_of_its_arrays, library=x)
    for x in ("interface", "torch", "dlpack")
}
STREAM = killer(recorded.test_the_stream_is_the_current_one_of_the_arrays_gpu)
MASK_STREAM = killer(recorded.test_a_mask_is_converted_on_the_stream_of_its_gpu)
CUPY = killer(recorded.test_cupys_stream_is_that_of_the_arrays_gpu)
WAITS = killer(recorded.test_what_writes_an_input_on_another_stream_is_waited_for)
ORDER = killer(recorded.test_memory_is_taken_filled_used_and_freed_in_this_order)
HOST = killer(recorded.test_host_arrays_are_sent_before_and_fetched_after)
DISK = killer(test_kernel_cache.test_what_a_kernel_is_compiled_with_is_in_its_key)
TYPES = {
    name: killer(test_launch_cache.test_what_equals_a_kept_call_and_is_refused, case=name)
    for name in ("scale", "lengths", "return_lse", "window")
}


def _passes(name, algorithm="fa2"):
    return killer(on_torch.test_both_passes_have_the_options, name=name, algorithm=algorithm)


def _added(name, algorithm="fa2"):
    test = on_torch.test_both_passes_have_the_tensors_among_the_options
    return killer(test, name=name, algorithm=algorithm)


INFERENCE = {
    name: killer(on_torch.test_a_call_without_gradients_keeps_nothing, name=name)
    for name in ("slopes", "bias")
}
DRAWN = killer(on_torch.test_dropout_without_a_seed_draws_one_from_torch)
WHOLE = killer(on_torch.test_large_seeds_are_drawn_whole)
NOT_DRAWN = killer(on_torch.test_without_need_none_is_drawn)
OWN = killer(on_torch.test_the_backward_pass_has_options_of_its_own)
ALONE = killer(on_torch.test_a_bias_alone_can_have_a_gradient)
CALLS_OWN = killer(on_torch.test_lengths_and_masks_are_those_of_the_call)
BEFORE = killer(on_torch.test_what_has_no_gradient_is_refused_before_the_forward_pass)
OF_O = killer(on_torch.test_without_a_gradient_of_o_nothing_is_launched)

# --- the faults ------------------------------------------------------------------------------


def mutants():
    found = []

    def add(module, title, needle, replacement, killed_by):
        found.append(Mutant(module, title, needle, replacement, killed_by))

    key_mutants(add)
    memory_mutants(add)
    device_mutants(add)
    torch_mutants(add)
    return found


# fmt: off
def key_mutants(add):
    """What a kept call is found by."""
    every = "for array in (*arrays, *map(options.get, named), out):"
    add(launch_cache, "a key without out", every,
        "for array in (*arrays, *map(options.get, named)):", KEPT["interface"])
    add(launch_cache, "a key without bias, mask and slopes", every, "for array in (*arrays, out):",
        KEPT["torch"])
    add(launch_cache, "a key without slopes", every,
        "for array in (*arrays, *map(options.get, named[:2]), out):", KEPT["torch"])
    add(launch_cache, "a key without the types of numbers", "key += (name, kind, value)",
        "key += (name, value)", TYPES["scale"])
    add(launch_cache, "a key without the types in tuples",
        "key += (name, *map(type, value), value)", "key += (name, value)", TYPES["lengths"])
    add(launch_cache, "a key without lengths and windows",
        "key += (name, *map(type, value), value)", "pass", KEPT["interface"])
    add(launch_cache, "a key without numbers and flags", "key += (name, kind, value)", "pass",
        KEPT["interface"])
    kinds = 'kinds = ("torch", array.get_device(), array.dtype)'
    add(arrays, "a tensor's key without its GPU", kinds, 'kinds = ("torch", array.dtype)',
        PLACE["torch"])
    add(arrays, "a tensor's key without its dtype", kinds, 'kinds = ("torch", array.get_device())',
        KEPT["torch"])
    layout = "(*kinds, array.shape, array.stride(), pointer % 16)"
    for title, less in (
        ("strides", "(*kinds, array.shape, pointer % 16)"),
        ("shape", "(*kinds, array.stride(), pointer % 16)"),
        ("alignment", "(*kinds, array.shape, array.stride())"),
        ("alignment beyond 8 bytes", "(*kinds, array.shape, array.stride(), pointer % 8)"),
    ):
        add(arrays, f"a tensor's key without its {title}", layout, less, KEPT["torch"])
    kinds = "kinds = (found.library, found.place, found.dtype)"
    add(arrays, "a key without the GPU", kinds, "kinds = (found.library, found.dtype)",
        KEPT["interface"])
    add(arrays, "a key without the dtype", kinds, "kinds = (found.library, found.place)",
        KEPT["interface"])
    layout = "layout = (found.shape, found.strides, found.pointer % 16)"
    for title, less in (
        ("strides", "layout = (found.shape, found.pointer % 16)"),
        ("shape", "layout = (found.strides, found.pointer % 16)"),
        ("alignment", "layout = (found.shape, found.strides)"),
        ("alignment beyond 8 bytes", "layout = (found.shape, found.strides, found.pointer % 8)"),
    ):
        add(arrays, f"a key without the {title}", layout, less, KEPT["interface"])
    add(arrays, "a key without whether it is read-only", "(*kinds, *layout, found.writable)",
        "(*kinds, *layout)", KEPT["interface"])
    kept = "key = (array.tobytes(), array.dtype.str, array.shape)"
    same = 'type("Same", (tuple,), {"__eq__": lambda *_: True, "__hash__": lambda _: 0})'
    add(binding, "small arrays kept without their shape", kept,
        f"key = (array.tobytes(), array.dtype.str, {same}(array.shape))", SMALL_SHAPE)
    add(binding, "small arrays kept for all GPUs", "_on_gpu(device.current_ordinal(), *key)",
        "_on_gpu(0, *key)", SMALL_GPU)


def memory_mutants(add):
    """Where arrays lie: alignment, extents, strides, who may write."""
    add(arrays, "8 bytes are enough for a start", "self.pointer % 16 == 0", "self.pointer % 8 == 0",
        START)
    add(arrays, "the start is not looked at", "self.pointer % 16 == 0", "True", START)
    add(arrays, "8 bytes are enough for a stride", "n == 1 or stride % 16 == 0",
        "n == 1 or stride % 8 == 0", STRIDE)
    add(arrays, "strides are not looked at", "n == 1 or stride % 16 == 0", "True", STRIDE)
    add(arrays, "the stride of one row is looked at", "n == 1 or stride % 16 == 0",
        "stride % 16 == 0", ONLY)
    add(arrays, "rows with gaps are aligned",
        "(self.shape[-1] == 1 or self.strides[-1] == DTYPES[self.dtype].bytes)\n            and ",
        "", STEP)
    add(arrays, "strides of tensors in floats", "tensor.element_size() * n", "4 * n", HALF)
    add(arrays, "strides of DLPack in elements", "tuple(itemsize * n for n in strides)", "strides",
        LAYOUT["dlpack"])
    add(arrays, "strides left out are in elements", "np.cumprod((dtype.itemsize, *shape[:0:-1])",
        "np.cumprod((1, *shape[:0:-1])", DENSE_ROWS["Array"])
    add(arrays, "strides left out count the first axis", "np.cumprod((1, *shape[:0:-1])",
        "np.cumprod((1, *shape[:-1])", DENSE_ROWS["Dlpack"])
    add(arrays, "a JAX array is read before it is ready", "array.block_until_ready()", "pass", JAX)
    add(arrays, "a JAX array is made before it is computed",
        "device.synchronize()\n        return jax", "return jax", JAX)
    add(arrays, "read-only is forgotten", "writable = _name(dtype), tuple(strides), not read_only",
        "writable = _name(dtype), tuple(strides), True", READ_ONLY)
    add(arrays, "read-only is forgotten in DLPack", "view.device_id, not view.readonly",
        "view.device_id, True", READ_ONLY)
    add(calls, "the alignment of out is not looked at", "matrices = [*matrices, target]", "pass",
        ONE_FORWARD)
    aligned = "_aligned(problem, matrices)"
    add(calls, "the alignment of O and dO is not looked at", aligned,
        "_aligned(problem, matrices[:3])", ONE_BACKWARD)
    add(calls, "the alignment of L counts", aligned, "_aligned(problem, [*matrices, *rows])",
        ONE_BACKWARD)
    add(calls, "head dimensions of any size are aligned",
        "problem.head_dim % DTYPES[problem.dtype].chunk == 0 and (", "(", CHUNKS)
    add(overlap, "negative strides cover nothing", "first, last = sum(min(0, n) for n in reach),",
        "first, last = 0,", EXTENT)
    add(overlap, "negative strides count as positive ones", "sum(max(0, n) for n in reach)",
        "sum(map(abs, reach))", EXTENT)
    add(overlap, "an extent without its last element", "first, last + STORED[a.dtype].bytes",
        "first, last", EXTENT)
    add(launch_cache, "a kept call does not ask for overlaps",
        " or (out is not None and found.may_overlap(call.pointers))", "", SHARED["q"])
    add(launch_cache, "an extent begins at the address",
        "[(p + begin, p + last) for p, (begin, last) in pairs]",
        "[(p, p + last) for p, (begin, last) in pairs]", SHARED["q"])
    add(launch_cache, "the extent of out is q's", "(*inputs, *targets)",
        "(*inputs, *inputs[: len(targets)])", SHARED["out"])
    add(launch_cache, "what ends behind is no overlap", "first < last and begin < end",
        "begin < first and first < last", SHARED["q"])


def device_mutants(add):
    """GPUs, streams, what is compiled for which, and the order of steps."""
    add(placement, "the stream of the current GPU", "current_stream(q.place)", "current_stream()",
        STREAM)
    add(placement, "the stream of GPU 0", "current_stream(q.place)", "current_stream(0)", STREAM)
    add(placement, "CuPy's stream of the current GPU", "with cupy.cuda.Device(q.place):",
        "if True:", CUPY)
    add(placement, "a mask is converted on torch's stream", "if stream is None or torch is None",
        "if True or torch is None", MASK_STREAM)
    add(placement, "a call runs on the current GPU", "return device.on_device(q.place)",
        "return contextlib.nullcontext()", PLACE["interface"])
    add(launch_cache, "a kept call runs on the current GPU",
        "if device.current_context() == found.context:", "if True:", PLACE["interface"])
    add(launch_cache, "a kept call runs on the default stream",
        "handle = placement.stream_handle(stream, found)", "handle = 0", STREAM)
    add(launch_cache, "workspace of GPU 0",
        "device.replay(recording, values, handle, device.current_ordinal())",
        "device.replay(recording, values, handle, 0)", STREAM)
    add(launching, "workspace on the default stream", "    order = driver.CUstream(stream)",
        "    order = driver.CUstream(0)", STREAM)
    add(arrays, "memory of interfaces is GPU 0's", "place = device.ordinal_of(pointer)",
        "place = 0", PLACE["interface"])
    add(arrays, "memory of DLPack is GPU 0's", "= view.device_id,", "= 0,", PLACE["dlpack"])
    add(arrays, "DLPack arrays are not waited for", "stream_ptr=1", "stream_ptr=-1",
        PLACE["dlpack"])
    add(arrays, "interfaces are not waited for", 'device.synchronize(interface["stream"])', "pass",
        WAITS)
    add(units, "adds of two on every GPU", "request.capability >= (9, 0)", "True", VECTOR)
    add(units, "adds of two on no GPU", "request.capability >= (9, 0)", "False", VECTOR)
    add(requests, "a plan kept across its vector adds",
        "device.shared_bytes_limit(), device.compute_capability(), places",
        "device.shared_bytes_limit(), (9, 0), places", VECTOR)
    add(kernel_cache, "a kernel kept across its vector adds", "return _function(value._defn, seen)",
        'return "an instruction"', VECTOR)
    add(kernel_cache, "a kernel kept across capabilities", "settings, capability, bounds",
        "settings, bounds", DISK)
    add(kernel, "a kernel is loaded on one GPU", "device = cuda.get_current_device().id",
        "device = 0", LOADED)
    add(kernel, "a kernel compiled for GPU 0", "select.capability_of(device)",
        "select.capability_of(0)", LOADED)
    add(select, "the capability of GPU 0", "gpu = cuda.gpus[ordinal]", "gpu = cuda.gpus[0]",
        LOADED)
    add(launch_record, "arrays of the workspace in rows", "round_up(array.nbytes, _ALIGNMENT)",
        "array.nbytes", ORDER)
    add(launch_record, "all workspace is at its start", "word.value = values[slot] + offset",
        "word.value = values[slot]", ORDER)
    add(execution, "outputs are not filled", "if output.zeroed:", "if False:", STREAM)
    add(execution, "workspace is not filled", "if buffer.zeroed:", "if False:", ORDER)
    add(launch_cache, "host arrays come back on the default stream",
        "device.to_host(array, result.argument(), handle)",
        "device.to_host(array, result.argument())", HOST)
    add(launch_cache, "host arrays are sent on the default stream",
        "device.to_gpu(x.argument(), handle)", "device.to_gpu(x.argument())", HOST)


def torch_mutants(add):
    """fa_numba.torch; its module is named None."""
    drawn = '_drawn_seed() if given.get("dropout_p") else 0'
    add(None, "a seed is never drawn", drawn, "0", DRAWN)
    add(None, "a seed is always drawn", drawn, "_drawn_seed()", NOT_DRAWN)
    add(None, "a seed replaces the caller's", 'if given.get("seed") is None:', "if True:",
        NOT_DRAWN)
    add(None, "half of a seed", 'device="cpu"))', 'device="cpu")) % 2**32', WHOLE)
    asked = "return_dbias=ctx.needs_input_grad[3]"
    add(None, "dbias is not asked for", asked, "return_dbias=False", _added("bias"))
    add(None, "dbias is asked for without need", asked, "return_dbias=bias is not None",
        _added("bias without a gradient"))
    add(None, "dbias is dropped", "zip(found, ctx.needs", "zip(found[:3], ctx.needs",
        _added("bias"))
    add(None, "the gradient of a mask is dropped", "zip(found, ctx.needs",
        "zip(found[:3], ctx.needs", ALONE)
    add(None, "gradients that nobody needs", "gradient if need else None", "gradient",
        _added("nothing"))
    add(None, "a bias alone has no gradient", "for x in (q, k, v, bias))", "for x in (q, k, v))",
        ALONE)
    options = "ctx.options = common | own"
    alone = 'ctx.options = {"algorithm": common["algorithm"]} | own'
    for name in ("causal", "window", "scale", "softcap", "lengths", "dropout", "blocks", "layout",
                 "packed", "all"):  # fmt: skip
        add(None, f"a backward pass without options, {name}", options, alone, _passes(name))
    for algorithm in ("standard", "fa1"):
        add(None, f"a backward pass without options, {algorithm}", options, alone,
            _passes("causal", algorithm))
    add(None, "a backward pass of fa2", options,
        'ctx.options = common | own | {"algorithm": "fa2"}', _passes("plain", "fa1"))
    for name in ("causal", "window", "softcap", "scale", "kv_lens", "seed", "offset"):
        case = {"kv_lens": "lengths", "seed": "dropout", "offset": "dropout"}.get(name, name)
        add(None, f"a backward pass without {name}", options,
            f'ctx.options = {{n: x for n, x in common.items() if n != "{name}"}} | own',
            _passes(case))
    add(None, "a backward pass without its own options", options, "ctx.options = common", OWN)
    add(None, "a backward pass without slopes", "            alibi_slopes=slopes,\n", "",
        _added("slopes"))
    add(None, "a backward pass without bias", "            bias=bias,\n            alibi",
        "            alibi", _added("bias without a gradient"))
    for name in ("slopes", "bias"):
        add(None, f"a call without gradients and {name}",
            'given |= {"bias": bias, "alibi_slopes": slopes, **ahead}', "pass", INFERENCE[name])
    add(None, "a call without its mask", "bias = _bias_of(mask, bias)", "bias = None",
        _added("mask"))
    add(None, "the order of sums is the caller's alone",
        "deterministic = torch.are_deterministic_algorithms_enabled()", "pass", OWN)
    add(None, "tiles of its own are not asked for", 'own["tiles"] = tiles', "pass", OWN)
    add(None, "lengths are the caller's memory", "np.array(on_host(name, given[name]))",
        "on_host(name, given[name])", CALLS_OWN)
    add(None, "a gradient of the bias is not checked",
        "dbias = bias is not None and bias.requires_grad", "dbias = False", BEFORE)
    add(None, "L has a gradient", "ctx.mark_non_differentiable(lse)", "pass", _passes("plain"))
    add(None, "a pass without a gradient of O", "if dout is None:", "if False:", OF_O)

# fmt: on


MUTANTS = mutants()
# A fault may end in an error of the driver or of the package; one of its own text is no fault.
BROKEN = (NameError, AttributeError, ImportError, SyntaxError, UnboundLocalError)


def test_every_mutant_has_a_title_of_its_own():
    assert len({(m.place, m.title) for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("killer", {m.killer: None for m in MUTANTS}, ids=lambda k: k.title)
def test_the_source_as_it_is_passes(killer):
    with run_of(killer.test, **killer.given) as run:
        run()


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda m: re.sub(r"\W+", " ", f"{m.place} {m.title}")
)
def test_a_mutant_is_caught(mutant, record_property):
    killer, text = mutant.killer, None
    change = (mutant.needle, mutant.replacement)
    with contextlib.ExitStack() as stack:
        if mutant.module is None:
            text = replaced(SOURCE.read_text(), *change)
        else:
            stack.enter_context(planted(mutant.module, *change))
        run = stack.enter_context(run_of(killer.test, text, **killer.given))
        with pytest.raises((Exception, pytest.fail.Exception)) as caught:
            run()
    assert not isinstance(caught.value, BROKEN), caught.value
    record_property("killed_by", f"{killer.title}: {type(caught.value).__name__}")


def test_what_is_planted_goes_again():
    before = {name: function.__code__ for name, function in functions_of(arrays).items()}
    with planted(arrays, "self.pointer % 16 == 0", "True") as changed:
        assert changed == ["Operand.aligned"]
        assert arrays.Operand.aligned.fget.__code__ is not before["Operand.aligned"]
    assert before == {name: function.__code__ for name, function in functions_of(arrays).items()}
