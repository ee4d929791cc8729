"""Faults planted by rule in kernels, parts and emulations: a call notices each, or it is none.

`survivors.csv` lists the faults that no test call notices, each with the reason why it is no fault.
Random calls prove the reasons (`proofs`). By default a sample of the faults and of the reasons is
tried. Two commands try some of them, and a third one writes down what noticed the sample:

    python tests/test_mutants.py NAME ...         try the faults whose name contains a NAME
    python tests/test_mutants.py prove NAME ...   prove the reasons of the survivors whose name
                                                  contains a NAME, and write them to the file
    python tests/test_mutants.py hints            write to `noticed.csv` which run noticed each
                                                  fault of the sample last
"""

import ast
import csv
import functools
import importlib
import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import mutant_cases
import mutants
import noticed
import numpy as np
import proofs
import pytest
import stand_in_torch

SURVIVORS = Path(__file__).parent / "data" / "survivors.csv"
UNITS = {"simt": 8, "mma": 5, "wgmma": 3}  # and of how many sites by default
HOST = {"host": 4, "ring": 4, "torch": 2, "intrinsics": 16}  # and of what is no kernel
PARTS = 48  # of all
SAMPLED_REASONS = 3  # that are proved by default
FALSE_REASON = "drop", "products.scale_and_add(rO, rf, rT)"
# Into how many shares a unit's runs are divided. A sample looks at one share after another: a small
# share takes less time, but leaves more mutants to the next share.
SHARES = {"simt": 12, "mma": 5, "wgmma": 5, "intrinsics": 5}
PACKAGES, INTRINSICS = ("fa_numba.kernels", "fa_numba.parts"), "fa_numba.intrinsics"
TORCH = "fa_numba.torch"  # imported by a stand-in for torch
ON_HOST = ("fa_numba.host", "fa_numba.choices.copies", "fa_numba.ring", TORCH)


# Columns of the file. The first ones name a fault, as `named` does. `proof` says what random calls
# show (`proofs.Proof.kind`); `calls` is how many calls ran the changed code, `differed` in how many
# of these calls the changed value was another one; `revision` is the commit that was tried.
NAMES = ("module", "function", "rule", "text", "occurrence")
COLUMNS = (*NAMES, "reason", "proof", "calls", "differed", "revision")


@functools.cache
def rows():
    """Return the rows of the file by `named`: each a dict by column."""
    with SURVIVORS.open() as file:
        found = list(csv.DictReader(file))
    return {(*(row[n] for n in NAMES[:-1]), int(row["occurrence"])): row for row in found}


@functools.cache
def survivors():
    """Why each is no fault, by `named`."""
    return {name: row["reason"] for name, row in rows().items()}


def named(site):
    return site.module, site.function, site.rule, site.text, site.occurrence


@functools.cache
def listed():
    """Return the faults that the file lists, by `named`; `random_faults` draws some of them."""
    others = mutants.modules_of(*PACKAGES)
    found = [site for name in others for site in mutants.sites_of(name, tuple(OTHERS))]
    rules = (*mutants.RULES, mutants.forget)
    drawn = [site for name in {row[0] for row in rows()} for site in mutants.sites_of(name, rules)]
    return {named(site): site for site in (*found, *drawn, *sites()) if named(site) in rows()}


@functools.cache
def sites():
    """All that a call can reach; in intrinsics what an emulation is and calls."""
    found = (mutants.sites_of(name) for name in mutants.modules_of(*PACKAGES))
    rules = (*mutants.RULES, mutants.forget)
    on_host = (mutants.sites_of(name, rules) for name in mutants.modules_of(*ON_HOST))
    names = list(mutants.modules_of(INTRINSICS))
    of_modules = [vars(importlib.import_module(name)).values() for name in names]
    functions = [x.emulation for x in itertools.chain(*of_modules) if hasattr(x, "emulation")]
    called = mutants.functions_from(functions, mutants.Calls())
    keys = {mutants.key_of(function.__code__) for function, _ in called}
    emulated = [site for name in names for site in mutants.sites_of(name) if site.key in keys]
    return [*itertools.chain(*found), *itertools.chain(*on_host), *emulated]


def units_of(site):
    """All units, what runs fastest first, but that which the module is of before; of the host's
    code those of the host, of emulations that alone.
    """
    words = site.module.split(".")
    if "intrinsics" in words:
        return ["intrinsics"]
    on_host = HOST.keys() & words or site.module in ON_HOST
    units = ("host", "ring", "torch") if on_host else UNITS
    return sorted(units, key=lambda unit: unit not in words)


@functools.cache
def records(unit, quick, share, shares):
    """A share of the runs of a unit with what they execute; of the host's code, where there is one
    share, those that are quick or not.
    """
    if unit in HOST:
        runs = [x for x in mutant_cases.host_runs() if x.unit == unit and x.quick == quick]
        with mock.patch.object(stand_in_torch, "TEXT", mutants.telling(TORCH)):
            told = [INTRINSICS] if unit == "intrinsics" else ON_HOST[:-1]
            return list(mutants.executed(runs, list(mutants.modules_of(*told))))
    found = [(run, mutants.reached(run)) for run in _runs_of(unit)[share::shares]]
    return sorted(found, key=lambda each: each[1].threads)


@functools.cache
def _runs_of(unit):
    return [run for run in mutant_cases.runs() if run.unit == unit]


_noticed: Counter = Counter()  # by function, module and run: what has noticed one looks first


def reaching(site, shares=1):
    """Lists of runs that execute a site: of its own unit, if there are any, else of the others; of
    the host's code those of its own that are quick, the rest of them, and those of the others.
    """
    units, words = units_of(site), site.module.split(".")

    def first(run):
        return -_noticed[site.key, run.title], -(shares > 1) * _noticed[site.module, run.title]

    if units[0] in HOST:
        ways = [(unit, quick, 0, 1) for unit in units for quick in (True, False)]
    else:
        ways = [(unit, True, share, shares) for share in range(shares) for unit in units]
    if units[0] in words:
        ways.sort(key=lambda way: way[0] != units[0])
    own = False
    for way in ways:
        if own and way[0] != units[0] and units[0] not in HOST:
            return
        found = [run for run, record in records(*way) if mutants.reaches(site, record)]
        own |= bool(found) and units[0] in words
        yield sorted(found, key=first)


def planted(site):
    if site.module == TORCH:
        return mock.patch.object(stand_in_torch, "TEXT", mutants.changed(site))
    return mutants.planted(site)


def tried(site, quick=False, shares=1, wanted=None):
    """(how, by which run, after how many) a mutant is noticed; how is None if it is not, or not by
    runs that are quick.

    The run that noticed it last goes first, and is enough if it notices it in one of the ways that
    are ``wanted``, or in any way. One of the host's or of an emulation may write anywhere, or not
    end, so that it has a process of its own.
    """
    count = 0
    alone = units_of(site)[0] in HOST
    last = [] if quick else _noticed_last(site)
    lists = itertools.islice(reaching(site, shares), 1 if quick else None)
    for runs in itertools.chain([last] * bool(last), lists):
        how, run, more = mutants.apart(_tried, site, runs) if alone else _tried(site, runs)
        count += more
        if how is not None and (runs is not last or wanted is None or how in wanted):
            _noticed.update([(site.key, run), (site.module, run)])
            if not quick:
                (unit,) = {each.unit for each in runs if each.title == run}
                noticed.note(site.name, unit, run)
            return how, run, count
    return None, "", count


def _noticed_last(site):
    """The run that noticed a mutant last, and others of its title; none if it is not known."""
    known = noticed.hint(site.name)
    if known is None:
        return []
    runs = mutant_cases.host_runs() if units_of(site)[0] in HOST else mutant_cases.runs()
    return [run for run in runs if (run.unit, run.title) == known]


def _tried(site, runs):
    if runs:
        with planted(site):
            for count, run in enumerate(runs, 1):
                how = mutants.noticed(run)
                if how is not None:
                    return how, run.title, count
    return None, "", len(runs)


def all_noticed(chosen, shares=1):
    chosen = [site for site in chosen if named(site) not in survivors()]
    unnoticed = [site.name for site in chosen if tried(site, shares=shares)[0] is None]
    assert not unnoticed, "\n".join(("nothing notices", *unnoticed))


def not_proved(chosen, **how):
    """Return a sentence for each of these survivors that random calls do not reach or notice."""
    tried = ((site, proofs.prove(site, **how)) for site in chosen)
    wrong = ((proof.noticed or proof.kind, site) for site, proof in tried if not proof.holds)
    return [f"{how}: {site.name}" for how, site in wrong]


# --- what the diagnosis is --------------------------------------------------------------------

EARLY = {"SharedHazard", "BarrierMisuse", "UninitialisedRead", "GlobalHazard"}
ON_ITS_WAY = {"RegisterHazard", "SharedHazard"}
STALLS = {"Deadlock", "BarrierDivergence"}
# A call that is dropped, and what says so.
MISSING = {
    "syncthreads": EARLY,
    "syncwarp": {"SharedHazard"},
    "commit_async": {"SharedHazard"},
    "wait_async": {"SharedHazard"},
    "init_mbarrier": {"BarrierMisuse"},
    "wait_mbarrier": EARLY,
    "arrive_mbarrier": STALLS | {"BarrierMisuse"},
    "expect_bytes": STALLS,
    "sync_named": EARLY,
    "arrive_named": STALLS,
    "fence_mbarrier_init": {"MissingFence"},
    "fence_async_proxy": {"MissingFence"},
    "commit_boxes": EARLY,
    "wait_boxes_read": EARLY,
    "wait_products": ON_ITS_WAY,
    "give_registers": {"Deadlock"},
    "add_global": {"counts"},
}
SELDOM = r"\bTURN_[12]\b"  # of which one run in forty tells: not in the sample


def another_phase(node):
    """Wait for the phase before or after the one that is meant."""
    if mutants.called(node, "wait_mbarrier"):
        *others, phase = node.value.args
        phase = ast.parse(f"uint32(({ast.unparse(phase)}) ^ 1)", mode="eval").body
        yield node, ast.Expr(ast.Call(node.value.func, [*others, phase], []))


def not_atomic(node):
    """A read, an add and a write where several blocks of a launch add to one element."""
    if mutants.called(node, "add_global"):
        array, *place, value = map(ast.unparse, node.value.args)
        yield node, ast.parse(f"{array}[{', '.join(place)}] += {value}").body[0]


def more_bytes(node):
    """Announce more bytes than come."""
    if mutants.called(node, "expect_bytes"):
        *others, size = node.value.args
        size = ast.BinOp(size, ast.Add(), ast.Constant(8))
        yield node, ast.Expr(ast.Call(node.value.func, [*others, size], []))


def more_registers(node):
    """Keep more registers than the launch leaves to the others."""
    if mutants.called(node, "give_registers"):
        more = ast.BinOp(node.value.args[0], ast.Add(), ast.Constant(8))
        yield node, ast.Expr(ast.Call(node.value.func, [more], []))


def half_sums(node):
    """Round sums to 16 bits within the loop that adds to them, before more is added."""
    if isinstance(node, ast.While):
        for each in node.body:
            if mutants.called(each) and each.value.args:
                first, name = map(ast.unparse, (each.value.args[0], each.value.func))
                later = not re.search("start|write|scale_columns", name)
                if first in ("rO", "rdQ", "rdK", "rdV") and later:
                    yield each, ast.parse(f"{ast.unparse(each)}; rounded_to_16_bits({first})")


def far_and_back(node):
    """Take a row's D to large numbers and back, of which a double loses nothing."""
    if isinstance(node, ast.Assign) and ast.unparse(node).startswith("rD[i] ="):
        place, value = ast.unparse(node.targets[0]), ast.unparse(node.value)
        yield node, ast.parse(f"{place} = {value} + float32(65536.0) - float32(65536.0)").body[0]


def rounded_to_16_bits(array):
    with np.errstate(over="ignore"):
        for e in range(array.size):
            array[e] = np.float64(np.float16(array[e]))


rounded_to_16_bits.emulation = rounded_to_16_bits  # as an intrinsic has it
OTHERS = {
    another_phase: EARLY | STALLS,
    not_atomic: {"GlobalHazard", "values"},
    more_bytes: STALLS,
    more_registers: {"Deadlock"},
    half_sums: {"values"},
    far_and_back: {"values"},
}


@functools.cache
def diagnosed():
    """(site, what says so, whether it is in the sample): the first three of each kind are, if they
    are not SELDOM's.
    """
    found = []
    rules = {(mutants.drop, name): wanted for name, wanted in MISSING.items()}
    rules |= {(rule, ""): wanted for rule, wanted in OTHERS.items()}
    modules = list(mutants.modules_of("fa_numba.kernels", "fa_numba.parts"))
    for (rule, name), wanted in rules.items():
        sites = [site for module in modules for site in mutants.sites_of(module, (rule,))]
        if rule is half_sums:
            sites = [site for site in sites if "mma" in site.module.split(".")]
        sites = [site for site in sites if not name or re.search(rf"\b{name}\(", site.text)]
        sites = sorted({site for site in sites if named(site) not in survivors()}, key=by_number)
        assert sites, f"no {rule.__name__} {name}"
        sites.sort(key=lambda site: bool(re.search(SELDOM, site.text)))
        found += [
            (site, wanted, n < 3 and not re.search(SELDOM, site.text))
            for n, site in enumerate(sites)
        ]
    return found


def by_number(site):
    return site.number


def all_diagnosed(chosen, shares=1):
    wrong = []
    for site, wanted in chosen:
        module = importlib.import_module(site.module)
        with mock.patch.object(module, "rounded_to_16_bits", rounded_to_16_bits, create=True):
            how, run, _ = tried(site, shares=shares, wanted=wanted)
        if how not in wanted:
            wrong.append(f"{how} in {run}, not {' or '.join(wanted)}: {site.name}")
    assert not wrong, "\n".join(wrong)


def sample_of(unit):
    """Return the faults of a unit that are tried by default, and pairs of others with what says
    so.
    """
    of_unit = (site for site in sites() if units_of(site)[0] == unit)
    chosen = sorted(of_unit, key=by_number)[: (UNITS | HOST)[unit]]
    of_all = diagnosed() if unit in UNITS else ()
    pairs = [(site, wanted) for site, wanted, first in of_all if first]
    return chosen, [(site, wanted) for site, wanted in pairs if units_of(site)[0] == unit]


# --- the tests -------------------------------------------------------------------------------


def some(values, by_default):
    """Parameters of which those are slow that are not wanted by default."""
    return [pytest.param(x, marks=() if x in by_default else pytest.mark.slow) for x in values]


OWN = mutant_cases.own_runs()


@pytest.mark.parametrize("run", some(OWN, OWN[::2]), ids=lambda run: f"{run.unit}-{run.title}")
def test_the_source_as_it_is_passes(run):
    run()


@pytest.mark.parametrize("unit", some(("host", "ring", "torch"), ["host"]))
def test_quick_runs_notice_most_of_a_sample(unit):
    """Of the places that they execute."""
    known = {key for _, record in records(unit, True, 0, 1) for key in record}
    executed = [site for site in sites() if units_of(site)[0] == unit and site.key in known]
    sample = sorted(executed, key=by_number)[: HOST[unit]]
    unnoticed = [site.name for site in sample if tried(site, quick=True)[0] is None]
    assert len(unnoticed) <= len(sample) // 2, "\n".join(unnoticed)


@pytest.mark.parametrize("unit", (*UNITS, "intrinsics"))
def test_a_sample_is_noticed(unit):
    """And a few by what they are; each unit in one process, which finds out what runs what."""
    chosen, of_unit = sample_of(unit)
    all_noticed(chosen, SHARES[unit])
    all_diagnosed(of_unit, SHARES[unit])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_are_noticed(part):
    all_noticed(sites()[part::PARTS])
    all_diagnosed([(site, wanted) for site, wanted, _ in diagnosed()[part::PARTS]])


@pytest.mark.parametrize("text, count", [("(1, 2, 3)", 3), ("x[1, 2, 3]", 3), ("x[:, 1, 2]", 0)])
def test_no_element_of_an_index_with_slices_is_left_out(text, count):
    """An index with slices is a tuple that Python does not read in round brackets."""
    nodes = ast.walk(ast.parse(text))
    assert sum(1 for node in nodes for _ in mutants.forget(node)) == count


def test_a_survivor_is_a_site_and_has_a_reason():
    assert all(survivors().values())
    assert rows().keys() <= listed().keys()


def test_a_sample_of_reasons_is_proved():
    """Of the survivors in kernels for CUDA cores, whose calls are short."""
    chosen = sorted(listed().values(), key=by_number)
    chosen = [x for x in chosen if "simt" in x.module.split(".") and rows()[named(x)]["calls"]]
    tried = (proofs.prove(site, wanted=1, most=1, pool=8, seconds=4) for site in chosen)
    found = list(itertools.islice((x for x in tried if x.reached or x.noticed), SAMPLED_REASONS))
    assert len(found) == SAMPLED_REASONS and not any(x.noticed for x in found), found


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_reasons_are_proved(part):
    chosen = sorted(listed().values(), key=by_number)
    wrong = not_proved([x for x in chosen if rows()[named(x)]["calls"]][part::PARTS])
    assert not wrong, "\n".join(wrong)


def test_a_false_reason_is_noticed():
    """As that O need not be rescaled and added to."""
    (site,) = (
        site
        for site in mutants.sites_of("fa_numba.kernels.simt.fa2_forward")
        if (site.rule, site.text) == FALSE_REASON
    )
    (wrong,) = not_proved([site], wanted=1, most=2, pool=8)
    assert wrong.startswith("results of simt")


def prove(asked):
    """Prove the reasons of some survivors and write what was found to the file."""
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    for name, site in listed().items():
        if any(text in site.name for text in asked):
            proof, row = proofs.prove(site), rows()[name]
            print(f"{proof.kind}\t{proof.reached}\t{proof.noticed}\t{site.name}", flush=True)
            row |= {"proof": proof.kind, "calls": proof.reached or "", "revision": revision}
            row["differed"] = proof.differed if proof.reached else ""
            with SURVIVORS.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows().values())


def main(asked):
    if asked[:1] == ["prove"]:
        prove(asked[1:])
        return
    if asked == ["hints"]:
        samples = map(sample_of, (*UNITS, "intrinsics"))
        found = [[*chosen, *(site for site, _ in pairs)] for chosen, pairs in samples]
        noticed.write(site.name for sites in found for site in sites)
        return
    for site in sites():
        if any(text in site.name for text in asked):
            how, run, count = tried(site)
            print(f"{how}\t{count}\t{run}\t{site.name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
