"""The command line: ``python -m experiments --help`` lists its commands."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # until all is imported, an interrupt ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

try:
    from rich.console import Console
    from rich.markup import escape
except ModuleNotFoundError as error:
    sys.exit(f"python -m experiments needs {error.name}: pip install -e '.[experiments]'")

from fa_numba.commands.arguments import MAX_SEQLEN, tiles, whole
from fa_numba.problem import MAX_HEAD_DIM

from .beside import compare, spills
from .lab.measure import tune
from .lab.record import FIGURES, FILTERED, REPOSITORY, Options, Store, origins, outdated
from .lab.record.drawing import side_by_side
from .lab.record.options import CHOICES, QUICK
from .lab.record.registry import load, names, needs, takes, words
from .lab.record.runner import Runner
from .lab.show import report

T = TypeVar("T")
CAUSAL = {"no": (False,), "yes": (True,), "both": (False, True)}


def _several(one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return a parser of values separated by commas, which drops repeated values."""
    return lambda text: tuple(dict.fromkeys(one(part) for part in text.split(",")))


def _tiles(text: str) -> tuple[int, int]:
    """Parse block sizes such as "64x32" into (Br, Bc)."""
    found = tiles(text)
    return found.Br, found.Bc


def _folder(text: str) -> Path:
    """Parse the path of a folder that exists or can be made."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} names no folder")
    path = Path(text).resolve()
    for place in (path, *path.parents):
        if place.exists():
            if not place.is_dir():
                raise argparse.ArgumentTypeError(f"{place} is a file, not a folder")
            break
    return path


def _parser() -> argparse.ArgumentParser:
    choices = argparse.ArgumentParser(add_help=False)
    quick, filtered = (folder.relative_to(REPOSITORY) for folder in (QUICK, FILTERED))
    chosen = (
        "--seqlens, --head-dims, --causal and --tiles leave a part of an experiment. Its figure "
        f"and data go to {filtered} unless --out is given: what is in figures/ comes from complete "
        "runs alone."
    )
    flag: dict[str, Any] = {"action": "store_true"}
    head_dims: dict[str, Any] = {"type": _several(whole(1, MAX_HEAD_DIM)), "metavar": "D,..."}
    options: dict[str, tuple[str, dict[str, Any]]] = {
        "--quick": (
            f"a few small sizes, in seconds; written to {quick} unless --out is given", flag),
        "--seqlens": ("sequence lengths to measure or draw, instead of the experiment's own",
                      {"type": _several(whole(1, MAX_SEQLEN)), "metavar": "N,..."}),
        "--head-dims": (
            "head dimensions to measure or draw, instead of the experiment's own", head_dims),
        "--causal": ("without the causal mask, with it, or both, instead of the experiment's own",
                     {"choices": CAUSAL}),
        "--tiles": (
            "block sizes, such as 64x64,32x128, of an experiment that takes them (see list)",
            {"type": _several(_tiles), "metavar": "BRxBC,..."}),
        "--recount": ("count on the emulator in any case; a complete run takes the stored counts "
                      "while the experiment's code and its kernels are unchanged", flag),
        "--out": ("where figures go, and their data under FOLDER/data (default: figures for "
                  "complete runs); what has no data there is drawn from the project's recordings "
                  "in figures/data", {"type": _folder, "metavar": "FOLDER"}),
        "--replace": ("replace a recording though torch or ncu, which it has numbers of, are "
                      "missing here", flag),
    }  # fmt: skip
    group = choices.add_argument_group("options")
    for option, (text, how) in options.items():
        group.add_argument(option, help=text, **how)
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description="Measure both loop orders of FlashAttention and draw the figures.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, text: str, about: str = "", **more: Any) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=about or text, **more)

    parts: dict[str, Any] = {"epilog": chosen, "parents": [choices]}
    add("list", "name the experiments and what each one shows")
    for name, text in (
        ("run", "measure the named experiments on this machine, store the rows, draw the figures"),
        ("draw", "draw the named figures from stored rows, measuring nothing"),
    ):
        about = f"any of: {', '.join(names())}"
        add(name, text, **parts).add_argument(
            "names", nargs="+", choices=names(), metavar="NAME", help=about
        )
    text = "run every experiment that this machine can run, draw every figure, say what is new"
    about = (
        f"{text}. An experiment is measured again on a GPU when its code or the kernels that it "
        "launches have changed. An interrupted run is continued by the same command."
    )
    add("all", text, about, **parts)
    compare.add(commands)
    text = "serve figures/explore.html on this machine, for sizes of your own, until Ctrl-C"
    port: dict[str, Any] = {"type": whole(1, 65535), "metavar": "P", "default": 0}
    add("explore", text).add_argument("--port", help="default: a free one", **port)
    tuning = add("tune", "time the tensor-core kernels' tiles on this GPU and store the fastest")
    text = f"head dimensions to sweep (default: {','.join(map(str, tune.HEAD_DIMS))})"
    tuning.add_argument("--head-dims", help=text, default=tune.HEAD_DIMS, **head_dims)
    for option, known in (("--series", tune.SERIES), ("--passes", tune.PASSES)):
        which: dict[str, Any] = {"nargs": "+", "choices": known, "default": known}
        tuning.add_argument(option, help="what to sweep (default: all)", **which)
    for name, text in (
        ("spills", "compile, without a GPU, what options make spill, and store the bytes that "
         "plans read"),
        ("report", "write the tables of paper_repro.md and figures/tables anew from figures/data"),
        ("origins", "list recordings whose commit is not in this history, or whose tree may have "
         "differed"),
        ("outdated", "list each recording as current, outdated or unknown; outdated is what was "
         "made with other kernels or other code than today's"),
    ):  # fmt: skip
        add(name, text)
    return parser


def _options(args: argparse.Namespace) -> Options:
    """Return the choices of the command line.

    Raises ValueError if --out names the folder of complete runs, but the run is not complete.
    """
    given = {name: getattr(args, name) for name in ("quick", "recount", "replace", *CHOICES)}
    options = Options(**given | {"causal": CAUSAL.get(args.causal)})
    usual = FIGURES if options.complete else QUICK if options.quick else FILTERED
    if args.out == FIGURES != usual:
        raise ValueError(
            f"argument --out: {FIGURES} has complete runs alone: allowed are other folders; "
            f"without --out it is {usual.relative_to(REPOSITORY)}"
        )
    return replace(options, out=args.out or usual)


def _report(console: Console) -> int:
    """Write the tables of all pages; return the exit status, 1 for an error."""
    try:
        changed = report.update()
    except (OSError, ValueError) as error:  # a file, a marker, or stored rows: it says which
        what = escape(str(error))
        console.print(f"[red]the tables are as they were: {what}[/]", soft_wrap=True)
        return 1
    console.print(f"tables: {', '.join(changed) if changed else 'nothing'} changed")
    return 0


def _origins(console: Console) -> int:
    """Print recordings of unknown origin; return 1 if the commit of one of them is lost."""
    found = list(origins.unknown(Store(FIGURES), origins.history()))
    for line, _ in found:
        console.print(line, soft_wrap=True, highlight=False)
    return int(any(lost for _, lost in found))


def _outdated(console: Console) -> int:
    """Print the state of every recording. Return 1 where one is outdated."""
    found = list(outdated.states(Store(FIGURES)))
    for each in found:
        console.print(str(each), soft_wrap=True, highlight=False)
    return int(any(each.state == outdated.OUTDATED for each in found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments without the program's name. Default: those of this process.

    Returns
    -------
    int
        0 for success, 1 for an error, 130 if interrupted.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set above
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _command(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _command(arguments: Sequence[str] | None) -> int:
    """Run one command and return its exit status; see `main`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    args = parser.parse_args(arguments)
    console = Console()
    if args.command == "list":
        for name in names():
            module = load(name)
            about = ". ".join(words(module))
            if what := " and ".join(needs(module)).replace("GPU", "a CUDA GPU"):
                about += f" Needs {what} to measure."
            console.print(f"[bold]{name}[/]: {about}", highlight=False)
        return 0
    if args.command == "report":
        return _report(console)
    if args.command == "compare":
        return compare.run(args, parser)
    if args.command == "explore":
        from .beside import explore_server  # draws nothing, and needs the colours of what does

        return explore_server.serve(args.port, console.print)

    if args.command == "origins":
        return _origins(console)
    if args.command == "outdated":
        return _outdated(console)
    if args.command == "spills":
        try:
            changed = spills.write(console.print)
        except ImportError as error:
            parser.error(str(error))
        console.print(f"{spills.SPILLS.name}: {'changed' if changed else 'nothing changed'}")
        return 0
    if args.command == "tune":
        wanted = tune.candidates(args.head_dims, args.series, args.passes)
        return Runner(Options(), arguments, console).tune(wanted)

    chosen = names() if args.command == "all" else list(dict.fromkeys(args.names))
    for choice in CHOICES:
        if getattr(args, choice) is None:
            continue
        other = [name for name in chosen if choice not in takes(load(name))]
        chosen = [name for name in chosen if name not in other]
        said = f"--{choice.replace('_', '-')} is nothing that {', '.join(other)} takes"
        if other and args.command == "all":
            console.print(f"{said}: left out", soft_wrap=True, highlight=False)
        elif other:
            taking = ", ".join(name for name in names() if choice in takes(load(name)))
            parser.error(f"{said}, only {taking}")
    try:
        options = _options(args)
    except ValueError as error:
        parser.error(str(error))
    if options.out == FILTERED:
        where = FILTERED.relative_to(REPOSITORY)
        console.print(f"a part of it: figures and data go to {where}", highlight=False)
    runner = Runner(options, arguments, console)
    try:
        for name in chosen if args.command != "draw" else ():
            runner.measure(name, again=args.command == "run")
            if runner.machine is not None:  # minutes may pass before the next is done
                runner.draw(name)
        if args.command == "draw" or runner.machine is None:
            side_by_side(runner, chosen)
    except KeyboardInterrupt:
        console.print("[yellow]interrupted; with the rows so far the same command goes on[/]")
        return 130
    reports = runner.reports
    missing = [name for name in chosen if not reports[name].drawn_from]
    failed = [f"{name}: {reports[name].error}" for name in reports if reports[name].error]
    if args.command == "all":
        for line in failed:
            console.print(f"[red]{escape(line)}[/]", soft_wrap=True)
        return 1 if failed else 0
    # What was asked for by name and is not there is an error.
    unable = [name for name in reports if reports[name].not_measured]
    for what, which in (("not measured", unable), ("not drawn", missing)):
        if which:
            console.print(f"[red]{what}: {', '.join(which)}[/]")
    return 1 if failed or unable or missing else 0


if __name__ == "__main__":
    sys.exit(main())
