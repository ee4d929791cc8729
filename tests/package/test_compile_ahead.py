"""Kernels of several plans that are compiled in parallel and stored on disk."""

import pickle

import pytest

import fa_numba
from fa_numba.__main__ import main
from fa_numba.commands import compile as command
from fa_numba.device import Kernel, kernel_cache
from fa_numba.device.select import planning_for
from fa_numba.host import ahead

SHAPE = (1, 2, 64, 64)


@pytest.fixture
def built(monkeypatch, tmp_path):
    """The names and compute capabilities of the kernels that were compiled; nothing is compiled."""
    found = []

    def build(kernel, capability):
        found.append((kernel.name, capability))
        kernel_cache.write(kernel, capability, b"machine code", "entry")
        return b"machine code", "entry"

    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(Kernel, "built", build)
    return found


def plans(capability=(8, 0), **options):
    with planning_for(capability, 99 * 1024):
        return [fa_numba.plan(SHAPE, SHAPE, dtype="float16", **options)]


def test_each_kernel_is_compiled_once_for_the_gpu_of_its_plan(built):
    both = plans(return_lse=True) + plans() + plans((9, 0), unit="mma")
    assert ahead.compile_ahead(both, jobs=1) == (2, 0)
    assert built == [("fa2_forward", (8, 0)), ("fa2_forward", (9, 0))]
    assert ahead.compile_ahead(both, jobs=1) == (0, 2)
    assert len(built) == 2


def test_a_machine_with_an_unknown_number_of_cores_compiles_in_one_process(built, monkeypatch):
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: None)
    assert ahead.compile_ahead(plans() + plans((9, 0), unit="mma")) == (2, 0)


def test_a_plan_of_the_emulator_is_for_hopper(built):
    with fa_numba.device.using("emulator"):
        plan = fa_numba.plan(SHAPE, SHAPE)
    ahead.compile_ahead([plan], jobs=1)
    assert built == [("fa2_forward", (9, 0))]


@pytest.mark.parametrize("error", [AttributeError, TypeError, ValueError, pickle.PicklingError])
def test_a_plan_that_cannot_be_pickled_is_compiled_here(built, monkeypatch, error):
    def dumps(plan):
        raise error("a local function")

    monkeypatch.setattr(ahead.pickle, "dumps", dumps)
    monkeypatch.setattr(ahead, "_compile_one", None)
    assert ahead.compile_ahead(plans(), jobs=2) == (1, 0)
    assert built == [("fa2_forward", (8, 0))]


def test_several_processes_compile_the_kernels(built, monkeypatch):
    """The stand-in for a pool of processes notes how many there are and runs their work."""
    used = []

    class Pool:
        def __init__(self, jobs, context):
            used.append((jobs, context.get_start_method()))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        map = staticmethod(map)

    monkeypatch.setattr(ahead, "ProcessPoolExecutor", Pool)
    found = [*plans(algorithm="fa1"), *plans()]
    assert ahead.compile_ahead(found, jobs=3) == (2, 0) and used == [(2, "spawn")]
    assert sorted(name for name, _ in built) == ["fa1_forward", "fa2_forward"]
    assert ahead.compile_ahead(found, jobs=3) == (0, 2) and len(built) == len(used) + 1


def test_nothing_can_be_stored_without_a_folder(built, monkeypatch):
    monkeypatch.setenv(kernel_cache.VARIABLE, "")
    with pytest.raises(ValueError, match="FA_NUMBA_CACHE must be the name of a folder"):
        ahead.compile_ahead(plans())
    assert not built


def test_the_command_compiles_every_combination(monkeypatch, capsys, tmp_path):
    given = []

    def compile_ahead(plans, jobs):
        given.append((plans, jobs))
        return ahead.Ahead(7, 2)

    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(command, "compile_ahead", compile_ahead)
    arguments = "compile --seqlen 64 1k --head-dim 64 --device T4 --jobs 3 --causal both"
    assert main(arguments.split()) == 0
    ((found, jobs),) = given
    assert jobs == 3
    # Two lengths, two masks; forward with and without the logsumexp, and backward.
    assert len({plan.asked for plan in found}) == len(found) == 2 * 2 * 3
    assert {plan.problem.dtype for plan in found} == {"float32"}
    assert {plan.asked.capability for plan in found} == {(7, 5)}
    line = capsys.readouterr().out
    assert "T4: compiled 7 kernels for 12 calls in" in line
    assert f"2 kernels were stored before, in {tmp_path}" in line


def test_the_command_needs_a_gpu_to_compile_for(monkeypatch, capsys):
    monkeypatch.setattr(command.bounds, "here", lambda: None)
    with pytest.raises(SystemExit):
        main(["compile", "--seqlen", "64", "--head-dim", "64"])
    assert "--device must name the GPU to compile for" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--batch", "65536"], "--batch: must be an integer from 1 to 65535, got 65536"),
        (["--jobs", "1025"], "--jobs: must be an integer from 1 to 1024, got 1025"),
    ],
)
def test_what_compile_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(["compile", "--seqlen", "64", "--head-dim", "64", "--device", "T4", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_processes_compile_side_by_side(monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path))
    both = plans() + plans(causal=True)
    assert ahead.compile_ahead(both, jobs=2) == (2, 0)
    for plan in both:
        (kernel,) = plan.launched
        cubin, name = kernel_cache.read(kernel, (8, 0))
        assert cubin[:4] == b"\x7fELF" and "fa2_forward" in name
