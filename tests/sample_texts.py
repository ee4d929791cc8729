"""Draws a random sample of the texts that users read, to be judged by somebody new to the project.

    python tests/sample_texts.py sentences  --n 120 --seed 7    pages, captions and help texts
    python tests/sample_texts.py docstrings --n 40  --seed 7    public names, with their signatures
    python tests/sample_texts.py messages   --n 60  --seed 7 --from FOLDER

Messages are those that tests have seen. A run of the tests writes them to a folder:

    SAMPLE_TEXTS=FOLDER python -m pytest -p sample_texts ...    with tests on PYTHONPATH

The reader answers for each text: clear at first reading, clear at second reading, or unclear.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import random
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "SAMPLE_TEXTS"  # names the folder that a run of the tests writes messages to
SKIPPED = ("|", "#", "    ", "!", "[", "<")
LINK = re.compile(r"\[[^\]]*\]\([^)]*\)")  # an entry of a table of contents
SENTENCE = re.compile(r"(?<=[.:;!?])\s+(?=[A-Z`*\"\d(])")


def pages() -> list[Path]:
    """Return the project's pages."""
    found = [*ROOT.glob("*.md"), *(ROOT / "fa_numba").rglob("*.md"), ROOT / "tests" / "README.md"]
    found += [ROOT / "experiments" / "README.md", *(ROOT / "figures").rglob("*.md")]
    return sorted(path for path in found if not {"quick", "filtered", "partial"} & {*path.parts})


def sentences() -> Iterator[tuple[str, str]]:
    """Yield (page, sentence) of all pages, then the help texts of both commands."""
    for path in pages():
        text = re.sub(r"```.*?```", "\n\n", path.read_text("utf-8"), flags=re.S)
        text = re.sub(r"<!--.*?-->", "\n\n", text, flags=re.S)
        for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
            lines = [line for line in block.splitlines() if line.strip()]
            if not lines or lines[0].startswith(SKIPPED):  # a heading, table, picture or code
                lines = [line for line in lines if not line.startswith(SKIPPED)]
            for sentence in SENTENCE.split(" ".join(line.strip() for line in lines)):
                sentence = re.sub(r"^(?:[-*]|\d+\.) ", "", sentence.strip())
                if len(sentence.split()) >= 5 and not LINK.fullmatch(sentence):
                    yield str(path.relative_to(ROOT)), sentence
    yield from help_texts()


def help_texts() -> Iterator[tuple[str, str]]:
    """Yield (command, text) for each description and each option's help of both commands."""
    for package in ("fa_numba", "experiments"):
        parsers: list[argparse.ArgumentParser] = []

        def keep(parser, *_, _found=parsers, **__):
            _found.append(parser)
            raise SystemExit

        module = importlib.import_module(f"{package}.__main__")
        with (
            mock.patch.object(argparse.ArgumentParser, "parse_args", keep),
            mock.patch.object(argparse.ArgumentParser, "parse_known_args", keep),
            contextlib.suppress(SystemExit),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            module.main(["--help"])
        for parser in parsers[:1]:
            yield from _helps(f"python -m {package}", parser)


def _helps(command: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for text in (parser.description, parser.epilog):
        if text:
            yield command, " ".join(text.split())
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _helps(f"{command} {name}", inner)
        elif action.help and action.dest != "help":
            name = action.option_strings[-1] if action.option_strings else action.dest
            yield f"{command} {name}", " ".join(action.help.split())


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield (name and signature, docstring) of every public name."""
    sys.path.insert(0, str(ROOT / ".ci"))
    from public_names import everything, value_of

    for module, name in everything():
        value = value_of(module, name)
        with contextlib.suppress(TypeError, ValueError):
            name = f"{name}{inspect.signature(value)}"
        yield f"{module}.{name}", inspect.getdoc(value) or ""


def messages(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (place of the raise, message), one message for each place, of a run of the tests."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            where, text = json.loads(line)
            found.setdefault(where, set()).add(text)
    for where, texts in sorted(found.items()):
        yield where, min(texts, key=lambda text: (len(text) > 400, text))


def pytest_configure() -> None:
    """Let ``pytest.raises`` note each message of the package: the hook that pytest calls."""
    if FOLDER not in os.environ:
        return
    from _pytest.raises import RaisesExc

    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    leave = RaisesExc.__exit__

    def noting(self, kind, error, trace):
        done = leave(self, kind, error, trace)
        frames = traceback.extract_tb(trace) if done and trace else []
        if frames:
            path = Path(frames[-1].filename)
            if path.is_relative_to(ROOT / "fa_numba") or path.is_relative_to(ROOT / "experiments"):
                where = f"{path.relative_to(ROOT)}:{frames[-1].lineno} {kind.__name__}"
                with open(folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
                    print(json.dumps([where, str(error)]), file=file)
        return done

    RaisesExc.__exit__ = noting


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("sentences", "docstrings", "messages"))
    parser.add_argument("--n", type=int, default=60, help="how many texts are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", dest="folder", type=Path, help="the folder of the messages")
    asked = parser.parse_args()
    if asked.kind == "messages" and asked.folder is None:
        parser.error("messages need --from FOLDER, which a run of the tests wrote")
    sys.path.insert(0, str(ROOT))
    found = list(messages(asked.folder) if asked.kind == "messages" else globals()[asked.kind]())
    drawn = random.Random(asked.seed).sample(found, min(asked.n, len(found)))
    print(f"{len(drawn)} of {len(found)} {asked.kind}, seed {asked.seed}\n")
    for number, (where, text) in enumerate(drawn, 1):
        print(f"[{number}] {where}\n    " + text.replace("\n", "\n    ") + "\n")


if __name__ == "__main__":
    main()
