"""O10: after an error that a program catches, call k of one rank meets call k of the others."""

import contextlib
import threading
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh import Mesh
from pmesh.client.session.session import TrainerSession
from tests.worlds.faults import Faults, Real
from tests.worlds.scripted_agent import PATIENCE_S
from tests.worlds.watched_agent import WatchedAgent, pair, run

STEPS = 8


class Breaks(Exception):  # noqa: N818 - an error of the program, not of pmesh
    """What ends a call in its middle."""


MANY = {"a": np.ones(3), "b": np.ones(3, np.int64), "c": np.ones(3, np.float32)}
"""A tree of three buckets: a broadcast of it takes three ops."""


def step(mesh: Mesh, k: int) -> "float | None":
    """The sum that all ranks give k to; None if the call raises."""
    try:
        return float(mesh.all_reduce(np.array([float(k)]), timeout_s=PATIENCE_S)[0])
    except pmesh.OpMismatch:
        return None


def steps(mesh: Mesh) -> "list[float | None]":
    return [step(mesh, k) for k in range(STEPS)]


def check(results: "list[list[float | None]]") -> None:
    """Each step gives its own sum or an error; the last ones give their sums."""
    for of_rank in results:
        assert all(got in (None, 2 * k) for k, got in enumerate(of_rank)), results
        assert of_rank[STEPS // 2 :] == [2 * k for k in range(STEPS // 2, STEPS)]


def mistaken(agent: WatchedAgent, tree: object, times: int) -> "list[list[float | None]]":
    """Rank 0's broadcasts return before rank 1 calls a barrier in place of the first one."""
    returned = threading.Event()

    def ahead(mesh: Mesh) -> "list[float | None]":
        for _ in range(times):
            mesh.broadcast(tree, root=0)
        returned.set()
        return steps(mesh)

    def behind(mesh: Mesh) -> "list[float | None]":
        assert returned.wait(PATIENCE_S)
        with pytest.raises(pmesh.OpMismatch):
            mesh.barrier()
        for _ in range(1, times):
            with contextlib.suppress(pmesh.OpMismatch):
                mesh.broadcast(tree, root=0)
        return steps(mesh)

    return pair(agent, ahead, behind)


@pytest.mark.parametrize(
    ("tree", "times"),
    [
        pytest.param(np.ones(3), 1, id="of one op"),
        pytest.param(MANY, 1, id="of three ops"),
        pytest.param(np.ones(3), 3, id="and two more"),
    ],
)
def test_a_root_that_learns_of_a_mismatch_in_its_next_call_does_not_stay_a_call_ahead(
    agent: WatchedAgent, tree: object, times: int
) -> None:
    check(mistaken(agent, tree, times))


def test_a_rank_that_fails_by_itself_between_two_ops_does_not_stay_an_op_behind(
    agent: WatchedAgent,
    faults: Faults,
) -> None:
    """Its next call would meet the second op of the others' call, which may be just like it."""
    three = {str(i): np.full(1, float(i)) for i in range(3)}

    def fine(mesh: Mesh) -> "list[float | None]":
        with pytest.raises(pmesh.OpMismatch):
            mesh.average_gradients(three, bucket_bytes=8)
        return steps(mesh)

    def failing(mesh: Mesh) -> "list[float | None]":
        calls, this_rank = [], threading.get_ident()

        def run_op(first: Real, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if threading.get_ident() == this_rank:
                calls.append(args)
                if len(calls) == 2:
                    raise Breaks
            return first(*args, **kwargs)

        with faults.around(TrainerSession, "run_op", run_op), pytest.raises(Breaks):
            mesh.average_gradients(three, bucket_bytes=8)
        return steps(mesh)

    check(pair(agent, fine, failing))


def test_an_error_and_then_a_sync_on_every_rank_loses_no_call(agent: WatchedAgent) -> None:
    """Each may make it after another number of calls: it is where all meet."""
    returned = threading.Event()

    def program(mesh: Mesh) -> "list[float | None]":
        if mesh.rank == 0:
            mesh.broadcast(np.ones(3), root=0)
            returned.set()
            with pytest.raises(pmesh.OpMismatch):
                mesh.barrier()
        else:
            assert returned.wait(PATIENCE_S)
            with pytest.raises(pmesh.OpMismatch):
                mesh.barrier()
        mesh.sync({"w": np.ones(2)}, timeout_s=PATIENCE_S)
        return steps(mesh)

    assert run(agent, 2, program) == [[2.0 * k for k in range(STEPS)]] * 2


def test_calls_that_were_queued_behind_the_one_that_fails_stay_in_step_too(
    agent: WatchedAgent,
) -> None:
    returned = threading.Event()

    def program(mesh: Mesh) -> "list[float | None]":
        if mesh.rank == 0:
            mesh.broadcast(np.ones(3), root=0)
            returned.set()
        else:
            assert returned.wait(PATIENCE_S)
            with pytest.raises(pmesh.OpMismatch):
                mesh.barrier()
        handles = [mesh.all_reduce(np.array([float(k)]), async_op=True) for k in range(STEPS)]
        results: list[float | None] = []
        for handle in handles:
            try:
                results.append(float(handle.wait(PATIENCE_S)[0]))
            except pmesh.OpMismatch:
                results.append(None)
        return results

    check(run(agent, 2, program))
