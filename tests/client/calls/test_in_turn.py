"""Small all-reduces that wait in line: their ops are sent together, and each ends by itself."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh import Mesh
from pmesh.client.calls.reducing import all_reduce_in_turn
from pmesh.core.wire.trainer import StartOp
from tests.worlds.scripted_agent import PATIENCE_S
from tests.worlds.watched_agent import WatchedAgent, WatchedSession, pair, run_ranks

SIZES = (1, 100, 7)


def arrays(mesh: Mesh) -> list[np.ndarray[Any, Any]]:
    dtypes = ("float32", "float16", "int64")
    return [np.full(n, mesh.rank + 10 * n, dtype) for n, dtype in zip(SIZES, dtypes, strict=True)]


def in_turn(mesh: Mesh, xs: list[Any]) -> list[Callable[[], object]]:
    return all_reduce_in_turn(mesh, xs, "sum", PATIENCE_S)


def requests_of(agent: WatchedAgent) -> list[StartOp]:
    """Those of rank 0 are noted as they come."""
    found = list[StartOp]()

    def note(session: WatchedSession, request: StartOp) -> None:
        if session.me == 0:
            found.append(request)

    agent.before_op = note
    return found


def outcome_of(call: Callable[[], object]) -> str:
    try:
        call()
    except pmesh.PmeshError as e:
        return type(e).__name__
    return ""


def test_each_has_its_own_sum(agent: WatchedAgent) -> None:
    requests = requests_of(agent)

    def program(mesh: Mesh) -> list[list[float]]:
        found = list[list[float]]()
        for _ in range(3):  # the memory of results is used again
            xs = arrays(mesh)
            for call in in_turn(mesh, xs):
                call()
            assert [x.dtype.name for x in xs] == ["float32", "float16", "int64"]
            found.append([float(x[-1]) for x in xs])
            assert all((x == x[0]).all() for x in xs)
        assert mesh.last_op is not None
        assert mesh.last_op.op == 3 * len(SIZES) - 1
        return found

    assert pair(agent, program, program) == [[[1 + 20 * n for n in SIZES]] * 3] * 2
    assert [r.follows for r in requests if r.call.kind == "all_reduce"] == [False, True, True] * 3


def test_ranks_need_not_have_as_many_of_them_in_line(agent: WatchedAgent) -> None:
    def together(mesh: Mesh) -> list[float]:
        xs = [np.full(5, float(k)) for k in range(6)]
        for call in in_turn(mesh, xs):
            call()
        return [float(x[0]) for x in xs]

    def one_by_one(mesh: Mesh) -> list[float]:
        return [float(mesh.all_reduce(np.full(5, float(k)))[0]) for k in range(6)]

    assert pair(agent, together, one_by_one) == [[2.0 * k for k in range(6)]] * 2


def test_an_op_has_ended_for_its_caller_while_the_next_one_waits(agent: WatchedAgent) -> None:
    first_has_ended = threading.Event()

    def together(mesh: Mesh) -> list[float]:
        xs = [np.ones(3), np.ones(3)]
        first, second = in_turn(mesh, xs)
        first()
        assert xs[0][0] == 2
        first_has_ended.set()
        second()
        return [float(x[0]) for x in xs]

    def one_by_one(mesh: Mesh) -> list[float]:
        one = float(mesh.all_reduce(np.ones(3))[0])
        assert first_has_ended.wait(PATIENCE_S)  # else it would be one op for both
        return [one, float(mesh.all_reduce(np.ones(3))[0])]

    assert pair(agent, together, one_by_one) == [[2, 2]] * 2


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_what_was_sent_after_a_failure_is_void_and_called_again(
    agent: WatchedAgent, fails: int
) -> None:
    def program(mesh: Mesh) -> tuple[list[str], list[float], float]:
        xs = [np.full(3, 1.0 + k) for k in range(3)]
        outcomes = [outcome_of(call) for call in in_turn(mesh, xs)]
        return outcomes, [float(x[0]) for x in xs], float(mesh.all_reduce(np.ones(1))[0])

    agent.mismatched = fails
    sums = [1.0 + fails if k == fails else 2.0 + 2 * k for k in range(3)]  # I8
    names = ["OpMismatch" if k == fails else "" for k in range(3)]
    assert pair(agent, program, program) == [(names, sums, 2.0)] * 2


def test_after_a_loss_the_rest_runs_among_those_who_are_left(agent: WatchedAgent) -> None:
    agent.losses = {1: 1}

    def program(mesh: Mesh) -> list[float]:
        xs = [np.ones(3) for _ in range(3)]
        for call in in_turn(mesh, xs):
            call()
        assert mesh.size == 1
        return [float(x[0]) for x in xs]

    def either(mesh: Mesh) -> list[float]:
        if mesh.rank == 0:
            return program(mesh)
        with pytest.raises(pmesh.AgentStopped):
            program(mesh)
        return []

    assert run_ranks(agent.home, 2, either)[0] == [2, 1, 1]


def test_a_call_of_another_thread_waits_until_all_of_them_have_ended(agent: WatchedAgent) -> None:
    def program(mesh: Mesh) -> list[float]:
        xs = [np.ones(3), np.full(3, 2.0)]
        first, second = in_turn(mesh, xs)
        first()
        results = list[float]()
        other = threading.Thread(
            target=lambda: results.append(float(mesh.all_reduce(np.full(3, 4.0))[0]))
        )
        other.start()
        other.join(0.05)  # it would have a wrong result, and fail the op at both ranks
        assert not results
        second()
        other.join(PATIENCE_S)
        return [float(xs[1][0]), *results]

    assert pair(agent, program, program) == [[4, 8]] * 2


def test_close_ends_those_that_were_sent(agent: WatchedAgent) -> None:
    def program(mesh: Mesh) -> list[str]:
        first, second = in_turn(mesh, [np.ones(3), np.ones(3)])
        first()
        mesh.close()  # as another thread may, between the two
        return [outcome_of(second), outcome_of(lambda: mesh.all_reduce(np.ones(3)))]

    assert run_ranks(agent.home, 1, program) == [["MeshClosed", "MeshClosed"]]


def test_they_come_after_what_waits_in_line(agent: WatchedAgent) -> None:
    def program(mesh: Mesh) -> list[float]:
        handle = mesh.all_reduce(np.ones(3), async_op=True)
        xs = [np.full(3, 2.0), np.full(3, 4.0)]
        for call in in_turn(mesh, xs):
            call()
        return [float(handle.wait()[0]), *(float(x[0]) for x in xs)]

    assert pair(agent, program, program) == [[2, 4, 8]] * 2
