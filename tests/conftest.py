"""`device`: the same test on the emulator and, marked `gpu`, on the GPU where there is one."""

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import time
from collections import defaultdict
from pathlib import Path

import pytest
import rooms  # noqa: F401
from hypothesis import HealthCheck, settings

# Before NumPy is imported: the processes that run the tests have the cores, and threads of BLAS
# that wait for each other on a core that is busy take many times as long as one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What pytest, a compiler or the emulator makes is seldom in circles: look at it seldom.
gc.set_threshold(50_000, 20, 20)
SECONDS_BETWEEN = 8  # of CPU time: `leave_alone` takes 30 ms
left_alone_at = 0.0

import fresh_memory  # noqa: E402
import launch_types  # noqa: E402, F401
from stand_in_device import no_calls_kept, no_gpu_but_its_driver  # noqa: E402
from stand_in_torch import no_torch_but_its_names  # noqa: E402

from fa_numba.device import gpu_available  # noqa: E402

pytest.register_assert_rewrite("helpers")

# An emulated launch takes a tenth of a second, so no deadline an example.
settings.register_profile(
    "fa_numba",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fa_numba")
every_example = True


def examples(count):
    """Hypothesis' settings for so many examples, a third of them where slow tests are left out."""
    return settings(max_examples=count if every_example else max(2, -(-count // 3)))


def pytest_report_header():
    if not gpu_available():
        return "no CUDA GPU of compute capability 7.5 or later: tests marked gpu are left out"


def pytest_configure(config):
    """Each worker begins to rewrite asserts at another module, and finds the others' on disk."""
    global every_example
    every_example = config.option.markexpr != "not slow"
    worker = getattr(config, "workerinput", None)
    if worker and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        names = sorted(path.stem for path in Path(__file__).parent.rglob("test_*.py"))
        first = int(worker["workerid"].removeprefix("gw")) * len(names) // worker["workercount"]
        for name in names[first:]:
            # What is wrong with it is said when it is collected.
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(name)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """The examples of docstrings are the package's: no test has any."""
    return [found for found in (yield) if type(found) is pytest.Module]


@pytest.hookimpl(wrapper=True)  # before those marked slow are left out, and after
def pytest_collection_modifyitems(config, items):
    take_turns([item for item in items if item.get_closest_marker("in_turn")])
    unwanted = [] if gpu_available() else ["gpu"]
    unwanted += [] if "browser" in config.option.markexpr else ["browser"]
    gone = {item for item in items if any(map(item.get_closest_marker, unwanted))}
    config.hook.pytest_deselected(items=list(gone))
    items[:] = [item for item in items if item not in gone]
    yield
    items.sort(key=lambda item: item.path.name != "test_mutants.py")  # what takes longest, first
    # The second process begins with these, and finds the emulator's loops compiled by the first.
    kernels = [item for item in items if item.path.name == "test_compile.py"]
    second = len(items) // getattr(config, "workerinput", {}).get("workercount", 1) // 4
    items[:] = [item for item in items if item.path.name != "test_compile.py"]
    items[second:second] = kernels
    leave_alone()


def take_turns(items):
    """`in_turn(name, share)`: each case runs with one of the values of this parameter, or about
    `share` of them, the next case with the next ones. The rest is slow.
    """
    of_function = defaultdict(list)
    for item in items:
        of_function[item.function].append(item)
    for items in of_function.values():
        mark = items[0].get_closest_marker("in_turn")
        parametrized = [each.args[0] for each in items[0].iter_markers("parametrize")]
        places = {names: numbered(items, names.split(", ")) for names in parametrized}
        mine = places.pop(*mark.args)
        every = len(set(mine)) // mark.kwargs.get("share", 1)
        for item, here, *others in zip(items, mine, *places.values(), strict=True):
            if (here - sum(others)) % every:
                item.add_marker(pytest.mark.slow)


def numbered(items, names):
    """Each item's values of these parameters as a number, in the order of appearance."""
    numbers = {}
    values = ([id(item.callspec.params[name]) for name in names] for item in items)
    return [numbers.setdefault(tuple(each), len(numbers)) for each in values]


def pytest_sessionstart(session):
    """With -q, a worker sends one report of a test that passes.

    The reports of what comes before and after the test show nothing then.
    """
    if session.config.option.verbose < 0:
        for plugin in session.config.pluginmanager.get_plugins():
            if hasattr(plugin, "sendevent"):
                plugin.sendevent = functools.partial(_send, plugin.sendevent)


def _send(send, name, **given):
    report = given.get("data", {}) if name == "testreport" else {}
    passed = report.get("outcome") == "passed" and report["when"] != "call"
    if name != "logstart" and not passed:
        send(name, **given)


def pytest_runtest_setup(item):
    fresh_memory.begin(item.nodeid)


def pytest_runtest_teardown(item, nextitem):
    begins_a_file = nextitem is not None and nextitem.path != item.path
    if begins_a_file and time.process_time() > left_alone_at + SECONDS_BETWEEN:
        leave_alone()


def leave_alone():
    """Collect garbage, and let later collections ignore all objects that live now.

    Modules, tests and kernels live to the end. A test may ask for many collections, which need not
    look at these objects. Memory of the emulator's arrays goes back to the system, which glibc does
    by itself only if no other memory lies above it.
    """
    global left_alone_at
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    gc.freeze()
    left_alone_at = time.process_time()


DEVICES = ["emulator", *([pytest.param("gpu", marks=pytest.mark.gpu)] if gpu_available() else [])]


@pytest.fixture
def kept():
    """The calls that are kept: none at first."""
    with no_calls_kept() as found:
        yield found


@pytest.fixture
def gpu(kept):
    """A driver that is a stand-in, and its GPU."""
    with no_gpu_but_its_driver() as found:
        yield found


@pytest.fixture
def torch(gpu):
    with no_torch_but_its_names(gpu) as found:
        yield found


@pytest.fixture(params=DEVICES, scope="session")
def device(request):
    return request.param
