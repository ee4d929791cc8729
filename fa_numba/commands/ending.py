"""The end of a command: its exit status, and messages if it is interrupted or cannot write."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

INTERRUPTED = 130  # 128 + SIGINT, as shells define it
_SHOWN = 60  # characters of a file name in a message


def ended(command: Callable[[], int]) -> int:
    """Run a command and return its exit status.

    ==========================================  ======  ===========================
    end of the command                          status  message on standard error
    ==========================================  ======  ===========================
    normal                                      as the command returns it
    interrupt (Ctrl-C)                          130     "interrupted"
    a file or the output cannot be written      1       one line with the reason
    closed pipe, such as by ``| head``          0       none
    ==========================================  ======  ===========================
    """
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return 0
    except OSError as error:
        _discard_output()
        _say(f"error: {reason(error)}")
        return 1


def reason(error: OSError) -> str:
    """Return the operating system's message about a file, or about the output if no file is named.

    A long file name is shortened.

    >>> reason(OSError(28, "No space left on device"))
    'the output cannot be written: No space left on device'
    >>> reason(OSError(36, "File name too long", "x" * 300))[:40]
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxx ... xxxxx"
    """
    said = error.strerror or str(error)
    if error.filename is None:
        return f"the output cannot be written: {said}"
    return f"{shortened(error.filename)!r} cannot be read or written: {said}"


def shortened(name: object) -> str:
    """Return a file name with its middle left out if it is longer than 60 characters."""
    text, half = str(name), _SHOWN // 2 - 1
    return text if len(text) <= _SHOWN else f"{text[:half]} ... {text[-half:]}"


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the disk that is full may also take the messages
        print(line, file=sys.stderr, flush=True)


def _discard_output() -> None:
    """Redirect the remaining output to the null device, so that Python does not fail at exit."""
    with contextlib.suppress(OSError, ValueError):  # an output without a file, as in a test
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
