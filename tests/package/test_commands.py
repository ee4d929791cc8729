"""python -m fa_numba: what its commands print, and what they refuse."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cuda.pathfinder import DynamicLibNotFoundError

import fa_numba
from fa_numba import __main__ as command
from fa_numba import bounds
from fa_numba.bounds import DEVICES
from fa_numba.commands import text
from fa_numba.commands.arguments import WIDTH
from fa_numba.device import linking


def output(capsys, *arguments):
    """What the command prints."""
    assert command.main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def refused(capsys, *arguments):
    """The message of a command that is refused; nothing else is printed."""
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.out == ""
    return " ".join(printed.err.split())


def traced(capsys, *arguments):
    """The lines of the command, with one space between the words of each."""
    return [" ".join(x.split()) for x in output(capsys, "trace", *arguments).splitlines()]


def fits(text):
    return max(map(len, text.splitlines())) <= WIDTH


# --- the commands ----------------------------------------------------------------------------


def test_without_a_command_it_says_what_there_is(capsys):
    text = output(capsys)
    assert all(re.search(rf"^ +{module.NAME} ", text, re.M) for module in command.COMMANDS)
    assert "python -m experiments" in text


@pytest.mark.parametrize("module", command.COMMANDS, ids=lambda module: module.NAME)
def test_help_explains(module, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([module.NAME, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert module.DESCRIPTION in text


def interrupted(folder, module):
    """What ``python -m module`` did, interrupted as NumPy is imported, which sends it here."""
    (folder / "numpy.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, "-m", *module.split()],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parents[2]}"},
    )
    return done.returncode, done.stdout, done.stderr


def test_an_interrupt_while_it_is_imported_shows_no_traceback(tmp_path):
    assert interrupted(tmp_path, "experiments list") == (-signal.SIGINT, "", "")


def test_a_package_that_imports_the_library_handles_its_interrupts(tmp_path):
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").write_text(
        "try:\n    import fa_numba\nexcept KeyboardInterrupt:\n    print('saved')\n"
    )
    (package / "run.py").write_text("print('ends')\n")
    assert interrupted(tmp_path, "training.run") == (0, "saved\nends\n", "")


def failing(monkeypatch, error):
    def run(args):
        raise error

    monkeypatch.setattr(command.trace, "run", run)


def test_an_interrupted_command_shows_no_traceback(monkeypatch, capsys):
    failing(monkeypatch, KeyboardInterrupt())
    assert command.main(["trace"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_file_that_cannot_be_read_is_a_line(monkeypatch, capsys):
    failing(monkeypatch, OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300))
    assert command.main(["trace"]) == 1
    name = f"{'x' * 29} ... {'x' * 29}"
    said = f"error: {name!r} cannot be read or written: File name too long\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("arguments", [[], ["trace"]])
def test_an_output_on_a_full_disk_is_a_line(arguments, monkeypatch, capsys):
    with open("/dev/full", "w") as full:  # which raises again as it is closed, as Python exits
        monkeypatch.setattr("sys.stdout", full)
        assert command.main(arguments) == 1
    said = "error: the output cannot be written: No space left on device\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("arguments", [[], ["trace"]])
def test_a_pipe_that_nobody_reads_any_more_is_no_error(arguments, monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert command.main(arguments) == 0
    assert capsys.readouterr().err == ""


# --- trace -----------------------------------------------------------------------------------


def test_the_worked_example(capsys):
    lines = traced(capsys)
    assert "0 0-3 1 2 4 2 0.000 4.000 1.320 0.641 2.185 1.135 1.420" in lines
    assert "1 4-7 5 1 3 1 0.368 5.000 1.658 1.525 3.822 2.553 0.749" in lines
    assert "end 0.920 2.306 1.540 0.452" in lines
    assert "writes 4.000 1.320 0.485 1.655 0.860 1.075" in lines
    assert "1 reads 4.000 1.320 0.485 1.655 0.860 1.075" in lines
    # o has four numbers, l and m one each, in two passes
    assert "memory traffic: 12 numbers read and 12 written, o, l and m in each of 2 passes" in lines
    assert "memory traffic: 5 numbers written, o and L, once" in lines


@pytest.mark.parametrize("block", [1, 3, 8, 9])
@pytest.mark.parametrize("example", [1, 2, 3])
def test_blocks_of_any_number_of_keys(example, block, capsys):
    text = output(capsys, "trace", "--example", f"{example}", "--block", f"{block}")
    assert fits(text) and text.endswith("differ from this result by less than 1e-12\n")
    passes = -(-(4 if example == 3 else 8) // block)
    assert f"in each of {passes} passes" in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--example", "4"], "argument --example: must be 1, 2 or 3, got '4'"),
        (["--block", "0"], "argument --block: must be an integer from 1 to 1048576, got 0"),
        (
            ["--block", "x"],
            "argument --block: must be an integer from 1 to 1048576, such as 4k (4096), got 'x'",
        ),
        (["--exmaple", "1"], "there is no option --exmaple; did you mean '--example'?"),
    ],
)
def test_what_trace_refuses(arguments, message, capsys):
    assert message in refused(capsys, "trace", *arguments)


def test_a_wrong_command_gets_the_nearest_one(capsys):
    with pytest.raises(SystemExit):
        command.main(["paln"])
    message = "must be trace, plan or compile, got 'paln'; did you mean 'plan'?"
    assert message in capsys.readouterr().err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"fa_numba {fa_numba.__version__}\n"


def test_experiments_are_named_only_where_they_run(capsys, monkeypatch):
    assert "python -m experiments" in output(capsys)
    monkeypatch.setattr("fa_numba.__main__._has_experiments", lambda: False)
    assert "python -m experiments" not in output(capsys)


# --- plan ------------------------------------------------------------------------------------

SIZE = ("--seqlen", "1000", "--head-dim", "64", "--heads", "4")


def planned(capsys, *arguments):
    """The cells of the two tables that are printed, by what a line is of."""
    lines = [re.split(r"  +", x.strip()) for x in output(capsys, "plan", *arguments).splitlines()]
    return {what: cells for what, *cells in lines if cells}


@pytest.mark.parametrize("device", [x for x in DEVICES if x != "T4"])
@pytest.mark.parametrize("passes", ["fwd", "bwd"])
def test_the_plan_is_the_librarys(device, passes, capsys):
    found = planned(
        capsys,
        *SIZE,
        *("--seqlen-k", "900", "--batch", "2", "--heads-k", "2", "--causal", "--device", device),
        *(["--backward"] if passes == "bwd" else []),
    )
    shapes, sheet = ((2, 4, 1000, 64), (2, 2, 900, 64)), DEVICES[device]
    facts = {"dtype": "float16", "passes": passes, "causal": True}
    with sheet.planning():
        plans = [fa_numba.plan(*shapes, algorithm=x, **facts) for x in ("fa1", "fa2", "standard")]
    expected = [bounds.expected(plan, sheet) for plan in plans]
    for what, want in (
        ("tiles Br x Bc", [f"{x.tiles.Br} x {x.tiles.Bc}" for x in plans]),
        ("workspace", [text.mebibytes(x.workspace_bytes) for x in plans]),
        ("elements loaded", [text.count(x.accesses.total_loads) for x in plans]),
        ("elements stored", [text.count(x.accesses.total_stores) for x in plans]),
        ("bytes accessed", [text.in_bytes(x.accesses.bytes) for x in plans]),
        ("FLOPs, useful", [text.count(x.flops) for x in plans]),
        ("FLOPs, computed", [text.count(x.flops) for x in expected]),
        ("working set", [text.mebibytes(x.dram.again) for x in expected]),
        ("DRAM bytes, about", [text.in_bytes(x.dram.bytes) for x in expected]),
        ("time, at least", [text.seconds(x.floor) for x in expected]),
        ("expected bound", [x.bound for x in expected]),
    ):
        assert found[what] == want, what
    for kernel in (x for plan in plans[:2] for x in plan.kernels if x.name.startswith("fa")):
        grid, threads, shared = found[kernel.name][:3]
        assert (grid, int(threads)) == ("x".join(map(str, kernel.grid)), kernel.threads)
        assert shared == f"{kernel.shared_bytes / 1024:.1f} KiB"


def test_the_plan_of_the_readmes_result_says_what_was_measured(capsys):
    """One block a head leaves most multiprocessors idle, and nothing of O stays in L2."""
    size = ("--seqlen", "16384", "--head-dim", "64", "--heads", "32", "--device", "H200")
    found = planned(capsys, *size)
    assert found["expected bound"][:2] == ["latency", "compute"]
    assert found["half of L2 holds it"][:2] == ["no", "yes"]
    shape, split = (1, 32, 16384, 64), {"algorithm": "fa1", "dtype": "float16", "query_splits": 4}
    with DEVICES["H200"].planning():
        plan = fa_numba.plan(shape, shape, **split)
    assert plan.kernels[0].grid == (4, 32, 1)
    assert bounds.expected(plan, DEVICES["H200"]).bound == "DRAM"


def test_the_plan_says_how_many_blocks_share_a_tile(capsys):
    size = ("--seqlen=4096", "--head-dim=64", "--heads=8", "--device=H200", "--algorithm=fa2")
    shared = (*size, "--heads-k=2", "--backward", "--causal")
    for arguments, row in (
        ((*size, "--seqlen=64", "--seqlen-k=16384"), ["blocks per row tile", "16"]),
        ((*shared, "--batch=2"), ["blocks per column tile", "2"]),
    ):
        text = output(capsys, "plan", *arguments)
        assert row in [re.split(r"  +", line.strip()) for line in text.splitlines()]
    assert "blocks per" not in output(capsys, "plan", *size)


@pytest.mark.parametrize("why", [DynamicLibNotFoundError("No libnvrtc"), ImportError("No NVVM")])
def test_registers_without_a_compiler_name_the_extra(why, capsys, monkeypatch):
    def compile(*_, **__):
        raise why

    monkeypatch.setattr(linking.cuda, "compile", compile)
    message = refused(capsys, "plan", *SIZE, "--device", "H200", "--registers")
    said = "NVIDIA's compiler, which a kernel needs, is not installed. Install the extra cu13, or"
    assert said in message and message.endswith(f"pip install '.[cu13]' ({why})")


def test_what_one_algorithm_cannot_the_others_are_shown_without(capsys):
    # FA-1 also has a tile of O in shared memory.
    arguments = ("--seqlen=512", "--head-dim=160", "--backward", "--tiles=64x64", "--device=A100")
    text = output(capsys, "plan", *arguments)
    assert "FA-1, one block per head: tiles must fit in" in text
    assert fits(text)
    assert re.search(r"^ +FA-2, grid over K/V +standard$", text, re.M)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: --seqlen, --head-dim"),
        (
            [*SIZE, "--device", "V100"],
            "argument --device: the name of the GPU must be one of A100, H100, H200",
        ),
        (
            [*SIZE, "--head-dim", "300"],
            "argument --head-dim: must be an integer from 1 to 256, got 300",
        ),
        ([*SIZE, "--heads-k", "3"], "k must have a number of heads that divides"),
        (
            [*SIZE, "--tiles", "64"],
            "argument --tiles: must be two integers such as 64x128, got '64'",
        ),
        (
            [*SIZE, "--tiles", "6x64"],
            "argument --tiles: tiles.Br must be a positive multiple of 4, got 6",
        ),
        (
            [*SIZE, "--tiles", "512x512"],
            "tiles must fit in the registers of at most 512 threads, got Br=512",
        ),
        ([*SIZE, "--unit", "simt"], "for float16, got 'simt', which multiplies float32"),
        (
            [*SIZE, "--dtype", "float64"],
            "argument --dtype: must be float32, float16 or bfloat16 (short: fp32, fp16, bf16), got "
            "'float64'; did you mean 'float16'?",
        ),
        ([*SIZE, "--device", "RTX409"], "got 'RTX409'; did you mean 'RTX 4090'?"),
        (
            [*SIZE, "--algorithm", "fa3"],
            "must be all, standard, fa1 or fa2, got 'fa3'; did you mean 'fa2'?",
        ),
        (
            [*SIZE, "--batch", "65536"],
            "argument --batch: must be an integer from 1 to 65535, got 65536",
        ),
    ],
)
def test_what_plan_refuses(arguments, message, capsys):
    assert message in refused(capsys, "plan", *arguments)


def test_sizes_and_dtypes_have_short_names(capsys):
    short = output(capsys, "plan", "--seqlen", "2k", "--head-dim", "64", "--dtype", "bf16")
    long = ("plan", "--seqlen", "2048", "--head-dim", "64", "--dtype", "bfloat16")
    assert short == output(capsys, *long)
    assert "(1, 1, 2048, 64), bfloat16" in short


def test_without_a_dtype_an_older_gpu_gets_the_one_that_it_has(capsys):
    text = output(capsys, "plan", *SIZE, "--device", "T4")
    assert "The T4 has no kernels for float16, so the plan is for float32." in text
    assert ", float32, forward" in text
    assert ", float16, forward" in output(capsys, "plan", *SIZE, "--device", "A100")
