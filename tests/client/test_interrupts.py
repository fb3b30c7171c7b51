"""What signal handlers raise in the middle of a call, as torch's does if a loader's worker dies."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType

import numpy as np
import pytest

import pmesh
from pmesh.client.session.session import TrainerSession
from tests.worlds.faults import Faults, Real
from tests.worlds.polling import await_poll_of_main_thread
from tests.worlds.watched_agent import WatchedAgent

WORKER = "DataLoader worker (pid 7) is killed by signal: Killed."
PATIENCE_S = 60.0
HERE = threading.main_thread()


def signal_main_thread_where_it_waits() -> None:
    """As if a worker died while the main thread polls its agent's socket."""
    await_poll_of_main_thread()
    signal.pthread_kill(HERE.ident or 0, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def handled() -> Iterator[threading.Event]:
    """Install a handler; the event is set once it runs."""
    runs = threading.Event()

    def raise_as_torch_does(_number: int, _frame: FrameType | None) -> None:
        runs.set()
        raise RuntimeError(WORKER)

    before = signal.signal(signal.SIGUSR1, raise_as_torch_does)
    yield runs
    signal.signal(signal.SIGUSR1, before)


def beside(
    agent: WatchedAgent, here: Callable[[pmesh.Mesh], None], there: Callable[[pmesh.Mesh], object]
) -> object:
    """Run one rank in the main thread and one in another; what the other gives."""

    def other() -> object:
        with pmesh.connect("job", wait_for=2, home=agent.home) as mesh:
            result = there(mesh)
            mesh.barrier()
            return result

    with ThreadPoolExecutor(1) as pool:
        future: Future[object] = pool.submit(other)
        with pmesh.connect("job", wait_for=2, home=agent.home) as mesh:
            here(mesh)
            mesh.barrier()
        return future.result()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_call_in_which_a_handler_raises_takes_place_and_the_mesh_goes_on(
    agent: WatchedAgent, at: int
) -> None:
    gradients = {str(i): np.ones(4, np.float32) for i in range(3)}

    def here(mesh: pmesh.Mesh) -> None:
        me = mesh.rank

        def interrupt(session: object, request: object) -> None:
            if (session.me, request.op) == (me, at):  # type: ignore[attr-defined]
                signal_main_thread_where_it_waits()

        agent.before_op = interrupt
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            mesh.average_gradients(gradients, bucket_bytes=16)
        assert mesh.all_reduce(np.ones(1))[0] == 2

    def there(mesh: pmesh.Mesh) -> object:
        averaged = mesh.average_gradients(gradients, bucket_bytes=16)
        return [float(each[0]) for each in averaged.values()], float(mesh.all_reduce(np.ones(1))[0])

    assert beside(agent, here, there) == ([1, 1, 1], 2)


def test_a_message_for_which_a_handler_raises_has_come_and_the_next_one_comes(
    agent: WatchedAgent,
) -> None:
    has_joined, has_all = threading.Event(), threading.Event()

    def here(mesh: pmesh.Mesh) -> None:
        has_joined.set()
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            mesh.recv(1 - mesh.rank)
        assert mesh.recv(1 - mesh.rank)[0] == 2
        has_all.set()
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            mesh.store.get("key")
        assert mesh.store.get("key") == b"value"

    def there(mesh: pmesh.Mesh) -> object:
        assert has_joined.wait(PATIENCE_S)
        signal_main_thread_where_it_waits()
        mesh.send(np.ones(1), 1 - mesh.rank)
        mesh.send(np.full(1, 2.0), 1 - mesh.rank)
        assert has_all.wait(PATIENCE_S)
        signal_main_thread_where_it_waits()
        mesh.store.set("key", b"value")
        return len(agent.attached)

    assert beside(agent, here, there) == 2


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_call_that_is_interrupted_between_its_ops_ends_the_mesh_and_says_so(
    agent: WatchedAgent, faults: Faults, kind: type[BaseException]
) -> None:
    """The others go on with its next op, and would meet another one of this rank there."""

    def interrupted(run_op: Real, *arguments: object, **named: object) -> object:
        done = run_op(*arguments, **named)
        signal.raise_signal(signal.SIGUSR1 if kind is RuntimeError else signal.SIGINT)
        return done

    with pmesh.connect("job", home=agent.home) as mesh:
        with faults.around(TrainerSession, "run_op", interrupted), pytest.raises(kind):
            mesh.all_gather(np.ones(2))
        with pytest.raises(pmesh.MeshClosed, match=f"this mesh has ended: {kind.__name__}"):
            mesh.barrier()


def test_a_second_exception_ends_the_call_at_once(
    agent: WatchedAgent, handled: threading.Event
) -> None:
    def interrupt(_session: object, _request: object) -> None:
        signal_main_thread_where_it_waits()
        assert handled.wait(PATIENCE_S)
        signal_main_thread_where_it_waits()

    with pmesh.connect("job", home=agent.home) as mesh:
        agent.before_op = interrupt
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            mesh.barrier()
        with pytest.raises(pmesh.MeshClosed, match="this mesh has ended: RuntimeError"):
            mesh.barrier()
