"""What the survivors see when a rank is lost."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import pmesh
from pmesh.client.calls import reducing
from pmesh.core.wire.trainer import Joined, OpDone, StartOp, World
from pmesh.ids import OpNumber, Rank, TrainerId
from simulation.wire import AnyRequest
from tests.worlds.faults import Faults
from tests.worlds.scripted_agent import VIEW, ScriptedAgent, TrainerSocket, op_done, replies
from tests.worlds.watched_agent import WatchedAgent, WatchedSession, run_ranks

T = TypeVar("T")
LOST = TrainerId(0)


def survivors(agent: WatchedAgent, size: int, program: Callable[[pmesh.Mesh], T]) -> list[T]:
    """The results of all ranks but 0, which the agent cuts off."""

    def rank(mesh: pmesh.Mesh) -> T | None:
        try:
            return program(mesh)
        except pmesh.AgentStopped:
            return None

    return [result for result in run_ranks(agent.home, size, rank) if result is not None]


def test_an_op_goes_on_among_the_survivors_who_see_it_when_their_call_returns(
    agent: WatchedAgent,
) -> None:
    agent.losses = {1: LOST}

    def program(mesh: pmesh.Mesh) -> tuple[Any, ...]:
        mesh.barrier()
        before = mesh.rank, mesh.size, mesh.names
        x = np.full(3, 10.0**mesh.rank)
        return before, mesh.all_reduce(x).tolist(), (mesh.rank, mesh.size, mesh.names), mesh.last_op

    names = ("simulated",) * 3
    results = survivors(agent, 3, program)
    assert results == [
        (
            (rank, 3, names),
            [110.0] * 3,
            (rank - 1, 2, names[1:]),
            pmesh.LastOp(OpNumber(1), (Rank(0), Rank(1)), names[1:], 24),
        )
        for rank in (1, 2)
    ]


def test_a_mesh_changes_its_ranks_only_when_the_whole_call_has_returned(
    agent: WatchedAgent, faults: Faults
) -> None:
    faults.limit(reducing, "DEFAULT_BUCKET_BYTES", 8)
    seen: list[tuple[int, int]] = []
    meshes: dict[int, pmesh.Mesh] = {}

    def before_op(session: WatchedSession, request: StartOp) -> None:
        if request.op == 1:
            seen.append((meshes[session.me].rank, meshes[session.me].size))

    agent.losses = {0: LOST}
    agent.before_op = before_op

    def program(mesh: pmesh.Mesh) -> tuple[int, int]:
        meshes[mesh.rank] = mesh
        mesh.all_reduce([np.ones(1), np.ones(1)])
        return mesh.rank, mesh.size

    assert survivors(agent, 3, program) == [(0, 2), (1, 2)]
    assert sorted(seen) == [(1, 3), (2, 3)]


@pytest.mark.parametrize("lost_before", [0, 1, 2])
def test_each_bucket_of_an_average_is_divided_by_what_was_contributed_to_it(
    agent: WatchedAgent, lost_before: int
) -> None:
    agent.losses = {lost_before: LOST}

    def program(mesh: pmesh.Mesh) -> list[float]:
        grads = [np.full(4, float(mesh.rank)) for _ in range(3)]
        averaged = mesh.average_gradients(grads, weight=mesh.rank + 1, bucket_bytes=32)
        return [float(x[0]) for x in averaged]

    everyone, without_0 = (0 * 1 + 1 * 2 + 2 * 3) / 6, (1 * 2 + 2 * 3) / 5
    expected = [everyone if op < lost_before else without_0 for op in range(3)]
    assert survivors(agent, 3, program) == [pytest.approx(expected)] * 2


def test_a_mean_counts_who_was_there(agent: WatchedAgent) -> None:
    agent.losses = {0: LOST}
    results = survivors(
        agent, 3, lambda mesh: float(mesh.all_reduce(np.array(mesh.rank * 1.0), "mean"))
    )
    assert results == [1.5, 1.5]


def test_a_broadcast_whose_root_is_lost_fails_everywhere_and_the_job_goes_on(
    agent: WatchedAgent,
) -> None:
    agent.losses = {0: LOST}

    def program(mesh: pmesh.Mesh) -> tuple[int, int, float]:
        with pytest.raises(pmesh.RankLost):
            mesh.broadcast(np.ones(3))
        return mesh.rank, mesh.size, float(mesh.broadcast(np.array(float(mesh.rank)), root=1))

    assert survivors(agent, 3, program) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_a_root_stays_the_same_trainer_while_ranks_change_between_buckets(
    agent: WatchedAgent, faults: Faults
) -> None:
    faults.limit(reducing, "DEFAULT_BUCKET_BYTES", 8)
    agent.losses = {0: LOST}

    def program(mesh: pmesh.Mesh) -> list[float]:
        mine = [np.array(float(mesh.rank)) for _ in range(3)]
        return [float(x) for x in mesh.broadcast(mine, root=1)]

    assert survivors(agent, 3, program) == [[1.0] * 3] * 2


def test_a_root_lost_between_buckets_fails_the_rest_without_another_op(
    tmp_path: Path, faults: Faults
) -> None:
    faults.limit(reducing, "DEFAULT_BUCKET_BYTES", 8)

    def joins_as_rank_1(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        del request
        trainer.send(Joined(World(1, (LOST, TrainerId(1)), ("mac-0", "mac-1")), VIEW))

    def loses_the_root(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        assert isinstance(request, StartOp)
        arena = agent.grant(trainer, "output", 8)
        trainer.send(OpDone(request.op, arena.number, World(0, (TrainerId(1),), ("mac-1",))))

    with ScriptedAgent(tmp_path) as agent:
        agent.steps = [joins_as_rank_1, loses_the_root, replies(op_done(1))]
        mesh = pmesh.connect("job", home=tmp_path)
        with pytest.raises(pmesh.RankLost, match="some of its arrays had not been sent"):
            mesh.broadcast([np.zeros(1), np.zeros(1)], root=0)
        mesh.barrier()
        assert mesh.size == 1
        mesh.close()


def test_who_asks_for_it_hears_of_a_loss_once(agent: WatchedAgent) -> None:
    agent.losses = {0: LOST}

    def program(rank: int) -> float | None:
        del rank
        with pmesh.connect("job", wait_for=3, home=agent.home, on_loss="raise") as mesh:
            if mesh.rank == 0:
                with pytest.raises(pmesh.AgentStopped):
                    mesh.all_reduce(np.ones(1))
                return None
            with pytest.raises(pmesh.RankLost):
                mesh.all_reduce(np.ones(1))
            assert mesh.size == 2
            return float(mesh.all_reduce(np.ones(1))[0])

    with ThreadPoolExecutor(3) as pool:
        results = [result for result in pool.map(program, range(3)) if result is not None]
    assert results == [2.0, 2.0]
