"""A newcomer, or one who comes back, on its way into a running job."""

from pathlib import Path
from typing import Any

import pytest

import pmesh
from pmesh.client.elastic import place
from pmesh.core.jobs.call_count import COMPARE
from pmesh.core.values import Verdict
from pmesh.core.wire.trainer import ENTERS, Connect, Joined, OpFailed, World
from pmesh.ids import OpNumber, TrainerId
from simulation.wire import AnyRequest
from tests.worlds.faults import Faults
from tests.worlds.scripted_agent import VIEW, ScriptedAgent, TrainerSocket, op_done, replies

SUPERSEDED = Verdict("HistorySuperseded", "the job went on elsewhere")


@pytest.fixture(autouse=True)
def _try_again_soon(faults: Faults) -> None:
    faults.limit(place, "_TRY_AGAIN_S", 0.001)


def newcomer(trainer: TrainerSocket, request: AnyRequest | None) -> None:
    """A step: the job runs already."""
    assert isinstance(request, Connect)
    trainer.send(Joined(World(-1, (TrainerId(0), TrainerId(3)), ("a", "b")), VIEW))


TIMED_OUT = Verdict("OpTimedOut", "nobody synced in time")


@pytest.mark.parametrize(
    ("failed_op", "next_op"), [(ENTERS, ENTERS), (4, 5)], ids=["before", "after it has entered"]
)
def test_who_fails_to_enter_must_sync_again_under_the_number_that_it_has_then(
    tmp_path: Path, failed_op: int, next_op: int
) -> None:
    seen: list[Any] = []

    def look(trainer: TrainerSocket, request: Any) -> None:  # noqa: ANN401 - a StartOp
        seen.append(request)
        entered = World(1, (TrainerId(0), TrainerId(7)), ("a", "b")) if failed_op == 4 else None
        number = failed_op if request.op == ENTERS else request.op
        trainer.send(OpFailed(OpNumber(number), TIMED_OUT, world=entered))

    scripted = ScriptedAgent(tmp_path, newcomer)
    with scripted:
        scripted.steps += [scripted.grants("input", 64), look, look]
        mesh = pmesh.connect("job", home=tmp_path)
        for _ in range(2):
            with pytest.raises(pmesh.OpTimedOut):
                mesh.sync({})
            with pytest.raises(pmesh.UsageError, match="enters it in"):
                mesh.barrier()
        mesh.close()
    assert [request.op for request in seen] == [ENTERS, next_op]


def test_a_newcomer_whose_agent_stops_is_not_alone_but_nowhere(tmp_path: Path) -> None:
    with ScriptedAgent(tmp_path, newcomer):
        mesh = pmesh.connect("job", home=tmp_path, on_superseded="sync")
        with pytest.raises(pmesh.AgentStopped):
            mesh.sync({}, timeout_s=0.02)
        assert (mesh.rank, mesh.size) == (-1, 2)
        with pytest.raises(pmesh.UsageError, match="enters it in"):
            mesh.barrier()
        mesh.close()


def test_who_is_left_behind_again_and_again_hears_of_it_in_the_end(tmp_path: Path) -> None:
    left_behind = replies(OpFailed(OpNumber(ENTERS), SUPERSEDED))
    with ScriptedAgent(tmp_path, newcomer) as scripted:
        scripted.steps += [scripted.grants("input", 64), *[left_behind] * 100_000]
        mesh = pmesh.connect("job", home=tmp_path, on_superseded="sync")
        with pytest.raises(pmesh.HistorySuperseded):
            mesh.sync({}, timeout_s=0.05)
        mesh.close()


def test_an_entrance_that_no_agent_would_grant_is_not_believed(tmp_path: Path) -> None:
    with ScriptedAgent(tmp_path, newcomer) as scripted:
        scripted.steps += [scripted.grants("input", 64), replies(op_done(ENTERS))]
        mesh = pmesh.connect("job", home=tmp_path)
        with pytest.raises(pmesh.AgentStopped, match="what no agent sends"):
            mesh.sync({})
        mesh.close()


MISMATCH = Verdict("OpMismatch", "the others compare their calls")


def test_who_enters_while_the_others_compare_their_calls_compares_and_syncs_once_more(
    tmp_path: Path,
) -> None:
    """O10: if the others do not sync then either, their programs differ from its own."""
    seen: list[tuple[int, str]] = []
    entered = World(1, (TrainerId(0), TrainerId(7)), ("a", "b"))

    def look(trainer: TrainerSocket, request: Any) -> None:  # noqa: ANN401 - a StartOp
        seen.append((request.op, request.call.kind))
        if request.call == COMPARE:
            trainer.send(op_done(request.op, scripted.grant(trainer, "output", 64).number))
        else:
            number = OpNumber(4 if request.op == ENTERS else request.op)
            trainer.send(OpFailed(number, MISMATCH, world=entered))

    scripted = ScriptedAgent(tmp_path, newcomer)
    with scripted:
        scripted.steps += [scripted.grants("input", 64), look, look, look]
        mesh = pmesh.connect("job", home=tmp_path)
        with pytest.raises(pmesh.OpMismatch):
            mesh.sync({})
        mesh.close()
    assert seen == [(ENTERS, "sync"), (5, "all_reduce"), (6, "sync")]
