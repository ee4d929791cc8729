"""`in_turn` leaves no value of its parameter and no case out, and marks the rest slow."""

from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import take_turns

LENGTHS = [(1, 1), (1, 40), (40, 1), (17, 33)]


def items(way_count, share):
    """Stand-ins for pytest's items of a function with three parametrisations."""
    marks = [SimpleNamespace(args=(names,)) for names in ("way", "causal", "Nq, Nk")]
    turn = SimpleNamespace(args=("way",), kwargs={"share": share})
    made = []
    for Nq, Nk in LENGTHS:
        for causal in (False, True):
            for way in "abcde"[:way_count]:
                params = {"device": "emulator", "way": way, "causal": causal, "Nq": Nq, "Nk": Nk}
                item = SimpleNamespace(function=items, callspec=SimpleNamespace(params=params))
                item.get_closest_marker = lambda name: turn
                item.iter_markers = lambda name: iter(marks)
                item.slow = False
                item.add_marker = lambda mark, item=item: setattr(item, "slow", mark.name == "slow")
                made.append(item)
    return made


@pytest.mark.parametrize("way_count, share", [(3, 1), (4, 1), (4, 2), (5, 2), (3, 3)])
def test_each_case_has_its_share_of_the_ways(way_count, share):
    found = items(way_count, share)
    take_turns(found)
    quick = [tuple(item.callspec.params.values())[1:] for item in found if not item.slow]
    cases = Counter(case for _, *case in quick for case in [tuple(case)])
    assert len(cases) == 2 * len(LENGTHS)
    assert {share} <= set(cases.values()) <= {share, share + 1}
    # A way runs both masks and, over the masks, several lengths.
    for causal in (False, True):
        assert {way for way, c, *_ in quick if c is causal} == set("abcde"[:way_count])
