"""The command line ``python -m fa_numba``, and its commands."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from fa_numba.commands import compile, plan, trace
from fa_numba.commands.arguments import Parser
from fa_numba.commands.ending import ended

COMMANDS = (trace, plan, compile)


def _has_experiments() -> bool:
    """Return whether `python -m experiments` would run the experiments of this source tree."""
    found = importlib.util.find_spec("experiments")
    checkout = Path(__file__).resolve().parents[1]
    return found is not None and Path(found.origin or "").is_relative_to(checkout)


def _parser() -> argparse.ArgumentParser:
    more = "For the options of a command, run python -m fa_numba COMMAND --help."
    if _has_experiments():
        more += " For measurements and figures, run python -m experiments --help."
    parser = Parser(
        prog="python -m fa_numba",
        description="Show how the two loop orders of FlashAttention compute the softmax (trace), "
        "show which kernels an attention call would launch (plan), or compile kernels before "
        "attention calls need the kernels (compile). The commands need no GPU.",
        epilog=more,
    )
    parser.add_version("fa_numba")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for module in COMMANDS:
        sub = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run, parser=sub)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. Without a command, print the help."""
    return ended(lambda: _command(arguments))


def _command(arguments: Sequence[str] | None) -> int:
    """Run one command, or print the help, and return the exit status.

    ``main`` calls this function inside of ``ended``, which handles interrupts and failed output.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.command is None:
        print(parser.format_help(), end="")
        return 0
    try:
        print(args.run(args))
    except (ValueError, ImportError) as error:  # what arguments say together, or need installed
        args.parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
