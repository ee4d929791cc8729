"""Writes the tables of paper_repro.md and of the pages in figures/tables from stored rows.

    <!-- table: NAME -->
    ...
    <!-- end: NAME -->

The text between two such markers is replaced by the table NAME. All other text of the pages is
written by hand.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from ..record import EMULATOR, FIGURES, MODEL, REPOSITORY, Row, Store, registry
from ..record.provenance import clocks, dates_and_commits, device_name, l2_names, of_rows
from ..record.store import replace_files, unknown
from .tables import Across, Make, fewer_runs, listed

PAGE = REPOSITORY / "paper_repro.md"
TABLES = FIGURES / "tables"
# The GPUs whose numbers the pages show, also if there are recordings of other GPUs. If both have
# recorded an experiment, the recording of LATER is of later kernels.
MACHINE, LATER = "nvidia-h200", "nvidia-h100-80gb-hbm3"
NO_RECORDING = "no recording yet"
_BLOCK = re.compile(
    r"(?P<start><!-- table: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(?P<end><!-- end: (?P=name) -->)",
    re.DOTALL,
)
# Finds tables with L2 bytes. "sectors from L2" is excluded, because it is the name of a counter.
_L2 = re.compile(r"(?<!from )(?<!to )\bL2\b")
# Finds tables of times or speeds.
_TIMED = re.compile(
    r"\b(ms|us)\b|T(FLOP|B)/s|[Tt]imes? (of|over|at|a|than)\b|[Mm]icroseconds|[Ff]astest|"
    r"Speed (of|in)\b|speed in bf16"
)


def known() -> dict[str, tuple[Make, tuple[str, ...]]]:
    """Return all tables of the pages.

    Returns
    -------
    dict
        Maps the name of a table to the function that makes it, and to the names of the experiments
        whose rows the function takes.

    Raises
    ------
    ValueError
        If two experiments have tables of the same name.
    """
    found: dict[str, tuple[Make, tuple[str, ...]]] = {}
    for experiment in registry.names():
        for name, make in tables_of(experiment).items():
            if name in found:
                others = ", ".join(found[name][1])
                raise ValueError(
                    f"table names must differ, but {experiment} and {others} both have {name!r}. "
                    "Rename one"
                )
            of = make.experiments if isinstance(make, Across) else (experiment,)
            found[name] = make, of
    shared = shared_tables()
    return found | {name: (make, make.experiments) for name, make in shared.items()}


def tables_of(name: str) -> Mapping[str, Make]:
    """Return the tables that the module of an experiment defines: `table`, and those in `TABLES`.

    Most tables use the rows of the experiment only. A table of class `Across` uses rows of several
    experiments.

    Parameters
    ----------
    name : str
        Name of the experiment.

    Returns
    -------
    mapping of str to callable
        Maps the name of a table, which the pages use, to a function that takes the rows.
    """
    module = registry.load(name)
    own = {name: module.table} if hasattr(module, "table") else {}
    return own | getattr(module, "TABLES", {})


def shared_tables() -> dict[str, Across]:
    """Return the tables that packages inside `experiments`, such as `verdicts`, define.

    A package defines such tables in a function `tables`. The tables use rows of several
    experiments.

    Returns
    -------
    dict of str to Across
        Maps the name of a table to the object that makes it.
    """
    found: dict[str, Across] = {}
    for package in registry.packages():
        found |= getattr(package, "tables", dict)()
    return found


def gpu(store: Store, experiment: str) -> str:
    """Return the name of the GPU whose numbers the pages show for an experiment.

    | recordings of the experiment | result |
    |---|---|
    | LATER (an H100) has a recording | LATER |
    | otherwise, MACHINE (an H200) has a recording | MACHINE |
    | otherwise, exactly one other GPU has a recording | this GPU |
    | all other cases | MACHINE |

    Parameters
    ----------
    store : Store
        The recordings.
    experiment : str
        Name of the experiment.

    Returns
    -------
    str
        Name of the GPU, such as "nvidia-h200".
    """
    if store.read(experiment, LATER):
        return LATER
    others = {*store.machines(experiment)} - {MODEL, EMULATOR, MACHINE}
    return others.pop() if len(others) == 1 and not store.read(experiment, MACHINE) else MACHINE


def text(name: str, store: Store) -> str:
    """Return the text of a table: the caption, a sentence about the origin, and the table.

    Parameters
    ----------
    name : str
        Name of the table.
    store : Store
        The recordings.

    Returns
    -------
    str
        Markdown text. If there is no recording, the text says this instead.

    Raises
    ------
    ValueError
        If there is no table of this name.
    """
    tables = known()
    if name not in tables:
        raise ValueError(unknown("table", name, tables))
    make, experiments = tables[name]
    own = make.machine if isinstance(make, Across) else ""
    gpus = {experiment: own or gpu(store, experiment) for experiment in experiments}
    rows: list[Row] = []
    for experiment, its_gpu in gpus.items():
        for machine in (MODEL, EMULATOR, its_gpu):
            rows += store.recorded(experiment, machine)[0]
    timed = isinstance(make, Across) and make.timed
    table = make(rows, _seconds(store, gpus)) if timed else make(rows)
    if table is None:
        return f"{NO_RECORDING}\n"
    if isinstance(make, Across) and not make.cites:
        return f"{table.caption}\n\n{table.body}"
    sources = [source for at in gpus.items() for source in _source(store, *at)]
    where = listed(sources)
    by = _l2_sentence(store, gpus) if _L2.search(table.body) else ""
    how = _how_timed(store, gpus) if _TIMED.search(table.caption + table.body) else ""
    what = "list" if table.body.lstrip().startswith("- ") else "table"
    named = [f"`{experiment}`" for experiment in gpus]
    of = f"experiment{'s' if len(named) > 1 else ''} {listed(named)}"
    said = f"The numbers in the {what} of the {of} are from {where}.{by}"
    return f"{table.caption}\n\n{said}\n\n{table.body}{how}"


def _seconds(store: Store, gpus: Mapping[str, str]) -> dict[str, float]:
    """Return how long the recording of each experiment took, as {experiment: seconds}.

    The time is the sum over the runs of the recording. `gpus` maps an experiment to the GPU whose
    recording is used. An experiment is left out if one of the recording's runs did not store its
    time.
    """
    found = {}
    for name, machine in gpus.items():
        runs = store.recorded(name, machine)[1]
        if runs and all("seconds" in run for run in runs):
            found[name] = sum(run["seconds"] for run in runs)
    return found


def _how_timed(store: Store, gpus: Mapping[str, str]) -> str:
    """Return text about how the times of several experiments were measured.

    The text describes the GPU's clock during the measurement. It also names the times that are
    medians of few calls. `gpus` maps an experiment to the GPU whose recording is used. The text is
    empty if the recordings contain no times.
    """
    said = []
    for name, machine in gpus.items():
        rows = [row for row in store.read(name, machine) if row.n is not None]
        runs = of_rows(store.runs(name, machine), rows)
        words = [clocks(run, name) for run in runs]
        words += [each for each in (fewer_runs(rows, name),) if each]
        if runs:
            sentence = " ".join(f"{each}." for each in words)
            several = len(gpus) > 1
            said.append(f"- {sentence}" if several else sentence)
    return "\n" + "\n".join(said) + "\n" if said else ""


def _l2_sentence(store: Store, gpus: Mapping[str, str]) -> str:
    """Return a sentence that names the hardware counters of L2 bytes; empty without L2 bytes."""
    names: set[str] = set()
    for experiment, machine in gpus.items():
        rows, runs = store.recorded(experiment, machine)
        names |= l2_names(runs, rows)
    counters = " and ".join("`" + name.replace(" + ", "` + `") + "`" for name in sorted(names))
    if not names:
        return ""
    return f" L2 bytes come from the hardware counters {counters}, which count sectors of 32 bytes."


def _source(store: Store, experiment: str, its_gpu: str) -> list[str]:
    """Return a list with one text: the file, GPU, date and commit of an experiment's recording.

    The recording is from the GPU `its_gpu`. If there is no such recording, the text describes the
    recording of the emulator or of closed forms. Without any recording, the list is empty.
    """
    stored = store.machines(experiment)
    counted = EMULATOR, "counted on the emulator"
    for machine, name in ((its_gpu,) * 2, counted, (MODEL, "closed forms")):
        if machine in stored:
            _, runs = store.recorded(experiment, machine)
            about = f"{device_name(runs, name)}, {dates_and_commits(runs)}"
            return [f"`figures/data/{experiment}/{machine}.csv` ({about})"]
    return []


def render(page: str, store: Store, path: Path = PAGE) -> str:
    """Return the text of a page in which all tables are made again.

    Parameters
    ----------
    page : str
        Text of the page.
    store : Store
        The recordings.
    path : Path
        File of the page. Links in tables are relative to this file.

    Returns
    -------
    str
        The new text.

    Raises
    ------
    ValueError
        If a marker contains the name of a table that does not exist.
    """

    def table(found: re.Match[str]) -> str:
        made = text(found["name"], store)
        if path.parent == TABLES:
            made = made.replace("](figures/", "](../")
        return f"{found['start']}{made}{found['end']}"

    return _BLOCK.sub(table, page)


def tables(page: str) -> dict[str, str]:
    """Return the texts between the markers of a page.

    Parameters
    ----------
    page : str
        Text of the page.

    Returns
    -------
    dict of str to str
        Maps the name of a table to the text between its markers.

    Raises
    ------
    ValueError
        If a marker has no end marker.
    """
    found = {block["name"]: block["body"] for block in _BLOCK.finditer(page)}
    for name in re.findall(r"<!-- table: ([\w-]+) -->", page):
        if name not in found:
            raise ValueError(
                f"the page has the marker <!-- table: {name} --> but not <!-- end: {name} -->; add "
                "the second marker where the table ends"
            )
    return found


def pages() -> list[Path]:
    """Return the paths of all pages with tables.

    Returns
    -------
    list of Path
        The pages, paper_repro.md first.
    """
    return [PAGE, *sorted(TABLES.glob("*.md"))]


def update(path: Path | None = None, store: Store | None = None) -> list[str]:
    """Make the tables of a page, or of all pages, again, and write the pages that change.

    Parameters
    ----------
    path : Path, optional
        The page. None: all pages.
    store : Store, optional
        The recordings. Default: the recordings in `figures`.

    Returns
    -------
    list of str
        Names of the tables that changed.
    """
    found = stale(path, store)
    replace_files({each: page for each, (_, page) in found.items()})
    return [name for names, _ in found.values() for name in names]


def stale(
    path: Path | None = None, store: Store | None = None
) -> dict[Path, tuple[list[str], str]]:
    """Return the pages whose tables differ from the recordings.

    Parameters
    ----------
    path : Path, optional
        The page. None: all pages.
    store : Store, optional
        The recordings. Default: the recordings in `figures`.

    Returns
    -------
    dict
        Maps a page to the names of its tables that differ, and to the text that the page should
        have.
    """
    old = {each: each.read_text("utf-8") for each in ([path] if path else pages())}
    store, found = store or Store(FIGURES), {}
    for each, page in old.items():
        now, made = tables(page), render(page, store, each)
        names = [name for name, body in tables(made).items() if now[name] != body]
        if names:
            found[each] = names, made
    return found
