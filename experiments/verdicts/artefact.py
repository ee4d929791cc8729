"""The table with which other people can check the main claims.

A line of the table has a claim, a command, the time of the command, the expected numbers, and how
far other numbers may differ.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from experiments import loop_order
from experiments.lab.measure import counts
from experiments.lab.record import Row
from experiments.lab.show.tables import MISSING, Across, Table, markdown, span

from .evidence import Evidence, MissingRows, Numbers, Quantity, rows
from .result import WORDS, equal_tiles, moved, took, took_own
from .rule import FACTORS

GPU = "GPU"
PROFILER = "GPU, Nsight Compute"
TORCH = "GPU, torch"
COUNTED = ("io_vs_seqlen", "io_vs_head_dim", "io_vs_sram")


@dataclass(frozen=True)
class Line:
    """A line of the table: a claim, and how to check it.

    Parameters
    ----------
    claim : str
        The claim.
    needs : str
        What checking the claim needs, such as "GPU".
    experiments : tuple of str
        Experiments whose rows decide whether the claim is true.
    expected : callable
        Takes the evidence and returns a text with our numbers.
    allowed : str
        How far the numbers of another run may differ from our numbers.
    """

    claim: str
    needs: str
    experiments: tuple[str, ...]
    expected: Callable[[Evidence], str]
    allowed: str


def _over_units(ratio: Callable[[str, str, str], Quantity]) -> Callable[[Evidence], Numbers]:
    """Return a function that computes ratios of FA-1 to FA-2 from stored rows, on every unit.

    The argument `ratio` defines the ratio on one unit: it takes three series (FA-1, FA-1 with query
    splits, and FA-2), and returns a `Quantity`. The returned function takes the stored rows. It
    returns {(unit, further values such as the sequence length): ratio}.
    """

    def find(found: Evidence) -> Numbers:
        of = {unit: ratio(*loop_order.series_of(unit)).find(found) for unit in WORDS}
        return {(unit, *at): value for unit, each in of.items() for at, value in each.items()}

    return find


def _span(find: Callable[[Evidence], Numbers], form: str = ".2f") -> Callable[[Evidence], str]:
    return lambda found: f"{span(find(found).values(), form)} times"


def _equal(found: Evidence) -> str:
    """Return a text about how many counted numbers equal the closed form."""
    same, number = zip(*(counts.equal(found.rows(name)) for name in COUNTED), strict=True)
    return f"{sum(same)} of {sum(number)} numbers"


def _speed(series: str) -> Callable[[Evidence], str]:
    found = rows("speed_fp16", "head_dim", "causal", "seqlen_q", series=series, metric="speed",
                 pass_="fwd", head_dim=(64, 128))  # fmt: skip
    return lambda evidence: f"{span(found.find(evidence).values(), '.0f')} TFLOP/s"


def _percent(kind: str) -> str:
    return f"{(FACTORS[kind] - 1) * 100:.0f} %"


RATIO = f"{_percent('ratio')}; on other GPUs: the number is above 1"
LINES = (
    Line(
        "Accesses counted on the emulator equal the closed form", "CPU", COUNTED, _equal, "none"
    ),
    Line(
        "L2 bytes / bytes accessed by the kernels", PROFILER, ("loop_order",),
        _span(_over_units(lambda _, a, b: equal_tiles(a, "l2") / equal_tiles(a, "model")), ".3f"),
        _percent("count"),
    ),
    Line(
        "DRAM bytes at equal tiles: K/V outer / Q outer", PROFILER, ("loop_order",),
        _span(_over_units(moved("dram")), ".0f"), RATIO,
    ),
    Line(
        "Time at equal tiles and a full grid: K/V outer / Q outer", GPU, ("loop_order",),
        _span(_over_units(took(1))), RATIO,
    ),
    Line(
        "Time at equal tiles on the paper's grid: K/V outer / Q outer", GPU, ("loop_order",),
        _span(_over_units(took(0)), ".1f"), RATIO,
    ),
    Line(
        "Time with query splits, each order at its own tiles: K/V outer / Q outer", GPU,
        ("speed", "speed_fp16"),
        _span(_over_units(took_own(1))), RATIO,
    ),
    Line("Speed of FA-2 on mma.sync, forward, fp16", TORCH, ("speed_fp16",), _speed("fa2-mma"),
         _percent("speed")),
    Line("Speed of FA-2 on wgmma, forward, fp16", TORCH, ("speed_fp16",), _speed("fa2-wgmma"),
         _percent("speed")),
)  # fmt: skip


def _table(found: Sequence[Row], seconds: Mapping[str, float]) -> Table | None:
    evidence, lines = Evidence(found), []
    for line in LINES:
        try:
            expected = line.expected(evidence)
        except MissingRows:
            continue
        took = [seconds[name] for name in line.experiments if name in seconds]
        minutes = f"{sum(took) / 60:.1f}" if len(took) == len(line.experiments) else MISSING
        command = f"`run {' '.join(line.experiments)}`"
        lines.append([line.claim, command, line.needs, minutes, expected, line.allowed])
    if not lines:
        return None
    header = ["claim", "command", "needs", "minutes", "expected", "allowed variation"]
    caption = (
        "To run a command of the table of claims to check, write `python -m experiments` before "
        "the command. The column *minutes* says how many minutes each complete command took when "
        "we recorded the data. The column *allowed variation* says how far your number may be "
        "from the expected number on an H200. For times and speeds, the allowed variation for an "
        "H200 also applies to an H100. After you run an experiment, `git diff figures/data` shows "
        "which recorded numbers changed."
    )
    return Table(caption, markdown(header, lines).replace("---:", "---"))


NAMES = tuple(dict.fromkeys(name for line in LINES for name in line.experiments))
TABLE = Across(_table, NAMES, cites=False, timed=True)
