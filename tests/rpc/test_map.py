# ruff: noqa: ANN401 - values of any kind
"""`mesh.rpc.map` on ranks in threads."""

import threading
from typing import Any
from unittest import mock

import pytest

import pmesh
from pmesh.errors import (
    RankLost,
    RemoteCallFailed,
)
from pmesh.ids import TrainerId
from pmesh.rpc.rules.deal import Deal
from pmesh.testing import SimulatedMesh
from tests.rpc.ranks import Gate, pair
from tests.worlds.scripted_agent import PATIENCE_S


def test_map_returns_the_results_in_order_from_all_ranks() -> None:
    used = set[int]()

    def program(mesh: pmesh.Mesh) -> Any:
        me = int(mesh.rank)

        @mesh.rpc.register
        def square(x: int) -> int:
            used.add(me)
            return x * x

        mesh.barrier()
        results = mesh.rpc.map("square", range(50)) if me == 0 else None
        some = mesh.rpc.map("square", [3, 4], ranks=[1]) if me == 0 else None
        mesh.barrier()
        return results, some

    results, some = SimulatedMesh(3).run(program)[0]
    assert results == [x * x for x in range(50)]
    assert some == [9, 16]
    assert used == {0, 1, 2}


def test_the_items_of_a_lost_rank_are_given_to_others() -> None:
    gate = Gate()
    simulated = SimulatedMesh(3, on_loss="continue")
    done = threading.Event()

    def program(mesh: pmesh.Mesh) -> Any:
        rank = int(mesh.rank)

        @mesh.rpc.register
        def work(x: int) -> int:
            if rank == 1:
                gate.entered.release()
                assert gate.may_go.wait(PATIENCE_S)
            return x + 1

        mesh.barrier()
        if rank == 0:
            results = mesh.rpc.map("work", range(20), ranks=[1, 2])
            gate.may_go.set()
            done.set()
            return results
        if rank == 2:
            assert gate.entered.acquire(timeout=PATIENCE_S)
            simulated.lose(1)
        assert done.wait(PATIENCE_S)
        return None

    assert simulated.run(program)[0] == list(range(1, 21))


def test_map_raises_the_first_error_and_the_loss_of_all_ranks() -> None:
    simulated = SimulatedMesh(2, on_loss="continue")
    gate = Gate()

    def program(mesh: pmesh.Mesh) -> None:
        rank = int(mesh.rank)

        @mesh.rpc.register
        def fail(x: int) -> int:
            return 1 // x

        gate.register(mesh)
        mesh.barrier()
        if rank == 0:
            with pytest.raises(RemoteCallFailed, match="ZeroDivisionError"):
                mesh.rpc.map("fail", [1, 0, 1])
            threading.Thread(target=lose).start()
            with pytest.raises(RankLost):
                mesh.rpc.map("wait", [1, 2, 3], ranks=[1])
            with pytest.raises(RankLost):
                mesh.rpc.map("wait", [1, 2, 3], ranks=[1])
            gate.may_go.set()
        else:
            assert gate.may_go.wait(PATIENCE_S)

    def lose() -> None:
        assert gate.entered.acquire(timeout=PATIENCE_S)
        simulated.lose(1)

    simulated.run(program)


def test_map_waits_for_ranks_that_are_full_of_calls_of_others() -> None:
    gate = Gate()

    def callee(mesh: pmesh.Mesh) -> None:
        mesh.rpc.serve(threads=1, waiting=0)
        gate.register(mesh)

    def caller(mesh: pmesh.Mesh) -> None:
        first = mesh.rpc.call_async(1, "wait", "first")
        assert gate.entered.acquire(timeout=PATIENCE_S)
        refused = Deal.refused

        def refuse(deal: Deal, rank: TrainerId, item: int) -> None:
            refused(deal, rank, item)
            gate.may_go.set()

        with mock.patch.object(Deal, "refused", refuse):
            assert mesh.rpc.map("wait", range(5), ranks=[1]) == list(range(5))
        assert first.wait() == "first"

    pair(caller, callee)
