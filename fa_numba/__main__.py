"""The command line, python -m fa_numba: trace, plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fa_numba.commands import plan, trace

COMMANDS = (trace, plan)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fa_numba",
        description="Look at the two loop orders of FlashAttention without writing a program. "
        "No GPU is needed.",
        epilog="Options of a command: python -m fa_numba COMMAND --help. Measurements and figures: "
        "python -m experiments --help.",
    )
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
    """Run one command; gives the exit status. Without a command it says which there are."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        print(args.run(args))
    except (ValueError, ImportError) as error:  # what arguments say together, or need installed
        args.parser.error(str(error))
    except BrokenPipeError:  # of `| head`
        sys.stderr.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
