"""What the terminals of the others show when a rank is lost."""

import contextlib
import logging
from typing import Literal

import numpy as np
import pytest

import pmesh
from pmesh.testing import SimulatedMesh


def warnings_of_a_run(
    caplog: pytest.LogCaptureFixture,
    *,
    dies: bool,
    on_loss: Literal["continue", "raise"] = "continue",
) -> list[str]:
    simulated = SimulatedMesh(3, on_loss=on_loss)

    def train(mesh: pmesh.Mesh) -> None:
        mesh.barrier()
        if mesh.rank == 1:
            if not dies:
                return  # `run` closes its mesh
            simulated.lose(1)
        raises = pytest.raises(pmesh.RankLost, match="rank 1") if on_loss == "raise" else None
        with raises or contextlib.nullcontext():
            mesh.all_reduce(np.ones(1))
        for _ in range(2):
            mesh.all_reduce(np.ones(1))

    with caplog.at_level(logging.WARNING, "pmesh"):
        simulated.run(train)
    return caplog.messages


def test_each_of_the_others_says_once_who_is_lost_and_how_many_are_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = warnings_of_a_run(caplog, dies=True)
    assert len(said) == 2
    for text in said:
        assert text.startswith("rank 1 (simulated) is lost: its trainer died; ")
        assert "job 'simulated' continues with 2 ranks, from op " in text


def test_a_loss_before_the_first_op_names_the_first_op(caplog: pytest.LogCaptureFixture) -> None:
    simulated = SimulatedMesh(2, on_loss="continue")

    def train(mesh: pmesh.Mesh) -> None:
        if mesh.rank == 1:
            simulated.lose(1)
        mesh.all_reduce(np.ones(1))

    with caplog.at_level(logging.WARNING, "pmesh"):
        simulated.run(train)
    assert [text.partition("; ")[2] for text in caplog.messages] == [
        "job 'simulated' continues with 1 rank, from op 0"
    ]


def test_each_of_the_others_says_once_who_has_finished_and_how_many_are_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What they compute from then on is the sum of fewer ranks."""
    said = warnings_of_a_run(caplog, dies=False)
    assert len(said) == 2
    for text in said:
        assert text.startswith("rank 1 (simulated) has finished; job 'simulated' continues with 2")


def test_ranks_that_end_together_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def train(mesh: pmesh.Mesh) -> None:
        for _ in range(3):
            mesh.all_reduce(np.ones(1))

    with caplog.at_level(logging.WARNING, "pmesh"):
        SimulatedMesh(3, on_loss="continue").run(train)
    assert caplog.messages == []


@pytest.mark.parametrize("dies", [True, False])
def test_where_a_loss_raises_the_error_says_it_and_nothing_continues(
    caplog: pytest.LogCaptureFixture, *, dies: bool
) -> None:
    assert warnings_of_a_run(caplog, dies=dies, on_loss="raise") == []


def test_the_warning_is_switched_off_as_any_logger_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pmesh"), "disabled", True)
    assert warnings_of_a_run(caplog, dies=True) == []


def test_what_others_have_written_does_not_control_the_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "pmesh"):
        logging.getLogger("pmesh").warning("%s is lost: %s", "mac\x1b[2J", "why\npmesh: done")
    assert caplog.messages == ["mac�[2J is lost: why pmesh: done"]
