"""Loops that Numba compiles for the emulator: what is stored on disk, and what damage does."""

import pytest

from fa_numba.emulator.compiling import VARIABLE, compiled


def doubled(x):
    return 2 * x


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_damaged_file_is_a_miss_and_is_written_again(kind, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))

    def found():
        """Whether the machine code was stored."""
        function = compiled()(doubled)
        assert function(3) == 6
        return sum(function.stats.cache_hits.values()) == 1

    assert not found() and found()
    (path,) = tmp_path.rglob(f"*.{kind}")
    for damage in (lambda x: b"", lambda x: x[:-1] + b"\xff"):
        path.write_bytes(damage(path.read_bytes()))
        assert not found() and found()
