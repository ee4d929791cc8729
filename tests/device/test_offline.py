"""A kernel is compiled once for every test and process that looks at it."""

import os
import threading
import time

import offline
import pytest
from test_kernel_cache import SPEC

from fa_numba.device import Kernel, array_type, kernel_cache
from fa_numba.kernels.mma import fa2_forward


@pytest.fixture
def compilations(tmp_path, monkeypatch):
    """What was compiled, as (kernel, arch); nothing of it really is."""
    found = []

    def from_source(kernel, arch):
        found.append((kernel, arch))
        time.sleep(0.05)  # so that another process would begin in the meantime
        return f"PTX of {kernel.name} for {arch}", "log"

    monkeypatch.setattr(offline, "from_source", from_source)
    monkeypatch.setattr(offline, "_apart", lambda kernel, arch: None)  # `found` is of this process
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "kept"))
    return found


def by_another_process(kernel, arch):
    """Past what this process remembers."""
    return offline.compiled.__wrapped__(kernel, arch)


def test_what_was_compiled_is_found_by_every_process(compilations):
    kernel = fa2_forward.make_forward(SPEC)
    first = offline.compiled(kernel, "sm_80")
    assert first == ("PTX of fa2_forward for sm_80", "log")
    assert by_another_process(kernel, "sm_80") == first
    assert len(compilations) == 1
    assert by_another_process(kernel, "sm_90a")[0] == "PTX of fa2_forward for sm_90a"
    assert [arch for _, arch in compilations] == ["sm_80", "sm_90a"]


def test_other_sources_compile_anew(compilations, monkeypatch):
    kernel = fa2_forward.make_forward(SPEC)
    by_another_process(kernel, "sm_80")
    monkeypatch.setattr(kernel_cache, "_sources", lambda: "other sources")
    by_another_process(kernel, "sm_80")
    monkeypatch.setattr(offline, "_here", lambda: b"another way to compile")
    by_another_process(kernel, "sm_80")
    assert len(compilations) == 3


def test_two_at_once_compile_once(compilations):
    kernel = fa2_forward.make_forward(SPEC)
    both = [threading.Thread(target=by_another_process, args=(kernel, "sm_80")) for _ in "12"]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(compilations) == 1


def test_a_damaged_file_compiles_anew(compilations):
    kernel = fa2_forward.make_forward(SPEC)
    whole = by_another_process(kernel, "sm_80")
    entries = kernel_cache.directory() / "entries"
    for path in (path for path in entries.rglob("*") if path.is_file()):
        path.write_bytes(b"{")
    assert by_another_process(kernel, "sm_80") == whole
    assert len(compilations) == 2


def test_what_cannot_be_kept_is_compiled(compilations, monkeypatch):
    def function(X):
        X[0] = 1

    of_a_test = Kernel(function, (array_type(1),), 32, 0)
    assert by_another_process(of_a_test, "sm_80") == ("PTX of function for sm_80", "log")
    monkeypatch.setenv(kernel_cache.VARIABLE, "")
    by_another_process(fa2_forward.make_forward(SPEC), "sm_80")
    assert len(compilations) == 2


def test_a_forked_process_returns_what_it_compiled(monkeypatch):
    """No process is forked for the first kernel. The result None asks the caller to compile.

    This is so for the first kernel, and for a kernel whose compilation raises an error.
    """
    monkeypatch.setattr(offline, "_loaded", [])
    monkeypatch.setattr(
        offline, "from_source", lambda kernel, arch: (f"PTX by {os.getpid()}", arch)
    )
    assert offline._apart(None, "sm_80") is None
    ptx, log = offline._apart(None, "sm_80")
    assert ptx.startswith("PTX by ") and ptx != f"PTX by {os.getpid()}" and log == "sm_80"
    monkeypatch.setattr(offline, "from_source", lambda kernel, arch: 1 / 0)
    assert offline._apart(None, "sm_80") is None
