"""Readers' machines: other libraries, no home, a cache that cannot be used, other terminals."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest
from helpers import random_inputs
from numpy.testing import assert_allclose
from stand_in_device import SHARED_BYTES, no_calls_kept, no_gpu_but_its_driver

import fa_numba
from fa_numba import bounds, device
from fa_numba.device import kernel_cache

ROOT = Path(__file__).resolve().parents[2]


def python(code, **settings):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **settings)


def test_the_package_needs_neither_torch_nor_numpys_row_stack():
    """NumPy 2.5 has no such name, which is gone again afterwards; one process for both."""
    done = python(
        "import sys, numpy as np; vars(np).pop('row_stack', None); "
        "np.__all__ = [name for name in np.__all__ if name != 'row_stack']; import fa_numba; "
        "from numba.cuda.np import arrayobj; print(hasattr(np, 'row_stack')); "
        "print('torch' in sys.modules, hasattr(fa_numba, 'torch')); "
        "sys.modules['torch'] = None; import fa_numba.torch"
    )
    assert done.stdout == "False\nFalse False\n", done.stderr
    assert "ImportError: fa_numba.torch needs PyTorch" in done.stderr
    assert "pip install 'torch>=2.5'" in done.stderr


@pytest.mark.parametrize(
    "settings",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "20"},
        {"HOME": os.devnull, "XDG_CACHE_HOME": os.devnull, "TERM": "dumb", "COLUMNS": "0"},
    ],
    ids=["no home, C locale, narrow", "a home that cannot be written, no terminal"],
)
def test_a_command_says_the_same_on_every_machine(settings, tmp_path):
    """In a folder with a space too, and where standard input is closed."""
    where = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **settings}
    (tmp_path / "a b").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "fa_numba", "trace", "--example", "3"],
        **dict(capture_output=True, text=True, env=where, cwd=tmp_path / "a b"),
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "0.032   0.087   0.237   0.644" in done.stdout


@pytest.mark.slow
def test_a_call_from_a_path_with_spaces(tmp_path):
    """The package too lies there, and what the emulator compiles is kept beside it."""
    place = tmp_path / "a b"
    place.mkdir()
    (place / "fa_numba").symlink_to(ROOT / "fa_numba")
    where = {"PATH": os.environ["PATH"], "HOME": str(place), "PYTHONPATH": str(place)}
    where[kernel_cache.VARIABLE] = str(place / "kept")
    code = (
        "import fa_numba, numpy as np; x = np.ones((1, 1, 9, 8), np.float32); "
        "print(fa_numba.__file__, fa_numba.attention(x, x, x, algorithm='fa1').sum())"
    )
    done = python(code, env=where, cwd=place)
    assert (done.stdout, done.stderr) == (f"{place}/fa_numba/__init__.py 72.0\n", "")
    assert any((place / "kept").iterdir())


@pytest.mark.parametrize("kept", ["/dev/null/kept", "x" * 300])
def test_show_config_says_what_a_report_needs(kept, monkeypatch, capsys):
    monkeypatch.setenv(kernel_cache.VARIABLE, kept)
    with bounds.as_gpu("T4"):
        fa_numba.show_config()
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (
        said["fa_numba"] == fa_numba.__version__ and f"numpy {np.__version__}" in said["packages"]
    )
    assert "simt" in said["units"] and "float16 none (float16 needs unit 'mma'" in said["units"]
    assert said["device"].startswith("emulator, since ") and "nothing is kept" in said["cache"]
    assert said["setting"] == f"FA_NUMBA_CACHE={kept}"


@pytest.mark.slow
def test_the_wheel_runs_from_another_folder(tmp_path):
    """In an environment of its own, beside the packages that this one has."""
    built, place = tmp_path / "built", tmp_path / "place"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", built, "."]
    source = tmp_path / "source"
    shutil.copytree(ROOT / "fa_numba", source / "fa_numba")
    shutil.copytree(ROOT / ".ci", source / ".ci")
    for name in ("setup.cfg", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(wheel, cwd=source, check=True)
    (made,) = built.glob("fa_numba-*.whl")
    venv.create(place)
    here = place / "bin" / "python"
    own = next((place / "lib").glob("python3*")) / "site-packages"
    install = [*pip, "--python", here, "install", "-q", "--no-deps", "--no-index", made]
    subprocess.run(install, check=True)
    others = sysconfig.get_path("purelib")  # whose own .pth files count: numba-cuda has one
    (own / "others.pth").write_text(f"import site; site.addsitedir({others!r})\n")
    where = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    code = "import fa_numba; print(fa_numba.__file__); fa_numba.show_config()"
    run = {"cwd": tmp_path, "env": where, "stdout": subprocess.PIPE, "text": True, "check": True}
    said = subprocess.run([here, "-c", code], **run).stdout.splitlines()
    assert Path(said[0]).is_relative_to(own) and said[1].split()[1] == fa_numba.__version__
    plan = [here, "-m", "fa_numba", "plan", "--seqlen", "99", "--head-dim", "64", "--device", "L4"]
    assert "tiles Br x Bc" in subprocess.run(plan, **run).stdout


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (10, 0), (12, 0)])
def test_first_calls_on_a_gpu_that_nobody_recorded(capability):
    """By the driver that stands in: what is launched there, in tiles that fit, is right."""
    q, k, v = random_inputs(1, 1, 1, 70, 70, 64)
    dout = np.ones_like(q)
    with no_gpu_but_its_driver(capability) as gpu, no_calls_kept():
        for algorithm in ("fa1", "fa2"):
            out, lse = fa_numba.attention(q, k, v, algorithm=algorithm, return_lse=True)
            dq, *_ = fa_numba.attention_backward(dout, q, k, v, out, lse, algorithm=algorithm)
            assert_allclose(out, fa_numba.reference.attention(q, k, v), atol=1e-5)
            true, *_ = fa_numba.reference.attention_backward(dout, q, k, v)
            assert_allclose(dq, true, atol=1e-5)
        assert {found for _, found, _ in gpu.loaded} == {capability}
        most = max(kernel.shared_bytes for kernel in gpu.launched)
        assert most <= SHARED_BYTES.get(capability, device.EMULATED_SHARED_BYTES)
