"""What pip was told decides what is installed, whether uv does it or pip; what an sdist has."""

import configparser
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / ".ci" / "install.py"
spec = importlib.util.spec_from_file_location("install", SOURCE)
install = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install)

BEST = ["--index-strategy", "unsafe-best-match"]


@pytest.mark.parametrize(
    "settings, options, variables",
    [
        ([], [], {}),
        (["global.index-url='https://a/simple'"], ["--default-index", "https://a/simple"], {}),
        # The environment before a command's section, and that before the section of all.
        (
            [
                ":env:.index-url='https://c'",
                "global.index-url='https://a'",
                "install.index-url='https://b'",
            ],
            ["--default-index", "https://c"],
            {},
        ),
        (
            ["install.index-url='https://b'", "global.index-url='https://a'"],
            ["--default-index", "https://b"],
            {},
        ),
        (
            [r"global.extra-index-url='file:///a\nhttps://b'", ":env:.find-links='/c /d'"],
            ["--index", "file:///a", "--index", "https://b", "--find-links", "/c"]
            + ["--find-links", "/d"],
            {},
        ),
        (["global.trusted-host='a:8080'"], ["--allow-insecure-host", "a:8080"], {}),
        (
            ["global.cert='/etc/a.pem'", ":env:.default-timeout='180'"],
            [],
            {"SSL_CERT_FILE": "/etc/a.pem", "UV_HTTP_TIMEOUT": "180"},
        ),
        ([":env:.extra-index-url=''", "global.quiet='1'", "download.no-index='1'"], [], {}),
    ],
)
def test_uv_is_told_what_pip_was_told(settings, options, variables):
    assert install.uv_arguments(settings) == (options + BEST, variables)


@pytest.mark.parametrize(
    "setting",
    ["global.proxy='http://a'", ":env:.no-index='1'", "install.constraint='a.txt'"]
    + ["global.client-cert='a.pem'", ":env:.no-binary=':all:'", "global.pre='true'"],
)
def test_what_uv_cannot_be_told_is_left_to_pip(setting):
    assert install.uv_arguments(["global.index-url='https://a'", setting]) is None


@pytest.mark.parametrize("fails", [None, "no pip", "older pip", "settings", "no uv", "uv"])
def test_pip_installs_what_uv_does_not(monkeypatch, tmp_path, fails):
    """And every command is for the environment that was named; before 22.3 pip knew none but its
    own.
    """
    python = tmp_path / "bin" / "python"
    commands = []

    class Done:
        def __init__(self, command, **_):
            commands.append([str(word) for word in command])
            listing = command[-2:] == ["config", "list"]
            self.stdout = "global.proxy='http://a'\n" if fails == "settings" else ""
            failing = {
                "no pip": "pip" in command and str(python) not in map(str, command),
                "older pip": command[1:4] == ["-m", "pip", "--python"],
                "no uv": command[-1] == "uv",
                "uv": str(command[0]).endswith("uv"),
            }
            self.returncode = int(not listing and failing.get(fails, False))
            if listing and fails == "no pip":
                self.returncode = 1

    monkeypatch.setattr(install.subprocess, "run", Done)
    monkeypatch.setattr(install.sys, "argv", ["install.py", str(tmp_path), "cu13,test"])
    assert install.main() == 0
    last = commands[-1]
    assert last[-2:] == ["-e", ".[cu13,test]"]
    if fails is None:
        assert last[:3] == [str(python.with_name("uv")), "pip", "install"]
        assert last[last.index("--python") + 1] == str(python)
    else:
        assert last[:4] == [str(python), "-m", "pip", "install"]


def test_an_environment_where_nothing_can_be_installed_is_an_error(monkeypatch, tmp_path, capsys):
    class Failed:
        returncode, stdout = 1, ""

    monkeypatch.setattr(install.subprocess, "run", lambda *_, **__: Failed)
    monkeypatch.setattr(install.sys, "argv", ["install.py", str(tmp_path), "cu13"])
    assert install.main() == 1
    said = capsys.readouterr().err
    assert "has no pip: on Debian, apt install python3-venv" in said  # nor could it be had
    assert "PIP_INDEX_URL names a mirror; without a network, PIP_NO_INDEX=1" in said


def test_a_source_distribution_has_all_that_its_tests_take(tmp_path):
    """Helpers, data, experiments, figures, pages: what is here and is not made by running."""
    write = [sys.executable, "-c", "import setuptools; setuptools.setup()"]
    told = ["-q", "egg_info", "--egg-base", str(tmp_path)]
    done = subprocess.run([*write, *told], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (listed,) = tmp_path.glob("*/SOURCES.txt")
    found = {line for line in listed.read_text().splitlines() if ".egg-info/" not in line}
    made = {"__pycache__", "quick", "filtered", "partial"}
    folders = ("fa_numba", "experiments", "figures", "tests", ".ci")
    here = [x for folder in folders for x in (ROOT / folder).rglob("*") if x.is_file()]
    here += [ROOT / name for name in ("Makefile", "setup.cfg", "pyproject.toml", "MANIFEST.in")]
    here += ROOT.glob("*.md")
    wanted = {str(x.relative_to(ROOT)) for x in here if not made & {*x.parts}}
    assert {"tests/conftest.py", "tests/data/plans.csv", ".ci/install.py"} <= wanted
    assert found >= wanted, sorted(wanted - found)
    assert not [x for x in found if made & {*Path(x).parts}]


def test_the_page_of_a_package_index_has_no_relative_links(tmp_path):
    """An index shows the page alone, so that links to files of the repository would be broken."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    page = (ROOT / setup["metadata"]["long_description"].removeprefix("file: ")).read_text()
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert links and all(link.startswith("https://") for link in links)
    assert "https://arxiv.org/abs/2205.14135" in setup["metadata"]["project_urls"]
    code = page.partition("## Call it")[2].replace("\n    ", "\n").partition("import")
    namespace = {}
    exec(code[1] + code[2].partition("\n`")[0], namespace)  # what the page shows, runs
    assert namespace["o"].shape == (1, 2, 48, 16) and namespace["counts"].loads["Q"]
