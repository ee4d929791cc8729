"""Results that tests remember are those of equal arguments, also from the database on disk."""

import numpy as np
import pytest
import remembered


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The calls of `compute`, of which some are remembered in a database of their own."""
    monkeypatch.setattr(remembered, "FOLDER", tmp_path)
    monkeypatch.setattr(remembered, "SHORT", 0)
    for function in (remembered._database, remembered._connection):
        function.cache_clear()
    yield []
    for function in (remembered._database, remembered._connection):
        function.cache_clear()


def remembering(calls):
    """A function that remembers, as a new process has it: it finds what is stored on disk alone."""

    def compute(x, **options):
        calls.append(options)
        return {"twice": 2 * x}

    return remembered.remembered(compute)


def test_equal_calls_are_computed_once_and_found_by_other_processes(calls):
    x, far = np.arange(3.0), np.float32([1, 2])
    for _ in range(2):
        compute = remembering(calls)
        for _ in range(2):
            found = compute(x.copy(), tiles=None, score_mod=lambda s, i: s + far[i])
            np.testing.assert_array_equal(found["twice"], 2 * x)
            assert not found["twice"].flags.writeable
    assert len(calls) == 1


def test_other_calls_are_computed(calls):
    compute, x, far = remembering(calls), np.arange(3.0), np.float32([1, 2])

    def scored(s, i):
        return s + far[i]

    for given in (x, x + 1, x.astype("f4"), x.reshape(3, 1)):
        compute(given, score_mod=scored)
    far[1] = 3
    compute(x, score_mod=scored)
    compute(x, score_mod=lambda s, i: s - far[i])
    compute(x, window=(1, 2))
    compute(x, window=[1, 2])
    assert len(calls) == 8


def test_what_has_no_key_is_computed_each_time(calls):
    compute = remembering(calls)
    for _ in range(2):
        compute(np.zeros(3), block_mask=object())
    assert len(calls) == 2


def test_a_broken_database_is_no_database(calls, tmp_path):
    (tmp_path / "float64").mkdir()
    (tmp_path / "float64" / f"{remembered.state()}.sqlite").write_bytes(b"no database" * 99)
    assert remembering(calls)(np.ones(2))["twice"].tolist() == [2, 2] and len(calls) == 1


def test_old_databases_are_deleted(calls, tmp_path):
    (tmp_path / "float64").mkdir()
    for n in range(9):
        (tmp_path / "float64" / f"{n}.sqlite").touch()
    remembering(calls)(np.ones(2))
    left = {path.name for path in (tmp_path / "float64").glob("*.sqlite")}
    assert len(left) == remembered.MOST_DATABASES and f"{remembered.state()}.sqlite" in left
