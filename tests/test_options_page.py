"""The option reference: each option has an entry, whose table says which kernels accept it."""

import functools
import inspect
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import fa_numba
from fa_numba.bounds import as_gpu
from fa_numba.options import NAMES

PAGE = Path(__file__).resolve().parent.parent / "fa_numba" / "options.md"
ALGORITHMS = {"standard": "standard", "fa1": "FA-1", "fa2": "FA-2"}
UNITS, PASSES = ("simt", "mma", "wgmma"), {"fwd": "forward", "bwd": "backward"}
EVERYWHERE = "Every algorithm accepts {} in both passes, on each unit that the algorithm supports."
HEADS, HEADS_K, ROWS = 4, 2, 256
STARTS = np.array([0, 100, 256])


def doubled(score, b, h, i, j):
    return score * 2.0


def two(score, b, h, i, j):
    return 2.0


def below(b, h, i, j):
    return j <= i


TABLE = np.zeros(ROWS, np.float32)


def captured(score, b, h, i, j):
    return score + TABLE[j]


def block_mask(unit, passes, d):
    """A block mask and the tiles that the kernels of a unit have."""
    tiles = fa_numba.Tiles(32, 32)
    if unit == "wgmma":
        tiles = fa_numba.Tiles(64 if passes == "bwd" and d > 64 else 128, 128)
    blocks = np.ones((ROWS // tiles.Br, ROWS // tiles.Bc), bool)
    return {"block_mask": blocks, "tiles": tiles}


PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "q": (ROWS, HEADS), "k": (ROWS, HEADS_K)}
PAGES = {"block_table": (2, 4), "kv_lens": [200, 100], "k": (10, HEADS_K, 64)}
MATRIX = (2, HEADS, ROWS, ROWS)
# What a call is given, by the names under which the page has a table.
GIVEN = {
    "scale": {"scale": 0.5},
    "causal": {"causal": True},
    "window": {"window": (64, 0)},
    "softcap": {"softcap": 30.0},
    "score_mod": {"score_mod": doubled},
    "score_mod_grad": {"score_mod": doubled, "score_mod_grad": two},
    "mask_mod": {"mask_mod": below},
    "block_mask": block_mask,
    "bias": {"bias": (HEADS, ROWS, ROWS)},
    "attn_mask": {"attn_mask": (ROWS, ROWS)},
    "alibi_slopes": {"alibi_slopes": (HEADS,)},
    "sinks": {"sinks": (HEADS,)},
    "q_lens": {"q_lens": [200, 100]},
    "kv_lens": {"kv_lens": [200, 100]},
    "cu_seqlens_q and cu_seqlens_k": PACKED,
    "block_table": PAGES,
    "check_table": PAGES | {"check_table": True},
    "prefix_k and prefix_v": {"prefix_k": HEADS_K},
    "dropout_p": {"dropout_p": 0.1},
    "seed and offset": {"dropout_p": 0.1, "seed": 1, "offset": 1},
    "layout": {"layout": "bnhd", "q": (2, ROWS, HEADS), "k": (2, ROWS, HEADS_K)},
    '"fp16x3"': {"precision": "fp16x3"},
    '"bf16x3"': {"precision": "bf16x3"},
    '"bf16x6"': {"precision": "bf16x6"},
    "head dimension of v": {"d_v": 32},
    "heads of k and v": {"k": (2, 1, ROWS)},
    "kv_splits": {"kv_splits": 2},
    "query_splits": {"query_splits": 2},
    "group_splits": {"group_splits": 2},
    "warp_partition": {"warp_partition": "keys"},
    "ablate": lambda unit, *_: {"ablate": ("turns" if unit == "wgmma" else "prefetch",)},
    "deterministic": {"deterministic": True},
    "return_lse": {"return_lse": True},
    "dlse": {"dlse": True},
    "return_dbias": {"return_dbias": True, "bias": MATRIX},
    "return_dsinks": {"return_dsinks": True, "sinks": (HEADS,)},
    "return_dcaptured": {"return_dcaptured": True, "score_mod": captured},
}
# What the sentence for options without a table calls an entry that is no option.
CALLED = {
    "head dimension of v": "a different head dimension of v",
    "heads of k and v": "fewer heads of k and v than of q",
}
# Several tables of a section, by the text before each.
TABLES = {
    "`q_lens`": "q_lens",
    "`kv_lens`": "kv_lens",
    '`"fp16x3"` and `"bf16x3"`': '"fp16x3"',
    '`"bf16x6"`': '"bf16x6"',
}


@functools.cache
def planned(name, algorithm, unit, passes, d, causal):
    """Whether a call is planned with what is given under a name."""
    given = GIVEN[name]
    given = dict(given(unit, passes, d) if callable(given) else given)
    q = (*given.pop("q", (2, HEADS, ROWS)), d)
    k = given.pop("k", (2, HEADS_K, ROWS))
    v = (*k, given.pop("d_v", d))
    if "prefix_k" in given:
        given["prefix_k"] = (HEADS_K, 64, d)
    floats = unit == "simt" or "precision" in given
    given = {"causal": causal, "dtype": "float32" if floats else "float16"} | given
    try:
        fa_numba.plan(q, (*k, d), v, algorithm=algorithm, unit=unit, passes=passes, **given)
    except ValueError:
        return False
    return True


def cell(name, algorithm, passes):
    """The units that accept an option in one pass of an algorithm, in words."""
    said = []
    for unit in UNITS:
        calls = itertools.product((64, 128), (False, True))
        found = {planned(name, algorithm, unit, passes, *call) for call in calls}
        if True in found:
            said.append(unit if found == {True} else f"{unit} (in part)")
    return ", ".join(said) or "-"


def accepted(name):
    """What the page says of the kernels that accept an option."""
    rows = []
    with as_gpu("H100"):
        for passes, word in PASSES.items():
            rows.append([word, *(cell(name, algorithm, passes) for algorithm in ALGORITHMS)])
    if all(row[1:] == ["simt, mma", *[", ".join(UNITS)] * 2] for row in rows):
        return EVERYWHERE.format(CALLED.get(name, f"`{name}`"))
    head = ["accepted by", *ALGORITHMS.values()]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * 4, *rows))


def sections():
    """Map the name of an entry to its text."""
    return dict(re.findall(r"^### (.+)\n((?:(?!##+ ).*\n)*)", PAGE.read_text(), re.M))


ANYTHING = re.escape(EVERYWHERE).replace(r"\{\}", ".+")
SAID = re.compile(rf"{ANYTHING}|\| accepted by \|(?:.*\n){{3}}.*\|")


def tables(title, text):
    """What each table of an entry is about, and the table."""
    found = []
    for match in SAID.finditer(text):
        before = text[: match.start()].rstrip().splitlines()[-1].removesuffix(":")
        found.append((TABLES.get(before, title), match[0]))
    return found


def with_tables(text):
    """The page with tables as they are now."""
    for title, section in sections().items():
        new = section
        for name, table in tables(title, section):
            new = new.replace(table, accepted(name), 1)
        text = text.replace(f"### {title}\n{section}", f"### {title}\n{new}")
    return text


@pytest.mark.parametrize("title", [t for t, text in sections().items() if SAID.search(text)])
def test_an_entry_says_which_kernels_accept_the_option(title):
    """`python tests/test_options_page.py` writes what is true now."""
    for name, table in tables(title, sections()[title]):
        assert table == accepted(name)


def test_planes_of_two_numbers_are_accepted_alike():
    assert accepted('"fp16x3"') == accepted('"bf16x3"')


def test_every_option_has_an_entry_and_a_line_of_the_first_table():
    page = PAGE.read_text()
    lines = page.partition("## All options\n")[2].partition("\n## ")[0]
    titles = {name for title in sections() for name in title.split(" and ")}
    functions = [
        fa_numba.flash_attention_1,
        fa_numba.flash_attention_2,
        fa_numba.standard_attention,
    ]
    functions += [fa_numba.flash_attention_1_backward, fa_numba.flash_attention_2_backward]
    kinds = (inspect.Parameter.KEYWORD_ONLY,)
    wanted = {p.name for f in functions for p in inspect.signature(f).parameters.values()
              if p.kind in kinds}  # fmt: skip
    wanted |= {*NAMES, "algorithm"}
    assert wanted <= titles
    assert all(re.search(rf"^\| \[.*`{name}`.*\]\(#", lines, re.M) for name in wanted)
    assert {name for title in GIVEN for name in title.split(" and ")} - titles == {
        '"fp16x3"', '"bf16x3"', '"bf16x6"'
    }  # fmt: skip


def test_every_argument_of_a_function_is_in_the_table_of_functions():
    part = PAGE.read_text().partition("## Arguments of each function\n")[2].partition("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("| `")]
    found = ((re.match(r"\| `(\w+)\(", row), row) for row in rows)
    shown = {match[1]: row for match, row in found if match}
    names = [n for n in fa_numba.__all__ if inspect.isfunction(getattr(fa_numba, n))]
    assert set(names) - {"show_config"} <= set(shown)
    titles = {name for title in sections() for name in title.split(" and ")}
    more = {name: sections()[name] for name in ("append_kv", "quantize")}
    more["plan"] = " ".join(titles)
    for end in ("", "_backward"):
        chosen = ("flash_attention_1", "flash_attention_2", "standard_attention")
        more[f"attention{end}"] = " ".join(shown[f"{name}{end}"] for name in chosen)
    for name in set(names) - {"show_config"}:
        text = shown[name] + more.get(name, "")
        if name.endswith("attention_backward") or name.endswith("_backward") and "flash" in name:
            text += shown["attention_backward"]
        for parameter in inspect.signature(getattr(fa_numba, name)).parameters:
            assert parameter in NAMES or re.search(rf"\b{parameter}\b", text), (name, parameter)


LENGTHS = ({"q_lens": [200, 100]}, {"kv_lens": [200, 100]}, PACKED)
BIAS, SLOPES = GIVEN["bias"], GIVEN["alibi_slopes"]
CAP, WINDOW, DROPOUT = GIVEN["softcap"], GIVEN["window"], GIVEN["dropout_p"]
MASKED = {"causal": True}
ADDS, DCAPTURED = {"score_mod": captured}, GIVEN["return_dcaptured"]
FIRST, SECOND = ("fa1", "fwd"), ("fa2", "bwd")
FIRST_BACKWARD = ("fa1", "bwd")
PLANES = {"precision": "fp16x3", "dtype": "float32"}
# The two tables of what Hopper's unit lacks: (algorithm, pass), options, head dimensions that are
# refused, and head dimensions that are not.
LACKS = [
    *((FIRST, x, (64, 128), ()) for x in (BIAS, SLOPES, GIVEN["kv_lens"], PACKED, DROPOUT)),
    *((FIRST_BACKWARD, x, (64, 128), ()) for x in (BIAS, SLOPES, *LENGTHS, DROPOUT, CAP)),
    (FIRST_BACKWARD, {}, (136, 256), (64, 128)),
    (SECOND, GIVEN["return_dbias"], (32, 64, 128, 192), ()),
    *((SECOND, CAP | x | MASKED, (32, 64, 128, 192), ()) for x in (BIAS, SLOPES, DROPOUT)),
    (SECOND, BIAS | SLOPES, (32, 128, 192), ()),
    *((SECOND, x | y, (16, 64), (72, 128, 192)) for x in (CAP, WINDOW) for y in LENGTHS),
    *((SECOND, SLOPES | MASKED | y, (16, 64), (72, 128, 192)) for y in LENGTHS),
    *((SECOND, BIAS | y, (56, 64), (48, 72, 192)) for y in LENGTHS[:2]),
    (SECOND, PACKED | {"bias": (HEADS, 156, 156)}, (56, 64, 136, 192), (48, 72, 128, 200)),
    (SECOND, BIAS | {"score_mod": doubled}, (16, 64, 136, 256), (72, 128)),
    (SECOND, BIAS | ADDS, (136, 256), (16, 64, 128)),
    (SECOND, SLOPES, (56, 64), (48, 72)),
    *((SECOND, x | DROPOUT | MASKED, (56, 64), (48, 72, 192)) for x in (SLOPES, BIAS)),
    (SECOND, DCAPTURED | DROPOUT, (56, 64), (48, 72, 128)),
    *((SECOND, x | DCAPTURED | MASKED, (56, 64), (48, 72)) for x in (SLOPES, BIAS)),
    *(
        (SECOND, DROPOUT | {"score_mod": doubled} | way, sizes, allowed)
        for way, sizes, allowed in (
            ({}, (136, 256), (64, 128)),
            ({"deterministic": True}, (64,), ()),
        )
    ),
    (SECOND, DROPOUT | ADDS | {"deterministic": True}, (), (64, 192)),
    *((SECOND, SLOPES | ADDS | MASKED | y, (), (64, 128)) for y in (*LENGTHS, DROPOUT)),
    *(
        (kernel, PLANES | x, (64, 128), ())
        for kernel in (FIRST, ("fa2", "fwd"), SECOND)
        for x in (CAP, BIAS, SLOPES, DROPOUT, ADDS, GIVEN["mask_mod"])
    ),
    *((kernel, PLANES, (136, 256), (64, 128)) for kernel in (FIRST, ("fa2", "fwd"), SECOND)),
    *((SECOND, PLANES | x, (136,), (64,)) for x in (*LENGTHS, WINDOW, MASKED)),
    (FIRST, PLANES | {"query_splits": 2}, (), (64,)),
    (("fa2", "fwd"), PLANES | {"kv_splits": 2}, (), (64,)),
    (SECOND, PLANES | {"precision": "bf16x6"}, (64, 128), ()),
    (SECOND, PLANES | {"v": (2, HEADS_K, ROWS, 32)}, (64, 128), ()),
]


@pytest.mark.parametrize("kernel, given, refused, allowed", LACKS)
def test_hoppers_unit_lacks_what_the_limits_say(kernel, given, refused, allowed):
    given = dict(given)
    q, k = given.pop("q", (2, HEADS, ROWS)), given.pop("k", (2, HEADS_K, ROWS))
    how = {"algorithm": kernel[0], "passes": kernel[1], "dtype": "float16"} | given
    v = how.pop("v", None)
    with as_gpu("H100"):
        for d in allowed:
            fa_numba.plan((*q, d), (*k, d), v, unit="wgmma", **how)
        for d in refused:
            with pytest.raises(ValueError, match="wgmma"):
                fa_numba.plan((*q, d), (*k, d), v, unit="wgmma", **how)
            assert fa_numba.plan((*q, d), (*k, d), v, **how).unit == "mma"


# The table of options that are refused together: options, and the argument that the message names.
TOGETHER = [
    (GIVEN["attn_mask"] | BIAS, "attn_mask"),
    *((PAGES | x, "block_table") for x in ({"algorithm": "fa1"}, {"algorithm": "standard"})),
    (PAGES | {"passes": "bwd"}, "block_table"),
    (PAGES | {"tiles": fa_numba.Tiles(16, 24)}, "tiles"),
    (PAGES | {"precision": "fp16x3"}, "precision"),
    (PAGES | {"q": (ROWS, HEADS), "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}, "cu_seqlens_k"),
    *(
        ({"prefix_k": (HEADS_K, 64, 64)} | x, next(iter(x)))
        for x in (WINDOW, BIAS, GIVEN["attn_mask"], SLOPES, DROPOUT, ADDS, GIVEN["mask_mod"])
    ),
    (PACKED | {"q_lens": [1, 1]}, "q_lens"),
    (PACKED | {"kv_lens": [1, 1]}, "kv_lens"),
    (PACKED | {"layout": "bnhd"}, "layout"),
    ({"precision": "fp16x3", "dtype": "float16"}, "precision"),
    ({"precision": "fp16x3", "algorithm": "standard"}, "precision"),
    ({"precision": "fp16x3", "algorithm": "fa1", "passes": "bwd"}, "precision"),
    ({"precision": "fp16x3", "passes": "bwd", "deterministic": True}, "precision"),
    ({"precision": "fp16x3", "passes": "bwd", "group_splits": 2}, "group_splits"),
    (DCAPTURED | {"passes": "bwd", "deterministic": True}, "deterministic"),
    (
        BIAS | {"passes": "bwd", "deterministic": True, "return_dbias": True},
        "deterministic",
    ),
    (DCAPTURED | {"passes": "bwd", "algorithm": "standard"}, "return_dcaptured"),
    *(
        (x | {"passes": "bwd", "group_splits": 4, "dtype": "float16"}, "group_splits")
        for x in (CAP, ADDS, SLOPES | MASKED, BIAS)
    ),
    (
        {"ablate": ("prefetch",), "tiles": fa_numba.Tiles(64, 64, stages=2), "dtype": "float16"},
        "tiles",
    ),
]


@pytest.mark.parametrize("given, named", TOGETHER)
def test_options_are_refused_together_as_the_limits_say(given, named):
    given = dict(given)
    q, k = given.pop("q", (2, HEADS, ROWS)), given.pop("k", (2, HEADS_K, ROWS))
    with as_gpu("H100"), pytest.raises(ValueError, match=named):
        fa_numba.plan((*q, 64), (*k, 64), **given)


def test_hoppers_unit_takes_rows_at_16_byte_addresses_alone_but_for_planes():
    q = np.ones((1, 1, 16, 13), np.float16)
    for function in (fa_numba.flash_attention_1, fa_numba.flash_attention_2):
        with pytest.raises(ValueError, match="wgmma.*multiples of 16 bytes"):
            function(q, q, q, unit="wgmma")
    q = q.astype(np.float32)
    assert fa_numba.flash_attention_2(q, q, q, unit="wgmma", precision="fp16x3").shape == q.shape
    with pytest.raises(ValueError, match="wgmma.*multiples of 16 bytes"):
        fa_numba.flash_attention_1(q, q, q, unit="wgmma", precision="fp16x3")


def test_a_block_mask_of_a_function_excludes_another_function():
    blocks = fa_numba.create_block_mask(below, 1, 1, 64, 64, tiles=fa_numba.Tiles(32, 32))
    shape = (1, 1, 64, 8)
    with pytest.raises(ValueError, match="mask_mod"):
        fa_numba.plan(shape, shape, block_mask=blocks, mask_mod=below)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
