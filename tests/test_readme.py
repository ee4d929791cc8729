"""The pages: their links lead somewhere, README's result is what the recording says."""

import contextlib
import csv
import inspect
import io
import itertools
import re
import shlex
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import fa_numba
from experiments import __main__ as experiments
from experiments.beside import compare
from experiments.lab.record import registry
from experiments.lab.record.store import Store
from experiments.lab.show import report
from fa_numba import __main__ as command
from fa_numba import device as devices
from fa_numba.commands import compile as compiling
from fa_numba.host import ahead

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("fa_numba", "fa_numba/kernels", "fa_numba/emulator", "experiments", "figures")
ROOMS += ("figures/data", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "paper_repro.md")
PAGES += tuple(f"{room}/README.md" for room in ROOMS)
PAGES += tuple(f"fa_numba/{name}.md" for name in ("guide", "options", "architecture"))
PAGES += tuple(str(path.relative_to(ROOT)) for path in sorted(report.TABLES.glob("*.md")))
RESULT = ROOT / "figures" / "data" / "loop_order" / "nvidia-h200.csv"
# README's rows, by series, and what their columns are: source and metric.
ROWS = {
    "fa1-mma": "FA-1, K/V outer, one thread block per head",
    "fa1-mma-splits": "FA-1, K/V outer, four thread blocks per head",
    "fa2-mma-fa1-tiles": "FA-2, Q outer, one thread block per row tile",
}
COLUMNS = (("measured", "time"), ("model", "traffic"), ("l2", "traffic"), ("dram", "traffic"))
SPEEDS = ROOT / "figures" / "data" / "speed_fp16" / "nvidia-h200.csv"
KERNELS = {
    "standard-mma": "standard attention | mma.sync",
    "fa1-mma": "FA-1, one thread block per head | mma.sync",
    "fa1-mma-splits": "FA-1, several thread blocks per head | mma.sync",
    "fa2-mma": "FA-2 | mma.sync",
    "fa1-wgmma-splits": "FA-1, several thread blocks per head | wgmma",
    "fa2-wgmma": "FA-2 | wgmma",
    "torch-unfused": "torch's unfused attention | -",
    "torch-fa2": "torch's FlashAttention-2 | -",
    "torch-cudnn": "cuDNN, called by torch | -",
    "torch-flex-flash": "torch's flex_attention, which calls FlashAttention-4 | -",
    "fa4": "flash-attn-4, FlashAttention-4 for Hopper | -",
}
SETTING = {
    "pass": "fwd",
    "dtype": "float16",
    "heads_q": "32",
    "seqlen_q": "16384",
    "head_dim": "64",
    "causal": "false",
}


def inputs(Nq, Nk):
    """q, k and v of one head of 8."""
    rng = np.random.default_rng(Nq)
    return (rng.standard_normal((1, 1, N, 8), np.float32) for N in (Nq, Nk, Nk))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    text = re.sub(r"^ {7,}.*$", "", (ROOT / page).read_text(), flags=re.M)  # no code in a list
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"^\[[^]]+\]: (\S+)$", text, re.M)
    for link in links:
        if not link.startswith("https://"):
            name, _, heading = link.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert path.exists(), link
            titles = [re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
                      for line in path.read_text().splitlines()
                      if line.startswith("#")] if heading else []  # fmt: skip
            assert not heading or heading in titles, link


def test_words_in_brackets_of_the_long_page_lead_somewhere():
    text = re.sub(r"`[^`]*`", "", (ROOT / "paper_repro.md").read_text())
    defined = set(re.findall(r"^\[([^]]+)\]: ", text, re.M))
    words = set(re.findall(r"(?<![]!])\[([^]]+)\](?![(:])", text))
    assert words - defined == set() and set(registry.names()) <= words


@pytest.mark.parametrize("path", sorted(report.TABLES.glob("*.md")), ids=lambda path: path.stem)
def test_figures_readme_has_every_page_with_what_is_drawn(path):
    text = path.read_text()
    title = text.splitlines()[0].removeprefix("# ")
    figure = re.search(r"!\[([^]]+)\]\(\.\./(\w+\.png)\)", text)
    drawn = f"[{figure[1]}]({figure[2]})" if figure else "-"
    name = f"`{path.stem}`" if path.stem in registry.names() else "-"
    row = f"| [{title}](tables/{path.name}) | {drawn} | {name} |\n"
    assert row in (ROOT / "figures" / "README.md").read_text()


@pytest.mark.parametrize("series", ROWS)
def test_readmes_result_is_the_recorded_one(series):
    with open(RESULT) as file:
        rows = [r for r in csv.DictReader(file) if SETTING.items() <= r.items()]
    rows = [r for r in rows if r["series"] == series]
    values = []
    for source, metric in COLUMNS:
        (row,) = [r for r in rows if (r["source"], r["metric"]) == (source, metric)]
        value = float(row["value"])
        values.append(f"{value:.1f} ms" if metric == "time" else f"{value / 1e9:.1f} GB")
    assert f"| {ROWS[series]} | {' | '.join(values)} |\n" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("series", KERNELS)
def test_readmes_speeds_are_the_recorded_ones(series):
    with open(SPEEDS) as file:
        rows = [r for r in csv.DictReader(file) if SETTING.items() <= r.items()]
    value = {r["metric"]: float(r["value"]) for r in rows if r["series"] == series}
    cells = f"{value['time']:.1f} ms | {value['speed']:.0f} | {value['memory']:.0f} MiB"
    assert f"| {KERNELS[series]} | {cells} |\n" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "paper_repro.md"])
def test_the_finding_is_the_forms(page):
    """README's introduction and the summary of the long page have the ratios of DRAM bytes and of
    time that the page's form expects.
    """
    text = (ROOT / page).read_text()
    heading = "What you get" if page == "README.md" else "The main result"
    finding = " ".join(text.partition(f"\n## {heading}\n")[0].split())
    form = report.text("artefact", Store(report.FIGURES))
    for claim, words in (
        ("DRAM bytes", "moves {} the"),
        ("Time at equal tiles and a full", "takes {} as"),
    ):
        (line,) = (line for line in form.splitlines() if line.startswith(f"| {claim}"))
        assert words.format(line.split(" | ")[4]) in finding


def measured_speeds(experiment):
    """{(series, pass, head dimension, causal, N): TFLOP/s} of a recording on an H200."""
    found = {}
    with open(ROOT / "figures" / "data" / experiment / "nvidia-h200.csv") as file:
        for r in csv.DictReader(file):
            if r["metric"] == "speed" and r["value"]:
                at = (r["series"], r["pass"], r["head_dim"], r["causal"], int(r["seqlen_q"]))
                found[at] = float(r["value"])
    return found


def test_the_times_of_both_orders_with_their_own_tiles():
    """README and the summary have the range of FA-1's time / FA-2's time, on equal units."""
    ratios, wide = [], []
    for experiment, units in (("speed", ["simt"]), ("speed_fp16", ["mma", "wgmma"])):
        fastest = {}
        for (series, pass_, d, *at), speed in measured_speeds(experiment).items():
            order, _, rest = series.partition("-")
            unit, _, rest = rest.partition("-")
            if pass_ == "fwd" and unit in units and rest in ("", "splits"):
                place = fastest.setdefault((unit, d, *at), {})
                place[order] = max(speed, place.get(order, 0))
        for (_, d, *_), x in fastest.items():
            (wide if d == "256" else ratios).append(x["fa2"] / x["fa1"])
    said = f"{min(ratios):.2f} to {max(ratios):.2f}"
    assert len(ratios) == 72 and len(wide) == 24
    at_256 = f"and {min(wide):.2f} to {max(wide):.2f} times as long at d=256"
    assert at_256 in words_of("paper_repro.md")
    assert f"takes {said} times as long as Q outer" in words_of("README.md")
    assert f"FA-1 takes {said} times as long as FA-2" in words_of("paper_repro.md")


def words_of(page):
    return " ".join((ROOT / page).read_text().split())


def test_what_the_page_says_of_peers():
    """The ranges of our FA-2's speed / a peer's speed below the table for wgmma."""
    speeds, page = measured_speeds("speed_fp16"), words_of("figures/tables/speed_fp16.md")

    def ratios(peer, pass_, dims, lengths):
        return [
            speed / speeds[peer, pass_, d, causal, N]
            for (series, of, d, causal, N), speed in speeds.items()
            if series == "fa2-wgmma" and of == pass_ and d in dims and N in lengths
        ]

    short, long, both = (512, 1024), (2048, 4096, 8192, 16384), ("64", "128")
    for words, peer, pass_, dims, lengths in (
        ("From N=2k on, our FA-2 has {} times cuDNN's speed", "torch-cudnn", "fwd", both, long),
        ("At N=512 and 1k, it has {} times cuDNN's speed", "torch-cudnn", "fwd", both, short),
        ("Our FA-2 has {} times cuDNN's speed at d=64", "torch-cudnn", "bwd", ["64"], short + long),
        ("and {} times at d=128", "torch-cudnn", "bwd", ["128"], short + long),
        ("backward.** Our FA-2 has {} times its speed", "torch-fa2", "bwd", both, short + long),
        ("Our FA-2 has {} times its speed in the forward pass", "fa4", "fwd", both, short + long),
        ("and {} times in the backward pass", "fa4", "bwd", both, short + long),
    ):
        found = ratios(peer, pass_, dims, lengths)
        assert words.format(f"{min(found):.2f} to {max(found):.2f}") in page, words
    slower = [sum(x < 1 for x in ratios("fa4", p, both, short + long)) for p in ("fwd", "bwd")]
    said = (
        "slower at {} of 24 sizes in the forward pass, and at {} of 24 sizes in the backward pass"
    )
    assert said.format(*slower) in page


def test_the_summary_counts_the_verdicts():
    """The two paragraphs on verdicts have the numbers of the captions of the two tables."""
    page = words_of("paper_repro.md")
    for begin, caption in (
        ("**The published figures.**", "verdicts in the table of published figures"),
        ("**Claims in texts.**", "verdicts that are counted in the table of claims"),
    ):
        number, counts = re.search(rf"Of the (\d+) {caption}, (.*?)\.", page).groups()
        counts = {word: n for n, word in re.findall(r'(\d+) are ("[a-z ]+")', counts)}
        paragraph = page.partition(begin)[2].partition(" **")[0]
        assert f"gives {number} verdicts on" in paragraph
        said = re.findall(r'(\d+) (?:verdicts )?are ("[a-z ]+")', paragraph)
        assert {word: n for n, word in said}.items() <= counts.items() and len(said) >= 3


def test_the_summarys_other_numbers_are_those_of_the_tables():
    page = (ROOT / "paper_repro.md").read_text()
    summary = " ".join(page.partition("\n## Summary\n")[2].partition("\n## ")[0].split())
    (line,) = (x for x in page.splitlines() if x.startswith("| bytes accessed |"))
    accessed = [float(x) for cell in line.split("|")[2:-1] for x in cell.split(" to ")]
    assert f"accesses {min(accessed):.2f} to {max(accessed):.2f} times as many" in summary
    (line,) = (x for x in page.splitlines() if x.startswith("| time, FA-1 on the paper's grid |"))
    slowest = max(float(x) for cell in line.split("|")[2:-1] for x in cell.split(" to "))
    assert f"up to {slowest} times as long as FA-2" in summary
    for peer, pass_, words in (
        ("torch-cudnn", "fwd", "{} times the speed of cuDNN in the forward pass"),
        ("torch-cudnn", "bwd", "the backward pass, our FA-2 on wgmma has {} times the speed"),
        ("fa4", "fwd", "our forward pass has {} times the speed of flash-attn-4"),
        ("fa4", "bwd", "our backward pass has {} times"),
    ):
        assert words.format(speed_over(peer, pass_)) in summary


def speed_over(peer, pass_):
    """The range of the speeds of FA-2 on wgmma, divided by those of another series."""
    with open(SPEEDS) as file:
        rows = [r for r in csv.DictReader(file) if (r["metric"], r["pass"]) == ("speed", pass_)]
    at = ("head_dim", "causal", "seqlen_q")
    speed = {(r["series"], *(r[x] for x in at)): float(r["value"]) for r in rows if r["value"]}
    over = [
        value / speed[peer, *key[1:]]
        for key, value in speed.items()
        if key[0] == "fa2-wgmma" and (peer, *key[1:]) in speed
    ]
    return f"{min(over):.2f} to {max(over):.2f}"


def test_the_emulators_times_are_those_of_the_file():
    with open(ROOT / "tests" / "data" / "emulator_speed.csv") as file:
        rows = list(csv.DictReader(file))
    page = (ROOT / "fa_numba" / "emulator" / "README.md").read_text()
    assert len(rows) > 5
    for row in rows:
        before, after = row["before"], row["after"]
        ratio = f"{float(before) / float(after):.0f}" if before else ""
        assert f"| {row['call']} | {before} | {after} | {ratio} |\n" in page


def test_the_speeds_of_float32_are_those_of_the_recording():
    times = {}
    with open(ROOT / "figures" / "data" / "speed" / "nvidia-h200.csv") as file:
        for row in csv.DictReader(file):
            if (row["metric"], row["pass"]) == ("time", "fwd") and row["value"]:
                case = int(row["head_dim"]), row["causal"] == "true", row["seqlen_q"]
                times[(*case, row["series"])] = float(row["value"])
    page = (ROOT / "fa_numba" / "guide.md").read_text()
    for d, causal in itertools.product((64, 128), (False, True)):
        cells = []
        for series, digits in (("fa2-simt", 2), ("fa2-wgmma-fp16x3", 1)):
            ratios = [
                times[d, causal, n, "torch-efficient"] / times[d, causal, n, series]
                for n in ("512", "1024", "2048", "4096", "8192", "16384")
            ]
            cells.append(f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}")
        assert f"| {d} | {'causal' if causal else 'none'} | {' | '.join(cells)} |\n" in page


def test_the_times_of_a_first_call_are_those_of_the_file():
    with open(ROOT / "tests" / "data" / "first_calls.csv") as file:
        rows = list(csv.DictReader(file))
    page = (ROOT / "CONTRIBUTING.md").read_text()
    cases = dict.fromkeys(row["case"] for row in rows)
    assert len(cases) == 5
    for case in cases:
        cells = []
        for tree in ("new", "base"):
            for column in ("forward_s", "backward_s"):
                some = [x for x in rows if (x["case"], x["tree"]) == (case, tree)]
                first, middle, last = sorted(float(x[column]) for x in some)
                cells.append(f"{middle:.1f} ({first:.1f} to {last:.1f})")
        assert f" | {' | '.join(cells)} |\n" in page, case
    slowest = max(float(row["forward_s"]) for row in rows if row["tree"] == "new")
    assert 1.4 <= slowest < 4.5  # the "two to four seconds" of fa_numba/guide.md


@pytest.mark.parametrize("Nq, Nk", [(20, 12), (12, 20), (16, 16)])
def test_a_mask_aligned_to_the_top_left_is_written_as_the_page_says(Nq, Nk):
    """torch's is_causal and JAX's: row i sees the columns j <= i."""
    q, k, v = inputs(Nq, Nk)
    hidden = np.where(np.arange(Nk) <= np.arange(Nq)[:, None], 0.0, -np.inf).astype(np.float32)
    want = fa_numba.attention(q, k, v, bias=hidden)
    if Nq >= Nk:
        got = fa_numba.attention(q, k, v, window=(-1, Nq - Nk))
    else:
        got = fa_numba.attention(q, k[:, :, :Nq], v[:, :, :Nq], causal=True)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


LOWEST = float(np.finfo(np.float32).min)


@pytest.mark.parametrize("name", ["standard", "fa1", "fa2"])
@pytest.mark.parametrize("value", [-np.inf, LOWEST, -2.3e38, -1e30])
def test_a_row_hidden_by_a_bias_is_as_the_limits_say(name, value):
    q, k, v = inputs(20, 20)
    bias = np.zeros((20, 20), np.float32)
    bias[5] = bias[7, 9:] = value
    o, lse = fa_numba.attention(q, k, v, algorithm=name, bias=bias, return_lse=True)
    masked = value == -np.inf or (value == LOWEST and name != "standard")
    want = np.zeros(8) if masked else v[0, 0].mean(axis=0)
    np.testing.assert_allclose(o[0, 0, 5], want, rtol=0, atol=1e-6)
    assert (lse[0, 0, 5] == -np.inf) == masked
    seen = fa_numba.attention(q[:, :, 7:8], k[:, :, :9], v[:, :, :9])
    np.testing.assert_allclose(o[0, 0, 7], seen[0, 0, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["standard", "fa1", "fa2"])
def test_an_infinite_value_is_as_the_limits_say(name):
    q, k, v = inputs(20, 20)
    v[0, 0, 12, 3] = np.inf
    o = fa_numba.attention(q, k, v, algorithm=name, causal=True)[0, 0]
    assert np.isinf(o[12:, 3]).all() and np.isnan(o[:12, 3]).all()
    assert np.isfinite(np.delete(o, 3, axis=1)).all()


COMMANDS = {"fa_numba": command.main, "experiments": experiments.main}
SHOWN = re.compile(
    r"```text\n\$ python -m (?P<package>\w+) (?P<arguments>[^\n]*)\n(?P<output>.*?)```\n", re.DOTALL
)


SHOWING = (ROOT / "fa_numba" / "guide.md", ROOT / "experiments" / "README.md")


def shown_again(page):
    """A page with what its commands print, where no GPU is, in place of what it says they print."""

    def printed(block):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert COMMANDS[block["package"]](shlex.split(block["arguments"])) == 0
        return block[0].removesuffix(f"{block['output']}```\n") + f"{said.getvalue()}```\n"

    with (
        mock.patch.object(compare.bounds, "here", lambda: None),
        mock.patch.object(devices, "why_no_gpu", lambda: "no CUDA GPU or driver was found"),
    ):
        return SHOWN.sub(printed, page.read_text())


def test_pages_show_what_the_commands_print():
    """`python tests/test_readme.py` writes what they print now."""
    blocks = [block for page in SHOWING for block in SHOWN.finditer(page.read_text())]
    shown = {(block["package"], block["arguments"].split()[0]) for block in blocks}
    # What compile prints contains a time and a folder: the next test runs its command.
    wanted = {("fa_numba", module.NAME) for module in command.COMMANDS if module is not compiling}
    assert shown == wanted | {("experiments", compare.NAME)}
    for page in SHOWING:
        assert shown_again(page) == page.read_text()


def test_the_guides_command_compiles_for_what_it_names(monkeypatch, capsys):
    guide = (ROOT / "fa_numba" / "guide.md").read_text()
    (arguments,) = re.findall(r"`python -m fa_numba (compile -[^`]+)`", guide)
    monkeypatch.setattr(compiling, "compile_ahead", lambda plans, jobs: ahead.Ahead(len(plans), 0))
    assert command.main(arguments.split()) == 0
    # Two lengths, two head dimensions and two masks; three calls each.
    assert capsys.readouterr().out.startswith("H100: compiled 24 kernels for 24 calls in ")


def test_the_table_for_other_libraries_names_what_there_is():
    page = (ROOT / "fa_numba" / "options.md").read_text()
    page = page.partition("## Coming from another library")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    names = {n for row in rows for n in re.findall(r"`(\w+)(?:=[^`]*)?`", row)}
    functions = (fa_numba.flash_attention_2_backward, fa_numba.flash_attention_1)
    functions += (fa_numba.append_kv, fa_numba.flash_attention_2)
    known = {p for f in functions for p in inspect.signature(f).parameters} | {*dir(fa_numba)}
    assert len(rows) > 10
    assert names <= known | set(fa_numba.AttentionOptions.__annotations__)


if __name__ == "__main__":
    for each in SHOWING:
        each.write_text(shown_again(each))
