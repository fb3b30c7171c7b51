"""A trainer that its job has left behind, or whose agent has stopped, and its way back."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.client.elastic import place
from pmesh.client.session.connection import AgentConnection
from pmesh.core.jobs.rank import COME_BACK
from pmesh.core.values import Verdict
from pmesh.core.wire.session import Refused, SessionDecoder, SessionMessage
from pmesh.core.wire.trainer import ENTERS, Connect, StartOp
from pmesh.ids import OpNumber, TrainerId
from simulation.wire import AnyRequest
from tests.worlds.faults import Faults
from tests.worlds.scripted_agent import PATIENCE_S, ScriptedAgent, TrainerSocket, joins, replies
from tests.worlds.watched_agent import WatchedAgent, WatchedSession, watched_agent

ONE = np.ones(1)
APART = TrainerId(0)


@pytest.fixture(autouse=True)
def _try_again_soon(faults: Faults) -> None:
    faults.limit(place, "_TRY_AGAIN_S", 0.001)


def two_ranks(
    agent: WatchedAgent,
    apart: Callable[[pmesh.Mesh], None],
    other: Callable[[pmesh.Mesh], None],
    **options: Any,  # noqa: ANN401 - of connect
) -> None:
    """Rank 0, which comes apart from the job in op 1, and the other, which stays in it."""

    def run(_: int) -> None:
        with pmesh.connect("job", wait_for=2, home=agent.home, **options) as mesh:
            me = apart if mesh.rank == 0 else other
            mesh.sync(None)
            me(mesh)

    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(run, i) for i in range(2)]
    errors = [error for rank in ranks if (error := rank.exception()) is not None]
    if errors:
        raise BaseExceptionGroup("of the ranks", errors)


def waits_for_it(agent: WatchedAgent) -> Callable[[pmesh.Mesh], None]:
    """Goes on with the job, and gives its state to the other when that comes back."""

    def other(mesh: pmesh.Mesh) -> None:
        assert mesh.all_reduce(ONE).tolist() == [1.0]
        assert (mesh.rank, mesh.size) == (0, 1)
        agent.wait_until(lambda: bool(agent.entering))
        assert mesh.sync({"position": 7}) == {"position": 7}
        assert (mesh.rank, mesh.size, mesh.step) == (0, 2, 2)
        assert mesh.all_reduce(ONE).tolist() == [2.0]

    return other


def syncs_without_it(agent: WatchedAgent) -> Callable[[pmesh.Mesh], None]:
    """Goes on with the job by a sync, and gives its state to the other in the next one.

    A trainer enters any sync that has not ended (O6), so the other is kept out of the first one.
    """
    ended = threading.Event()

    def before_op(_: WatchedSession, request: StartOp) -> None:
        if request.op == ENTERS:
            assert ended.wait(PATIENCE_S)

    agent.before_op = before_op

    def other(mesh: pmesh.Mesh) -> None:
        assert mesh.sync({"position": 6}) == {"position": 6}
        assert (mesh.rank, mesh.size, mesh.step) == (0, 1, 2)
        ended.set()
        agent.wait_until(lambda: bool(agent.entering))
        assert mesh.sync({"position": 7}) == {"position": 7}
        assert (mesh.rank, mesh.size, mesh.step) == (0, 2, 3)

    return other


def comes_back(mesh: pmesh.Mesh) -> None:
    assert mesh.sync({"position": -1, "mine": ONE}) == {"position": 7}
    assert (mesh.rank, mesh.size, mesh.step) == (1, 2, 2)
    assert mesh.all_reduce(ONE).tolist() == [2.0]


WAYS_APART = {"superseded": pmesh.HistorySuperseded, "without an agent": pmesh.AgentStopped}
LOSSES = pytest.mark.parametrize("error", WAYS_APART.values(), ids=WAYS_APART.keys())


def comes_apart(agent: WatchedAgent, error: type[pmesh.RunError]) -> None:
    """Rank 0 does, in op 1."""
    if error is pmesh.HistorySuperseded:
        agent.left_behind = {1: APART}
    else:
        agent.losses = {1: APART}


@LOSSES
def test_it_is_told_at_each_call_until_it_syncs(
    agent: WatchedAgent, error: type[pmesh.RunError]
) -> None:
    comes_apart(agent, error)

    def apart(mesh: pmesh.Mesh) -> None:
        with pytest.raises(error):
            mesh.all_reduce(ONE)
        for call in (mesh.barrier, lambda: mesh.broadcast(ONE), lambda: mesh.shard(10)):
            with pytest.raises(error, match=r"mesh\.sync\(state\) comes back to the job"):
                call()
        comes_back(mesh)

    two_ranks(agent, apart, waits_for_it(agent))


@LOSSES
def test_it_goes_on_alone_until_it_syncs_if_it_likes(
    agent: WatchedAgent,
    error: type[pmesh.RunError],
    caplog: pytest.LogCaptureFixture,
) -> None:
    comes_apart(agent, error)

    def apart(mesh: pmesh.Mesh) -> None:
        x: dict[str, Any] = {"a": np.arange(3, dtype=np.float16), "b": [np.ones((2, 2), np.int64)]}
        for alike in (mesh.all_reduce(x, "max"), mesh.broadcast(x, root=1)):
            assert alike["a"] is not x["a"]
            np.testing.assert_array_equal(alike["a"], x["a"])
            assert alike["a"].dtype == np.float16
            np.testing.assert_array_equal(alike["b"][0], x["b"][0])
        assert (mesh.rank, mesh.size, mesh.names) == (0, 1, ("simulated",))
        assert mesh.last_op == pmesh.LastOp(OpNumber(-1), (0,), ("simulated",), 3 * 2 + 4 * 8)  # type: ignore[arg-type]
        assert mesh.average_gradients(np.full(2, 5.0), weight=3).tolist() == [5.0, 5.0]
        assert mesh.average_gradients([np.float32(2), None], missing="zeros") == [2, None]
        with pytest.raises(pmesh.UsageError, match="add up to 0"):
            mesh.average_gradients(ONE, weight=0)
        mesh.barrier()
        assert mesh.last_op == pmesh.LastOp(OpNumber(-1), (0,), ("simulated",), 0)  # type: ignore[arg-type]
        assert sorted(mesh.shard(5).tolist()) == [0, 1, 2, 3, 4]
        comes_back(mesh)

    with caplog.at_level(logging.WARNING, "pmesh"):
        two_ranks(agent, apart, waits_for_it(agent), on_superseded="sync")
    alone = [m for m in caplog.messages if "until then this rank trains alone" in m]
    assert len(alone) == 1


def test_by_default_it_goes_on_alone_until_it_syncs_if_the_job_syncs_again_and_again(
    agent: WatchedAgent,
) -> None:
    """As in a loop with `mesh.sync` at its top, whose machine has slept."""
    agent.left_behind = {2: APART}

    def apart(mesh: pmesh.Mesh) -> None:
        mesh.sync(None)
        assert mesh.all_reduce(ONE).tolist() == [1.0]
        assert (mesh.rank, mesh.size, mesh.step) == (0, 1, 2)
        assert mesh.sync({"position": -1}) == {"position": 7}
        assert (mesh.rank, mesh.size, mesh.step) == (1, 2, 3)

    def other(mesh: pmesh.Mesh) -> None:
        mesh.sync(None)
        assert mesh.all_reduce(ONE).tolist() == [1.0]
        agent.wait_until(lambda: bool(agent.entering))
        assert mesh.sync({"position": 7}) == {"position": 7}

    two_ranks(agent, apart, other)


COMES_BACK = pytest.mark.parametrize(
    ("error", "options"),
    [
        (pmesh.HistorySuperseded, {}),
        (pmesh.HistorySuperseded, {"on_superseded": "sync"}),
        (pmesh.AgentStopped, {"on_superseded": "sync"}),
    ],
)
STOPS = pytest.mark.parametrize(
    ("error", "options"),
    [
        (pmesh.HistorySuperseded, {"on_superseded": "raise"}),
        (pmesh.AgentStopped, {"on_superseded": "raise"}),
        (pmesh.AgentStopped, {}),
    ],
)


@COMES_BACK
def test_a_sync_that_is_cut_short_comes_back_by_itself(
    agent: WatchedAgent,
    error: type[pmesh.RunError],
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    comes_apart(agent, error)

    def apart(mesh: pmesh.Mesh) -> None:
        assert mesh.sync({"position": -1}) == {"position": 7}
        assert (mesh.rank, mesh.size, mesh.step) == (1, 2, 3)

    two_ranks(agent, apart, syncs_without_it(agent), **options)
    [message] = [m for m in caplog.messages if "; this call of mesh.sync " in m]
    assert COME_BACK not in message  # it says so once


@STOPS
def test_if_it_is_to_raise_the_sync_does_and_the_next_one_comes_back(
    agent: WatchedAgent, error: type[pmesh.RunError], options: dict[str, Any]
) -> None:
    comes_apart(agent, error)

    def apart(mesh: pmesh.Mesh) -> None:
        with pytest.raises(error):
            mesh.sync({"position": -1})
        assert mesh.sync({"position": -1}) == {"position": 7}

    two_ranks(agent, apart, syncs_without_it(agent), **options)


def test_a_restarted_agent_is_waited_for_and_begins_the_job_anew_where_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with watched_agent(tmp_path):
        mesh = pmesh.connect("job", home=tmp_path, on_superseded="sync")
        for _ in range(3):
            mesh.sync({})
    with watched_agent(tmp_path) as second, caplog.at_level(logging.WARNING, "pmesh"):
        state = {"position": 3}
        assert mesh.sync(state) is state
        assert (mesh.step, mesh.rank, mesh.size) == (4, 0, 1)
        mesh.close()
    assert [session.me for session in second.sessions] == [0]


BEGINNINGS: dict[str, tuple[Callable[[pmesh.Mesh], object], str, int]] = {
    "it has synced": (lambda mesh: mesh.sync({"of": "the job"}), "the job", 2),
    "it has just begun": (lambda mesh: mesh.rank, "another history", 4),
}


@pytest.mark.parametrize(("begin", "winner", "step"), BEGINNINGS.values(), ids=BEGINNINGS.keys())
def test_who_comes_back_from_a_history_that_came_further_takes_the_state_of_a_job_that_has_one(
    tmp_path: Path, begin: Callable[[pmesh.Mesh], object], winner: str, step: int
) -> None:
    with watched_agent(tmp_path):
        back = pmesh.connect("job", home=tmp_path, on_superseded="sync")
        for _ in range(3):
            back.sync({"of": "another history"})
    with watched_agent(tmp_path) as second, ThreadPoolExecutor(1) as pool:
        mesh = pmesh.connect("job", home=tmp_path)
        begin(mesh)
        entering = pool.submit(back.sync, {"of": "another history"})
        second.wait_until(lambda: bool(second.entering))
        assert mesh.sync({"of": "the job"}) == {"of": winner}
        assert entering.result() == {"of": winner}
        assert mesh.step == back.step == step
        mesh.close()
        back.close()


def test_no_agent_in_time_is_an_error_and_the_next_sync_tries_again(tmp_path: Path) -> None:
    with watched_agent(tmp_path):
        mesh = pmesh.connect("job", home=tmp_path)
        mesh.sync({})
    with pytest.raises(pmesh.AgentStopped):
        mesh.sync({})
    with pytest.raises(pmesh.AgentNotRunning, match="'pmesh up'"):
        mesh.sync({}, timeout_s=0.02)
    with pytest.raises(pmesh.AgentStopped, match="comes back to the job"):
        mesh.barrier()
    with watched_agent(tmp_path):
        mesh.sync({})
        mesh.barrier()
        mesh.close()


def test_an_agent_that_refuses_is_believed_and_asked_again_by_the_next_sync(
    tmp_path: Path,
) -> None:
    refused = Refused(Verdict("NotEnoughRanks", "1 of 2 came"))
    with ScriptedAgent(tmp_path, joins) as scripted:
        mesh = pmesh.connect("job", wait_for=2, home=tmp_path)
        scripted.wait_until_closed()
        with pytest.raises(pmesh.AgentStopped):
            mesh.barrier()
        scripted.steps = [replies(refused)]
        with pytest.raises(pmesh.NotEnoughRanks):
            mesh.sync({})
        with pytest.raises(pmesh.NotEnoughRanks):
            mesh.sync({})
    mesh.close()


def test_a_reconnection_asks_for_the_same_job_on_the_same_terms(tmp_path: Path) -> None:
    seen: list[AnyRequest | None] = []

    def look(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        seen.append(request)
        joins(trainer, request)

    with ScriptedAgent(tmp_path, look) as scripted:
        mesh = pmesh.connect("job", wait_for=3, timeout_s=5, home=tmp_path, min_ranks=2)
        scripted.wait_until_closed()
        for _ in range(2):
            with pytest.raises(pmesh.AgentStopped):
                mesh.sync({}, timeout_s=1000)
    mesh.close()
    first, second = seen
    assert isinstance(first, Connect)
    assert isinstance(second, Connect)
    assert (first.timeout_s, first.wait_for, first.terms.min_ranks) == (5, 3, 2)
    assert second.timeout_s > 900  # what is left of the sync's
    assert (second.job, second.wait_for, second.terms) == (first.job, 3, first.terms)


def test_closing_ends_the_wait_for_an_agent(tmp_path: Path, faults: Faults) -> None:
    tried = threading.Event()

    def try_in_vain(home: Path, replies: SessionDecoder[SessionMessage]) -> object:
        tried.set()
        return AgentConnection(home, replies)

    with ScriptedAgent(tmp_path, joins) as scripted:
        mesh = pmesh.connect("job", home=tmp_path)
        scripted.wait_until_closed()
        with pytest.raises(pmesh.AgentStopped):
            mesh.barrier()
    faults.instead(place, "AgentConnection", try_in_vain)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: mesh.sync(None))
        assert tried.wait(20)
        mesh.close()
        with pytest.raises(pmesh.MeshClosed, match="it was closed"):
            waiting.result(20)
    with pytest.raises(pmesh.MeshClosed, match="it was closed"):
        mesh.sync({})


def test_closing_ends_a_reconnection_that_has_just_been_made(
    tmp_path: Path, faults: Faults
) -> None:
    with ScriptedAgent(tmp_path, joins) as scripted:
        mesh = pmesh.connect("job", home=tmp_path)
        scripted.wait_until_closed()
        with pytest.raises(pmesh.AgentStopped):
            mesh.barrier()

        def closed_meanwhile(home: Path, replies: SessionDecoder[SessionMessage]) -> object:
            connection = AgentConnection(home, replies)
            mesh.close()  # the lock is held, so it only interrupts
            return connection

        faults.instead(place, "AgentConnection", closed_meanwhile)
        with pytest.raises(pmesh.MeshClosed, match="it was closed"):
            mesh.sync({})


def test_a_mesh_that_is_alone_can_be_closed_like_any_other(tmp_path: Path) -> None:
    with ScriptedAgent(tmp_path, joins) as scripted:
        scripted_job = pmesh.connect("job", home=tmp_path, on_superseded="sync")
        with scripted_job as mesh:
            scripted.wait_until_closed()
            mesh.barrier()
            assert mesh.all_reduce(ONE).tolist() == [1.0]
    with pytest.raises(pmesh.MeshClosed, match="it was closed"):
        mesh.barrier()
