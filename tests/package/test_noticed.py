"""The run that noticed a planted fault last goes first, and is a hint alone."""

import contextlib
from types import SimpleNamespace

import mutant_cases
import noticed
import pytest
import remembered
import test_mutants
from mutant_cases import Run

SITE = SimpleNamespace(module="fa_numba.kernels.simt", name="kernels.simt:f drop g()", key="f")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(remembered, "FOLDER", tmp_path / "new")
    noticed._connection.cache_clear()
    yield tmp_path / "new"
    noticed._connection.cache_clear()


def test_the_last_run_is_told_to_every_process(folder):
    assert noticed.hint("a") is None
    noticed.note("a", "mma", "one")
    noticed.note("a", "simt", "two")
    noticed._connection.cache_clear()  # as in another process
    assert noticed.hint("a") == ("simt", "two") and noticed.hint("b") is None


def test_where_nothing_can_be_written_nothing_is_known(folder, monkeypatch):
    folder.mkdir()
    (folder / noticed.FILE).write_text("no database, but a text of several lines\n" * 9)
    noticed.note("a", "mma", "one")
    assert noticed.hint("a") is None
    noticed._connection.cache_clear()
    monkeypatch.setattr(remembered, "FOLDER", None)
    noticed.note("a", "mma", "one")
    assert noticed.hint("a") is None


def test_hints_of_the_file_are_for_who_has_none(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(noticed, "HINTS", tmp_path / "hints.csv")
    noticed.in_file.cache_clear()
    (tmp_path / "hints.csv").write_text('fault,unit,title\n"a, b",mma,one\nc,simt,"two, 2"\n')
    noticed.note("c", "wgmma", "three")
    assert noticed.hint("a, b") == ("mma", "one") and noticed.hint("c") == ("wgmma", "three")
    noticed.write(["d", "c", "a, b", "c"])
    noticed.in_file.cache_clear()
    assert noticed.in_file() == {"a, b": ("mma", "one"), "c": ("wgmma", "three")}
    noticed.in_file.cache_clear()


def test_most_hints_of_the_file_are_of_runs_that_there_are():
    """Otherwise: python tests/test_mutants.py hints"""
    runs = {(run.unit, run.title) for run in (*mutant_cases.runs(), *mutant_cases.host_runs())}
    found = noticed.in_file().values()
    assert sum(hint in runs for hint in found) > 0.9 * len(found) > 0


@pytest.fixture
def run(folder, monkeypatch):
    """A function that makes the runs that execute the fault, and what has been called."""
    called = []

    def runs(**errors):
        def made(title, error):
            def call():
                called.append(title)
                if error:
                    raise error

            return Run("simt", title, call)

        found = [made(*each) for each in errors.items()]
        monkeypatch.setattr(mutant_cases, "runs", lambda: found)
        monkeypatch.setattr(test_mutants, "reaching", lambda site, shares: iter([found]))
        return called

    monkeypatch.setattr(test_mutants, "planted", lambda site: contextlib.nullcontext())
    return runs


def test_the_run_of_the_last_time_goes_first_and_must_notice_it_again(run):
    called = run(one=None, two=ValueError(), three=KeyError())
    assert test_mutants.tried(SITE) == ("ValueError", "two", 2)
    assert test_mutants.tried(SITE) == ("ValueError", "two", 1)
    assert called == ["one", "two", "two"]
    run(one=None, two=None, three=KeyError())
    assert test_mutants.tried(SITE) == ("KeyError", "three", 4)
    run(one=None, two=None, three=None)
    assert test_mutants.tried(SITE) == (None, "", 4)


def test_a_run_that_notices_it_in_another_way_is_not_enough(run):
    called = run(one=None, two=ValueError())
    test_mutants.tried(SITE)
    run(one=KeyError(), two=ValueError())
    called.clear()
    assert test_mutants.tried(SITE, wanted={"KeyError"})[:2] == ("KeyError", "one")
    assert test_mutants.tried(SITE, wanted={"KeyError"}) == ("KeyError", "one", 1)


def test_runs_that_are_quick_are_looked_for_among_themselves(run):
    called = run(one=None, two=ValueError())
    test_mutants.tried(SITE, quick=True)
    assert noticed.hint(SITE.name) is None and called == ["one", "two"]
