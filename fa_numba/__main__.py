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
        description="Show how the two loop orders of FlashAttention compute, and what a call of "
        "attention would launch. No GPU is needed.",
        epilog="For the options of a command, run python -m fa_numba COMMAND --help. For "
        "measurements and figures, run python -m experiments --help.",
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
