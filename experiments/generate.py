"""Generates text with a small language model, with and without a paged K/V cache.

Each step appends the likeliest character. Both ways give the same text. The table has the accesses
of attention for one character, counted and by closed forms. On a GPU, the time for one character is
measured too.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device
from fa_numba.problem import Problem

from .beside import small_model
from .beside.small_model import Cache, steps, whole
from .char_model import ALPHABET
from .char_model import generate as lines_of
from .lab.measure import calls, counts, peers
from .lab.measure.check import WrongResult
from .lab.measure.series import LABELS, columns, unit
from .lab.measure.timing import Timing, attempt
from .lab.record import EMULATOR, MODEL, Bench, Options, Row, nested
from .lab.record import FIGURES as RECORDED
from .lab.show import style, tables

NAME = "generate"
TAKES = ()

SIZES = small_model.Sizes(len(ALPHABET), heads=2, head_dim=32, layers=2)
CHARACTERS = 2**16
PAGE_SIZE, PROMPT = 16, 8
SEQUENCES, LENGTH, SPLITS = 2, 36, 2
DTYPES = {"fa2-simt": "float32", "fa2-mma": "float16"}
# Lengths of the closed forms, and sequences and lengths of the timed steps.
LENGTHS = tuple(2**n for n in range(5, 13))
TIMED_SEQUENCES, TIMED_LENGTHS, QUICK_LENGTHS = 32, (64, 256, 1024, 4096), (64, 128)
# The number of timed characters: the last ones before each length.
WINDOW = 16
CACHE, WHOLE, TEXT = "with a cache", "without one", "text"
PROTOCOL = (
    f"time per character of {TIMED_SEQUENCES} sequences at once, as the median of {WINDOW} "
    "characters with a synchronisation after each; torch computes matrix products in fp32, and "
    "attention runs in the dtype"
)


# The trained weights in float32, by name. They are the result of 150 steps of Adam in NumPy, each
# on 16 windows of 48 characters, by `small_model.train` in commit e9ff510.
WEIGHTS = RECORDED / "data" / NAME / "weights.npz"


@cache
def learned() -> np.ndarray:
    """Return the text on which the model was trained, as one number per character."""
    return np.array([ALPHABET.index(character) for character in lines_of(CHARACTERS)], np.int64)


@cache
def model() -> dict[str, np.ndarray]:
    """Return the stored weights of the trained model by name."""
    with np.load(WEIGHTS) as stored:
        return {name: x for name, x in stored.items() if name != "sources"}


def words(characters: Any) -> str:
    """Return characters, given as numbers, as text. Line ends become blanks."""
    return "".join(ALPHABET[int(n)] for n in characters).replace("\n", " ")


def prompts(text: np.ndarray, sequences: int, length: int) -> np.ndarray:
    """Return an array of characters, shape (sequences, length), into which text will be generated.

    The first PROMPT characters of each sequence are taken from `text`. The other characters are 0.
    """
    characters = np.zeros((sequences, length), np.int64)
    starts = np.linspace(0, len(text) - PROMPT, sequences).astype(int)
    characters[:, :PROMPT] = text[starts[:, None] + np.arange(PROMPT)]
    return characters


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Generate text with a cache and without a cache, and yield rows that compare both ways.

    The rows contain the number of characters in which both texts differ, the bytes that attention
    moves for each character, and on a GPU the time of a character.
    """
    yield from bench.counted([(series,) for series in DTYPES], "generating", _counted)
    for series in DTYPES:
        for n in sorted({*LENGTHS, *range(PROMPT + 1, LENGTH)}):
            yield from _modelled(series, n)
    if bench.machine is None:
        return
    if not peers.available():
        bench.say("  no torch with CUDA here: a character's time is not measured")
        return
    lengths = QUICK_LENGTHS if options.quick else TIMED_LENGTHS
    for series in bench.each(list(DTYPES), "timing"):
        yield from _timed(series, lengths, bench.machine)


def _columns(series: str, place: str, sequences: int, keys: int, machine: str) -> dict[str, Any]:
    rows = 1 if place == CACHE else keys
    H, d = SIZES.heads, SIZES.head_dim
    problem = Problem(sequences, H, H, rows, keys, d, dtype=DTYPES[series], causal=True)
    return columns(NAME, series, problem, machine)


def _traffic(series: str, place: str, n: int, machine: str, moved: float) -> Row:
    """Return the row with the bytes that attention moves to generate one character of a sequence.

    The character follows `n` characters. `place` is CACHE (generated with a K/V cache) or WHOLE
    (without a cache). `moved` is the number of bytes for all SEQUENCES sequences together. The row
    contains the bytes of one sequence.
    """
    common = _columns(series, place, SEQUENCES, n, machine)
    return Row(metric="traffic", unit="bytes", value=moved / SEQUENCES, note=place, **common)


def _difference(
    series: str, sequences: int, keys: int, machine: str, differing: int, text: str
) -> Row:
    """Return the row with the number of characters that differ between two ways of generation.

    The two ways are generation with a cache and generation without a cache. `differing` is the
    number of different characters in `sequences` sequences of `keys` characters. `text` is the
    beginning of a generated text, which is stored in the row's note.
    """
    common = _columns(series, CACHE, sequences, keys, machine)
    common |= {"metric": "difference", "unit": "characters", "note": f"{TEXT}; {text}"}
    return Row(value=differing, n=sequences * (keys - PROMPT), **common)


def _counted(series: str) -> Iterator[Row]:
    """Generate text on the emulator, once with a cache and once without a cache.

    Yield rows with the counted bytes that attention moves for each character. The last row contains
    the number of characters in which the two texts differ. Raise WrongResult if this number is not
    0.
    """
    dtype = DTYPES[series]
    w, text = model(), learned()
    options: dict[str, Any] = {"unit": unit(series), "alibi_slopes": SIZES.slopes}

    def put(x: np.ndarray, dtype: str) -> np.ndarray:
        return x.astype(dtype)

    sizes = (SEQUENCES, LENGTH, PAGE_SIZE)
    pages = Cache.of(SIZES, *sizes, put, dtype, kv_splits=SPLITS, **options)
    of: dict[str, tuple[small_model.LayerAttention, bool]] = {
        CACHE: (pages.attend, True),
        WHOLE: (whole(np.zeros(0, dtype), kv_splits=1, **options), False),
    }
    found, rows = {}, []
    for place, (layer_attention, cached) in of.items():
        found[place] = prompts(text, SEQUENCES, LENGTH)
        each = steps(w, SIZES, found[place], layer_attention, first=PROMPT, cached=cached)
        for n in range(PROMPT, LENGTH):
            with device.using("emulator"), fa_numba.count_accesses() as counts:
                next(each)
            moved = sum(counts.load_bytes.values()) + sum(counts.store_bytes.values())
            if n > PROMPT:  # the first step computes the prompt, not a single character
                rows.append(_traffic(series, place, n, EMULATOR, moved))
    differing = int((found[CACHE] != found[WHOLE]).sum())
    if differing:
        raise WrongResult(
            "the text must be the same with and without a cache, but "
            f"{differing} of {found[CACHE].size} characters differ"
        )
    yield from rows
    begin = words(found[CACHE][0])
    yield _difference(series, SEQUENCES, LENGTH, EMULATOR, differing, begin)


def _modelled(series: str, n: int) -> Iterator[Row]:
    """Yield the bytes of attention for the character that follows n characters, by closed forms.

    There is one row with a cache and one row without. The plans are for the emulated device.
    """
    H, d, dtype = SIZES.heads, SIZES.head_dim, DTYPES[series]
    table = (SEQUENCES, -(-max(n, LENGTH) // PAGE_SIZE))
    pages = (table[0] * table[1], H, PAGE_SIZE, d)
    common: dict[str, Any] = {"algorithm": "fa2", "dtype": dtype, "unit": unit(series)}
    common |= {"causal": True, "alibi_slopes": (H,)}
    row, square = (SEQUENCES, H, 1, d), (SEQUENCES, H, n, d)
    own: dict[str, Any] = {"block_table": table, "kv_lens": (n,) * SEQUENCES, "kv_splits": SPLITS}
    with device.using("emulator"):
        step = fa_numba.plan(row, pages, **common, **own)
        again = fa_numba.plan(square, square, **common, kv_splits=1)
    appended = 4 * SEQUENCES * H * d * np.dtype(dtype).itemsize  # K and V, loaded and stored
    moved = {CACHE: step.accesses.bytes + appended, WHOLE: again.accesses.bytes}
    for place, total in moved.items():
        yield _traffic(series, place, n, MODEL, SIZES.layers * total)


def _timed(series: str, lengths: Sequence[int], machine: str) -> Iterator[Row]:
    """Yield rows with the time of a character on a GPU, with a cache and without a cache.

    `lengths` are the lengths of the text at which the time is measured. The last row contains the
    number of characters that the model would choose differently without a cache; see `_generated`.
    If the measurement fails, yield one row with the reason.
    """
    taken, failure = attempt(_generated, series, DTYPES[series], sorted(lengths))
    if taken is None:
        common = _columns(series, CACHE, TIMED_SEQUENCES, lengths[0], machine)
        yield calls.time_row(None, failure, CACHE, **common)
        return
    times, differing, text = taken
    for (place, n), found in times.items():
        common = _columns(series, place, TIMED_SEQUENCES, n, machine)
        yield calls.time_row(Timing.of(found), "", place, **common)
    yield _difference(series, TIMED_SEQUENCES, max(lengths), machine, differing, text)


def _generated(
    series: str, dtype: str, lengths: Sequence[int]
) -> tuple[dict[tuple[str, int], list[float]], int, str]:
    """Generate text on the GPU with a K/V cache, and check it by the model without a cache.

    Return three values:

    - The times of characters in milliseconds, as {(CACHE or WHOLE, length): times}. For each length
      in `lengths`, the last WINDOW characters before this length are timed, once with a cache
      (CACHE). Then they are generated and timed again without a cache (WHOLE).
    - The number of characters that the model without a cache would have chosen differently. One
      call without a cache computes the likeliest next character at every position of the text.
    - The beginning of the first text.
    """
    trained, text = model(), learned()

    def put(x: np.ndarray, dtype: str) -> Any:
        return peers.on_device((x,), dtype)[0]

    w = {name: put(x, "float32") for name, x in trained.items()}
    options = {"unit": unit(series), "alibi_slopes": put(SIZES.slopes, "float32")}
    characters = put(prompts(text, TIMED_SEQUENCES, lengths[-1]), "int64")
    sizes = (TIMED_SEQUENCES, lengths[-1], PAGE_SIZE)
    rows = Cache.of(SIZES, *sizes, put, dtype, **options)
    uncached = whole(rows.pages[0][0], **options)
    times: dict[tuple[str, int], list[float]] = {}
    windows = {n: length for length in lengths for n in range(length - WINDOW + 1, length + 1)}
    each = steps(w, SIZES, characters, rows.attend, first=PROMPT, cached=True)
    for n in range(PROMPT + 1, lengths[-1] + 1):
        spent = _seconds(each)
        if n in windows:
            times.setdefault((CACHE, windows[n]), []).append(1e3 * spent)
    for length in lengths:
        for _ in range(2):  # the first time includes planning and compiling
            again = characters[:, :length] + 0
            last = steps(w, SIZES, again, uncached, first=length - WINDOW, cached=False)
            times[WHOLE, length] = [1e3 * _seconds(last) for _ in range(WINDOW)]
    logits = small_model.logits(w, SIZES, characters[:, :-1], uncached)
    wanted = logits[:, PROMPT - 1 :].argmax(-1)
    differing = int((wanted != characters[:, PROMPT:]).sum())
    return times, differing, words(characters[0, :LENGTH])


def _seconds(each: Iterator[int]) -> float:
    device.synchronize()
    start = time.perf_counter()
    next(each)
    device.synchronize()
    return time.perf_counter() - start


def by_length(
    rows: Sequence[Row], metric: str, source: str
) -> dict[tuple[str, str], dict[int, float]]:
    """Return the numbers of a metric as {(series, CACHE or WHOLE): {characters before: number}}.

    "Characters before" is the number of characters to which the new character is appended.
    """
    rows = sorted(rows, key=lambda row: row.seqlen_k)
    return nested(rows, attrgetter("series", "place"), "seqlen_k", metric=metric, source=source)


_NAMES = {CACHE: CACHE, WHOLE: "without a cache"}
_LOOKS = {CACHE: ("#0072B2", "o"), WHOLE: ("#D55E00", "s")}


def draw(rows: Sequence[Row]) -> Any:
    """Draw the bytes and the time of one character over the length. Return None without rows."""
    modelled = by_length(rows, "traffic", "model")
    counted, timed = by_length(rows, "traffic", "counted"), by_length(rows, "time", "measured")
    if not modelled:
        return None
    figure, ((left, right),) = style.new(1, 2, 4.6)
    message, about = _message(modelled, timed)
    style.legend(figure, [], message, about=about)
    series = "fa2-simt"
    left.set_title(f"accesses of attention, {DTYPES[series]}")
    left.set_ylabel("bytes per character")
    for place, (colour, marker) in _LOOKS.items():
        by, marks = modelled.get((series, place), {}), counted.get((series, place), {})
        style.line(left, by, color=colour, label=f"{_NAMES[place]}: model")
        looks: dict[str, Any] = {"color": colour, "marker": marker, "ls": "", "ms": 4}
        style.line(left, marks, label=f"{_NAMES[place]}: counted", **looks)
    left.set_yscale("log")
    style.byte_axis(left.yaxis)
    style.sizes(left, (8, 16, *LENGTHS), "characters in the context")
    left.legend()
    right.set_title(f"time, {TIMED_SEQUENCES} sequences at once")
    for (series, place), by in sorted(timed.items()):
        colour, marker = _LOOKS[place]
        looks = {"color": colour, "marker": marker, "ls": "-" if series == "fa2-simt" else "--"}
        right.plot([*by], [*by.values()], label=f"{_NAMES[place]}, {DTYPES[series]}", **looks)
    if timed:
        right.set(yscale="log", ylabel="time per character (ms)")
        low, high = right.get_ylim()
        right.set_yticks([x for x in (0.2, 0.5, 1, 2, 5, 10, 20, 50) if low <= x <= high])
        style.plain_ticks(right.yaxis)
        style.sizes(
            right, sorted({n for by in timed.values() for n in by}), "characters in the context"
        )
        right.legend()
    else:
        style.empty(right, "not measured here")
    return figure


def _message(
    modelled: Mapping[tuple[str, str], Mapping[int, float]],
    timed: Mapping[tuple[str, str], Mapping[int, float]],
) -> tuple[str, str]:
    """Return the title of the figure, about bytes, and the line below it, about time.

    Both arguments are results of `by_length`.
    """
    parts = []
    for numbers in (modelled, timed):
        last = {key: max(by) for key, by in numbers.items() if by}
        over = [
            by[last[series, WHOLE]] / numbers[series, CACHE][last[series, WHOLE]]
            for (series, place), by in numbers.items()
            if place == WHOLE and last.get((series, CACHE)) == last[series, WHOLE]
        ]
        if over:
            n = style.short(max(last.values()))
            parts.append(f"{tables.between(over)} times")
    if not parts:
        return "Text with a cache of keys and values, and without a cache", ""
    about = f"Context of {n} characters."
    if len(parts) > 1:
        about += f" Without a cache, the time is {parts[1]} as long."
    return f"Without a K/V cache, a character moves {parts[0]} the bytes", about


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of bytes and times per character, or None without rows."""
    modelled = by_length(rows, "traffic", "model")
    timed = by_length(rows, "time", "measured")
    lengths = [n for n in LENGTHS if any(n in by for by in (*modelled.values(), *timed.values()))]
    texts = [row for row in rows if row.metric == "difference" and row.value is not None]
    if not lengths:
        return None
    columns = [(modelled, s, place, ",.0f") for s in DTYPES for place in (CACHE, WHOLE)]
    columns += [(timed, s, place, ".3g") for s in DTYPES for place in (CACHE, WHOLE)]
    lines = [
        [str(n), *(tables.number(by.get((s, p), {}), n, form) for by, s, p, form in columns)]
        for n in lengths
    ]
    header = ["characters before this one"]
    for what in ("bytes", "ms"):
        header += [
            f"{what}, {unit(s)}, {way} a cache" for s in DTYPES for way in ("with", "without")
        ]
    caption = (
        "The table of text generation contains bytes and times per generated character. The "
        f"language model that generates text has {SIZES.layers} layers and {SIZES.heads} heads of "
        f"d={SIZES.head_dim}. Each page of the language model's K/V cache has {PAGE_SIZE} rows of "
        "K and V. The bytes in the table of text generation are what attention loads and stores "
        f"for one character of one sequence, by the closed form.{_equal(rows)} Each time in the "
        f"table of text generation is the median over {WINDOW} characters. In the timed steps of "
        f"text generation, {TIMED_SEQUENCES} sequences are continued at the same time, and the "
        "host waits for the GPU after each character. In the language model, torch computes the "
        "matrix products outside attention in fp32. The language model's attention runs in fp16 "
        "on tensor cores (mma) and in fp32 on CUDA cores (simt)."
    )
    for row in texts:
        where = "on the emulator" if row.source == "counted" else "on a GPU"
        caption += (
            f" With {LABELS[row.series]} on {unit(row.series)}, run {where}, {row.value} of "
            f"{row.n} generated characters differ between the texts with and without a K/V cache."
        )
    if texts:
        text = texts[0].note.partition("; ")[2]
        caption += f" The text that the language model generates begins with `{text}`."
    return tables.of(caption, header, lines)


def _equal(rows: Sequence[Row]) -> str:
    """Return a sentence about how many counted numbers equal the closed form.

    The sentence is empty if nothing was counted.
    """
    same, counted = counts.equal([row for row in rows if row.metric == "traffic"])
    if not counted:
        return ""
    return (
        f" Of {counted} byte counts of the emulator for text generation, {same} equal the closed "
        "form."
    )
