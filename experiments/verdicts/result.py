"""The main result, and the result of `io_vs_seqlen`, as text with numbers from the rows."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments import loop_order
from experiments.lab.record import Row
from experiments.lab.show.tables import Across, Table, markdown, span

from .evidence import Evidence, MissingRows, Quantity, rows

WORDS = {
    "simt": "fp32 on CUDA cores",
    "mma": "fp16 on tensor cores",
    "wgmma": "fp16 on Hopper's tensor cores (wgmma)",
}
AT = ("batch", "heads_q", "head_dim", "causal", "seqlen_q")


def in_setting(batch: int, heads: int, d: int, causal: bool, N: int) -> bool:
    """Return whether a problem is of FA-2's benchmark: 16k tokens, hidden dimension 2048."""
    return batch * N == 16384 and heads * d == 2048


def equal_tiles(series: str, source: str) -> Quantity:
    """Return the time or the bytes of a series from `loop_order`, whose series have equal tiles.

    With the source "measured" the numbers are times, else bytes. Only problems of FA-2's benchmark
    are included.
    """
    metric = "time" if source == "measured" else "traffic"
    found = rows("loop_order", *AT, series=series, source=source, metric=metric)
    return found.where(in_setting)


def own_tiles(series: str) -> Quantity:
    """Return the forward time of a series with its own tiles, from the speed experiments."""
    experiment = "speed" if "simt" in series else "speed_fp16"
    return rows(experiment, *AT, series=series, metric="time", pass_="fwd", head_dim=(64, 128))


def moved(source: str) -> Callable[..., Quantity]:
    """Return a function that takes the three series of a unit and returns a ratio of bytes.

    The series are the result of `loop_order.series_of`. The ratio is the bytes of FA-1 with query
    splits / the bytes of FA-2, at equal tiles. `source` says which bytes, such as "dram".
    """
    return lambda _, split, two: equal_tiles(split, source) / equal_tiles(two, source)


def took(at: int) -> Callable[..., Quantity]:
    """Return a function that takes the three series of a unit and returns a ratio of times.

    The series are the result of `loop_order.series_of`. The ratio is the time of FA-1 / the time of
    FA-2, at equal tiles. FA-1 is on the paper's grid if `at` is 0, and has query splits if `at` is
    1.
    """
    return lambda *of: equal_tiles(of[at], "measured") / equal_tiles(of[2], "measured")


def took_own(at: int) -> Callable[..., Quantity]:
    """Return a function that takes the three series of a unit and returns a ratio of times.

    The series are the result of `loop_order.series_of`: FA-1 on the paper's grid, FA-1 with query
    splits, and FA-2. The ratio is the time of FA-1 / the time of FA-2. Each loop order runs with
    the tiles that the library chooses for it. FA-1 is on the paper's grid if `at` is 0, and has
    query splits if `at` is 1.
    """
    return lambda *of: own_tiles(of[at]) / own_tiles(of[2].removesuffix("-fa1-tiles"))


def sentences(found: Evidence) -> str:
    """Return the main result as text in Markdown."""

    def line(name: str, ratio: Callable[..., Quantity], form: str = ".2f") -> list[str]:
        units = (ratio(*loop_order.series_of(unit)).find(found).values() for unit in WORDS)
        return [name, *(span(numbers, form) for numbers in units)]

    def of_accesses() -> str:
        run = {row.series for row in found.rows("loop_order", source="l2")}
        pairs = (equal_tiles(series, "l2") / equal_tiles(series, "model") for series in run)
        return span((x for pair in pairs for x in pair.find(found).values()), ".3f")

    counted = equal_tiles("fa1-simt-splits", "dram").find(found)
    timed = equal_tiles("fa1-simt-splits", "measured").find(found)
    masked = sum(place[3] for place in counted)
    lines = [
        line("bytes accessed", moved("model")),
        line("L2 bytes", moved("l2")),
        line("DRAM bytes", moved("dram"), ".0f"),
        line("time, full grid", took(1)),
        line("time, FA-1 on the paper's grid", took(0), ".1f"),
        line("time, each order's own tiles, FA-1 with query splits", took_own(1)),
        line("time, each order's own tiles, FA-1 on the paper's grid", took_own(0), ".1f"),
    ]
    return (
        "Each cell shows the smallest and the largest value of the ratio *K/V outer / Q outer*, "
        "of bytes or of times. K/V outer is FlashAttention-1's loop order, and Q outer is "
        "FlashAttention-2's. The calls are forward calls with N=512 to 16k, with and without a "
        "causal mask. The two calls of a comparison multiply matrices with equal instructions. In "
        "the first five rows, both loop orders use equal tile sizes. On CUDA cores and with "
        "mma.sync, these are the tile sizes with which FA-1 is fastest. With wgmma, they are the "
        "tile sizes with which FA-2 is fastest. In the last two rows, each loop order uses its "
        "own fastest tile sizes. Accessed bytes are computed by closed forms. L2 bytes, DRAM "
        f"bytes and times are measured. L2 and DRAM bytes were measured for {len(counted)} of the "
        f"{len(timed)} combinations of N, head dimension and mask, and for {masked or 'no'} calls "
        "with a causal mask.\n\n"
        + markdown(["K/V outer / Q outer", *WORDS.values()], lines)
        + f"\n\n- By the hardware counters, L2 moves {of_accesses()} times the bytes that the "
        "kernels load and store by the closed forms.\n- For every column tile, K/V outer reads "
        "and writes O and the softmax statistics l and m of all rows. With K/V outer, O, l and m "
        "of all rows do not fit in L2, so DRAM moves O, l and m for every column tile.\n- For "
        "every row tile, Q outer reads K and V of the tile's head again. With Q outer, K and V of "
        "the heads that run at the same time fit in L2.\n- On the grid of FA-1's paper, FA-1 has "
        "one thread block per batch entry and head. At equal work, the time of FA-1 on the grid "
        "of FA-1's paper grows if there are fewer batch entries and heads.\n"
    )


def traffic(found: Evidence) -> str:
    """Return the result of the experiment `io_vs_seqlen` as text in Markdown."""

    def of(series: str, source: str, **fields: Any) -> Quantity:
        return rows("io_vs_seqlen", "head_dim", "seqlen_q", series=series, source=source,
                    metric="traffic", unit="bytes", **fields)  # fmt: skip

    def over(one: Quantity, other: Quantity) -> str:
        return span((one / other).find(found).values())

    once = rows("io_vs_seqlen", "head_dim", "seqlen_q", series="fa2-simt", source="dram",
                value=lambda r: 16 * r.batch * r.heads_q * r.seqlen_q * r.head_dim)  # fmt: skip
    longest = max(N for _, N in of("fa1-simt", "dram").find(found))
    at = {"head_dim": 128, "seqlen_q": longest}
    wide = [
        over(of("fa1-simt", source, **at), of("standard-simt", source))
        for source in ("model", "dram")
    ]
    share = over(of("fa1-simt", "dram"), of("fa1-simt", "model"))
    lines = [
        f"With K/V outer in fp32, DRAM moves {share} times the bytes that the kernel loads and "
        "stores. With K/V outer, O, l and m of all rows do not fit into L2, except at the "
        "shortest sequence lengths.",
        f"With Q outer in fp32, DRAM moves {over(of('fa2-simt', 'dram'), once)} times the size of "
        "Q, K, V and O together, for every N. With Q outer, every row tile reads K and V of the "
        "tile's head again, but K and V mostly stay in L2.",
        f"At d=128 and N={longest}, K/V outer accesses {wide[0]} times as many bytes as standard "
        f"attention, but moves {wide[1]} times as many bytes through DRAM. In fp32, registers "
        "limit a tile to few columns, so K/V outer reads and writes each row of O many times.",
    ]
    head = "The list of DRAM traffic compares bytes of forward calls in fp32 without a mask.\n\n"
    return head + "".join(f"- {line}\n" for line in lines)


def _text(say: Callable[[Evidence], str], *experiments: str) -> Across:
    """Return an object with which a page makes a text from stored rows.

    `say` takes the stored rows of the named experiments and returns the text. The text is treated
    like a table: the part before the first empty line is the caption, the rest is the body. If rows
    are missing, the page gets no text.
    """

    def make(found: Sequence[Row]) -> Table | None:
        try:
            return Table(*say(Evidence(found)).split("\n\n", 1))
        except MissingRows:
            return None

    return Across(make, experiments)


TEXT = _text(sentences, "loop_order", "speed", "speed_fp16")
TRAFFIC = _text(traffic, "io_vs_seqlen")
