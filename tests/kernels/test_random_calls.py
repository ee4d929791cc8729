"""Random calls are made again from their number, and a wrong one is told."""

import helpers
import pytest
import random_calls


def test_a_wrong_call_is_told_with_its_number(monkeypatch, capsys):
    only = ["--device", "emulator", "--seed", "3", "--each", "1", "--only"]
    kinds = [random_calls.kind_of(3, n) for n in range(200)]
    assert kinds == [random_calls.kind_of(3, n) for n in range(200)]
    single = [(n, k) for n, k in enumerate(kinds) if (k.passes, k.dtype) == ("fwd", "float32")]
    plain = [n for n, k in single if not (k.prefix or {"tiles", "precision"} & {*k.chosen})]
    number = plain[0]
    assert random_calls.main([*only, str(number)]) == 0
    assert "1 calls of 1 kinds (1 on simt), 0 refused, 0 wrong" in capsys.readouterr().out
    right = helpers.attend
    monkeypatch.setattr(
        helpers, "attend", lambda *a, **o: helpers.Result(right(*a, **o).O * 1.01, None)
    )
    assert random_calls.main([*only, str(number)]) == 1
    said = capsys.readouterr().out
    assert f"--seed 3 --only {number}, call 0: Kind(passes='fwd'" in said and "1 wrong" in said


@pytest.mark.gpu
def test_a_minute_of_random_calls_on_a_gpu():
    assert random_calls.main(["--device", "gpu", "--seconds", "60"]) == 0


@pytest.mark.parametrize(
    "those",
    [
        lambda kind: kind.chosen.get("precision") == "bf16x3" and kind.passes == "bwd",
        lambda kind: {"wgmma", "bf16x3"} <= {*map(str, kind.chosen.values())},
        lambda kind: "precision" in kind.chosen and kind.head_dim_v and kind.prefix,
        lambda kind: "created" in kind.options and kind.passes == "bwd",
    ],
)
def test_any_combination_is_drawn(those):
    assert any(those(random_calls.kind_of(0, n)) for n in range(500))


def test_what_a_plan_refuses_a_call_has_to_refuse_alike():
    """Before anything runs, and by the same words."""

    def call(text):
        if text:
            raise ValueError(text)

    assert random_calls.refused("emulator", ValueError("no"), call, "no") == random_calls.REFUSED
    for text in ("other", ""):
        with pytest.raises(AssertionError, match="refused"):
            random_calls.refused("emulator", ValueError("no"), call, text)
