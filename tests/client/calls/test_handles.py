"""`async_op=True`: calls in line behind one another, and their handles."""

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.client.calls.queue import Handle, Line
from pmesh.core.wire.trainer import StartOp
from tests.worlds.every_array import make, seen
from tests.worlds.faults import Faults, Real
from tests.worlds.watched_agent import WatchedAgent, WatchedSession, run_ranks

PATIENCE_S = 20.0


class OpGate:
    """Holds an agent's ops back until it is opened."""

    def __init__(self, agent: WatchedAgent, first: int = 0) -> None:
        self._agent = agent
        self._first = first
        self.opened = threading.Event()
        self.reached = threading.Event()
        agent.before_op = self._hold

    def _hold(self, session: WatchedSession, request: StartOp) -> None:
        del session
        if request.op >= self._first:
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)


def test_handles_are_waited_for_in_any_order(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> list[float]:
        handles = [mesh.all_reduce(np.array(10.0 * k + mesh.rank), async_op=True) for k in range(5)]
        return [float(handles[k].wait()) for k in (3, 0, 4, 4, 1, 2)]

    assert run_ranks(agent.home, 2, program) == [[61, 1, 81, 81, 21, 41]] * 2


CALLS: dict[str, tuple[Callable[[Any], Handle[Any]], list[Any]]] = {
    "all_reduce": (lambda m: m.all_reduce(np.full(1, m.rank + 1.0), async_op=True), [[3], [3]]),
    "broadcast": (lambda m: m.broadcast(np.full(1, m.rank), 1, async_op=True), [[1], [1]]),
    "reduce": (lambda m: m.reduce(np.full(1, m.rank), 1, async_op=True), [None, [1]]),
    "gather": (lambda m: m.gather(np.full(1, m.rank), async_op=True), [[0, 1], None]),
    "all_gather": (lambda m: m.all_gather(np.full(1, m.rank), async_op=True), [[0, 1]] * 2),
    "reduce_scatter": (lambda m: m.reduce_scatter(np.arange(3), async_op=True), [[0, 2], [4]]),
    "scatter": (
        lambda m: m.scatter(None if m.rank else [np.zeros(1), np.ones(2)], async_op=True),
        [[0], [1, 1]],
    ),
    "all_to_all": (
        lambda m: m.all_to_all([np.full(1, 2 * m.rank), np.full(1, 5)], async_op=True),
        [[[0], [2]], [[5], [5]]],
    ),
    "average_gradients": (
        lambda m: m.average_gradients(np.full(1, m.rank + 1.0), weight=2, async_op=True),
        [[1.5], [1.5]],
    ),
}


@pytest.mark.parametrize(("call", "expected"), CALLS.values(), ids=CALLS.keys())
def test_every_call_that_can_wait_for_later_gives_the_same_then(
    agent: WatchedAgent, call: Callable[[Any], Handle[Any]], expected: list[Any]
) -> None:
    def plain(x: Any) -> Any:  # noqa: ANN401
        return [plain(one) for one in x] if isinstance(x, list) else x if x is None else x.tolist()

    def program(mesh: pmesh.Mesh) -> Any:  # noqa: ANN401
        return plain(call(mesh).wait())

    assert run_ranks(agent.home, 2, program) == expected


def test_a_handle_knows_whether_its_call_is_done(agent: WatchedAgent, mesh: pmesh.Mesh) -> None:
    gate = OpGate(agent)
    handle = mesh.all_reduce(np.ones(2), async_op=True)
    assert gate.reached.wait(PATIENCE_S)
    assert not handle.done()
    assert repr(handle) == "<Handle, under way>"
    with pytest.raises(pmesh.UsageError, match="under way: wait"):
        handle.result()
    with pytest.raises(pmesh.OpTimedOut, match=r"still under way after 0\.01 s"):
        handle.wait(0.01)
    gate.opened.set()
    assert handle.wait(PATIENCE_S).tolist() == [1, 1]
    assert handle.done()
    assert handle.result() is handle.wait()
    assert repr(handle) == "<Handle, done>"


@pytest.mark.parametrize("timeout_s", [math.inf, 1e12, threading.TIMEOUT_MAX, -1.0])
def test_a_wait_may_be_as_long_or_short_as_one_likes(
    agent: WatchedAgent, mesh: pmesh.Mesh, timeout_s: float
) -> None:
    gate = OpGate(agent)
    handle = mesh.all_reduce(np.ones(1), async_op=True)
    assert gate.reached.wait(PATIENCE_S)
    gate.opened.set()
    if timeout_s < 0:
        handle.wait()
    assert handle.wait(timeout_s).tolist() == [1]


def test_two_threads_may_wait_for_one_handle_each_as_long_as_it_likes(
    agent: WatchedAgent, mesh: pmesh.Mesh
) -> None:
    gate = OpGate(agent)
    handle = mesh.all_reduce(np.ones(1), async_op=True)
    results: list[Any] = []
    waiting = threading.Thread(target=lambda: results.append(handle.wait()))
    waiting.start()
    assert gate.reached.wait(PATIENCE_S)
    with pytest.raises(pmesh.OpTimedOut, match=r"still under way after 0\.01 s"):
        handle.wait(0.01)
    gate.opened.set()
    waiting.join(PATIENCE_S)
    assert handle.wait() is results[0]


def test_a_time_that_is_over_in_the_call_is_not_taken_for_the_waits() -> None:
    line = Line()

    def fails() -> None:
        raise pmesh.OpTimedOut("op 0 took too long")

    future = line.submit(fails)
    handle: Handle[None] = Handle(future.done, future.result)
    with pytest.raises(pmesh.OpTimedOut, match="too long"):
        handle.wait(PATIENCE_S)
    line.end()


def test_an_error_is_raised_by_wait_and_the_calls_behind_go_on(
    agent: WatchedAgent,
) -> None:
    def program(mesh: pmesh.Mesh) -> list[float]:
        bad = mesh.all_reduce(np.ones(2 + mesh.rank), async_op=True)
        good = mesh.all_reduce(np.ones(2), async_op=True)
        assert good.wait().tolist() == [2, 2]
        for take in (bad.wait, bad.wait, bad.result):
            with pytest.raises(pmesh.OpMismatch, match="op 0"):
                take()
        return mesh.all_reduce(np.ones(1)).tolist()

    assert run_ranks(agent.home, 2, program) == [[2.0]] * 2


def test_wrong_arguments_are_told_at_the_call(agent: WatchedAgent, mesh: pmesh.Mesh) -> None:
    for call in (
        lambda: mesh.all_reduce("x", async_op=True),
        lambda: mesh.all_gather(np.array(1), async_op=True),
        lambda: mesh.scatter([], async_op=True),
    ):
        with pytest.raises(pmesh.UsageError):
            call()
    assert agent.calls == []


def test_a_blocking_call_runs_behind_those_under_way(agent: WatchedAgent, mesh: pmesh.Mesh) -> None:
    gate = OpGate(agent)
    first = mesh.all_gather(np.ones(1), async_op=True)
    assert gate.reached.wait(PATIENCE_S)
    threading.Timer(0.01, gate.opened.set).start()
    x = make("torch", "bfloat16", [3])
    assert seen(mesh.all_reduce(x)) == seen(x)
    mesh.barrier()
    assert mesh.sync({"a": 1}) == {"a": 1}
    assert first.done()
    kinds = [call.kind for call in agent.calls]
    assert kinds == ["exchange", "all_gather", "all_reduce", "barrier", "sync"]


def test_the_world_and_the_last_op_change_when_a_call_is_waited_for(agent: WatchedAgent) -> None:
    agent.losses = {1: 2}

    def program(mesh: pmesh.Mesh) -> None:
        if mesh.rank == 2:
            mesh.all_reduce(np.ones(1))
            with pytest.raises(pmesh.AgentStopped):
                mesh.all_reduce(np.ones(1))
            return
        handles = [mesh.all_reduce(np.ones(1), async_op=True) for _ in range(4)]
        handles[3].wait()
        assert (mesh.size, mesh.last_op and mesh.last_op.op) == (2, 3)
        assert handles[0].wait().tolist() == [3]  # of before: the world does not go back
        assert (mesh.size, mesh.last_op and mesh.last_op.op) == (2, 3)

    run_ranks(agent.home, 3, program)


def test_mlx_arrays_are_made_in_the_thread_that_waits(mesh: pmesh.Mesh, faults: Faults) -> None:
    mx: Any = pytest.importorskip("mlx.core")
    makers: list[str] = []

    def noted(array: Real, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        makers.append(threading.current_thread().name)
        return array(*args, **options)

    xs = [make("mlx", dtype, [1, 2]) for dtype in ("float32", "bfloat16")]
    calls: list[Callable[[], Handle[Any]]] = [
        lambda: mesh.all_reduce(xs, async_op=True),
        lambda: mesh.broadcast(xs, async_op=True),
        lambda: mesh.reduce(xs, async_op=True),
        lambda: mesh.reduce_scatter(xs[1], async_op=True),
        lambda: mesh.average_gradients(xs, async_op=True),
    ]
    handles = [call() for call in calls]
    faults.around(mx, "array", noted)
    for handle in handles:
        handle.wait()
    assert len(makers) == 9
    assert {*makers} == {threading.current_thread().name}


def test_out_is_written_when_the_call_is_waited_for(agent: WatchedAgent, mesh: pmesh.Mesh) -> None:
    out = np.zeros(2)
    handle = mesh.all_reduce(np.ones(2), out=out, async_op=True)
    agent.wait_until(lambda: bool(agent.calls))
    assert handle.wait() is out
    assert out.tolist() == [1, 1]


def test_closing_ends_what_is_in_line_and_its_thread(agent: WatchedAgent) -> None:
    gate = OpGate(agent)
    before = {*threading.enumerate()}
    mesh = pmesh.connect("job", home=agent.home)
    handles = [mesh.all_reduce(np.ones(1), async_op=True) for _ in range(2)]
    assert gate.reached.wait(PATIENCE_S)
    (thread,) = [t for t in threading.enumerate() if t.name == "pmesh" and t not in before]
    mesh.close()
    for handle in handles:
        with pytest.raises(pmesh.MeshClosed, match="it was closed"):
            handle.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    gate.opened.set()
    late = mesh.all_reduce(np.ones(1), async_op=True)
    with pytest.raises(pmesh.MeshClosed, match="it was closed"):
        late.wait()


def test_threads_that_call_at_once_all_have_their_results(mesh: pmesh.Mesh) -> None:
    wrong: list[object] = []

    def work(k: int) -> None:
        for i in range(20):
            x = np.full(3, 100.0 * k + i)
            call = (
                mesh.all_reduce(x, async_op=True).wait if i % 2 else lambda x=x: mesh.all_reduce(x)
            )
            wrong.extend([x] if (call() != x).any() else [])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert mesh.last_op is not None
    assert mesh.last_op.op == 79
