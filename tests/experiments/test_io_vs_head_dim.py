"""Accesses over the head dimension; the tests that it shares with the memory's are in
test_io_vs_sram.py."""

import pytest
import test_io_vs_sram

from experiments import io_vs_head_dim
from experiments.lab.measure import scaling
from experiments.lab.measure.workloads import one_head
from experiments.lab.record.options import Options


def synthetic():
    with pytest.MonkeyPatch.context() as patch:
        return test_io_vs_sram.measured(io_vs_head_dim, patch, options=Options(quick=True))


def test_every_series_has_its_tiles():
    found = {s.series: s for s in io_vs_head_dim.settings(one_head(4096, 128))}
    assert list(found) == [*scaling.PLANNED, *scaling.RULED]
    assert (found["fa1-simt-rule"].Br, found["fa1-simt-rule"].Bc) == (16, 16)
    assert all(scaling.made(setting) for setting in found.values())
