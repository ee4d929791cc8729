"""What is said of how a recording was made: its commit, clocks, and how many runs."""

from experiments.lab.measure.series import row_fields
from experiments.lab.measure.workloads import one_head
from experiments.lab.record import provenance
from experiments.lab.record.store import Row
from experiments.lab.show import report, tables

CLOCKS = {"SM clock, MHz": [1095.0, 1620.0, 1980.0], "busy": 102, "held by": {"power cap": 94}}


def time(n, N=64, **fields):
    common = {"machine": report.MACHINE, "experiment": "speed", "source": "measured"}
    common |= {"metric": "time", "unit": "ms", "value": 1.0, **row_fields(one_head(N, 64))}
    return Row(n=n, **{"series": "fa2-simt"} | common | fields)


def test_clocks_are_said_in_words():
    assert provenance.clocks({"clocks": CLOCKS}) == (
        "SM clock 1095 to 1980 MHz, in the median 1620 MHz in 102 samples of the busy GPU, held "
        "down by the power cap in 94 of them"
    )
    steady = {"SM clock, MHz": [1980.0] * 3, "busy": 2, "held by": {}}
    assert provenance.clocks({"clocks": steady}) == "SM clock 1980 MHz in 2 samples of the busy GPU"
    assert "no sample" in provenance.clocks({"clocks": CLOCKS | {"busy": 0}})
    assert provenance.clocks({}) == "clocks were not sampled"


def test_rows_of_few_runs_are_named():
    rows = [time(20), time(1, 128), time(4, 256, series="fa1-simt"), time(None)]
    assert (
        tables.fewer_runs(rows)
        == "2 of 3 times are of 1 to 4 runs: N=128 to 256, fa1-simt, fa2-simt"
    )
    assert tables.fewer_runs([time(1)]) == "1 of 1 times are of 1 run: N=64, fa2-simt"
    assert tables.fewer_runs([time(5), time(1, metric="memory"), time(1, value=None)]) == ""
