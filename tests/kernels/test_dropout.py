"""Dropout's random words against published vectors, and the mask that comes of them."""

import math

import numpy as np
import pytest
from helpers import refused

from fa_numba import dropout
from fa_numba.dropout import dropout_mask, kept
from fa_numba.masks import make_philox
from fa_numba.options import drop_threshold
from fa_numba.problem import Problem

SEED, OFFSET = 0x1234_5678_9ABC_DEF0, 0x0FED_CBA9
SIGMAS = 5.0  # how far a count may be from its mean, in standard deviations


def python_int(bits):
    return lambda n: int(n) & (2**bits - 1)


CASTS = {"numpy": (np.uint32, np.uint64), "int": (python_int(32), python_int(64))}
PHILOX = {name: (make_philox(*casts), casts[0]) for name, casts in CASTS.items()}

ONES = (2**32 - 1,) * 4
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
# Random123's kat_vectors for philox4x32: rounds, counter, key, words.
VECTORS = [
    (7, (0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, ONES, ONES[:2], (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, *PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, (0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ONES, ONES[:2], (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, *PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize("casts", PHILOX)
@pytest.mark.parametrize("rounds, counter, key, words", VECTORS)
def test_philox_gives_the_published_words(casts, rounds, counter, key, words):
    philox, word = make_philox(*CASTS[casts], rounds), CASTS[casts][0]
    with np.errstate(over="ignore"):  # the key's sums wrap
        assert tuple(int(n) for n in philox(*map(word, counter), *map(word, key))) == words


def test_philox_of_arrays_is_that_of_each_element():
    vectors = (vector[1:] for vector in VECTORS if vector[0] == 7)
    counters, keys, words = (np.array(part, np.uint32) for part in zip(*vectors, strict=True))
    found = PHILOX["numpy"][0](*counters.T, *keys.T)
    np.testing.assert_array_equal(np.transpose(found), words)
    assert all(word.dtype == np.uint32 for word in found)


def test_an_element_is_kept_by_its_own_bits():
    """The counter, the key and the half's number as masks.py says, in Python's integers."""
    philox, _ = PHILOX["int"]
    B, H, Nq, Nk, p = 2, 3, 35, 70, 0.4
    mask = dropout_mask(B, H, Nq, Nk, dropout_p=p, seed=SEED, offset=OFFSET)
    assert mask.shape == (B, H, Nq, Nk) and mask.dtype == bool
    for b, h, row, col in np.ndindex(mask.shape):
        across, down = col // 32 * 8 + col % 8, row // 16 * 8 + row % 8
        words = philox(across, down, (b << 16) + h, OFFSET, SEED & 0xFFFFFFFF, SEED >> 32)
        half = row // 8 % 2 * 4 + col // 8 % 4
        bits = words[half // 2] >> 16 * (half % 2) & 0xFFFF
        assert mask[b, h, row, col] == (bits >= drop_threshold(p))


def test_bits_at_the_threshold_are_kept():
    word, *_ = PHILOX["int"][0](0, 0, 0, OFFSET, SEED & 0xFFFFFFFF, SEED >> 32)
    for threshold, want in ((word & 0xFFFF, True), ((word & 0xFFFF) + 1, False)):
        p = threshold / 2**16
        assert drop_threshold(p) == threshold
        assert dropout_mask(1, 1, 1, 1, dropout_p=p, seed=SEED, offset=OFFSET).item() is want


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.25, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("seed", [0, SEED])
def test_one_element_in_so_many_is_dropped(p, seed):
    mask = dropout_mask(2, 3, 128, 300, dropout_p=p, seed=seed)
    sigma = math.sqrt(mask.size * p * (1 - p))
    assert abs(np.count_nonzero(~mask) - p * mask.size) < SIGMAS * sigma
    # and so in every row, column and head
    for axes in ((0, 1, 2), (0, 1, 3), (2, 3)):
        dropped = np.count_nonzero(~mask, axis=axes)
        n = mask.size // dropped.size
        assert np.all(np.abs(dropped - n * p) < SIGMAS * math.sqrt(n * p * (1 - p)) + 1)


def test_a_smaller_mask_is_a_part_of_a_larger_one(monkeypatch):
    given = dict(dropout_p=0.3, seed=SEED, offset=OFFSET)
    whole = dropout_mask(3, 4, 70, 200, **given)
    for B, H, Nq, Nk in [(1, 1, 1, 1), (2, 3, 17, 65), (3, 4, 70, 64), (3, 4, 69, 199)]:
        part = dropout_mask(B, H, Nq, Nk, **given)
        np.testing.assert_array_equal(part, whole[:B, :H, :Nq, :Nk])
    for rows in (range(70), range(5, 6), range(13, 70)):
        for columns in (1, 16, 17, 64, 65, 200):
            np.testing.assert_array_equal(
                kept(2, 1, rows, columns, **given), whole[2, 1, rows.start : rows.stop, :columns]
            )
    monkeypatch.setattr(dropout, "_ROWS", 9)
    np.testing.assert_array_equal(dropout_mask(3, 4, 70, 200, **given), whole)


def test_a_smaller_probability_drops_a_part_of_the_same():
    masks = [dropout_mask(1, 2, 60, 60, dropout_p=p, seed=9) for p in (0.0, 0.2, 0.5, 0.95)]
    assert masks[0].all()
    for less, more in zip(masks, masks[1:], strict=False):
        assert np.all(less | ~more) and np.any(less & ~more)


def test_the_ends_of_the_probabilities():
    for p in (0, 0.0, np.float32(0), 1e-12):
        assert dropout_mask(1, 1, 50, 64, dropout_p=p).all()
    most = dropout_mask(1, 1, 50, 64, dropout_p=np.nextafter(1.0, 0.0))
    assert np.count_nonzero(most) < 3  # of 3200 with a chance of 2^-16
    assert drop_threshold(0.5) == 2**15 and drop_threshold(0.0) == 0
    assert Problem(1, 1, 1, 1, 1, 1, dropout_p=0.1).dropout_p == 6554 / 2**16


def test_the_ends_of_the_counter():
    words = dict(seed=2**64 - 1, offset=2**32 - 1)
    rows = range(2**31 - 3, 2**31 - 1)
    last = kept(2**16 - 1, 2**16 - 1, rows, 70, dropout_p=0.5, **words)
    assert last.shape == (2, 70) and 40 < np.count_nonzero(last) < 100


GOOD = dict(batch=1, heads=1, seqlen_q=2, seqlen_k=3, dropout_p=0.5)


@pytest.mark.parametrize(
    "bad, error, says",
    [
        (
            {"batch": 0},
            ValueError,
            ["batch must be an integer of at least 1, got 0 (an empty axis)"],
        ),
        ({"batch": 2**16 + 1}, ValueError, ["batch must be at most 65536 with dropout, got 65537"]),
        ({"heads": 1.0}, TypeError, ["heads must be an integer of at least 1, got 1.0"]),
        ({"heads": 2**16 + 1}, ValueError, ["heads must be at most 65536 with dropout, got 65537"]),
        ({"seqlen_q": -1}, ValueError, ["seqlen_q must be an integer of at least 1, got -1"]),
        ({"seqlen_k": True}, TypeError, ["seqlen_k must be an integer of at least 1, got True"]),
        (
            {"seqlen_k": 2**31},
            ValueError,
            ["seqlen of k must be at most 2147482624, got 2147483648"],
        ),
        (
            {"dropout_p": 1.0},
            ValueError,
            ["dropout_p must be a number of at least 0 and less than 1, got 1.0"],
        ),
        (
            {"dropout_p": -0.1},
            ValueError,
            ["dropout_p must be a number of at least 0 and less than 1, got -0.1"],
        ),
        (
            {"dropout_p": float("nan")},
            ValueError,
            ["dropout_p must be a number of at least 0 and less than 1, got nan"],
        ),
        (
            {"dropout_p": "0.1"},
            TypeError,
            ["dropout_p must be a number of at least 0 and less than 1, got '0.1'"],
        ),
        ({"seed": -1}, ValueError, ["seed must be an integer from 0 to 2**64 - 1, got -1"]),
        (
            {"seed": 2**64},
            ValueError,
            ["seed must be an integer from 0 to 2**64 - 1, got 18446744073709551616"],
        ),
        ({"seed": 1.0}, TypeError, ["seed must be an integer from 0 to 2**64 - 1, got 1.0"]),
        ({"seed": None}, TypeError, ["seed must be an integer from 0 to 2**64 - 1, got None"]),
        (
            {"offset": 2**32},
            ValueError,
            ["offset must be an integer from 0 to 2**32 - 1, got 4294967296"],
        ),
        ({"offset": True}, TypeError, ["offset must be an integer from 0 to 2**32 - 1, got True"]),
    ],
    ids=str,
)
def test_a_bad_argument_is_refused(bad, error, says):
    assert dropout_mask(**GOOD).shape == (1, 1, 2, 3)
    with refused(error, says):
        dropout_mask(**{**GOOD, **bad})


def test_no_dropout_keeps_everything():
    for none in (0.0, None):
        assert dropout_mask(**{**GOOD, "dropout_p": none}).all()


def test_the_probability_has_no_default_and_names_are_given():
    with pytest.raises(TypeError, match="dropout_p"):
        dropout_mask(1, 1, 2, 3)
    with pytest.raises(TypeError, match="positional"):
        dropout_mask(1, 1, 2, 3, 0.5)
