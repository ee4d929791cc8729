"""Random calls are made again from their number, and a wrong one is told."""

import helpers
import random_calls


def test_a_wrong_call_is_told_with_its_number(monkeypatch, capsys):
    only = ["--device", "emulator", "--seed", "3", "--each", "1", "--only"]
    kinds = [random_calls.kind_of(3, n) for n in range(9)]
    assert kinds == [random_calls.kind_of(3, n) for n in range(9)]
    single = [(n, k) for n, k in enumerate(kinds) if (k.passes, k.dtype) == ("fwd", "float32")]
    number = next(n for n, kind in single if "tiles" not in kind.chosen)
    assert random_calls.main([*only, str(number)]) == 0
    assert "1 calls of 1 kinds (1 on simt), 0 wrong" in capsys.readouterr().out
    right = helpers.attend
    monkeypatch.setattr(
        helpers, "attend", lambda *a, **o: helpers.Result(right(*a, **o).O * 1.01, None)
    )
    assert random_calls.main([*only, str(number)]) == 1
    said = capsys.readouterr().out
    assert f"--seed 3 --only {number}, call 0: Kind(passes='fwd'" in said and "1 wrong" in said
