"""Faults in a ring: every rank ends with an error that says why, and a slow rank is named."""

import json
from dataclasses import asdict

import pytest

from experiments.beside import ring_faults
from experiments.beside.ring_faults import FAULTS, LIMIT, VICTIM_DIES, Outcome


def test_what_is_wrong_with_an_outcome_is_said():
    late = Outcome(0, LIMIT, "did not end within 120 s")
    for fault in FAULTS:
        assert ring_faults.problems(fault, [late]) == ["rank 0 did not end within 120 s"]
    for fault in (*VICTIM_DIES, "interrupted"):
        assert ring_faults.problems(fault, [Outcome(1, 2.0, "RuntimeError: ...")]) == []
        (said,) = ring_faults.problems(fault, [Outcome(1, 2.0)])
        assert said == "rank 1 returned in spite of the fault"
    (said,) = ring_faults.problems("lengths", [Outcome(0, 0.1, "RuntimeError: gone")])
    assert said == "rank 0 does not say what differs: RuntimeError: gone"
    named = [Outcome(rank, 3.0, named="rank 1 is slow: 3 s") for rank in range(2)]
    assert ring_faults.problems("slow", named) == []
    assert ring_faults.problems("slow", [*named, Outcome(2, 3.0)]) == [
        f"rank {rank} does not name the slow rank" for rank in range(3)
    ]
    assert ring_faults.problems("slow", [Outcome(0, 1.0, "E: x")]) == ["rank 0 failed: E: x"]


def test_a_rank_that_says_nothing_is_known_by_its_process(tmp_path):
    assert ring_faults._outcome(tmp_path, 1, -6, 31.0).error == "ended by signal SIGABRT"
    assert ring_faults._outcome(tmp_path, 1, 1, 31.0).error == "exit status 1"
    assert ring_faults._outcome(tmp_path, 1, None, None).error == "did not end within 120 s"
    wrote = Outcome(1, 0.5, "RuntimeError: another rank has failed")
    (tmp_path / "outcome.1").write_text(json.dumps(asdict(wrote)))
    assert ring_faults._outcome(tmp_path, 1, 0, 31.0) == wrote


WORDS = {
    "dies": "not all ranks of the group have called ring_attention in time",
    "dies-inside": "another rank has failed or is late",
    "hangs": "not all ranks of the group have called ring_attention in time",
    "lengths": "q must be equal on all ranks of the group",
    "interrupted": "",
    "slow": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_no_rank_hangs(fault):
    pytest.importorskip("torch.distributed")
    outcomes = ring_faults.run(fault, 3, "cpu", timeout=20.0)
    assert ring_faults.problems(fault, outcomes) == []
    assert [x.rank for x in outcomes] == [0, 1, 2][: 2 if fault in VICTIM_DIES else 3]
    assert all(WORDS[fault] in each.error for each in outcomes)
    assert all(each.seconds < (5.0 if fault in ("dies", "lengths") else 60.0) for each in outcomes)
