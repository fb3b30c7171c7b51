from contextlib import AbstractContextManager, nullcontext

import pytest

from simulation import seeds


def test_a_violation_is_printed_with_the_command_that_replays_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert seeds.main(1, mutation="same_incarnation", processes=1) == 1
    out = capsys.readouterr().out
    assert "seed 0: " in out
    command = "python -m simulation.seeds 1 --first 0 --trace --mutation same_incarnation"
    assert f"  replay: {command}\n" in out
    assert "1 seeds, 1 violations" in out


def test_a_mutation_may_stand_in_any_module() -> None:
    name = "tests.simulation.test_seeds:harmless"
    assert [verdict.violation for verdict in seeds.judge_many([0], mutation=name)] == [""]


def harmless() -> AbstractContextManager[None]:
    return nullcontext()


def test_processes_share_the_seeds_and_mutate_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert seeds.main(2, mutation="same_incarnation", processes=2) == 1
    assert "2 seeds, 2 violations" in capsys.readouterr().out
    assert seeds.main(2, processes=2) == 0
    assert "2 seeds, 0 violations" in capsys.readouterr().out


def test_a_trace_tells_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    assert seeds.main(1, trace=True) == 0
    out = capsys.readouterr().out
    assert "node 0 starts as" in out
    assert "installs 2." in out
