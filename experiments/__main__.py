"""The command line `python -m experiments`, which measures and draws experiments.

`python -m experiments --help` lists the commands.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # During the imports, an interrupt ends the program without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

try:
    from rich.console import Console
    from rich.markup import escape
except ModuleNotFoundError as error:
    sys.exit(f"python -m experiments needs {error.name}: pip install -e '.[experiments]'")

from fa_numba.commands.arguments import MAX_SEQLEN, Parser, name_of, tiles, whole
from fa_numba.commands.ending import INTERRUPTED, ended, shortened
from fa_numba.problem import MAX_HEAD_DIM

from .beside import compare, ring_faults, spills
from .lab.measure import tune
from .lab.record import FIGURES, FILTERED, REPOSITORY, Options, Store, origins, outdated
from .lab.record.options import LIMITED, QUICK
from .lab.record.registry import load, names, needs, takes, words
from .lab.run.drawing import side_by_side
from .lab.run.runner import Runner
from .lab.show import recordings_page, report

T = TypeVar("T")
CAUSAL = {"no": (False,), "yes": (True,), "both": (False, True)}
_LEGEND = """
[CPU]: the experiment runs on every machine. On a machine with a GPU, it may measure more.
[GPU] or [GPU, torch]: measuring needs a GPU, or a GPU and torch. The figure can be drawn from
stored results on every machine.
For the full description of an experiment, run python -m experiments list NAME"""


def _several(one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return a function that parses text with several values, separated by commas.

    `one` parses a single value. The returned function takes the text, and returns a tuple of the
    values in their order. A value that is repeated in the text occurs once in the tuple.
    """
    return lambda text: tuple(dict.fromkeys(one(part) for part in text.split(",")))


def _tiles(text: str) -> tuple[int, int]:
    """Parse block sizes such as "64x32" (rows x columns) into (Br, Bc)."""
    found = tiles(text)
    return found.Br, found.Bc


_experiment = name_of(names)


def _folder(text: str) -> Path:
    """Parse the path of a folder that exists or can be created.

    Raise ArgumentTypeError if the text is no path, or if a part of the path is a file.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(f"must be the name of a folder, got {text!r}")
    try:
        path = Path(text).resolve()
        there = next(place for place in (path, *path.parents) if place.exists())
    except (OSError, ValueError) as error:  # a name that is too long, or has a null byte
        why = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(
            f"must be the name of a folder, got {shortened(text)!r}: {why}"
        ) from None
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, but {there} is a file")
    return path


def _parser() -> argparse.ArgumentParser:
    choices = argparse.ArgumentParser(add_help=False)
    quick, filtered = (folder.relative_to(REPOSITORY) for folder in (QUICK, FILTERED))
    chosen = (
        "The options --seqlens, --head-dims, --causal and --tiles select a part of an experiment. "
        f"The figure and the data of a partial run are written to {filtered}, unless --out "
        "names another folder. The folder figures contains figures and data of complete runs only."
    )
    flag: dict[str, Any] = {"action": "store_true"}
    head_dims: dict[str, Any] = {"type": _several(whole(1, MAX_HEAD_DIM)), "metavar": "D,..."}
    options: dict[str, tuple[str, dict[str, Any]]] = {
        "--quick": (
            "run each experiment with only a few small sizes, which takes seconds; the results "
            f"are written to {quick}, unless --out names another folder", flag),
        "--seqlens": ("sequence lengths to measure or draw, such as 512,1024 (default: the "
                      "experiment's sequence lengths)",
                      {"type": _several(whole(1, MAX_SEQLEN)), "metavar": "N,..."}),
        "--head-dims": ("head dimensions to measure or draw, such as 64,128 (default: the "
                        "experiment's head dimensions)", head_dims),
        "--causal": ("measure or draw without the causal mask (no), with the causal mask (yes), or "
                     "both (default: the experiment's choice)", {"choices": CAUSAL}),
        "--tiles": (
            "tile sizes to measure or draw, such as 64x64,32x128; 32x128 means 32 rows of Q and "
            "128 rows of K (default: the experiment's tile sizes). Only a few experiments, such as "
            "timeline, support --tiles",
            {"type": _several(_tiles), "metavar": "BRxBC,..."}),
        "--recount": ("count accesses on the emulator again. Without --recount, a complete run "
                      "uses stored counts if the code and the kernels of the experiment have not "
                      "changed", flag),
        "--out": ("folder for the figures. The data of the figures are written to FOLDER/data. "
                  "Complete runs are written to the folder figures by default. If FOLDER contains "
                  "no data of an experiment, the figure is drawn from the recording in "
                  "figures/data", {"type": _folder, "metavar": "FOLDER"}),
        "--replace": ("replace a recording (the stored results of an experiment) even if torch or "
                      "ncu (Nsight Compute) is missing on this machine; the numbers from torch or "
                      "ncu in the recording are lost", flag),
        "--seconds": (
            "time limit of an experiment. When S seconds have passed, the run stops after the call "
            "that is being measured. Results are added to the recording after each call. The same "
            "command later measures only the results that are missing, or whose code or kernels "
            "have changed. Only ring supports --seconds",
            {"type": whole(1, 10**6), "metavar": "S"}),
    }  # fmt: skip
    group = choices.add_argument_group("options")
    for option, (text, how) in options.items():
        group.add_argument(option, help=text, **how)
    parser = Parser(
        prog="python -m experiments",
        description="Measure the two loop orders of FlashAttention (K/V outer and Q outer), and "
        "draw figures and tables of the results.",
        epilog="For the options of a command, run python -m experiments COMMAND --help. "
        "Example of a command: python -m experiments run io_vs_seqlen --quick",
    )
    parser.add_version("experiments of fa_numba")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, text: str, about: str = "", **more: Any) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=about or text, **more)

    parts: dict[str, Any] = {"epilog": chosen, "parents": [choices]}
    text = "list all experiments, with what each experiment shows and needs"
    about = f"{text[0].upper()}{text[1:]}. With names, describe the named experiments in full."
    listing = add("list", text, about)
    listing.add_argument(
        "names",
        nargs="*",
        type=_experiment,
        metavar="NAME",
        help="names of experiments to describe in full",
    )
    listing.add_argument("--verbose", action="store_true", help="describe every experiment in full")
    for name, text in (
        ("run", "measure experiments on this machine, store the results and draw the figures"),
        ("draw", "draw figures from stored results, without measuring"),
    ):
        about = f"names of experiments, separated by spaces. The names are {', '.join(names())}"
        add(name, text, f"{text[0].upper()}{text[1:]}.", **parts).add_argument(
            "names", nargs="+", type=_experiment, metavar="NAME", help=about
        )
    text = "run all experiments that this machine can run, and draw all figures"
    about = (
        f"{text[0].upper()}{text[1:]}. On a GPU, an experiment is measured again only if the code "
        "of the experiment or the kernels that the experiment launches have changed. If a run of "
        "all experiments is interrupted, repeat the command to continue the run."
    )
    add("all", text, about, **parts)
    compare.add(commands)
    text = (
        "start a local web server for the interactive page figures/explore.html. With the server, "
        "the page can show masks of your own and the plan of any attention call"
    )
    port: dict[str, Any] = {"type": whole(1, 65535), "metavar": "P", "default": 0}
    about = f"{text[0].upper()}{text[1:]}. Press Ctrl-C to stop the server."
    add("explore", text, about).add_argument(
        "--port", help="TCP port, 1 to 65535 (default: a free port)", **port
    )
    text = "plant faults in processes that share one sequence, and check how each process ends"
    about = (
        f"{text[0].upper()}{text[1:]}. Every process must end with an error within 120 seconds, "
        "and a slow process must be named. The processes use the GPUs of this machine, or the "
        "emulator if there is at most one GPU. The command needs torch."
    )
    faults = add("faults", text, about)
    faults.add_argument(
        "--ranks",
        type=whole(2, 64),
        metavar="P",
        help="number of processes (default: one per GPU, or 3 without several GPUs)",
    )
    faults.add_argument(
        "--faults",
        nargs="+",
        choices=ring_faults.FAULTS,
        default=ring_faults.FAULTS,
        help="faults to plant (default: all)",
    )
    text = "time tile sizes of the tensor-core kernels on this GPU, and store the fastest sizes"
    about = (
        f"{text[0].upper()}{text[1:]} in fa_numba/choices/tuned.csv. Attention calls on GPUs with "
        "this GPU's compute capability use the tile sizes in tuned.csv."
    )
    tuning = add("tune", text, about)
    text = f"head dimensions to time (default: {','.join(map(str, tune.HEAD_DIMS))})"
    tuning.add_argument("--head-dims", help=text, default=tune.HEAD_DIMS, **head_dims)
    for option, known, what in (
        ("--series", tune.SERIES, "names of the kernels"),
        ("--passes", tune.PASSES, "forward (fwd) and backward (bwd) passes"),
    ):
        which: dict[str, Any] = {"nargs": "+", "choices": known, "default": known}
        tuning.add_argument(option, help=f"{what} to time (default: all)", **which)
    for name, text in (
        ("spills", "compile Hopper's backward kernels with options that may spill registers, and "
         "store how many bytes of registers the kernels spill to memory. Plans of attention calls "
         "use the stored numbers. The command spills needs no GPU"),
        ("report", "write the tables in paper_repro.md and in figures/tables again, from the "
         "recordings in figures/data"),
        ("origins", "list recordings (stored results of experiments) whose commit is not in the "
         "git history, and recordings that may have been made with uncommitted changes"),
        ("outdated", "list each recording (the stored results of an experiment) as current, "
         "outdated or unknown. A recording is outdated if the code or the kernels that produced "
         "the recording have changed"),
    ):  # fmt: skip
        command = add(name, text, f"{text[0].upper()}{text[1:]}.")
    command.add_argument(
        "--write", action="store_true", help="also write the list to figures/tables/recordings.md"
    )
    return parser


def _list(console: Console, chosen: Sequence[str], verbose: bool) -> None:
    """Print one line for each experiment, or the complete descriptions of experiments.

    `chosen` contains the names of the experiments to describe completely. If `verbose` is true and
    `chosen` is empty, every experiment is described completely.
    """
    for name in chosen or names():
        try:
            module = load(name)
        except Exception as error:  # one broken file must not hide the other experiments
            text = f"{name:17}cannot be imported: {type(error).__name__}: {error}"
            console.print(f"[red]{escape(text)}[/]", highlight=False, soft_wrap=True)
            continue
        what = ", ".join(needs(module)) or "CPU"
        if chosen or verbose:
            text = (module.__doc__ or "").strip()
            console.print(
                f"[bold]{name}[/] {escape(f'[{what}]')}\n{escape(text)}\n",
                highlight=False,
                soft_wrap=True,
            )
            continue
        title = escape(f"{words(module)[0]} [{what}]")
        console.print(f"[bold]{name:17}[/]{title}", highlight=False, soft_wrap=True)
    if not chosen and not verbose:
        console.print(escape(_LEGEND), highlight=False, soft_wrap=True)


def _options(args: argparse.Namespace) -> Options:
    """Return the `Options` object for the parsed command line `args`.

    A run is partial if options such as --quick or --seqlens select a part of an experiment. The
    folder `figures` contains complete runs only. Raise ValueError if the run is partial, and --out
    names the folder `figures`.
    """
    given = {name: getattr(args, name) for name in ("quick", "recount", "replace", *LIMITED)}
    options = Options(**given | {"causal": CAUSAL.get(args.causal)})
    usual = FIGURES if options.complete else QUICK if options.quick else FILTERED
    if args.out == FIGURES != usual:
        raise ValueError(
            f"argument --out: must not be {FIGURES} for a part of an experiment, because that "
            "folder holds complete runs only. Without --out the results go to "
            f"{usual.relative_to(REPOSITORY)}"
        )
    return replace(options, out=args.out or usual)


def _report(console: Console) -> int:
    """Write the tables of all pages again. Return the exit status: 0, or 1 for an error."""
    try:
        changed = report.update()
    except (OSError, ValueError) as error:  # the message names the file, marker or stored rows
        what = escape(str(error))
        console.print(f"[red]no table was changed: {what}[/]", soft_wrap=True)
        return 1
    console.print(f"changed tables: {', '.join(changed) or 'none'}")
    return 0


def _origins(console: Console) -> int:
    """Print the recordings whose origin is not known for certain. Return the exit status.

    The exit status is 1 if the commit of a recording is not in the git history, else 0.
    """
    found = list(origins.unknown(Store(FIGURES), origins.history()))
    for line, _ in found:
        console.print(line, soft_wrap=True, highlight=False)
    return int(any(lost for _, lost in found))


def _outdated(console: Console, write: bool) -> int:
    """Print whether each recording is current, outdated or unknown. Return the exit status.

    The exit status is 1 if at least one recording is outdated, else 0. If `write` is true, also
    write the page of recordings.
    """
    store = Store(FIGURES)
    found = list(outdated.states(store))
    for each in found:
        console.print(str(each), soft_wrap=True, highlight=False)
    if write:
        recordings_page.write(found, store)
    return int(any(each.state == outdated.OUTDATED for each in found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments without the program's name. Default: the arguments of this process.

    Returns
    -------
    int
        0 for success, 1 for an error, 130 if interrupted.

    Raises
    ------
    SystemExit
        If an argument is wrong (exit status 2), or after ``--help`` and ``--version``.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set at the top of this file
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return ended(lambda: _command(arguments))


def _command(arguments: Sequence[str] | None) -> int:
    """Run the command that the arguments name. Return the exit status; see `main`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    args = parser.parse_args(arguments)
    console = Console()
    if args.command == "list":
        _list(console, args.names, args.verbose)
        return 0
    if args.command == "report":
        return _report(console)
    if args.command == "compare":
        return compare.run(args, parser)
    if args.command == "explore":
        from .beside import explore_server  # only this command needs these imports

        return explore_server.serve(args.port, console.print)

    if args.command == "faults":
        try:
            return ring_faults.check(args.faults, args.ranks, print)
        except ImportError as error:
            parser.error(f"faults needs torch: {error}")
    if args.command == "origins":
        return _origins(console)
    if args.command == "outdated":
        return _outdated(console, args.write)
    if args.command == "spills":
        try:
            changed = spills.write(console.print)
        except ImportError as error:
            parser.error(str(error))
        console.print(f"{spills.SPILLS.name}: {'changed' if changed else 'unchanged'}")
        return 0
    if args.command == "tune":
        wanted = tune.candidates(args.head_dims, args.series, args.passes)
        return Runner(Options(), arguments, console).tune(wanted)

    chosen = names() if args.command == "all" else list(dict.fromkeys(args.names))
    for choice in LIMITED:
        if getattr(args, choice) is None:
            continue
        other = [name for name in chosen if choice not in takes(load(name))]
        chosen = [name for name in chosen if name not in other]
        said = f"{', '.join(other)} {'have' if len(other) > 1 else 'has'} no option "
        said += f"--{choice.replace('_', '-')}"
        if other and args.command == "all":
            console.print(f"not run: {said}", soft_wrap=True, highlight=False)
        elif other:
            taking = ", ".join(name for name in names() if choice in takes(load(name)))
            parser.error(f"{said}. Experiments with this option: {taking}")
    try:
        options = _options(args)
    except ValueError as error:
        parser.error(str(error))
    if options.out == FILTERED:
        where = FILTERED.relative_to(REPOSITORY)
        console.print(f"a part of the experiment: results go to {where}", highlight=False)
    runner = Runner(options, arguments, console)
    try:
        for name in chosen if args.command != "draw" else ():
            runner.measure(name, again=args.command == "run")
            if runner.machine is not None:  # the next experiment may take minutes
                runner.draw(name)
        if args.command == "draw" or runner.machine is None:
            side_by_side(runner, chosen)
    except KeyboardInterrupt:
        console.print(
            "[yellow]interrupted; the results so far are stored, and the same command continues[/]"
        )
        return INTERRUPTED
    reports = runner.reports
    missing = [name for name in chosen if not reports[name].drawn_from]
    failed = [f"{name}: {reports[name].error}" for name in reports if reports[name].error]
    if args.command == "all":
        for line in failed:
            console.print(f"[red]{escape(line)}[/]", soft_wrap=True)
        return 1 if failed else 0
    # If a named experiment is not measured or not drawn, the command fails.
    unable = [name for name in reports if reports[name].not_measured]
    for what, which in (("not measured", unable), ("not drawn", missing)):
        if which:
            console.print(f"[red]{what}: {', '.join(which)}[/]")
    return 1 if failed or unable or missing else 0


if __name__ == "__main__":
    sys.exit(main())
